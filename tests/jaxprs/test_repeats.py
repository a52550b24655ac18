"""Equations that repeat an earlier one: which, and how often they run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul.jaxprs.repeats import repeats

X, Y = jnp.ones((8, 4)), jnp.zeros((8, 4))


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((4,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def gathered(mesh: Mesh, x: Any, dimension: int = 0) -> Any:
    """x, gathered along a dimension, in a shard_map of its own."""
    spec = P(*["t" if each == dimension else None for each in range(2)])
    gather = functools.partial(lax.all_gather, axis_name="t", axis=dimension, tiled=True)
    return jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)(x)


def runs_of_repeats(fun: Callable, *args: Any) -> int:
    program = jax.make_jaxpr(fun)(*args).jaxpr
    return sum(n for _, _, n in repeats(program, lambda each: each.primitive.name == "all_gather"))


def gathers_when_compiled(fun: Callable, *args: Any) -> int:
    text = jax.jit(fun).lower(*args).compile().as_text()
    assert text is not None
    return text.count(" all-gather(")


def test_what_repeats_is_what_the_compiler_merges(mesh: Mesh) -> None:
    gather = functools.partial(gathered, mesh)
    for fun, traced, repeated in (
        (lambda x, y: (gather(x) + 1, gather(x) * 2), 2, 1),
        (lambda x, y: (gather(x) + 1, gather(y) * 2), 2, 0),
        (lambda x, y: (gather(x) + 1, gather(x, 1) * 2), 2, 0),
        (lambda x, y: (jax.jit(gather)(x) + 1, gather(x) * 2), 2, 1),
        (lambda x, y: (gather(jnp.sin(x)), 2 * gather(jnp.sin(x)), 3 * gather(x)), 3, 1),
        (lambda x, y: (gather(x + 1.0), 2 * gather(x + 2.0)), 2, 0),
    ):
        assert runs_of_repeats(fun, X, Y) == repeated
        assert gathers_when_compiled(fun, X, Y) == traced - repeated


def test_the_first_equal_equation_is_named(mesh: Mesh) -> None:
    program = jax.make_jaxpr(lambda x: (jnp.sin(x), jnp.cos(x), jnp.sin(x)))(X).jaxpr
    ((later, first, runs),) = repeats(program, lambda each: True)
    assert (later, first, runs) == (program.eqns[2], program.eqns[0], 1)


def test_a_loop_repeats_what_its_body_repeats(mesh: Mesh) -> None:
    def step(x: Any, _: Any) -> Any:
        return gathered(mesh, x) + gathered(mesh, x), None

    assert runs_of_repeats(lambda x: lax.scan(step, x, length=5)[0], X) == 5
    # A step gathers other values than the program around it.
    assert runs_of_repeats(lambda x: (gathered(mesh, x), lax.scan(step, x, length=5)[0]), X) == 5


def test_branches_and_what_is_computed_again_repeat_nothing_before(mesh: Mesh) -> None:
    gather = functools.partial(gathered, mesh)
    either = lambda x: (gather(x), lax.cond(x[0, 0] > 0, gather, gather, x))  # noqa: E731
    assert runs_of_repeats(either, X) == 0
    again = jax.checkpoint(lambda x: jnp.sin(gather(x)))
    assert runs_of_repeats(jax.value_and_grad(lambda x: again(x).sum()), X) == 0


def test_parts_by_other_specs_are_other_arrays(mesh: Mesh) -> None:
    def own(x: Any, spec: P) -> Any:
        gather = functools.partial(lax.all_gather, axis_name="t", axis=0, tiled=True)
        return jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)(x)

    assert runs_of_repeats(lambda x: (own(x, P("t")), own(x, P("t"))), X) == 1
    assert runs_of_repeats(lambda x: (own(x, P("t")), own(x, P(None, "t"))), X) == 0
