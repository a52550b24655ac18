"""Ops and `overlap` inside a `shard_map` that leaves explicit mesh axes to JAX's types.

Mesh (2, 2) over an explicit "data", which shards the batch, and "tensor", which is manual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import collective_matmul as cm
from tests.covering import pairwise
from tests.reference import AXIS, PORTABLE

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

DATA = "data"


@dataclass(frozen=True)
class Form:
    """One call of an op.

    Attributes:
      call: on local arrays x and w.
      unsharded: the same on whole arrays.
      shapes: global shapes of x and w.
      manual: how the manual axis divides x, w and the result.
      weights: how the explicit axis divides w; it divides the first dimension of x.
    """

    call: Callable
    unsharded: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    manual: tuple[P, P, P]
    weights: P | None = None


_X, _W = (4, 4, 8), (8, 6)
GATHERED = (P(None, AXIS), P(None, AXIS), P(None, None, AXIS))
SCATTERED = (P(None, None, AXIS), P(AXIS), P(None, AXIS))
FORMS = {
    "gather": Form(
        functools.partial(cm.all_gather_matmul, axis_name=AXIS, gather_dimension=1),
        "bsd,df->bsf",
        (_X, _W),
        GATHERED,
    ),
    "scatter": Form(
        functools.partial(cm.matmul_reduce_scatter, axis_name=AXIS, scatter_dimension=1),
        "bsd,df->bsf",
        (_X, _W),
        SCATTERED,
    ),
    "all-reduce": Form(
        functools.partial(cm.matmul_all_reduce, axis_name=AXIS),
        "bsd,df->bsf",
        (_X, _W),
        (*SCATTERED[:2], P()),
    ),
    "einsum, a matmul": Form(
        functools.partial(cm.collective_einsum, "bsd,dhk->bshk", axis_name=AXIS, gather="s"),
        "bsd,dhk->bshk",
        (_X, (8, 2, 3)),
        GATHERED,
    ),
    "einsum, a batch label": Form(
        functools.partial(cm.collective_einsum, "bsd,bdf->bsf", axis_name=AXIS, scatter="s"),
        "bsd,bdf->bsf",
        (_X, (4, 8, 6)),
        (SCATTERED[0], P(None, AXIS), SCATTERED[2]),
        P(DATA),
    ),
    "einsum, a contracted label": Form(
        functools.partial(cm.collective_einsum, "bsd,bsf->bdf", axis_name=AXIS, gather="s"),
        "bsd,bsf->bdf",
        (_X, (4, 4, 6)),
        (P(None, AXIS), P(None, None, AXIS), P(None, None, AXIS)),
        P(DATA),
    ),
}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh(
        (2, 2), (DATA, AXIS), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4]
    )


def placed(mesh: Mesh, form: Form) -> list[jax.Array]:
    """Operands, divided over both axes; the explicit one divides the batch."""
    generator = np.random.default_rng(0)
    (_, *x), (first, *w), _ = form.manual
    specs = (P(DATA, *x), P(*(form.weights or (first,)), *w))
    return [
        jax.device_put(generator.standard_normal(s, np.float32), NamedSharding(mesh, spec))
        for s, spec in zip(form.shapes, specs, strict=True)
    ]


def sharded(mesh: Mesh, form: Form, fun: Callable, **keywords: Any) -> Callable:
    x, w, y = form.manual
    return jax.shard_map(
        fun, mesh=mesh, in_specs=(x, w), out_specs=y, axis_names={AXIS}, **keywords
    )


def results_and_gradients(fun: Callable, x: Any, w: Any) -> tuple:
    def loss(x: jax.Array, w: jax.Array) -> tuple:
        y = fun(x, w)
        return jnp.sum(jnp.sin(y)), y

    (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
    return y, *gradients


def check(mesh: Mesh, form: Form, fun: Callable) -> None:
    """Numbers, and that nothing is gathered over the explicit axis."""
    operands = placed(mesh, form)
    with jax.set_mesh(mesh):
        compiled = jax.jit(functools.partial(results_and_gradients, fun)).lower(*operands).compile()
    actual = compiled(*operands)
    expected = results_and_gradients(
        functools.partial(jnp.einsum, form.unsharded), *(np.asarray(a) for a in operands)
    )
    # Sums of at most 16 products of float32, in another order.
    for value, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=2e-5)
    assert [value.sharding.spec[0] for value in actual[:2]] == [DATA, DATA]


@pairwise(form=list(FORMS), implementation=[None, *PORTABLE], check_vma=[True, False])
def test_ops(form: str, implementation: str | None, check_vma: bool, mesh: Mesh) -> None:
    chosen = FORMS[form]
    call = lambda x, w: chosen.call(x, w, implementation=implementation)  # noqa: E731
    check(mesh, chosen, sharded(mesh, chosen, call, check_vma=check_vma))


@pytest.mark.parametrize("implementation", [None, "ring"])
@pytest.mark.parametrize("form", ["gather", "scatter", "all-reduce"])
def test_overlap(form: str, implementation: str | None, mesh: Mesh) -> None:
    """Forward and backward are sites, within the gradient and outside of it."""
    chosen = FORMS[form]

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        if form == "gather":
            return lax.all_gather(x, AXIS, axis=1, tiled=True) @ w
        if form == "scatter":
            return lax.psum_scatter(x @ w, AXIS, scatter_dimension=1, tiled=True)
        return lax.psum(x @ w, AXIS)

    keywords: dict[str, Any] = {"require": 1, "implementation": implementation}
    check(mesh, chosen, cm.overlap(sharded(mesh, chosen, plain), **keywords))


def test_overlap_of_gradients(mesh: Mesh) -> None:
    form = FORMS["gather"]
    fun = sharded(mesh, form, lambda x, w: lax.all_gather(x, AXIS, axis=1, tiled=True) @ w)
    step = functools.partial(results_and_gradients, fun)
    x, w = placed(mesh, form)
    with jax.set_mesh(mesh):
        plain = jax.jit(lambda x, w: step(x, w)[0])(x, w)
        rewritten = jax.jit(cm.overlap(step, require=2, implementation="ring"))(x, w)
    np.testing.assert_allclose(rewritten[0], plain, rtol=1e-5, atol=1e-5)


def agree(mesh: Mesh, fun: Callable, unsharded: Callable, shapes: tuple, specs: tuple) -> None:
    """Results and gradients of a function of x and w, and of the same on whole arrays."""
    generator = np.random.default_rng(0)
    whole = [generator.standard_normal(shape, np.float32) for shape in shapes]
    shardings = [NamedSharding(mesh, spec) for spec in specs]

    def step(fun: Callable, x: Any, w: Any) -> tuple:
        def loss(x: jax.Array, w: jax.Array) -> tuple:
            results = fun(x, w)
            return sum(jnp.sum(jnp.sin(y)) for y in results), results

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)

    with jax.set_mesh(mesh):
        actual = jax.jit(functools.partial(step, fun))(*map(jax.device_put, whole, shardings))
    expected = step(unsharded, *whole)
    for value, wanted in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        # Sums of at most 200 numbers of float32, in another order.
        np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize("implementation", ["ring", "ring_two_way"])
def test_overlap_under_vmap_of_an_array_in_use(implementation: str, rows: int, mesh: Mesh) -> None:
    """Chunks are kept, and joined for the sine. Of 4 rows, half a shard has 1 for 2 devices."""

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = lax.all_gather(x, AXIS, tiled=True)
        return whole @ w, jnp.sin(whole) * jnp.sum(w)

    def unsharded(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        halves = jnp.sum(w[:, :3]), jnp.sum(w[:, 3:])
        return x @ w, jnp.concatenate([jnp.sin(x) * half for half in halves])

    plain = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P(AXIS), P(None, AXIS)),
        out_specs=(P(None, AXIS), P(AXIS)),
        axis_names={AXIS},
    )
    fun = cm.overlap(plain, require=1, implementation=implementation)
    specs = P(None, (AXIS, DATA)), P(None, None, AXIS)
    shapes = (2, rows, 4), (2, 4, 6)
    agree(mesh, jax.vmap(fun), jax.vmap(unsharded), shapes, specs)


@pytest.mark.parametrize("implementation", PORTABLE)
def test_rows_that_the_explicit_axis_divides_before_the_scatter_only(
    implementation: str, mesh: Mesh
) -> None:
    """6 rows are on 2 devices; a shard of 3 cannot be, and is on each."""
    call = functools.partial(
        cm.matmul_reduce_scatter, axis_name=AXIS, implementation=implementation
    )
    form = Form(call, "md,df->mf", ((6, 8), (8, 4)), (P(None, AXIS), P(AXIS), P(AXIS)))
    fun = sharded(mesh, form, lambda x, w: (call(x, w),))
    agree(mesh, fun, lambda x, w: (x @ w,), form.shapes, (P(DATA, AXIS), P(AXIS)))
