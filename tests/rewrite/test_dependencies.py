"""Sites whose operands depend on each other, or do not vary over the axis.

Equations that a replacement executes at once may not wait for one another, and none may disappear
that something else reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.conftest import MeshFactory
from tests.reference import AXIS
from tests.rewrite.programs import Program, assert_same, counts, gradients_of, ring, sites
from tests.rewrite.simulator import simulated

vma_on_and_off = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])


def gather(x: jax.Array) -> jax.Array:
    return lax.all_gather(x, AXIS, tiled=True)


def scatter(y: jax.Array) -> jax.Array:
    return lax.psum_scatter(y, AXIS, tiled=True)


def _both_gathered(x, w):
    """The weight gradient contracts the rows of two gathered arrays."""
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(scatter(gather(x) @ w))), (0, 1))(x, w)


def _both_gathered_twice(x, w):
    def loss(x, w):
        y = jnp.sin(scatter(gather(x) @ w))
        return jnp.sum(jnp.sin(scatter(gather(y) @ w.T)))

    return jax.grad(loss, (0, 1))(x, w)


def _second_order(x, w):
    def loss(x, w):
        return jnp.sum(jnp.sin(scatter(gather(x) @ w)))

    dx, dw = jax.grad(lambda x, w: jnp.sum(jnp.cos(jax.grad(loss)(x, w))), (0, 1))(x, w)
    return dx, dw


def _contrastive(x, w):
    whole = gather(x)
    return whole @ whole.T + jnp.sum(w)


def _derived(x, w):
    whole = gather(x)
    return whole @ (2 * whole.T + 1) + jnp.sum(w)


def _derived_from_product(x, w):
    whole = gather(x)
    return (whole @ w) @ (whole @ w).T


def _attention(x, w):
    whole = gather(x)
    return jax.nn.softmax((whole @ w) @ (2 * whole @ w).T / 4) @ whole @ w


def _weight_gradients_of_itself(x, w):
    """Contracts the rows of the gathered array with those of arrays computed from it."""
    whole = gather(x)
    return (whole.T @ (2 * whole) + whole.T @ jnp.sin(whole)) @ w + jnp.sum(whole @ w)


def _scaled_by_itself(x, w, factor=0.3):
    """The second operand is used in no other way."""
    whole = gather(x)
    scaled = whole * factor
    return jnp.tensordot(scaled, whole, ((0,), (0,))) @ w + jnp.sum(scaled @ w)


def _alike(x, w, factor=0.3):
    """Two arrays computed in the same way are multiplied with each other."""
    whole = gather(x)
    first, second = whole * factor, whole * factor
    return jnp.tensordot(first, second, ((0,), (0,))) @ w + jnp.sum(first @ w)


def _gathered_twice(x, w):
    return gather(x) @ gather(x).T + jnp.sum(w)


def _one_after_another(x, w):
    """The second gathered array is made of the first, and both are multiplied together."""
    whole = gather(x)
    other = gather(jnp.tanh(scatter(whole @ w)))
    return whole @ (other @ w.T).T + (other @ w.T) @ whole.T


def _weight_made_of_a_weight_gradient(x, w):
    whole = gather(x)
    first = whole @ w
    gradient = whole.T @ first
    return whole @ (gradient * 0.5) + first


def _gradient_of_contrastive(x, w):
    def loss(x, w):
        whole = gather(x)
        return jnp.sum(jnp.sin(whole @ w @ whole.T))

    return jax.grad(loss, (0, 1))(x, w[:, :1] * jnp.ones((1, w.shape[0]), w.dtype))[0]


#: Bodies of x [8, 6], with sharded rows, and w [6, 4], and the number of sites that are replaced.
SHARED: dict[str, tuple[Callable, int]] = {
    "both gathered": (_both_gathered, 2),
    "both gathered, twice": (_both_gathered_twice, 4),
    "second order": (_second_order, 4),
    "contrastive": (_contrastive, 0),
    "derived": (_derived, 0),
    "derived from a product": (_derived_from_product, 1),
    "attention": (_attention, 1),
    "weight gradients of itself": (_weight_gradients_of_itself, 1),
    "scaled by itself": (_scaled_by_itself, 0),
    "exactly scaled by itself": (functools.partial(_scaled_by_itself, factor=0.5), 1),
    "alike": (_alike, 0),
    "exactly alike": (functools.partial(_alike, factor=0.5), 1),
    "gathered twice": (_gathered_twice, 1),
    "one after another": (_one_after_another, 2),
    "weight made of a weight gradient": (_weight_made_of_a_weight_gradient, 1),
    "gradient of contrastive": (_gradient_of_contrastive, 1),
}


def sharded_by_rows(body: Callable) -> Program:
    """A program whose results, [8 * 2, n] or of the arguments' shapes, are joined by rows."""
    gradients = body in (_both_gathered, _both_gathered_twice, _second_order)
    return Program(
        body, [(8, 6), (6, 4)], [P(AXIS), P()], (P(AXIS), P(AXIS)) if gradients else P(AXIS)
    )


