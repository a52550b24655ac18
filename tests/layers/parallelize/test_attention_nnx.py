"""`parallelize` on nnx.MultiHeadAttention."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul.layers import Column, Heads, Row
from collective_matmul.layers.parallelize.parallelize import parallelize
from tests.conftest import MeshFactory
from tests.layers.reference import (
    assert_close,
    assert_identical,
    exhaustive,
    outcome,
    pure,
    random,
    unsharded_outcome,
)

# A norm over a head of fewer features amplifies rounding errors.
BATCH, LENGTH, FEATURES, HEADS, KV_HEADS, HEAD_DIM = 4, 8, 12, 8, 4, 4


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({"data": 2, "tensor": 4})


def attention(**options: Any) -> nnx.MultiHeadAttention:
    options = dict(decode=False, bias_init=nnx.initializers.normal(1.0), **options)
    return nnx.MultiHeadAttention(HEADS, FEATURES, HEADS * HEAD_DIM, rngs=nnx.Rngs(0), **options)


def rotary(query: jax.Array, key: jax.Array, *arguments: Any, **options: Any) -> jax.Array:
    """An attention function that rotates queries and keys by their positions first."""

    def rotate(x: jax.Array) -> jax.Array:
        angles = jnp.arange(x.shape[-3], dtype=x.dtype).reshape(1, -1, 1, 1)
        first, second = jnp.split(x, 2, axis=-1)
        rotated = (first * jnp.cos(angles) - second * jnp.sin(angles), second + first)
        return jnp.concatenate(rotated, axis=-1)

    return nnx.dot_product_attention(rotate(query), rotate(key), *arguments, **options)


class Block(nnx.Module):
    """A norm, causal attention with options, a residual."""

    def __init__(self, **options: Any):
        self.norm = nnx.LayerNorm(FEATURES, rngs=nnx.Rngs(0))
        self.attention = attention(**options)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(jnp.ones((x.shape[0], LENGTH)))
        return x + self.attention(self.norm(x), mask=mask)


GROUPED: dict[str, Any] = dict(num_kv_heads=KV_HEADS, normalize_qk=True)


def assert_outcomes_close(actual: Any, expected: Any) -> None:
    """Compares results, and gradients in all: those of a key's bias are zero, up to rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    actual, expected = jax.tree.map(np.asarray, (actual, expected))
    assert_close(actual[0], expected[0])
    assert_close(ravel_pytree(actual[1:])[0], ravel_pytree(expected[1:])[0])


@functools.cache
def expected_outcome() -> Any:
    return unsharded_outcome(Block(**GROUPED), random(BATCH, LENGTH, FEATURES))


@pytest.mark.parametrize(
    "context", ["auto", "explicit", exhaustive("local"), exhaustive("local_unchecked")]
)
def test_grouped_normalized_attention_stays_the_same(context: str, mesh: Mesh) -> None:
    model = parallelize(Block(**GROUPED), {"attention": Heads()}, implementation="ring")
    actual = outcome(model, random(BATCH, LENGTH, FEATURES), context, mesh)
    assert_outcomes_close(actual, expected_outcome())


@pytest.mark.parametrize(
    "context", ["auto", exhaustive("explicit"), "local", exhaustive("local_unchecked")]
)
def test_fewer_heads_of_keys_and_values_than_devices_are_copied(context: str, mesh: Mesh) -> None:
    options = dict(GROUPED, num_kv_heads=2)
    kind = AxisType.Explicit if context == "explicit" else AxisType.Auto
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(kind, kind))
    model = parallelize(Block(**options), {"attention": Heads()}, mesh=mesh, implementation="ring")
    assert_identical(pure(nnx.state(model)), pure(nnx.state(Block(**options))))
    x = random(BATCH, LENGTH, FEATURES)
    actual = outcome(model, x, context, mesh)
    assert_outcomes_close(actual, unsharded_outcome(Block(**options), x))


def permutes(fun: Any, *arguments: Any) -> int:
    return str(jax.make_jaxpr(fun)(*arguments)).count("ppermute")


def compute(model: Any, *arguments: Any, **options: Any) -> jax.Array:
    return jax.jit(lambda model, *arguments: model(*arguments, **options))(model, *arguments)


