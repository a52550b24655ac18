"""A search for einsums whose results or gradients differ from those of whole arrays.

Each case is one program, result and both gradients together. Where exhaustive tests are selected,
programs are compiled too, and the search is longer. Nearly all the time goes there; so
sizes are tiny.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import MeshFactory
from tests.ops.matmul.einsum_reference import EinsumCase
from tests.reference import AXIS, PORTABLE, assert_close, poisoned_results
from tests.rewrite.simulator import simulated, simulated_or_compiled

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

#: The terms that have a label of each role: x, w and the result.
ROLES = {"batch": (0, 1, 2), "free in x": (0, 2), "free in w": (1, 2), "contracted": (0, 1)}

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 2)


@pytest.fixture(autouse=True, scope="module")
def _poisoned() -> Iterator[None]:
    with poisoned_results():
        yield


@st.composite
def einsums(draw: Callable, use: str, *roles: str) -> EinsumCase:
    """An einsum with up to three labels of every role, in any order; one of `roles` is used.

    Shards have up to three rows along it: halves of different sizes, and rows that have none.
    """
    role = draw(st.sampled_from(roles))
    terms: list[list[str]] = [[], [], []]
    unused = iter(draw(st.permutations(string.ascii_lowercase)))
    label = ""
    for name, places in ROLES.items():
        for _ in range(draw(st.integers(int(name == role), 3))):
            added = next(unused)
            label = label or (added if name == role else "")
            for place in places:
                terms[place].append(added)
    x, w, y = ("".join(draw(st.permutations(term))) for term in terms)
    return EinsumCase(
        f"{x},{w}->{y}",
        tuple(
            draw(st.integers(1, 3) if other == label else sizes) for other in dict.fromkeys(x + w)
        ),
        draw(st.sampled_from([1, 2, 3, 4, 8])),
        label if use == "gather" else None,
        label if use == "scatter" else None,
        draw(st.integers(0, 1)),
        draw(st.sampled_from([None, *PORTABLE])),
        draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        draw(st.booleans()),
    )


def compare(case: EinsumCase, seed: int, run: Callable, make_mesh: MeshFactory) -> None:
    assert_close(case.compare(make_mesh({AXIS: case.devices}), seed, run))


@simulated_or_compiled
@given(case=einsums("gather", "free in x", "free in w"), seed=seeds)
def test_gathered_free_label(
    case: EinsumCase, seed: int, run: Callable, make_mesh: MeshFactory
) -> None:
    compare(case, seed, run, make_mesh)


@given(case=einsums("gather", "contracted"), seed=seeds)
def test_gathered_contracted_label(case: EinsumCase, seed: int, make_mesh: MeshFactory) -> None:
    compare(case, seed, simulated, make_mesh)


@given(case=einsums("gather", "batch"), seed=seeds)
def test_gathered_batch_label(case: EinsumCase, seed: int, make_mesh: MeshFactory) -> None:
    compare(case, seed, simulated, make_mesh)


@simulated_or_compiled
@given(case=einsums("scatter", "free in x", "free in w"), seed=seeds)
def test_scattered_free_label(
    case: EinsumCase, seed: int, run: Callable, make_mesh: MeshFactory
) -> None:
    compare(case, seed, run, make_mesh)


@given(case=einsums("scatter", "batch"), seed=seeds)
def test_scattered_batch_label(case: EinsumCase, seed: int, make_mesh: MeshFactory) -> None:
    compare(case, seed, simulated, make_mesh)
