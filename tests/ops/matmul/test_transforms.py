"""The ops under JAX's transformations, and on meshes with more axes than their own.

Arrays are compared within 1e-5 of their largest value. A sum of up to 32 float32 terms, taken in
another order, is off by at most 32 · 2⁻²⁴ = 2e-6 of them, and a few such sums follow each other; a
chunk that is lost, doubled or misplaced is off by about the values themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul import (
    CHECKPOINT_NAME,
    all_gather_matmul,
    collective_einsum,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from tests.conftest import MeshFactory
from tests.covering import pairwise
from tests.reference import AXIS, OPS, Case, poisoned_results, reference

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

every_op = pytest.mark.parametrize("op", OPS)
vma_on_and_off = pytest.mark.parametrize("check_vma", [True, False])
xla_and_ring = pytest.mark.parametrize("implementation", ["xla", "ring"])


@pytest.fixture(autouse=True, scope="module")
def _poisoned() -> Iterator[None]:
    with poisoned_results():
        yield


def assert_same(actual: Any, expected: Any) -> None:
    def compare(a: jax.Array, b: jax.Array) -> None:
        assert np.max(np.abs(np.asarray(a) - np.asarray(b))) <= 1e-5 * np.max(np.abs(b))

    jax.tree.map(compare, actual, expected)


def result_and_gradients(fun: Callable, *arguments: Any) -> tuple:
    """fun's result, and by `jax.grad` its gradients under weights that all differ."""

    def loss(*arguments: Any) -> tuple[jax.Array, jax.Array]:
        y = fun(*arguments)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)), y

    gradients, y = jax.jit(jax.grad(loss, tuple(range(len(arguments))), has_aux=True))(*arguments)
    return y, *gradients


REMATERIALIZATIONS = {
    "none": lambda fun: fun,
    "full": jax.checkpoint,
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
    "results": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME)
    ),
}


@pairwise(
    rematerialize=list(REMATERIALIZATIONS), implementation=["xla", "ring"], check_vma=[True, False]
)
def test_scan_over_checkpointed_layers(
    rematerialize: str, implementation: str, check_vma: bool, make_mesh: MeshFactory
) -> None:
    def stack(gather: Callable, scatter: Callable, x: jax.Array, layers: Any) -> jax.Array:
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            up, down = weights
            return x + scatter(jax.nn.gelu(gather(x, up)), down), None

        return lax.scan(REMATERIALIZATIONS[rematerialize](layer), x, layers)[0]

    options = {"axis_name": AXIS, "implementation": implementation}
    sharded = jax.shard_map(
        functools.partial(
            stack,
            functools.partial(all_gather_matmul, **options),
            functools.partial(matmul_reduce_scatter, **options),
        ),
        mesh=make_mesh({AXIS: 2}),
        in_specs=(P(AXIS), (P(None, None, AXIS), P(None, AXIS))),
        out_specs=P(AXIS),
        check_vma=check_vma,
    )
    generator = np.random.default_rng(0)
    x, up, down = (
        generator.standard_normal(shape, np.float32) / 3 for shape in ((4, 6), (2, 6, 8), (2, 8, 6))
    )
    unsharded = functools.partial(stack, jnp.matmul, jnp.matmul)
    assert_same(
        result_and_gradients(sharded, x, (up, down)), result_and_gradients(unsharded, x, (up, down))
    )


@pairwise(op=OPS, in_axes=[(0, None), (None, 0), (1, 2)], check_vma=[True, False])
def test_vmap(
    op: str, in_axes: tuple[int | None, int | None], check_vma: bool, make_mesh: MeshFactory
) -> None:
    case = Case(op, "ring", 2, (4,), 2, ((4,),), check_vma=check_vma)

    def place_batch(spec: P, axis: int | None) -> P:
        padded = [*spec, *(None,) * (2 - len(spec))]
        return P(*padded) if axis is None else P(*padded[:axis], None, *padded[axis:])

    x_spec, (w_spec,), (y_spec,) = case.specs
    sharded = jax.shard_map(
        jax.vmap(lambda x, w: case.call(x, (w,))[0], in_axes),
        mesh=make_mesh({AXIS: 2}),
        in_specs=(place_batch(x_spec, in_axes[0]), place_batch(w_spec, in_axes[1])),
        out_specs=place_batch(y_spec, 0),
        check_vma=check_vma,
    )
    generator = np.random.default_rng(0)
    x, w = (
        generator.standard_normal(
            shape if axis is None else (*shape[:axis], 3, *shape[axis:]), np.float32
        )
        for shape, axis in zip(((4, 2), (2, 4)), in_axes, strict=True)
    )
    unsharded = jax.vmap(jnp.matmul, in_axes)
    assert_same(result_and_gradients(sharded, x, w), result_and_gradients(unsharded, x, w))


