"""Layers of heads that share a gather, where there are fewer of keys and values than devices."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import explain
from collective_matmul._compat import ShardingTypeError
from collective_matmul.layers import Column, Row, Shared, parallelize
from collective_matmul.layers.linear.functions import own_columns
from collective_matmul.layers.sharding_context import LocalShards, current_context

HEADS = {"q": (8, 8), "k": (2, 8), "v": (2, 8)}
OPS = "all_gather_matmul", "matmul_reduce_scatter"
PLAN = {"": Shared(*HEADS, heads={"q": 8, "k": 2, "v": 2}), "o": Row()}


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


class Flat(nnx.Module):
    """Layers with all features in one dimension."""

    def __init__(self, rngs: nnx.Rngs):
        for name, (heads, size) in HEADS.items():
            setattr(self, name, nnx.Linear(32, heads * size, rngs=rngs))
        self.o = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        made = [getattr(self, name)(x) for name in HEADS]  # Inside a shard_map, of the whole x.
        y = attend(*(each.reshape(*each.shape[:-1], -1, 8) for each in made))
        return self.o(y.reshape(*y.shape[:-2], -1))


class OfLinen(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        heads = [linen.DenseGeneral(heads, name=name)(x) for name, heads in HEADS.items()]
        return linen.DenseGeneral(32, axis=(-2, -1), name="o")(attend(*heads))


@pytest.mark.parametrize("library", ["nnx", "flat", "linen", "flat linen"])
def test_they_share_one_gather(make_mesh, library):
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    mesh = make_mesh({"tensor": 4})
    if "linen" not in library:
        model = (OfNnx if library == "nnx" else Flat)(nnx.Rngs(0))
        expected = model(x)
        parallelize(model, PLAN, mesh=mesh, implementation="ring")
        call = nnx.jit(lambda model, x: model(x))
    else:
        model = (OfLinen if library == "linen" else FlatLinen)()
        variables = model.init(jax.random.key(0), x)
        expected: Any = model.apply(variables, x)
        parallel = parallelize(model, PLAN, mesh=mesh, implementation="ring")
        call = jax.jit(lambda _, x: parallel.apply(variables, x))
    arguments = None if "linen" in library else model, x
    # float32, and sums of 64 products in another order.
    np.testing.assert_allclose(call(*arguments), expected, rtol=1e-4, atol=1e-5)
    # One gather for all three, and the scatter of the output.
    found = str(explain(call)(*arguments))
    assert [len(re.findall(rf"^1× +forward +{op} ", found, re.MULTILINE)) for op in OPS] == [1, 1]


class FlatLinen(linen.Module):
    """Layers with all features in one dimension."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        made = [linen.Dense(n * size, name=name)(x) for name, (n, size) in HEADS.items()]
        heads = (y.reshape(*x.shape[:-1], -1, 8) for y in made)
        return linen.Dense(32, name="o")(attend(*heads).reshape(*x.shape[:-1], -1))


#: Numbers of heads that do not fit the features beside them, with the sentence that says so.
WRONG = {
    "more heads": ({"q": 8, "k": 4, "v": 4}, "'q' has 64 features, 8 heads of 8; 'k' has 16"),
    "one wrong": ({"q": 8, "k": 2, "v": 1}, "'k' has 16 features, 2 heads of 8; 'v' has 16"),
    "no divisor": (
        {"q": 8, "k": 12, "v": 2},
        "'k': heads=12: does not divide out_features=16, the features of all heads, one head after"
        " the other; expected a divisor, such as 2, 4, 8, 16",
    ),
    "neither": ({"q": 8, "k": 3, "v": 2}, "'k': heads=3: "),
}


@pytest.mark.parametrize("library", ["nnx", "linen"])
@pytest.mark.parametrize("heads", [*WRONG])
def test_wrong_heads_of_one_dimension_are_refused(make_mesh, library, heads):
    number, expected = WRONG[heads]
    plan, mesh = {"": Shared(*HEADS, heads=number)}, make_mesh({"tensor": 4})
    with pytest.raises(ValueError, match=re.escape(expected)):
        if library == "nnx":
            parallelize(Flat(nnx.Rngs(0)), plan, mesh=mesh)
            return
        model, x = FlatLinen(), jnp.zeros((2, 16, 32))
        variables = model.init(jax.random.key(0), x)
        jax.eval_shape(parallelize(model, plan, mesh=mesh).apply, variables, x)


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_layers_that_say_how_many_heads_they_have_are_refused_without(make_mesh, library):
    plan: Any = {"": Shared(*HEADS), "o": Row()}
    sentence = r"'k': out_features=\(2, 8\): 2 is not divisible by .* of size 4; .* each: heads=2\b"
    with pytest.raises(ValueError, match=f"^{sentence}"):
        if library == "nnx":
            parallelize(OfNnx(nnx.Rngs(0)), plan, mesh=make_mesh({"tensor": 4}))
            return
        model, x = OfLinen(), jnp.zeros((2, 16, 32))
        variables = model.init(jax.random.key(0), x)
        jax.eval_shape(parallelize(model, plan, mesh=make_mesh({"tensor": 4})).apply, variables, x)


