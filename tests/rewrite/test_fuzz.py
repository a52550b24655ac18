"""Random programs agree with their rewritten forms, and would not if the rewrite were wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest
from jax import lax

from collective_matmul.rewrite import find_sites
from tests.rewrite.fuzz import Search, finding, search
from tests.rewrite.minimize import kind, minimized, script
from tests.rewrite.random_programs import Case, drawn, functions

#: Numbers of draws: in each test, in the short search and in the long one.
BLOCK, SHORT_SEARCH, LONG_SEARCH = 25, 25, 100


def assert_nothing(result: Search) -> None:
    assert not result.findings
    # Otherwise the search would agree with anything.
    assert result.programs > 0.8 * (result.programs + result.refused)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=() if first < SHORT_SEARCH else pytest.mark.exhaustive)
        for first in range(0, LONG_SEARCH, BLOCK)
    ],
)
def test_random_programs_agree_with_their_rewritten_form(first: int) -> None:
    assert_nothing(search(range(first, first + BLOCK)))


def test_a_reversed_permute_is_found_and_its_program_made_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    permute = lax.ppermute

    def reversed_permute(
        x: jax.Array, axis_name: str, perm: list[tuple[int, int]], **kwargs: Any
    ) -> Any:
        return permute(x, axis_name, [(to, source) for source, to in perm], **kwargs)

    monkeypatch.setattr(lax, "ppermute", reversed_permute)
    ((_, wrong, case),) = search(range(32, 40), stop=1).findings
    small = minimized(case)
    assert kind(finding(small)) == kind(wrong)
    assert len(small.lines) <= 2 < len(case.lines)
    assert "print" in compile(script(small), "script", "exec").co_names


def case_of(*lines: str, arguments: tuple, implementation: str, mode: str = "not") -> Case:
    return Case(
        lines,
        results=(lines[-1].split(" = ")[0],),
        arguments=arguments,
        mesh=(("t", 2),),
        manual=("t",),
        explicit=False,
        dtype="float32",
        rounds=False,
        wide=False,
        fp8=None,
        mode=mode,
        check_vma=False,
        strict=False,
        implementation=implementation,
        seed=0,
    )


def test_a_second_pass_takes_no_gather_that_would_wait_for_an_op() -> None:
    """Its weight is made by a matmul, which the first pass replaces."""
    case = case_of(
        "y1 = lax.all_gather(a0, 't', tiled=True)",
        "y2 = jnp.einsum('ab,av->bv', y1, a1)",
        "y3 = lax.all_gather(y2, 't', tiled=True)",
        "y4 = y3 @ a2",
        arguments=(((6, 6), ("t", None)), ((12, 6), ("t", None)), ((12, 12), ("t", None))),
        implementation="ring",
        mode="inside",
    )
    assert finding(case) is None


def test_one_pass_replaces_a_gather_that_shares_a_matmul_with_a_sum() -> None:
    """One of its two matmuls would need a transpose and belongs to the sum."""
    case = case_of(
        "y1 = lax.all_gather(a0, 't', tiled=True)",
        "y2 = y1 @ a1",
        "y3 = jnp.einsum('ab,ub->au', y2, y1)",
        "y4 = lax.psum(y3, 't')",
        arguments=(((8, 2), ("t", None)), ((2, 2), (None, None))),
        implementation="xla",
    )
    assert finding(case) is None


def test_one_pass_replaces_a_gather_with_the_matmuls_that_transpose_nothing() -> None:
    """The derivative of y3 multiplies two gathered arrays, one of which would be transposed."""
    case = case_of(
        "y1 = lax.all_gather(a0, 't', tiled=True)",
        "y2 = y1 @ a1",
        "y3 = jnp.einsum('ub,ab->au', y1, y1)",
        arguments=(((4, 4), (None, None)), ((4, 6), (None, None))),
        implementation="xla",
        mode="forward",
    )
    assert finding(case) is None


@pytest.mark.parametrize("size", [1, 2])
def test_an_all_reduce_reads_a_weight_that_another_site_could_gather(size: int) -> None:
    """The scatter over d would gather y1 in its loop, and the weight gradient needs it whole."""
    case = case_of(
        "y1 = lax.all_gather(a0, 't', axis=2, tiled=True)",
        "y2 = jnp.einsum('cv,abc->bva', a1, y1)",
        "y3 = lax.psum_scatter(y2, 'd', scatter_dimension=1, tiled=True)",
        arguments=(((2, 2, 4), (None, None, None)), ((8, 2), (None, None))),
        implementation="ring",
        mode="inside",
    )
    axes = ("d", "t")
    assert finding(replace(case, mesh=(("d", size), ("t", 2)), manual=axes, check_vma=True)) is None


def test_chunks_that_an_explicit_axis_cannot_divide() -> None:
    """The halves of a two-way ring have one row; two devices share it."""
    case = case_of(
        "y1 = lax.all_gather(a0, 't', axis=0, tiled=True)",
        "y2 = jnp.einsum('abc,cv->abv', y1, a1)",
        arguments=(((2, 3, 4), (None, None, None)), ((4, 3), (None, None))),
        implementation="ring_two_way",
    )
    case = replace(case, results=("y2", "y1"), mesh=(("d", 2), ("t", 2)), explicit=True)
    assert finding(case) is None
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape, _ in case.arguments]
    assert find_sites(functions(case)[0], implementation="ring_two_way")(*arguments)[0].replaced


@pytest.mark.parametrize("seed", [7002400, 7000100])
def test_programs_that_end_the_process_are_not_compiled(seed: int) -> None:
    """The compiler does not survive the plain program: 16-bit sums, empty arrays."""
    assert finding(drawn(seed), compiled=True) is None