@every_op
@vma_on_and_off
def test_second_derivatives(op: str, check_vma: bool, make_mesh: MeshFactory) -> None:
    """Reverse over reverse: the backward's own rings are transposed."""
    case = Case(op, "ring", 2, (4,), 2, ((4,),), check_vma=check_vma)

    def gradient_penalty(fun: Callable, x: jax.Array, w: jax.Array) -> jax.Array:
        gradients = jax.grad(lambda x, w: jnp.sum(jnp.tanh(fun(x, w))), (0, 1))(x, w)
        return jnp.concatenate([jnp.ravel(gradient) for gradient in gradients])

    global_op = case.sharded(make_mesh({AXIS: 2}))
    sharded = functools.partial(gradient_penalty, lambda x, w: global_op(x, (w,))[0])
    unsharded = functools.partial(gradient_penalty, jnp.matmul)
    x, (w,), _ = case.arrays()
    assert_same(result_and_gradients(sharded, x, w), result_and_gradients(unsharded, x, w))


@every_op
@xla_and_ring
def test_gradients_of_weights_are_summed_over_data(
    op: str, implementation: str, make_mesh: MeshFactory
) -> None:
    """Inside one `shard_map`, of weights replicated over the other axis, by the types alone."""
    case = Case(op, implementation, 2, (2, 4), 4, ((4,),), 1)
    x_spec, w_specs, (y_spec,) = case.specs
    x_spec, y_spec = P("data", *x_spec[1:]), P("data", *y_spec[1:])

    def results_and_gradients(x, ws, dys):
        ys, transpose = jax.vjp(case.call, x, ws)
        return ys, *transpose(dys)

    sharded = jax.shard_map(
        results_and_gradients,
        mesh=make_mesh({"data": 2, AXIS: 2}),
        in_specs=(x_spec, w_specs, (y_spec,)),
        out_specs=((y_spec,), x_spec, w_specs),
    )
    x, ws, dys = case.arrays()
    assert_same(jax.jit(sharded)(x, tuple(ws), tuple(dys)), tuple(reference(x, ws, dys)))


@pairwise(op=OPS, implementation=["xla", "ring"], operand=["x", "w"])
def test_gradients_of_replicated_operands_are_summed(
    op: str, implementation: str, operand: str, make_mesh: MeshFactory
) -> None:
    """All devices hold the same x or w: globally it is repeated along what would be sharded."""
    case = Case(op, implementation, 3, (6,), 6, ((6,),))
    x_spec, (w_spec,), y_specs = case.specs
    x, (w,), dys = case.arrays()
    repeated_along = (x_spec if operand == "x" else w_spec).index(AXIS)

    def first(array: np.ndarray) -> np.ndarray:
        return np.split(array, 3, repeated_along)[0]

    if operand == "x":
        x, x_spec = first(x), P()
    else:
        w, w_spec = first(w), P()

    def gradients(x, ws, dys):
        return jax.vjp(case.call, x, ws)[1](dys)

    sharded = jax.shard_map(
        gradients,
        mesh=make_mesh({AXIS: 3}),
        in_specs=(x_spec, (w_spec,), y_specs),
        out_specs=(x_spec, (w_spec,)),
    )
    dx, (dw,) = jax.jit(sharded)(x, (w,), tuple(dys))

    def repeat(array: np.ndarray) -> np.ndarray:
        return np.concatenate([array] * 3, repeated_along)

    whole_x, whole_w = (repeat(x), w) if operand == "x" else (x, repeat(w))
    expected = reference(whole_x, [whole_w], dys)
    parts = np.split(expected.dx if operand == "x" else expected.dws[0], 3, repeated_along)
    assert_same(dx if operand == "x" else dw, sum(parts))