@pytest.mark.parametrize("name", SHARED)
@vma_on_and_off
def test_operands_that_share_their_history(
    name: str, check_vma: bool, make_mesh: MeshFactory
) -> None:
    body, replaced = SHARED[name]
    program = sharded_by_rows(body)
    fun, arguments = program.sharded(make_mesh({AXIS: 2}), check_vma), program.arguments()
    found = sites(fun, *arguments)
    assert sum(site.replaced for site in found) == replaced, found
    if not replaced:
        assert counts(ring(fun), *arguments) == counts(fun, *arguments)
    assert_same(*simulated(lambda *args: (ring(fun)(*args), fun(*args)))(*arguments))


def _batched(x, w):
    return scatter(jnp.einsum("sk,skn->sn", x, jnp.stack([w] * 8)))


def _summed_gradients(x, w):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(scatter(x @ w))), (0, 1))(x, w)


def _all_reduced_gradients(x, w):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(lax.psum(0.5 * (x @ w), AXIS))), (0, 1))(x, w)


def _one_varies(x, w):
    """One of two products that are added varies over the axis."""
    varying = lax.axis_index(AXIS).astype(x.dtype) * x
    return scatter(x @ w + varying @ w)


#: Bodies of x [8, 6] and w [6, 4], which all devices have, and the spec of their results.
REPLICATED: dict[str, tuple[Callable, P]] = {
    "scatter": (lambda x, w: scatter(x @ w), P(AXIS)),
    "scatter of columns": (
        lambda x, w: lax.psum_scatter(x @ w, AXIS, scatter_dimension=1, tiled=True),
        P(None, AXIS),
    ),
    "batched scatter": (_batched, P(AXIS)),
    "all-reduce": (lambda x, w: lax.psum(0.5 * (x @ w), AXIS), P()),
    "gather": (lambda x, w: gather(x) @ w, P(AXIS)),
    "one varies": (_one_varies, P(AXIS)),
    "gradients of a scatter": (_summed_gradients, P()),
    "gradients of an all-reduce": (_all_reduced_gradients, P()),
}


@pytest.mark.parametrize("name", REPLICATED)
@vma_on_and_off
def test_products_that_do_not_vary_over_the_axis(
    name: str, check_vma: bool, make_mesh: MeshFactory
) -> None:
    body, spec = REPLICATED[name]
    program = Program(body, [(8, 6), (6, 4)], [P(), P()], spec)
    fun, arguments = program.sharded(make_mesh({AXIS: 2}), check_vma), program.arguments()
    assert any(site.replaced for site in sites(fun, *arguments))
    plain, rewritten = (jax.make_jaxpr(f)(*arguments) for f in (fun, ring(fun)))
    assert plain.out_avals == rewritten.out_avals
    assert_same(*simulated(lambda *args: (ring(fun)(*args), fun(*args)))(*arguments))
    if spec != P():
        actual, expected = (gradients_of(f, 2) for f in (ring(fun), fun))
        assert_same(*simulated(lambda *args: (actual(*args), expected(*args)))(*arguments))


@vma_on_and_off
def test_two_dimensional_sharding(check_vma: bool, make_mesh: MeshFactory) -> None:
    """The gradients of weights that are sharded over the data too, and of replicated operands."""

    def body(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple:
        def loss(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
            whole = gather(lax.all_gather(x, "data", axis=1, tiled=True))
            y = scatter(whole @ lax.all_gather(w, "data", tiled=True))
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(scatter(y @ v)))

        return jax.grad(loss, (0, 1, 2))(x, w, v)

    specs = P(AXIS, "data"), P("data"), P()
    mesh = make_mesh({"data": 2, AXIS: 2})
    fun = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=check_vma)
    arguments = Program(body, [(8, 6), (6, 4), (4, 4)], specs, specs).arguments()
    assert sum(site.replaced for site in sites(fun, *arguments)) >= 3
    assert_same(*jax.jit(lambda *args: (ring(fun)(*args), fun(*args)))(*arguments))


def test_effects_keep_their_order(make_mesh: MeshFactory) -> None:
    """Also an effect between the first use of the gathered array and the weight of its matmul."""

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        whole = gather(x)
        jax.debug.callback(print, jnp.mean(whole), ordered=False)
        y = whole @ (2 * w)
        jax.debug.callback(print, jnp.max(y))
        jax.debug.callback(print, jnp.min(w))
        return y

    program = sharded_by_rows(body)
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    assert [site.replaced for site in sites(fun, *arguments)] == [True]
    texts = [str(jax.make_jaxpr(f)(*arguments)) for f in (fun, ring(fun))]
    for text in texts:
        operations = [text.index(f"reduce_{name}") for name in ("sum", "max", "min")]
        assert operations == sorted(operations)
        assert text.count("debug_callback[") == 3
