"""Transformer blocks without this library are rewritten, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from tests.conftest import MeshFactory
from tests.reference import AXIS
from tests.rewrite.blocks import programs
from tests.rewrite.programs import (
    assert_same,
    collectives,
    counts,
    gradients_of,
    ring,
    sites,
)
from tests.rewrite.simulator import simulated_or_compiled

every_block = pytest.mark.parametrize("name", programs())


@every_block
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@simulated_or_compiled
def test_every_site_of_a_block_is_replaced_forward_and_backward(
    name: str, check_vma: bool, run: Callable, make_mesh: MeshFactory
) -> None:
    """Tests gradients of the rewritten block, and the rewritten form of its gradients."""
    program, expected = programs()[name]
    fun, arguments = program.sharded(make_mesh({AXIS: 2}), check_vma), program.arguments()
    gradients = gradients_of(fun, len(arguments))
    after, before = gradients_of(ring(fun), len(arguments)), ring(gradients)
    assert [site.replaced for site in sites(fun, *arguments)] == [True] * expected
    found = sites(gradients, *arguments)
    # The backward has as many sites, and more where the forward is recomputed.
    assert sum(site.replaced for site in found) >= 2 * expected
    # Gradients of norm scales are summed over devices without a matmul.
    assert all(site.replaced or site.kind == "psum" for site in found)
    for rewritten in (ring(fun), after, before):
        left = collectives(rewritten, *arguments)
        assert not set(left) - {"psum", "psum_invariant"}, left

    def all_of_them(*args: Any) -> list:
        return [fun(*args), gradients(*args), ring(fun)(*args), after(*args), before(*args)]

    y, expected_gradients, *actual = run(all_of_them)(*arguments)
    assert_same(actual[0], y)
    assert_same(actual[1], expected_gradients)
    assert_same(actual[2], expected_gradients)


def test_a_block_in_bfloat16_agrees_with_its_rewritten_form(make_mesh: MeshFactory) -> None:
    program, _ = programs("bfloat16")["llama"]
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    scaled = [argument / 4 for argument in arguments]
    actual, expected = jax.jit(lambda *args: (ring(fun)(*args), fun(*args)))(*scaled)
    assert_same(actual, expected, "bfloat16")


def test_a_rewritten_block_equals_one_written_with_the_ops(make_mesh: MeshFactory) -> None:
    """Both have the same number of permutes, matmuls and transposes."""
    from collective_matmul import all_gather_matmul, matmul_reduce_scatter

    program, _ = programs()["mlp"]

    def with_ops(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        y = jax.nn.gelu(all_gather_matmul(x, up, AXIS, gather_dimension=1, implementation="ring"))
        return matmul_reduce_scatter(y, down, AXIS, scatter_dimension=1, implementation="ring")

    mesh, arguments = make_mesh({AXIS: 2}), program.arguments()
    hand = jax.shard_map(
        with_ops, mesh=mesh, in_specs=tuple(program.in_specs), out_specs=program.out_specs
    )
    plain = ring(program.sharded(mesh))
    for rewritten, written in ((plain, hand), (gradients_of(plain, 3), gradients_of(hand, 3))):
        numbers = [counts(fun, *arguments) for fun in (rewritten, written)]
        for name in ("ppermute", "dot_general", "transpose", "all_gather", "reduce_scatter"):
            assert numbers[0][name] == numbers[1][name], name
