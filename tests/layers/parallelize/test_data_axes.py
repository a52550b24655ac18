"""`data_axis_name` and `weight_axis_name`: a second axis that shards the batch, and kernels too."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import explain
from collective_matmul.layers import (
    Column,
    ColumnParallelLinear,
    GatedFeedForward,
    Heads,
    Row,
    Shared,
    parallelize,
)
from tests.conftest import MeshFactory
from tests.layers.reference import assert_close, outcome, random, unsharded_outcome

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

FEATURES, HIDDEN = 8, 16
SHAPE = 4, 8, FEATURES
PLAN = {"attention": Heads(), "": Shared("gate", "up"), "down": Row()}


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({"data": 2, "tensor": 4})


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(
            4, FEATURES, decode=False, use_bias=False, rngs=rngs
        )
        self.gate = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.up = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, FEATURES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(x)
        return x + self.down(nnx.silu(self.gate(x)) * self.up(x))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + linen.MultiHeadDotProductAttention(4, name="attention")(x)
        return x + linen.Dense(FEATURES, name="down")(linen.Dense(HIDDEN, name="up")(x))


def local_inputs(fun: Any, *args: Any) -> set[tuple[int, ...]]:
    """The first operands' local shapes in the ops of a function."""
    return {decision.site.operands[0][0] for decision in explain(fun)(*args).decisions}