@pytest.mark.parametrize("inputs", [exhaustive("qqq"), "qkk", exhaustive("qkv"), "qqv"])
def test_each_distinct_input_is_gathered_once(inputs: str, mesh: Mesh) -> None:
    arrays = {name: random(2, LENGTH, FEATURES, seed=i) for i, name in enumerate("qkv")}
    given = [arrays[name] for name in inputs]
    expected = compute(attention(), *given)
    model = parallelize(attention(), {"": Heads()}, mesh=mesh, implementation="ring")
    # Traced arrays of one name are one object, as in the code of a model.
    distinct = [arrays[name] for name in dict.fromkeys(inputs)]

    def call(*distinct: jax.Array) -> jax.Array:
        by_name = dict(zip(dict.fromkeys(inputs), distinct, strict=True))
        return model(*(by_name[name] for name in inputs))

    assert permutes(call, *distinct) == 3 * len(distinct) + 3
    assert_close(jax.jit(call)(*distinct), expected)


def test_layers_that_are_named_one_by_one_share_the_gather_too(mesh: Mesh) -> None:
    plan = {"query": Column(), "key": Column(), "value": Column(), "out": Row()}
    model = parallelize(attention(), plan, mesh=mesh, implementation="ring")
    assert permutes(model, random(2, LENGTH, FEATURES)) == 3 + 3
    # One head of keys and values for all, which the axis does not divide, stays whole.
    model = parallelize(attention(num_kv_heads=1), {"query": Column(), "out": Row()}, mesh=mesh)
    x = random(2, LENGTH, FEATURES)
    assert_close(compute(model, x), compute(attention(num_kv_heads=1), x))


QUICK = ("dropout of each head", "a mask for each head")
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dropout": (dict(dropout_rate=0.5), dict(deterministic=False)),
    "dropout of each head": (
        dict(dropout_rate=0.5, broadcast_dropout=False),
        dict(deterministic=False),
    ),
    "attention_fn": (dict(attention_fn=rotary), {}),
    "is_causal": (dict(use_bias=False), dict(is_causal=True)),
    "a mask for each head": (
        dict(out_features=8),
        dict(mask=np.arange(2 * HEADS * LENGTH * LENGTH).reshape(2, HEADS, LENGTH, -1) % 3 > 0),
    ),
}


@pytest.mark.parametrize("name", [name if name in QUICK else exhaustive(name) for name in OPTIONS])
def test_options_of_attention_stay_the_same(name: str, mesh: Mesh) -> None:
    constructed, called = OPTIONS[name]
    x = random(2, LENGTH, FEATURES)
    model = parallelize(attention(**constructed), {"": Heads()}, mesh=mesh)
    assert_close(compute(model, x, **called), compute(attention(**constructed), x, **called))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flax's, of Module.sow.
def test_weights_stay_sown_and_out_sharding_is_kept(mesh: Mesh) -> None:
    x = random(2, LENGTH, FEATURES)
    model = parallelize(attention(), {"": Heads()}, mesh=mesh)

    @nnx.jit
    def call(model: nnx.MultiHeadAttention, x: jax.Array) -> jax.Array:
        return model(x, sow_weights=True, out_sharding=P("data"))

    sharding: Any = call(model, x).sharding
    assert sharding.spec == P("data")
    state = nnx.state(model, nnx.Intermediate)
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(2, HEADS, LENGTH, LENGTH)]


@nnx.jit
def decode(model: Any, x: jax.Array) -> Any:
    return model(x, decode=True)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_decoding_stays_the_same_with_a_cache_sharded_over_heads(
    kind: AxisType, mesh: Mesh
) -> None:
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(kind, kind))
    batch = NamedSharding(mesh, P("data"))
    tokens = random(3, 2, 1, FEATURES)
    expected_model: Any = attention(**GROUPED)
    model: Any = attention(**GROUPED)
    expected_model.init_cache((2, 3, FEATURES))
    expected = [decode(expected_model, x) for x in tokens]
    if kind == AxisType.Auto:  # Before, and in the other case after.
        model.init_cache((2, 3, FEATURES))
    with jax.set_mesh(mesh):
        parallelize(model, {"": Heads()}, implementation="ring")
        if kind == AxisType.Explicit:
            model.init_cache((2, 3, FEATURES))
        assert model.cached_key.get_value().sharding.spec == P(None, None, "tensor", None)
        for x, expected_y in zip(tokens, expected, strict=True):
            y = decode(model, jax.device_put(x, batch))
            assert_close(y, expected_y)
            assert y.sharding.spec[0] == "data"
            spec = model.cached_value.get_value().sharding.spec
            assert tuple(spec)[:3] == ("data", None, "tensor")
    assert_close(pure(nnx.state(model, nnx.Cache)), pure(nnx.state(expected_model, nnx.Cache)))


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_cache_has_the_copies_of_heads(made: str, mesh: Mesh) -> None:
    x = random(2, 1, FEATURES)
    expected_model, model = attention(num_kv_heads=2), attention(num_kv_heads=2)
    expected_model.init_cache((2, 3, FEATURES))
    if made == "before":
        model.init_cache((2, 3, FEATURES))
    parallelize(model, {"": Heads()}, mesh=mesh)
    if made == "after":
        model.init_cache((2, 3, FEATURES))
    assert_close(decode(model, x), decode(expected_model, x))
    for cache, expected in (
        (model.cached_key, expected_model.cached_key),
        (model.cached_value, expected_model.cached_value),
    ):
        assert cache is not None and expected is not None
        assert_close(cache[...], jnp.repeat(expected[...], 2, -2))
        sharding: Any = cache.get_value().sharding
        assert sharding.shard_shape(cache.shape)[-2] == 1


