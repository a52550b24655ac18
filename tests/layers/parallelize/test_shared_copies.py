"""Layers of heads that share a gather, where there are fewer of keys and values than devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from collective_matmul import explain
from collective_matmul.layers import Row, Shared, parallelize

HEADS, COPIES = {"q": (8, 8), "k": (2, 8), "v": (2, 8)}, {"k": 2, "v": 2}
OPS = "all_gather_matmul", "matmul_reduce_scatter"
PLAN = {"": Shared(*HEADS, copies=COPIES), "o": Row()}


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    key, value = (jnp.repeat(x, query.shape[-2] // x.shape[-2], -2) for x in (key, value))
    return nnx.dot_product_attention(query, key, value)


class OfNnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        for name, heads in HEADS.items():
            setattr(self, name, nnx.LinearGeneral(32, heads, rngs=rngs))
        self.o = nnx.LinearGeneral((8, 8), 32, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.o(attend(*(getattr(self, name)(x) for name in HEADS)))


class OfLinen(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        heads = [linen.DenseGeneral(heads, name=name)(x) for name, heads in HEADS.items()]
        return linen.DenseGeneral(32, axis=(-2, -1), name="o")(attend(*heads))


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_they_share_one_gather(make_mesh, library):
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    mesh = make_mesh({"tensor": 4})
    if library == "nnx":
        model = OfNnx(nnx.Rngs(0))
        expected = model(x)
        parallelize(model, PLAN, mesh=mesh, implementation="ring")
        call = nnx.jit(lambda model, x: model(x))
    else:
        model = OfLinen()
        variables = model.init(jax.random.key(0), x)
        expected: Any = model.apply(variables, x)
        parallel = parallelize(model, PLAN, mesh=mesh, implementation="ring")
        call = jax.jit(lambda _, x: parallel.apply(variables, x))
    arguments = model if library == "nnx" else None, x
    # float32, and sums of 64 products in another order.
    np.testing.assert_allclose(call(*arguments), expected, rtol=1e-4, atol=1e-5)
    # One gather for all three, and the scatter of the output.
    found = str(explain(call)(*arguments))
    assert [found.count(f"1×  forward  {op}") for op in OPS] == [1, 1]


def test_copies_of_a_layer_that_does_not_share_are_refused():
    with pytest.raises(ValueError, match=r"expected names among .*'k'.*, not w"):
        Shared("q", "k", copies={"w": 2})