def shapes_of(batch: int) -> set[tuple[int, ...]]:
    """The inputs of the ops of a block over 4 devices, for one device's part of the batch."""
    return {(batch, 2, FEATURES), (batch, 8, 2), (batch, 8, HIDDEN // 4)}


def test_results_and_gradients_stay_the_same(mesh: Mesh) -> None:
    x = random(*SHAPE)
    expected = unsharded_outcome(Block(nnx.Rngs(0)), x)
    model = parallelize(Block(nnx.Rngs(0)), PLAN, data_axis_name="data", implementation="ring")
    assert_close(outcome(model, x, "auto", mesh), expected)


@pytest.mark.parametrize(("named", "batch"), [((), 4), ("data", 2), (("data",), 2)])
def test_ops_see_one_devices_part_of_the_batch(named: Any, batch: int, mesh: Mesh) -> None:
    model = parallelize(Block(nnx.Rngs(0)), PLAN, mesh=mesh, data_axis_name=named)
    explanation = explain(lambda model, x: model(x))(model, random(*SHAPE))
    assert local_inputs(lambda model, x: model(x), model, random(*SHAPE)) == shapes_of(batch)
    assert ("shapes count all that data=2" in str(explanation)) == (not named)


def test_a_batch_that_the_axis_does_not_divide_stays_whole(mesh: Mesh) -> None:
    model, x = Block(nnx.Rngs(0)), random(3, *SHAPE[1:])
    expected = model(x)
    parallelize(model, PLAN, mesh=mesh, data_axis_name="data")
    assert local_inputs(lambda model, x: model(x), model, x) == shapes_of(3)
    assert_close(jax.jit(lambda model, x: model(x))(model, x), expected)


def test_tokens_in_one_dimension_are_sharded_over_both_axes(mesh: Mesh) -> None:
    model, x = Block(nnx.Rngs(0)).down, random(32, HIDDEN)
    expected = model(x)
    both = nnx.List([model])
    parallelize(both, {"0": Column()}, mesh=mesh, data_axis_name="data")
    assert local_inputs(lambda model, x: model[0](x), both, x) == {(4, HIDDEN)}
    assert_close(jax.jit(lambda model, x: model[0](x))(both, x), expected)


def test_inside_a_shard_map_over_the_axis_arrays_are_shards_already(mesh: Mesh) -> None:
    x = random(*SHAPE)
    model = parallelize(Block(nnx.Rngs(0)), PLAN, data_axis_name="data")
    assert_close(outcome(model, x, "local", mesh), unsharded_outcome(Block(nnx.Rngs(0)), x))


def test_linen_modules_take_it_too(mesh: Mesh) -> None:
    x, plan = random(*SHAPE), {"attention": Heads(), "up": Column(), "down": Row()}
    model = parallelize(LinenBlock(), plan, mesh=mesh, data_axis_name="data")
    variables = model.init(jax.random.key(0), x)
    assert local_inputs(model.apply, variables, x) == shapes_of(2)
    assert_close(jax.jit(model.apply)(variables, x), LinenBlock().apply(variables, x))


def test_other_layers_take_it_as_an_option(mesh: Mesh) -> None:
    options: Any = dict(data_axis_name="data", mesh=mesh, rngs=nnx.Rngs(0))
    layer = GatedFeedForward(FEATURES, HIDDEN, **options)
    shapes = {(2, 2, FEATURES), (2, 8, HIDDEN // 4)}
    assert local_inputs(lambda layer, x: layer(x), layer, random(*SHAPE)) == shapes


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown": ("batch", ValueError, "data_axis_name='batch': the mesh has the axes ('data', 'ten"),
    "the axis of the layer": (
        "tensor",
        ValueError,
        "data_axis_name='tensor': expected mesh axes that differ",
    ),
    "no name": (0, TypeError, "data_axis_name=0: expected the name of a mesh axis that shards"),
    "an array": (random(2), TypeError, "data_axis_name=an array float32[2]: expected"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, mesh: Mesh) -> None:
    named, error, sentence = REFUSED[case]
    model = Block(nnx.Rngs(0))
    with pytest.raises(error, match=re.escape(sentence)):
        parallelize(model, PLAN, mesh=mesh, data_axis_name=named)
    assert type(model.down) is nnx.Linear
    with pytest.raises(error, match=re.escape(sentence)):
        ColumnParallelLinear(8, 8, mesh=mesh, data_axis_name=named, rngs=nnx.Rngs(0))


FSDP: Any = dict(data_axis_name="data", weight_axis_name="data")


@pytest.mark.parametrize("context", ["auto", "explicit", "local"])
def test_sharded_kernels_give_the_same_results_and_gradients(context: str, mesh: Mesh) -> None:
    x = random(*SHAPE)
    expected = unsharded_outcome(Block(nnx.Rngs(0)), x)
    model = parallelize(Block(nnx.Rngs(0)), PLAN, implementation="ring", **FSDP)
    assert_close(outcome(model, x, context, mesh), expected)


def test_ops_gather_kernels_that_the_axis_of_the_batch_shards(mesh: Mesh) -> None:
    model = parallelize(Block(nnx.Rngs(0)), PLAN, mesh=mesh, **FSDP)
    kernels: Any = model.up.kernel[...], model.down.kernel[...]
    assert [k.sharding.spec for k in kernels] == [P("data", "tensor"), P("tensor", "data")]
    decisions = explain(lambda model, x: model(x))(model, random(*SHAPE)).decisions
    shards = {str(decision.site.weight_shards) for decision in decisions}
    assert len(decisions) == 4 and shards == {"K of w over data=2", "N of w over data=2"}


def test_output_features_are_sharded_where_both_axes_divide_those_of_all(mesh: Mesh) -> None:
    def sharded(*features: int) -> list[int]:
        model: Any = nnx.List(nnx.Linear(FEATURES, n, rngs=nnx.Rngs(0)) for n in features)
        parallelize(model, {"*": Column()}, mesh=mesh, **FSDP)
        return [layer.weight_dimension for layer in model]

    assert sharded(16, 24) == [1, 1]
    assert sharded(16, 24, 12) == [0, 0, 0]


def test_the_compiler_gathers_kernels_for_a_batch_that_stays_whole(mesh: Mesh) -> None:
    model, x = Block(nnx.Rngs(0)), random(3, *SHAPE[1:])
    expected = model(x)
    parallelize(model, PLAN, mesh=mesh, **FSDP)
    decisions = explain(lambda model, x: model(x))(model, x).decisions
    assert {decision.site.weight_shards for decision in decisions} == {None}
    assert_close(jax.jit(lambda model, x: model(x))(model, x), expected)


def test_adapters_are_sharded_over_the_layers_own_axis_alone(mesh: Mesh) -> None:
    def make() -> nnx.List:
        return nnx.List(
            nnx.LoRALinear(FEATURES, HIDDEN, lora_rank=2, rngs=nnx.Rngs(seed)) for seed in range(2)
        )

    x, layers = random(*SHAPE), make()
    for layer in layers:
        layer.lora.lora_b[...] = random(2, HIDDEN, seed=1)
    expected = layers[0](x)
    parallelize(layers, {"*": Column()}, mesh=mesh, implementation="ring", **FSDP)
    lora = layers[0].lora
    assert lora.lora_a[...].sharding.spec == P() or lora.lora_a[...].sharding.spec == P(None, None)
    assert lora.lora_b[...].sharding.spec == P(None, "tensor")
    assert_close(jax.jit(lambda layers, x: layers[0](x))(layers, x), expected)


def test_kernels_that_cannot_be_sharded_are_refused(mesh: Mesh) -> None:
    model = nnx.List([nnx.Linear(FEATURES + 1, 12, rngs=nnx.Rngs(0))])
    with pytest.raises(ValueError, match="'0': weight_axis_name='data': its 2 devices do not divi"):
        parallelize(model, {"0": Column()}, mesh=mesh, **FSDP)
    assert type(model[0]) is nnx.Linear
    with pytest.raises(ValueError, match="12 features in 4 parts along the layer's own axis"):
        ColumnParallelLinear(8, 12, mesh=mesh, rngs=nnx.Rngs(0), **FSDP)
    layer = ColumnParallelLinear(8, 12, rngs=nnx.Rngs(0), **FSDP)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="12 features in 4 parts along the la"):
        jax.eval_shape(layer, random(*SHAPE))
    with pytest.raises(ValueError, match="layers of a linen module do not gather"):
        parallelize(LinenBlock(), {"up": Column()}, mesh=mesh, **FSDP)
    with pytest.raises(ValueError, match="weight_axis_name='model': the mesh has the axes"):
        parallelize(model, {"0": Column()}, mesh=mesh, weight_axis_name="model")