@pytest.mark.parametrize("where", ["auto", "explicit", "shard_map"])
def test_without_the_number_of_heads_a_part_of_one_is_gathered_or_does_not_fit(where):
    """Layers of one output dimension do not say how many heads they have, so nothing can warn."""
    types = (AxisType.Explicit if where == "explicit" else AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("tensor",), types, devices=jax.devices()[:4])
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    expected = Flat(nnx.Rngs(0))(x)
    model = parallelize(Flat(nnx.Rngs(0)), {"": Shared(*HEADS), "o": Row()}, mesh=mesh)
    if where == "auto":
        y = nnx.jit(lambda model, x: model(x))(model, x)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
        return
    if where == "explicit":
        with jax.set_mesh(mesh), pytest.raises(ShardingTypeError, match="reshape"):
            nnx.jit(lambda model, x: model(x))(model, x)
        return
    graph, state = nnx.split(model)
    spec = P(None, "tensor")
    run = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x),
        mesh=mesh,
        in_specs=(nnx.get_partition_spec(state), spec),
        out_specs=spec,
    )
    with pytest.raises(TypeError, match=r"cannot reshape array of shape \(2, 16, 4\)"):
        jax.eval_shape(run, state, x)


def test_heads_need_the_size_of_the_axis():
    plan: Any = {"": Shared(*HEADS, heads={"q": 8, "k": 2, "v": 2})}
    with pytest.raises(ValueError, match=r"heads=8: how many devices compute each .* pass mesh="):
        parallelize(Flat(nnx.Rngs(0)), plan)


@pytest.mark.parametrize(("copies", "expected"), [(2, "aabb"), (2, "ababcdcd"), (4, "abababab")])
def test_devices_have_the_same_part_of_one_dimension(make_mesh, copies, expected):
    """Global, and in a shard_map over four devices."""
    weights = jnp.arange(3.0 * len({*expected})).reshape(3, -1)
    mesh = make_mesh({"tensor": 4})
    whole = own_columns(current_context("tensor", mesh, weights), weights, 1, copies)

    def local(weights: jax.Array) -> jax.Array:
        return own_columns(LocalShards("tensor"), weights, 1, copies)

    shards = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(None, "tensor"))(weights)
    wanted = weights[:, [*map("abcd".index, expected)]]
    np.testing.assert_array_equal(whole, wanted)
    np.testing.assert_array_equal(shards, wanted)


def test_heads_of_a_layer_that_does_not_share_are_refused():
    for heads in ({"w": 2}, {"q": 8, "k": 2, "v": 2, "w": 2}, {}, 8):
        wrong: Any = heads
        with pytest.raises(ValueError, match=r"heads=.*; expected the number of heads of each"):
            Shared("q", "k", "v", heads=wrong)
    with pytest.raises(ValueError, match="names 'w', which is not among the layers; expected"):
        Shared("q", "k", heads={"q": 8, "k": 2, "w": 2})


@pytest.mark.parametrize("number", [0, 2.0, "2"])
def test_what_is_no_number_of_heads_is_refused(number: Any):
    sentence = f"={number!r}: expected the number of heads, a whole number of at least 1"
    with pytest.raises(ValueError, match=rf"^heads\['k'\]{sentence}"):
        Shared("q", "k", heads={"q": 8, "k": number})
    with pytest.raises(ValueError, match=f"^heads{sentence}"):
        Column(heads=number)


class Nested(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = Flat(rngs)


def test_a_layer_with_a_wrong_number_of_heads_is_named_by_its_path(make_mesh):
    plan = {"attention": Shared(*HEADS, heads={"q": 8, "k": 12, "v": 2})}
    with pytest.raises(ValueError, match=r"^'attention\.k': heads=12: does not divide"):
        parallelize(Nested(nnx.Rngs(0)), plan, mesh=make_mesh({"tensor": 4}))


@pytest.mark.parametrize("library", ["nnx", "linen"])
@pytest.mark.parametrize(
    ("given", "missing", "whole"),
    [
        ({"q": 8, "k": 2}, "'v'", "{'q': 8, 'k': 2, 'v': ...}"),
        ({"k": 2, "q": 8}, "'v'", "{'q': 8, 'k': 2, 'v': ...}"),
        ({"q": 8, "v": 2}, "'k'", "{'q': 8, 'k': ..., 'v': 2}"),
        ({"v": 2, "q": 8}, "'k'", "{'q': 8, 'k': ..., 'v': 2}"),
        ({"q": 8}, "'k' and 'v'", "{'q': 8, 'k': ..., 'v': ...}"),
        ({"k": 2, "v": 2}, "'q'", "{'q': ..., 'k': 2, 'v': 2}"),
    ],
)
def test_a_forgotten_layer_is_named_with_what_to_write(make_mesh, library, given, missing, whole):
    made = Flat(nnx.Rngs(0)) if library == "nnx" else FlatLinen()
    with pytest.raises(ValueError) as error:
        parallelize(made, {"": Shared(*HEADS, heads=given)}, mesh=make_mesh({"tensor": 4}))
    assert str(error.value) == (
        f"heads={given} has no number for {missing}; expected the number of heads of each layer"
        f" that shares the gather: heads={whole}"
    )
