"""The nnx layers equal Flax's own, on local shards and on global arrays."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul.layers import (
    AttentionProjection,
    ColumnParallelLinear,
    GatedFeedForward,
    RowParallelLinear,
)
from collective_matmul.log import warn_once
from tests.conftest import MeshFactory
from tests.layers.reference import (
    CONTEXTS,
    assert_close,
    assert_identical,
    exhaustive,
    outcome,
    pure,
    random,
    result_and_gradients,
    unsharded_outcome,
)

FEATURES, HEADS, HEAD_DIM, HIDDEN = 12, 4, 3, 16
BIAS: dict[str, Any] = dict(use_bias=True, bias_init=nnx.initializers.normal(1.0))

every_context = pytest.mark.parametrize("context", CONTEXTS)
xla_and_ring = pytest.mark.parametrize("implementation", ["xla", "ring"])


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({"data": 2, "tensor": 4})


class Block(nnx.Module):
    """All layers once, with biases: attention without a softmax, then feed-forward."""

    def __init__(self, **options: Any):
        options = dict(BIAS, rngs=nnx.Rngs(0), **options)
        self.projection = AttentionProjection(FEATURES, HEADS, HEADS, HEAD_DIM, **options)
        self.output = RowParallelLinear((HEADS, HEAD_DIM), FEATURES, **options)
        self.feed_forward = GatedFeedForward(FEATURES, HIDDEN, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = self.projection(x)
        x = x + self.output(query * key + value)
        return x + self.feed_forward(x)


class FlaxBlock(nnx.Module):
    """The layers of `Block` as Flax has them, with the same paths."""

    def __init__(self):
        options: Any = dict(BIAS, rngs=nnx.Rngs(0))
        heads = (HEADS, HEAD_DIM)
        self.projection = nnx.Dict(
            {
                name: nnx.LinearGeneral(FEATURES, heads, **options)
                for name in ("query", "key", "value")
            }
        )
        self.output = nnx.LinearGeneral(heads, FEATURES, axis=(-2, -1), **options)
        self.feed_forward = nnx.Dict(
            gate=nnx.Linear(FEATURES, HIDDEN, **options),
            up=nnx.Linear(FEATURES, HIDDEN, **options),
            down=nnx.Linear(HIDDEN, FEATURES, **options),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = (self.projection[n](x) for n in ("query", "key", "value"))
        x = x + self.output(query * key + value)
        hidden = jax.nn.silu(self.feed_forward["gate"](x)) * self.feed_forward["up"](x)
        return x + self.feed_forward["down"](hidden)


@cache
def expected_outcome() -> tuple[Any, Any, Any]:
    return unsharded_outcome(FlaxBlock(), random(4, 8, FEATURES))


def test_initial_parameters_equal_those_of_flax() -> None:
    assert_identical(pure(nnx.state(Block())), pure(nnx.state(FlaxBlock())))


@every_context
@xla_and_ring
def test_results_and_gradients_equal_those_of_flax(
    context: str, implementation: str, mesh: Mesh
) -> None:
    model = Block(implementation=implementation)
    assert_close(outcome(model, random(4, 8, FEATURES), context, mesh), expected_outcome())


class Pair(nnx.Module):
    """A column-parallel layer, gelu and a row-parallel layer: a feed-forward."""

    def __init__(self, *, gather: int | None = -2, scatter: int | None = -2, **options: Any):
        options = dict(BIAS, rngs=nnx.Rngs(0), **options)
        self.up = ColumnParallelLinear(FEATURES, HIDDEN, gather_dimension=gather, **options)
        self.down = RowParallelLinear(HIDDEN, FEATURES, scatter_dimension=scatter, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class FlaxPair(nnx.Module):
    def __init__(self):
        options: Any = dict(BIAS, rngs=nnx.Rngs(0))
        self.up = nnx.Linear(FEATURES, HIDDEN, **options)
        self.down = nnx.Linear(HIDDEN, FEATURES, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class WholeSequence(nnx.Module):
    """A pair without sequence parallelism between the two halves of a pair with it."""

    def __init__(self, **options: Any):
        options = dict(BIAS, rngs=nnx.Rngs(0), **options)
        self.up = ColumnParallelLinear(FEATURES, HIDDEN, **options)
        self.sum = RowParallelLinear(HIDDEN, FEATURES, scatter_dimension=None, **options)
        self.again = ColumnParallelLinear(FEATURES, HIDDEN, gather_dimension=None, **options)
        self.down = RowParallelLinear(HIDDEN, FEATURES, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.sum(jax.nn.gelu(self.up(x)))
        return self.down(jax.nn.gelu(self.again(x)))


class FlaxWholeSequence(nnx.Module):
    def __init__(self):
        options: Any = dict(BIAS, rngs=nnx.Rngs(0))
        self.up = nnx.Linear(FEATURES, HIDDEN, **options)
        self.sum = nnx.Linear(HIDDEN, FEATURES, **options)
        self.again = nnx.Linear(FEATURES, HIDDEN, **options)
        self.down = nnx.Linear(HIDDEN, FEATURES, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.sum(jax.nn.gelu(self.up(x)))
        return self.down(jax.nn.gelu(self.again(x)))


@pytest.mark.parametrize("context", ["auto", "local", "local_unchecked"])
def test_without_sequence_parallelism_every_device_has_the_whole_sequence(
    context: str, mesh: Mesh
) -> None:
    x = random(4, 8, FEATURES)
    assert_close(
        outcome(WholeSequence(implementation="ring"), x, context, mesh),
        unsharded_outcome(FlaxWholeSequence(), x),
    )


@pytest.mark.parametrize(
    ("shape", "dimension"),
    [((8, FEATURES), 0), ((8, 3, FEATURES), -3), ((3, 2, 8, FEATURES), 2)],
    ids=str,
)
def test_any_dimension_before_the_features_may_be_sharded(
    shape: tuple[int, ...], dimension: int, make_mesh: MeshFactory
) -> None:
    x = random(*shape)
    mesh = make_mesh({"tensor": 4})
    pair = Pair(gather=dimension, scatter=dimension, implementation="ring", mesh=mesh)
    y = jax.jit(lambda pair, x: pair(x))(pair, x)
    assert y.sharding.spec.index("tensor") == dimension % len(shape)
    assert_close(y, FlaxPair()(x))


@pytest.mark.parametrize("context", ["auto", "local"])
@pytest.mark.parametrize("size", [1, 7])
def test_a_sequence_that_the_axis_does_not_divide_is_whole_on_every_device(
    size: int, context: str, mesh: Mesh
) -> None:
    x = random(4, size, FEATURES)
    pair = Pair(implementation="ring")
    whole = P("data")
    assert_close(outcome(pair, x, context, mesh, whole), unsharded_outcome(FlaxPair(), x))


def test_a_sequence_that_could_be_padded_is_reported(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    jax.eval_shape(Pair(mesh=mesh), random(4, 7, FEATURES))
    jax.eval_shape(Pair(mesh=mesh), random(4, 1, FEATURES))
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "gather_dimension",
        "scatter_dimension",
    ]
    assert "size 7 of dimension 1 is not divisible by axis 'tensor'" in caplog.text
    assert "pad it to 8 to shard it" in caplog.text


def test_an_axis_of_size_1_computes_the_same(make_mesh: MeshFactory) -> None:
    x = random(2, 3, FEATURES)
    pair = Pair(implementation="ring", mesh=make_mesh({"data": 1, "tensor": 1}))
    assert_close(jax.jit(lambda pair, x: pair(x))(pair, x), FlaxPair()(x))


def test_layers_run_without_jit(make_mesh: MeshFactory) -> None:
    x = random(2, 4, FEATURES)
    assert_close(Pair(mesh=make_mesh({"tensor": 2}))(x), FlaxPair()(x))


def test_grouped_query_attention_has_fewer_key_and_value_heads(mesh: Mesh) -> None:
    layer = AttentionProjection(FEATURES, 8, 4, 3, mesh=mesh, rngs=nnx.Rngs(0))
    x = random(2, 4, FEATURES)
    query, key, value = jax.jit(lambda layer, x: layer(x))(layer, x)
    for heads, name in ((query, "query"), (key, "key"), (value, "value")):
        assert_close(heads, jnp.tensordot(x, getattr(layer, name).kernel[...], 1))
    assert (query.shape, key.shape, value.shape) == ((2, 4, 8, 3), (2, 4, 4, 3), (2, 4, 4, 3))


class FewKeyHeads(nnx.Module):
    """Attention without a softmax, whose keys and values have two heads."""

    def __init__(self, **options: Any):
        options = dict(BIAS, rngs=nnx.Rngs(0), **options)
        self.projection = AttentionProjection(FEATURES, 8, 2, HEAD_DIM, **options)
        self.output = RowParallelLinear((8, HEAD_DIM), FEATURES, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = self.projection(x)
        copies = query.shape[-2] // key.shape[-2]
        key, value = (jnp.repeat(heads, copies, axis=-2) for heads in (key, value))
        return self.output(query * key + value)


@pytest.mark.parametrize("context", ["auto", "local"])
def test_more_devices_than_key_value_heads_compute_copies(
    context: str, make_mesh: MeshFactory, mesh: Mesh
) -> None:
    x = random(2, 4, FEATURES)
    model = FewKeyHeads(mesh=mesh)
    assert model.projection.key.kernel.shape == (FEATURES, 2, HEAD_DIM)
    one = make_mesh({"data": 1, "tensor": 1})
    expected = outcome(FewKeyHeads(mesh=one), x, "auto", one)
    assert_close(outcome(model, x, context, mesh), expected)


def collectives(compiled: Any) -> Counter[str]:
    """The number of times that each collective occurs in the optimized HLO."""
    names = "collective-permute|all-gather|reduce-scatter|all-reduce|all-to-all"
    return Counter(re.findall(rf" ({names})(?:-start)?\(", compiled.as_text()))


def placed(model: Any, x: np.ndarray, mesh: Mesh) -> tuple[Any, jax.Array]:
    """The model sharded by its partition specs, and a batch sharded over the data axis."""
    graph, state = nnx.split(model)
    state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
    return nnx.merge(graph, state), jax.device_put(x, NamedSharding(mesh, P("data")))


# A collective of "xla" would gather the batch, which the compiler shards: None must not choose it.
permutes_only = pytest.mark.parametrize("implementation", ["ring", None])


@permutes_only
def test_between_the_two_layers_nothing_is_gathered_and_the_batch_stays_sharded(
    mesh: Mesh, implementation: str | None
) -> None:
    pair = Pair(implementation=implementation, mesh=mesh)
    arguments = placed(pair, random(4, 8, FEATURES), mesh)
    compiled = jax.jit(lambda pair, x: pair(x)).lower(*arguments).compile()
    found = collectives(compiled)
    assert found["collective-permute"] == 3 + 3
    assert not {"all-gather", "all-reduce", "all-to-all"} & set(found)
    assert compiled.output_shardings.spec == P("data", "tensor")


@permutes_only
def test_gradients_do_not_gather_the_batch(mesh: Mesh, implementation: str | None) -> None:
    pair = Pair(implementation=implementation, mesh=mesh)
    arguments = placed(pair, random(4, 8, FEATURES), mesh)
    gradient = jax.grad(lambda pair, x: jnp.sum(pair(x) ** 2))
    found = collectives(jax.jit(gradient).lower(*arguments).compile())
    assert found["collective-permute"] > 0
    assert not {"all-gather", "all-to-all"} & set(found)


# Fewer layers show the rest.
@pytest.mark.parametrize(
    "layers", [8 if jax.__version_info__ < (0, 11) else 2, exhaustive(8)], ids=["default", "8"]
)
def test_many_layers_compile_with_an_axis_left_to_the_compiler(layers: int, mesh: Mesh) -> None:
    """jaxlib 0.10 cannot compile 8 `shard_map`s if they use an axis index."""

    def stack(block: Block | FlaxBlock, x: jax.Array) -> jax.Array:
        for _ in range(layers):
            x = jnp.tanh(block(x))
        return x

    x = random(4, 8, FEATURES)
    arguments = placed(Block(implementation="ring", mesh=mesh), x, mesh)
    # Each block amplifies the rounding errors of the previous ones.
    actual, expected = jax.jit(stack)(*arguments), jax.jit(stack)(FlaxBlock(), x)
    np.testing.assert_allclose(actual, expected, atol=1e-3)


def test_explicit_axes_that_shard_the_batch_stay_in_the_type(mesh: Mesh) -> None:
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    pair, x = placed(Pair(), random(4, 8, FEATURES), explicit)
    with jax.set_mesh(explicit):
        hidden = jax.eval_shape(pair.up, x)
        assert hidden.sharding.spec == P("data", None, "tensor")
        assert jax.eval_shape(pair.down, hidden).sharding.spec == P("data", "tensor", None)


def test_layers_inside_a_shard_map_over_another_axis_compute_the_same(mesh: Mesh) -> None:
    x = random(4, 8, FEATURES)
    graph, state = nnx.split(Pair(implementation="ring", mesh=mesh))
    call = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )
    y, by_state, by_x = result_and_gradients(call, state, x)
    assert_close((y, pure(by_state), by_x), unsharded_outcome(FlaxPair(), x))


def test_layers_that_share_an_input_gather_it_once(make_mesh: MeshFactory) -> None:
    mesh = make_mesh({"tensor": 4})
    options: Any = dict(implementation="ring", mesh=mesh, rngs=nnx.Rngs(0))
    x = random(2, 4, FEATURES)

    def permutes(fun: Any) -> int:
        return str(jax.make_jaxpr(fun)(x)).count("ppermute")

    assert permutes(AttentionProjection(FEATURES, 4, 4, 3, **options)) == 3
    assert permutes(GatedFeedForward(FEATURES, HIDDEN, **options)) == 3 + 3


def test_partition_specs_shard_features_over_the_axis() -> None:
    specs = pure(nnx.get_partition_spec(nnx.state(Block())))
    heads = {"kernel": P(None, "tensor", None), "bias": P("tensor", None)}
    columns = {"kernel": P(None, "tensor"), "bias": P("tensor")}
    assert specs == {
        "projection": {"query": heads, "key": heads, "value": heads},
        "output": {"kernel": P("tensor", None, None), "bias": P(None)},
        "feed_forward": {
            "gate": columns,
            "up": columns,
            "down": {"kernel": P("tensor", None), "bias": P(None)},
        },
    }


def test_dtype_sets_the_computation_and_param_dtype_the_parameters(
    make_mesh: MeshFactory,
) -> None:
    mesh, x = make_mesh({"tensor": 2}), random(2, 4, FEATURES)

    def result_dtype(x: np.ndarray, **options: Any) -> tuple[Any, Any]:
        pair = Pair(mesh=mesh, **options)
        return pair.up.kernel.dtype, jax.eval_shape(pair, x).dtype

    half = x.astype(jnp.bfloat16)
    assert result_dtype(x, dtype=jnp.bfloat16) == (jnp.float32, jnp.bfloat16)
    assert result_dtype(half) == (jnp.float32, jnp.float32)
    assert result_dtype(half, param_dtype=jnp.bfloat16) == (jnp.bfloat16, jnp.bfloat16)
    assert result_dtype(np.ones_like(x, np.int32)) == (jnp.float32, jnp.float32)
