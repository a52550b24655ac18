"""Dataflow that is deep, or that has more paths than equations, as long training steps have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul import explain, overlap
from collective_matmul.jaxprs.graph import Graph
from collective_matmul.rewrite.replace import site_choice
from tests.conftest import MeshFactory
from tests.reference import AXIS


def sharded(fun, make_mesh: MeshFactory):
    mesh = make_mesh({AXIS: 2})
    return overlap(
        jax.shard_map(fun, mesh=mesh, in_specs=(P(AXIS), P(AXIS)), out_specs=P()),
        implementation="ring",
    )


def test_a_sum_may_have_more_terms_than_python_has_frames(make_mesh: MeshFactory) -> None:
    """Global norms are such sums: they add the square of one parameter after the other."""

    def total(x: jax.Array, w: jax.Array) -> jax.Array:
        square = jnp.sum(x * w)
        for _ in range(1100):
            square += 1.0
        return lax.psum(square, AXIS)

    assert sharded(total, make_mesh)(jnp.ones(4), jnp.ones(4)) == 4 + 2 * 1100


def test_calls_are_inlined_once_for_all_collectives(
    make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To say why each was left alone. A model has a few of them in each layer."""
    inlined = []

    def counted(graph: Graph) -> Graph:
        inlined.append(graph)
        return site_choice_inlined(graph)

    site_choice_inlined = site_choice.inlined
    monkeypatch.setattr(site_choice, "inlined", counted)
    project = jax.jit(lambda x, w: jnp.sin(x) @ w)

    def layers(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(3):
            x = project(lax.all_gather(x, AXIS, tiled=True), w)[:2]
        return lax.psum(jnp.sum(x), AXIS)

    ones = jnp.ones((4, 2)), jnp.ones((4, 2))
    plain = explain(sharded(layers, make_mesh), verbose=True)(*ones).plain
    assert ["sin at" in site.reason for site in plain] == [True, True, True, False]
    assert inlined and len({id(graph) for graph in inlined}) == len(inlined)


@pytest.mark.parametrize("function", [lambda y: y + y, lambda y: y + 2 * y])
def test_a_sum_may_have_more_paths_than_could_be_followed(function, make_mesh: MeshFactory) -> None:
    def total(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.sum(x * w)
        for _ in range(50):
            y = function(y)
        return lax.psum(y, AXIS)

    one = sharded(total, make_mesh)(jnp.ones(4), jnp.ones(4))
    assert one == 4 * float(function(1.0)) ** 50
