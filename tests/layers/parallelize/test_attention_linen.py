"""`parallelize` on linen's attention modules."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul.layers import Heads
from collective_matmul.layers.parallelize.parallelize import parallelize
from tests.conftest import MeshFactory
from tests.layers.reference import assert_close, exhaustive, random, result_and_gradients

LENGTH, FEATURES, HEADS = 8, 12, 4
NO_PATH = "attention"


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({"data": 2, "tensor": 4})


class Block(linen.Module):
    """Attention that is rematerialized, causal and normalized, and attention stacked by a scan."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = linen.make_causal_mask(jnp.ones((x.shape[0], LENGTH)))
        options: Any = dict(num_heads=HEADS, bias_init=linen.initializers.normal(1.0))
        remat: Any = linen.remat(linen.MultiHeadDotProductAttention)
        plain = remat(normalize_qk=True, qkv_features=16, name="plain", **options)
        x = x + plain(x, mask=mask)
        scan = linen.scan(
            lambda module, x, _: (x + module(x, inputs_kv=x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return scan(linen.MultiHeadAttention(name="stack", **options), x, None)[0]


X = random(4, LENGTH, FEATURES)
PLAN = {"plain": Heads(), "stack": Heads()}
pytestmark = [
    pytest.mark.filterwarnings("ignore:The inputs_kv arg:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning"),
]


@cache
def variables() -> Any:
    return jax.jit(Block().init)(jax.random.key(0), X)


@pytest.mark.parametrize("context", ["auto", exhaustive("local")])
def test_attention_stays_the_same(context: str, mesh: Mesh) -> None:
    model = parallelize(Block(), PLAN, mesh=mesh, implementation="ring")
    apply = model.apply
    if context == "local":
        spec = P("data", "tensor")
        specs = (model.partition_specs(variables()), spec)
        apply = jax.shard_map(apply, mesh=mesh, in_specs=specs, out_specs=spec)
    y, *gradients = result_and_gradients(apply, variables(), X)
    expected, *expected_gradients = result_and_gradients(Block().apply, variables(), X)
    assert_close(y, expected)
    # In all, as the gradients of a key's bias are zero, up to rounding.
    assert_close(ravel_pytree(gradients)[0], ravel_pytree(expected_gradients)[0])


def test_partition_specs_divide_the_heads() -> None:
    shapes = jax.eval_shape(Block().init, jax.random.key(0), X)
    specs = parallelize(Block(), PLAN).partition_specs(shapes)["params"]
    assert specs["plain"]["query"] == {"kernel": P(None, "tensor", None), "bias": P("tensor", None)}
    assert specs["plain"]["out"] == {"kernel": P("tensor", None, None), "bias": P(None)}
    assert specs["plain"]["key_ln"] == {"scale": P()}
    assert specs["stack"]["key"]["kernel"] == P(None, None, "tensor", None)
    assert specs["stack"]["out"]["bias"] == P(None, None)


class Attention(linen.Module):
    """One attention module with options."""

    kind: Any = linen.MultiHeadDotProductAttention
    options: Any = linen.FrozenDict()

    @linen.compact
    def __call__(self, *inputs: jax.Array, **arguments: Any) -> jax.Array:
        options = dict(num_heads=HEADS, qkv_features=16, **self.options)
        return self.kind(name=NO_PATH, **options)(*inputs, **arguments)


def made(module: Any, *inputs: Any, **arguments: Any) -> Any:
    return jax.jit(lambda key, *inputs: module.init(key, *inputs, **arguments))(
        jax.random.key(0), *inputs
    )


@pytest.mark.parametrize("inputs", [exhaustive("qqq"), "qkk", exhaustive("qkv")])
def test_each_distinct_input_is_gathered_once(inputs: str, mesh: Mesh) -> None:
    arrays = {name: random(2, LENGTH, FEATURES, seed=i) for i, name in enumerate("qkv")}
    distinct = {name: arrays[name] for name in inputs}
    model = parallelize(Attention(), {NO_PATH: Heads()}, mesh=mesh, implementation="ring")

    def call(module: Any, distinct: dict[str, jax.Array]) -> jax.Array:
        return module.apply(made_variables, *(distinct[name] for name in inputs))

    made_variables = made(Attention(), *arrays.values())
    program = jax.make_jaxpr(lambda distinct: call(model, distinct))(distinct)
    assert str(program).count("ppermute") == 3 * len(distinct) + 3
    actual = jax.jit(lambda distinct: call(model, distinct))(distinct)
    assert_close(actual, jax.jit(lambda distinct: call(Attention(), distinct))(distinct))


@pytest.mark.parametrize("broadcast", [exhaustive(True), False])
def test_dropout_stays_the_same(broadcast: bool, mesh: Mesh) -> None:
    options = linen.FrozenDict(dropout_rate=0.5, broadcast_dropout=broadcast)
    module = Attention(linen.SelfAttention, options)
    x = random(2, LENGTH, FEATURES)
    values = made(module, x, deterministic=True)
    model = parallelize(module, {NO_PATH: Heads()}, mesh=mesh)

    def call(module: Any) -> jax.Array:
        rngs = {"dropout": jax.random.key(1)}
        return jax.jit(lambda v, x: module.apply(v, x, deterministic=False, rngs=rngs))(values, x)

    assert_close(call(model), call(module))


@pytest.mark.parametrize("context", ["auto", "local"])
def test_decoding_stays_the_same_with_a_cache_sharded_over_heads(context: str, mesh: Mesh) -> None:
    module = Attention(options=linen.FrozenDict(decode=True))
    model = parallelize(module, {NO_PATH: Heads()}, mesh=mesh, implementation="ring")
    whole = jnp.ones((2, 3, FEATURES), jnp.float32)
    actual, expected = made(model, whole), made(module, whole)

    def step(values: Any, x: jax.Array) -> Any:
        y, cache = model.apply(values, x, mutable=["cache"])
        return y, {**values, **cache}

    if context == "local":
        specs = model.partition_specs(actual)
        step = jax.shard_map(step, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs))
    step = jax.jit(step)
    for x in random(3, 2, 1, FEATURES):
        assert "tensor" in actual["cache"][NO_PATH]["cached_key"].sharding.spec
        y, actual = step(actual, x)
        expected_y, cache = jax.jit(lambda v, x: module.apply(v, x, mutable=["cache"]))(expected, x)
        expected = {**expected, **cache}
        assert_close(y, expected_y)
    assert_close(actual, expected)


def test_heads_that_do_not_divide_are_refused(mesh: Mesh) -> None:
    model = parallelize(Attention(), {NO_PATH: Heads()}, axis_name="data", mesh=mesh)
    jax.eval_shape(model.init, jax.random.key(0), X)
    model = parallelize(
        linen.Sequential([linen.SelfAttention(6, qkv_features=12)]), {"*": Heads()}, mesh=mesh
    )
    sentence = "'layers_0': num_heads=6: 6 is not divisible by axis 'tensor' of size 4"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        jax.eval_shape(model.init, jax.random.key(0), X)
    precise = Attention(options=linen.FrozenDict(precision="highest"))
    with pytest.raises(ValueError, match=r"'attention' has precision='highest'"):
        parallelize(precise, {NO_PATH: Heads()}, mesh=mesh).init(jax.random.key(0), X)
