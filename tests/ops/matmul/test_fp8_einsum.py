"""`collective_einsum` with operands in 8 bits: matmuls of whole dimensions, by the ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, collective_einsum, matmul_reduce_scatter
from tests.conftest import MeshFactory
from tests.fp8_reference import SHIPPED_RECIPES
from tests.reference import AXIS
from tests.rewrite.simulator import simulated_or_compiled

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

B, S, D, H, K = 2, 6, 12, 3, 4

#: Subscripts, the label, shapes of x and w per device, and the same by an op on matrices.
GATHERS = [
    ("bsd,dhk->bshk", (B, S, D), (D, H, K), lambda x, w: (x, w.reshape(D, -1))),
    ("...sd,kd->...sk", (B, S, D), (K, D), lambda x, w: (x, w.T)),
    ("dk,bsd->bsk", (D, K), (B, S, D), lambda w, x: (x, w)),
    ("bshk,khd->bsd", (B, S, H, K), (K, H, D), lambda x, w: (merged(x), swapped(w))),
]
SCATTERS = [
    ("bshk,hkd->bsd", (B, S, H, K), (H, K, D), lambda x, w: (merged(x), w.reshape(-1, D))),
    ("dhk,bsd->bshk", (D, H, K), (B, S, D), lambda w, x: (x, w.reshape(D, -1))),
]


def merged(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1)


def swapped(w: jax.Array) -> jax.Array:
    return w.swapaxes(0, 1).reshape(-1, w.shape[-1])


def on_devices(fun: Callable, make_mesh: MeshFactory) -> Callable:
    """A function of arrays that differ on every device, and of all results side by side."""
    spec = P(AXIS)

    def local(x: Any, w: Any) -> Any:
        return jax.tree.map(lambda y: y[None], fun(x[0], w[0]))

    return jax.shard_map(local, mesh=make_mesh({AXIS: 2}), in_specs=spec, out_specs=spec)


def with_gradients(fun: Callable) -> Callable:
    def results(x: jax.Array, w: jax.Array) -> Any:
        y, transpose = jax.vjp(fun, x, w)
        return y.ravel(), transpose(jnp.sin(y))

    return results


@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
@pytest.mark.parametrize(
    ("scatters", "case"), [*((False, c) for c in GATHERS), *((True, c) for c in SCATTERS)]
)
@simulated_or_compiled
def test_equals_the_op(
    scatters: bool, case: Any, fp8: Any, run: Callable, make_mesh: MeshFactory
) -> None:
    subscripts, shape_x, shape_w, as_matrices = case
    keywords: Any = {"fp8": fp8, "implementation": "ring"}

    def einsum(x: jax.Array, w: jax.Array) -> jax.Array:
        label = {"scatter" if scatters else "gather": "s"}
        return collective_einsum(subscripts, x, w, AXIS, **label, **keywords)

    def op(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = as_matrices(x, w)
        if scatters:
            return matmul_reduce_scatter(x, w, AXIS, scatter_dimension=1, **keywords)
        return all_gather_matmul(x, w, AXIS, gather_dimension=1, **keywords)

    generator = np.random.default_rng(0)
    x, w = (
        generator.standard_normal((2, *shape)).astype(np.float32) for shape in (shape_x, shape_w)
    )
    # The op's result is sine'd in another shape, by the same numbers.
    expected = run(on_devices(with_gradients(op), make_mesh))(x, w)
    actual = run(on_devices(with_gradients(einsum), make_mesh))(x, w)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "label", "wrong"),
    [
        ("sd,sf->df", [(4, 6), (8, 2)], {"gather": "s"}, "the gathered label 's' is contracted"),
        ("esd,edf->esf", [(2, 4, 6), (2, 6, 2)], {"gather": "s"}, "label 'e' is in both operands"),
        ("s,f->sf", [(4,), (6,)], {"gather": "s"}, "it contracts nothing"),
        ("sd,d->s", [(4, 6), (6,)], {"scatter": "s"}, "one operand has no free label"),
        ("dsb,df->bsf", [(6, 4, 2), (6, 2)], {"gather": "s"}, "one operand as 'sbd' and the re"),
        ("sbd,df->bsf", [(4, 2, 6), (6, 2)], {"scatter": "s"}, "and the result as 'sbf'"),
    ],
)
def test_other_einsums_are_refused(
    subscripts: str, shapes: Any, label: Any, wrong: str, make_mesh: MeshFactory
) -> None:
    def einsum(x: jax.Array, w: jax.Array) -> jax.Array:
        return collective_einsum(subscripts, x, w, AXIS, fp8="rowwise", **label)

    arguments = [jax.ShapeDtypeStruct((2, *shape), jnp.float32) for shape in shapes]
    message = f"fp8='rowwise': subscripts={subscripts!r} is not a matmul .*{wrong}.*leave fp8 out"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(on_devices(einsum, make_mesh), *arguments)


def test_an_unknown_recipe_is_refused(make_mesh: MeshFactory) -> None:
    def einsum(x: jax.Array, w: jax.Array) -> jax.Array:
        recipe: Any = "mxfp8"
        return collective_einsum("sd,df->sf", x, w, AXIS, gather="s", fp8=recipe)

    with pytest.raises(ValueError, match=r"fp8='mxfp8': expected None .*'rowwise'"):
        jax.eval_shape(on_devices(einsum, make_mesh), jnp.ones((2, 4, 6)), jnp.ones((2, 6, 2)))