def test_decoding_inside_shard_map_stays_the_same(mesh: Mesh) -> None:
    x = random(2, 1, FEATURES)
    expected_model, model = attention(), parallelize(attention(), {"": Heads()})
    for each in (expected_model, model):
        each.init_cache((2, 3, FEATURES))
    graph, state = nnx.split(model)

    def step(state: nnx.State, x: jax.Array) -> Any:
        local = nnx.merge(graph, state)
        return local(x, decode=True), nnx.state(local)

    specs = nnx.get_partition_spec(state)
    step = jax.shard_map(step, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs))
    y, state = jax.jit(step)(state, x)
    assert_close(y, decode(expected_model, x))
    assert_close(pure(state), pure(nnx.state(expected_model)))


def test_weights_keep_their_values_and_paths_and_get_specs(mesh: Mesh) -> None:
    model = parallelize(Block(**GROUPED), {"attention": Heads()}, mesh=mesh)
    assert_identical(pure(nnx.state(model)), pure(nnx.state(Block(**GROUPED))))
    assert isinstance(model.attention, nnx.MultiHeadAttention)
    specs = pure(nnx.get_partition_spec(nnx.state(model.attention)))
    heads = {"kernel": P(None, "tensor", None), "bias": P("tensor", None)}
    assert specs["query"] == specs["key"] == specs["value"] == heads
    assert specs["out"] == {"kernel": P("tensor", None, None), "bias": P(None)}
    assert specs["key_ln"] == {"scale": P()}


class Inherits(nnx.MultiHeadAttention):
    """Has the constructor of its own that most models give it."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(HEADS, FEATURES, decode=False, qkv_features=16, rngs=rngs)


class CallsOtherwise(Inherits):
    def __call__(self, inputs_q: jax.Array, *arguments: Any, **options: Any) -> jax.Array:
        return super().__call__(inputs_q + 1, *arguments, **options)


def test_a_subclass_that_inherits_the_call_is_accepted(mesh: Mesh) -> None:
    x = random(2, LENGTH, FEATURES)
    model = parallelize(Inherits(nnx.Rngs(0)), {"": Heads()}, mesh=mesh, implementation="ring")
    assert isinstance(model, Inherits)
    assert permutes(model, x) == 3 + 3
    assert_close(compute(model, x), compute(Inherits(nnx.Rngs(0)), x))


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "heads": (
        lambda: nnx.MultiHeadAttention(6, FEATURES, rngs=nnx.Rngs(0)),
        Heads(),
        "'0': num_heads=6: 6 is not divisible by axis 'tensor' of size 4; the nearest to it:"
        " 4 or 8",
    ),
    "key-value heads": (
        lambda: nnx.MultiHeadAttention(12, FEATURES, num_kv_heads=3, rngs=nnx.Rngs(0)),
        Heads(),
        "'0': num_kv_heads=3: 3 is not divisible by axis 'tensor' of size 4",
    ),
    "precision": (
        lambda: attention(precision="highest"),
        Heads(),
        "plan['0']: '0.query' has precision='highest'",
    ),
    "own call": (
        lambda: CallsOtherwise(nnx.Rngs(0)),
        Heads(),
        "plan['0']: '0' is a CallsOtherwise, defined in"
        " tests.layers.parallelize.test_attention_nnx; Heads() takes nnx.MultiHeadAttention, and"
        " subclasses that inherit its __call__; this one has its own. Column() and Row() take the"
        " linear layers inside it",
    ),
    "linear": (
        lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
        Heads(),
        "plan['0']: '0' is a Linear, defined in flax.nnx.nn.linear; Heads() takes"
        " nnx.MultiHeadAttention. Column() and Row() take linear layers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_whose_heads_cannot_be_divided_is_refused(name: str, mesh: Mesh) -> None:
    make, style, sentence = REFUSED[name]
    model = nnx.List([nnx.eval_shape(make)])
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parallelize(model, {"0": style}, mesh=mesh)
    assert nnx.graphdef(model) == before