@vma_on_and_off
def test_rings_over_two_axes_in_one_program(check_vma: bool, make_mesh: MeshFactory) -> None:
    """Neither waits for the other, and devices may reach them in any order."""

    def both(x, w, z, v):
        return (
            all_gather_matmul(x, w, "rows", gather_dimension=1, implementation="ring"),
            matmul_reduce_scatter(z, v, "columns", scatter_dimension=1, implementation="ring"),
        )

    sharded = jax.shard_map(
        both,
        mesh=make_mesh({"rows": 2, "columns": 3}),
        in_specs=(P("columns", "rows"), P(None, "rows"), P("rows", None, "columns"), P("columns")),
        out_specs=(P("columns", None, "rows"), P("rows", "columns")),
        check_vma=check_vma,
    )

    def joined(fun: Callable) -> Callable:
        return lambda *operands: jnp.concatenate([jnp.ravel(y) for y in fun(*operands)])

    generator = np.random.default_rng(0)
    shapes = (3, 4, 2), (2, 4), (2, 6, 3), (3, 5)
    operands = [generator.standard_normal(shape, np.float32) for shape in shapes]
    unsharded = joined(lambda x, w, z, v: (x @ w, z @ v))
    assert_same(
        result_and_gradients(joined(sharded), *operands), result_and_gradients(unsharded, *operands)
    )


def _einsum(x: jax.Array, w: jax.Array) -> jax.Array:
    return collective_einsum("bd,df->fb", x, w, AXIS, gather="b", implementation="xla")


@pytest.mark.parametrize(
    "forward_mode",
    [
        lambda fun, x, w: jax.jvp(fun, (x, w), (x, w)),
        lambda fun, x, w: jax.jacfwd(fun)(x, w),
        lambda fun, x, w: jax.hessian(lambda x: fun(x, w).sum())(x),
    ],
    ids=["jvp", "jacfwd", "hessian"],
)
@pytest.mark.parametrize(
    ("fun", "x_spec", "out_spec"),
    [
        (functools.partial(all_gather_matmul, axis_name=AXIS), P(AXIS), P(None, AXIS)),
        (_einsum, P(AXIS), P(AXIS)),
    ],
    ids=["op", "einsum"],
)
def test_forward_mode_is_refused_with_what_to_use_instead(
    forward_mode: Callable, fun: Callable, x_spec: P, out_spec: P, make_mesh: MeshFactory
) -> None:
    """Outside of `jax.jit` too, where JAX would speak of a type that cannot be hashed."""
    sharded = jax.shard_map(
        fun, mesh=make_mesh({AXIS: 2}), in_specs=(x_spec, P(None, AXIS)), out_specs=out_spec
    )
    with pytest.raises(TypeError, match=r"^forward-mode .* jax\.jvp.* use jax\.vjp, jax\.grad"):
        forward_mode(sharded, np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("op", [all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce])
def test_second_derivatives_of_operands_in_8_bits_are_refused(
    op: Callable, jitted: bool, check_vma: bool, make_mesh: MeshFactory
) -> None:
    """Rounding has no derivative: JAX would return zeros, or speak of one of our primitives."""
    specs = (P(AXIS), P(None, AXIS)) if op is all_gather_matmul else (P(None, AXIS), P(AXIS))
    results = {
        all_gather_matmul: P(None, AXIS),
        matmul_reduce_scatter: P(AXIS),
        matmul_all_reduce: P(),
    }
    sharded = jax.shard_map(
        lambda x, w: op(x, w, AXIS, fp8="rowwise"),
        mesh=make_mesh({AXIS: 2}),
        in_specs=specs,
        out_specs=results[op],
        check_vma=check_vma,
    )

    def norm_of_gradient(x: jax.Array, w: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda x: jnp.sum(jnp.tanh(sharded(x, w))))(x)
        return jnp.sum(gradient**2)

    twice = jax.grad(norm_of_gradient)
    x, w = jnp.ones((4, 8), np.float32), jnp.ones((8, 2), np.float32)
    assert np.isfinite(jax.jit(norm_of_gradient)(x, w))
    with pytest.raises(TypeError, match=r"^second derivative .* fp8=.*: .* leave fp8 out"):
        (jax.jit(twice) if jitted else twice)(x, w)
