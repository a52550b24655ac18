"""`overlap` of weights that a second axis shards, gathered by the program's own collectives."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul.rewrite import find_sites
from tests.conftest import MeshFactory
from tests.reference import AXIS
from tests.rewrite.programs import Program, assert_same, collectives, gradients_of, ring, sites
from tests.rewrite.simulator import simulated_or_compiled

FSDP = "fsdp"
#: x [4, 4, 8], and weights [8, 12] and [12, 8]: columns, and rows, over AXIS.
ROWS, UP, DOWN = P(FSDP, AXIS), P(FSDP, AXIS), P(AXIS, FSDP)


def gather(w: jax.Array, dimension: int, axis: str = FSDP) -> jax.Array:
    return lax.all_gather(w, axis, axis=dimension, tiled=True)


def scatter(y: jax.Array) -> jax.Array:
    return lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)


def _gated(x, up, down):
    """Two weights with one gather of x; one of them is cast before it is gathered."""
    whole, second = gather(x, 1, AXIS), gather((up * 2).astype(x.dtype), 0)
    return scatter(jax.nn.silu(whole @ gather(up, 0)) * (whole @ second) @ gather(down, 1))


def _in_heads(x, up, down):
    """Weights of three dimensions, reshaped after they are gathered; rows are merged."""
    heads = gather(up, 0).reshape(8, 2, 3)
    y = jnp.einsum("bsd,dnh->bsnh", gather(x, 1, AXIS), heads)
    return scatter(jnp.einsum("bsnh,nhd->bsd", jnp.sin(y), gather(down, 1).reshape(2, 3, 8)))


def _transposed(x, up, down):
    """Weights that are stored as [N, K]."""
    y = jnp.einsum("bsd,fd->bsf", gather(x, 1, AXIS), gather(up.T, 1))
    return scatter(jnp.einsum("bsf,df->bsd", jnp.sin(y), gather(down.T, 0)))


def _kept_whole(x, up, down):
    """The gathered x has another use."""
    whole = gather(x, 1, AXIS)
    y = whole @ gather(up, 0) + jnp.sum(jnp.sin(whole), -1, keepdims=True)
    return scatter(y @ gather(down, 1))


def _kept_constant(x, up, down):
    """Variant of `_kept_whole` where the gathered x has no cotangent."""
    whole = gather(x, 1, AXIS)
    scale = jnp.sum(jnp.sin(lax.stop_gradient(whole)), -1, keepdims=True)
    return scatter((whole @ gather(up, 0) + scale) @ gather(down, 1))


def _differentiated(x, up, down):
    """Its gradients are computed on each device."""
    dx, dup, ddown = gradients_of(_gated, 3)(x, up, down)
    return dx + jnp.sum(dup) + jnp.sum(ddown)


def _used_elsewhere(x, up, down):
    whole = gather(up, 0)
    return scatter(gather(x, 1, AXIS) @ whole @ gather(down, 1)) + jnp.sum(jnp.sin(whole))


def _in_pieces(x, up, down):
    """Each device has a part of every head, which is no block of the columns."""
    heads = gather(up.reshape(4, 3, 2), 2).reshape(4, -1)
    y = gather(x[..., :4], 1, AXIS) @ heads
    return scatter(y[..., :6] @ gather(down, 1))


def _by_itself(x, up, down):
    """A weight is multiplied by itself, so it is x too."""
    whole = gather(up, 0)
    y = x + jnp.sum(scatter(gather(x, 1, AXIS) @ gather(up, 0) @ gather(down, 1)))
    return y + scatter((whole @ whole.T)[None]).reshape(2, 2, 8)


#: Bodies, with the number of weights that ops gather, and of others.
BODIES: dict[str, tuple[Callable, int, int]] = {
    "gated": (_gated, 3, 0),
    "in heads": (_in_heads, 2, 0),
    "transposed": (_transposed, 2, 0),
    "kept whole": (_kept_whole, 2, 0),
    "kept whole, a constant": (_kept_constant, 2, 0),
    "differentiated": (_differentiated, 3, 0),
    "used elsewhere": (_used_elsewhere, 1, 1),
    "in pieces": (_in_pieces, 1, 1),
    "by itself": (_by_itself, 2, 1),
}


def program_of(name: str) -> Program:
    return Program(BODIES[name][0], [(4, 4, 8), (8, 12), (12, 8)], (ROWS, UP, DOWN), ROWS)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_weights_are_gathered_by_the_op_of_their_matmul(
    name: str, check_vma: bool, make_mesh: MeshFactory
) -> None:
    program = program_of(name)
    fun = program.sharded(make_mesh({FSDP: 2, AXIS: 2}), check_vma)
    found = sites(fun, *program.arguments())
    weights = [s for s in found if s.axes == (FSDP,) and s.kind == "all_gather"]
    in_ops = [site for site in weights if site.replaced and not site.kept]
    assert (len(in_ops), len(weights) - len(in_ops)) == BODIES[name][1:]
    assert all(s.decision and s.decision.site.weight_shards for s in in_ops)
    assert collectives(ring(fun), *program.arguments()).get("all_gather", 0) == BODIES[name][2]


@pytest.mark.parametrize("name", BODIES)
@simulated_or_compiled
def test_values_and_gradients_stay_the_same(
    name: str, run: Callable, make_mesh: MeshFactory
) -> None:
    program = program_of(name)
    fun = program.sharded(make_mesh({FSDP: 2, AXIS: 2}))
    functions = [fun, ring(fun)]
    if name != "differentiated":
        functions += [gradients_of(fun, 3), gradients_of(ring(fun), 3)]
    results = run(lambda *a: [f(*a) for f in functions])(*program.arguments())
    for expected, actual in zip(results[::2], results[1::2], strict=True):
        assert_same(actual, expected)


def test_sites_are_the_same_where_xla_executes_them(make_mesh: MeshFactory) -> None:
    program = program_of("gated")
    fun = program.sharded(make_mesh({FSDP: 2, AXIS: 2}))
    found = find_sites(fun, implementation="xla")(*program.arguments())
    assert [s.replaced for s in found] == [True] * 5
    assert [s.kept for s in found if s.axes == (FSDP,)] == [True] * 3
