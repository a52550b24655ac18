"""`parallelize` on nnx models."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import overlap_jit
from collective_matmul.layers import (
    Column,
    ColumnParallelLinear,
    Row,
    RowParallelLinear,
    Shared,
)
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

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

FEATURES, HIDDEN = 12, 16


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({"data": 2, "tensor": 4})


class FeedForward(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **options: Any):
        options = dict(rngs=rngs, bias_init=nnx.initializers.normal(1.0), **options)
        self.up = nnx.Linear(FEATURES, HIDDEN, **options)
        self.down = nnx.Linear(HIDDEN, FEATURES, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(x)))


class Model(nnx.Module):
    """Linear layers in every kind of container, one of them with two paths."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([FeedForward(rngs), FeedForward(rngs, use_bias=False)])
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.sequential = nnx.Sequential(
            nnx.Linear(FEATURES, HIDDEN, rngs=rngs),
            jax.nn.gelu,
            nnx.Linear(HIDDEN, FEATURES, rngs=rngs),
        )
        self.table = nnx.data({"up": nnx.Linear(FEATURES, HIDDEN, rngs=rngs)})
        self.pair = nnx.data((jax.nn.gelu, nnx.Linear(HIDDEN, FEATURES, rngs=rngs)))
        self.again = self.pair[1]
        self.head = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        x = x + self.sequential(self.norm(x))
        x = x + self.pair[1](self.table["up"](x))
        return self.head(x)


PLAN = {
    "blocks.*.up": Column(),
    "blocks.*.down": Row(),
    "sequential.layers.0": Column(),
    "sequential.layers.2": Row(),
    "table.up": Column(),
    "pair.1": Row(),
}


def make_model() -> Model:
    return Model(nnx.Rngs(0))


@cache
def expected_outcome() -> Any:
    return unsharded_outcome(make_model(), random(4, 8, FEATURES))


# The layers that it makes have tests in every context.
@pytest.mark.parametrize(
    "context", ["auto", exhaustive("explicit"), "local", exhaustive("local_unchecked")]
)
def test_results_in_every_context_stay_the_same(context: str, mesh: Mesh) -> None:
    x = random(4, 8, FEATURES)
    model = parallelize(make_model(), PLAN, implementation="ring" if context != "auto" else "xla")
    assert_close(outcome(model, x, context, mesh), expected_outcome())


def test_layers_are_replaced_in_place_with_the_same_weights_and_paths() -> None:
    model = make_model()
    assert parallelize(model, PLAN) is model
    assert_identical(pure(nnx.state(model)), pure(nnx.state(make_model())))
    assert isinstance(model.blocks[0].up, ColumnParallelLinear)
    assert isinstance(model.blocks[1].down, RowParallelLinear)
    assert isinstance(model.sequential.layers[0], ColumnParallelLinear)
    assert isinstance(model.table["up"], ColumnParallelLinear)
    assert isinstance(model.pair[1], RowParallelLinear)
    assert type(model.head) is nnx.Linear


def test_a_layer_with_two_paths_stays_one_layer() -> None:
    model = parallelize(make_model(), PLAN)
    assert model.again is model.pair[1]


def test_a_parameter_of_two_layers_stays_shared() -> None:
    model = FeedForward(nnx.Rngs(0))
    other = FeedForward(nnx.Rngs(1))
    other.up.kernel = model.up.kernel
    both = nnx.List([model, other])
    parallelize(both, {"0.up": Column()})
    assert both[0].up.kernel is both[1].up.kernel
    assert type(both[1].up) is nnx.Linear


def test_partition_specs_shard_features_over_the_axis() -> None:
    model = parallelize(make_model(), PLAN)
    specs = pure(nnx.get_partition_spec(nnx.state(model)))
    assert specs["blocks"][0] == {
        "up": {"kernel": P(None, "tensor"), "bias": P("tensor")},
        "down": {"kernel": P("tensor", None), "bias": P(None)},
    }
    assert specs["head"] == {"kernel": P(), "bias": P()}


def test_a_sharding_given_to_a_parameter_is_kept() -> None:
    kept = ("data", "tensor")
    model = FeedForward(nnx.Rngs(0))
    model.up.kernel = nnx.Param(model.up.kernel[...], out_sharding=kept, eager_sharding=False)
    parallelize(model, {"up": Column(), "down": Row()})
    assert model.up.kernel.get_metadata("out_sharding") == kept


def test_options_of_the_layer_are_kept(make_mesh: MeshFactory) -> None:
    model = FeedForward(nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.float16)
    parallelize(model, {"up": Column(), "down": Row()}, mesh=make_mesh({"tensor": 2}))
    assert model.up.kernel.dtype == jnp.float16
    assert jax.eval_shape(model.up, random(2, 4, FEATURES)).dtype == jnp.bfloat16


def test_options_of_the_plan_are_kept(make_mesh: MeshFactory) -> None:
    mesh, x = make_mesh({"tensor": 4}), random(8, 3, FEATURES)
    expected = FeedForward(nnx.Rngs(0))(x)
    model = FeedForward(nnx.Rngs(0))
    parallelize(model, {"up": Column(0), "down": Row(0)}, mesh=mesh, implementation="ring")
    assert_close(jax.jit(lambda model, x: model(x))(model, x), expected)


def test_a_model_of_shapes_without_values_is_accepted() -> None:
    abstract = nnx.eval_shape(make_model)
    parallelize(abstract, PLAN)
    assert isinstance(abstract.blocks[0].up.kernel.get_value(), jax.ShapeDtypeStruct)


def test_layers_stacked_for_a_scan_compute_the_same(make_mesh: MeshFactory) -> None:
    @nnx.vmap
    def stack(key: jax.Array) -> FeedForward:
        return FeedForward(nnx.Rngs(key))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def through(x: jax.Array, block: FeedForward) -> jax.Array:
        return block(x)

    x = random(2, 4, FEATURES)
    model = stack(jax.random.split(jax.random.key(0), 3))
    expected = through(x, model)
    parallelize(model, {"up": Column(), "down": Row()}, mesh=make_mesh({"tensor": 4}))
    specs = pure(nnx.get_partition_spec(nnx.state(model)))
    assert specs["up"] == {"kernel": P(None, None, "tensor"), "bias": P(None, "tensor")}
    assert_close(jax.jit(through)(x, model), expected)


REFUSED: dict[str, tuple[Any, str]] = {
    "no match": (
        {"blocks.*.up": Column(), "mlp.*": Row()},
        "plan['mlp.*']: matches no layer; the nnx layers here are again, blocks.0.down,"
        " blocks.0.up, blocks.1.down, blocks.1.up, head, pair.1, sequential.layers.0,"
        " sequential.layers.2, table.up",
    ),
    "not a linear": (
        {"norm": Column()},
        "plan['norm']: 'norm' is a LayerNorm, defined in flax.nnx.nn.normalization; Column() takes"
        " nnx.Linear, nnx.LinearGeneral, nnx.LoRALinear and nnx.LoRA. Narrow the pattern so that it"
        " matches only such layers",
    ),
    "container": ({"blocks.?": Row()}, "plan['blocks.?']: 'blocks.0' is a FeedForward"),
    "two patterns": (
        {"blocks.*.up": Column(), "blocks.0.*": Row()},
        "plan: 'blocks.*.up' and 'blocks.0.*' both match 'blocks.0.up'; narrow one of them",
    ),
    "two entries": (
        {"again": Column(), "pair.1": Row()},
        f"plan: 'pair.1' has {Row()} for 'pair.1', and 'again' has {Column()} for 'again',"
        " which is the same layer; drop one entry",
    ),
    "shared and alone": (
        {"blocks.0": Shared("up", "down"), "*.up": Row()},
        f"plan: '*.up' has {Row()} for 'blocks.0.up', and 'blocks.0' has {Column()} for it; drop"
        " one entry",
    ),
    "empty": ({}, "plan={}: expected at least one entry"),
    "size": (
        {"head": Column()},
        "'head': out_features=12: 12 is not divisible by axis 'tensor' of size 8; the nearest to"
        " it: 8 or 16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_plan_changes_nothing(name: str, make_mesh: MeshFactory) -> None:
    plan, sentence = REFUSED[name]
    model = nnx.eval_shape(make_model)
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parallelize(model, plan, mesh=make_mesh({"tensor": 8}))
    assert nnx.graphdef(model) == before


class General(nnx.Module):
    """Layers with several feature dimensions, contracted or not."""

    def __init__(self, rngs: nnx.Rngs):
        options: Any = dict(rngs=rngs, bias_init=nnx.initializers.normal(1.0))
        self.up = nnx.LinearGeneral(FEATURES, (4, 3), **options)
        self.mix = nnx.LinearGeneral((4, 3), (3, 4), axis=(-2, -1), **options)
        self.split = nnx.LinearGeneral((3, 4), (4, 2), axis=(-1, -2)[::-1], **options)
        self.down = nnx.LinearGeneral((4, 2), (FEATURES,), axis=(-2, -1), **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.split(self.mix(self.up(x))))


def test_layers_with_several_feature_dimensions_compute_the_same(mesh: Mesh) -> None:
    x = random(4, 8, FEATURES)
    plan = {"up": Column(), "mix": Row(), "split": Column(), "down": Row()}
    model = parallelize(General(nnx.Rngs(0)), plan, implementation="ring")
    assert_close(outcome(model, x, "local", mesh), unsharded_outcome(General(nnx.Rngs(0)), x))
    specs = pure(nnx.get_partition_spec(nnx.state(model)))
    assert specs["mix"] == {"kernel": P("tensor", None, None, None), "bias": P(None, None)}
    assert specs["split"] == {"kernel": P(None, None, "tensor", None), "bias": P("tensor", None)}


class Experts(nnx.Module):
    """Feed-forwards of several experts, each with matrices in stacked parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(FEATURES, 4, rngs=rngs)
        self.up = nnx.Param(jnp.zeros((4, FEATURES, HIDDEN)))
        self.down = nnx.Param(jnp.zeros((4, HIDDEN, FEATURES)))


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (
            Experts,
            "'0' is a Experts, defined in tests.layers.parallelize.test_parallelize_nnx; Column()"
            " takes nnx.Linear, nnx.LinearGeneral, nnx.LoRALinear and nnx.LoRA."
            " Its parameters are stacked matrices, like those of"
            " experts. To divide experts over devices, build a"
            " collective_matmul.layers.ExpertMLP in its place, and leave it out of the plan",
        ),
        (
            lambda rngs: nnx.Conv(4, 8, kernel_size=(3,), rngs=rngs),
            "'0' is a Conv, defined in flax.nnx.nn.linear; Column() takes"
            " nnx.Linear, nnx.LinearGeneral, nnx.LoRALinear and nnx.LoRA. Narrow the pattern so"
            " that it matches only such layers",
        ),
        (
            lambda rngs: ColumnParallelLinear(4, 8, rngs=rngs),
            "'0' is a ColumnParallelLinear, defined in collective_matmul.layers.linear.linear;"
            " Column() takes nnx.Linear, nnx.LinearGeneral, nnx.LoRALinear and nnx.LoRA."
            " Layers of collective_matmul are parallel by"
            " their own arguments, such as axis_name: leave it out of the plan",
        ),
        (
            lambda rngs: nnx.LinearGeneral(4, 8, axis=1, rngs=rngs),
            "'0' has axis=(1,); a collective matmul contracts the last dimensions: construct it"
            " with axis=-1",
        ),
        (
            lambda rngs: nnx.LinearGeneral(4, 8, batch_axis={0: 2}, rngs=rngs),
            "'0' has batch_axis=FrozenDict({",
        ),
        (
            lambda rngs: nnx.MultiHeadAttention(4, 8, rngs=rngs),
            "'0' is a MultiHeadAttention, defined in flax.nnx.nn.attention; Column() takes"
            " nnx.Linear, nnx.LinearGeneral, nnx.LoRALinear and nnx.LoRA."
            " Heads() takes Flax's attention modules",
        ),
    ],
)
def test_what_cannot_be_a_column_parallel_layer_is_refused(layer: Any, sentence: str) -> None:
    model = nnx.List([nnx.eval_shape(lambda: layer(nnx.Rngs(0)))])
    with pytest.raises(ValueError, match=re.escape(f"plan['0']: {sentence}")):
        parallelize(model, {"0": Column()})


def other_dot_general(*arguments: Any, **options: Any) -> jax.Array:
    return lax.dot_general(*arguments, **options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("precision", "highest"),
        ("dot_general", other_dot_general),
        ("promote_dtype", lambda arrays, dtype: arrays),
        ("preferred_element_type", jnp.float32),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(option: str, value: Any) -> None:
    model = FeedForward(nnx.Rngs(0), **{option: value})
    with pytest.raises(ValueError, match=rf"plan\['up'\]: 'up' has {option}=.* construct it with"):
        parallelize(model, {"up": Column()})


@pytest.mark.parametrize(
    ("model", "plan", "sentence"),
    [
        (make_model, ["head"], "plan=['head']: expected a dictionary"),
        (make_model, {"head": "column"}, "plan['head']='column': expected a path pattern"),
        (dict, {"head": Column()}, "model: a dict; expected a flax.nnx.Module"),
        (lambda: PLAN, make_model(), "a dict and a Model, which are swapped; give the model first"),
        (make_model, make_model(), "plan=Model("),
        (make_model, {"head": make_model()}, "plan['head']=Model("),
    ],
)
def test_arguments_of_another_type_are_refused(model: Any, plan: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=re.escape(sentence)) as refused:
        parallelize(model(), plan)
    # A model's own text has hundreds of lines.
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 250


def test_implementation_and_axis_are_checked_at_once(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="implementation='rign'"):
        parallelize(make_model(), PLAN, implementation="rign")
    with pytest.raises(ValueError, match="axis_name='model': the mesh has the axes"):
        parallelize(make_model(), PLAN, axis_name="model", mesh=mesh)


def test_the_example_of_the_readme_computes_the_same() -> None:
    class FeedForward(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(64, 128, rngs=rngs)
            self.down = nnx.Linear(128, 64, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.gelu(self.up(x)))

    model, x = (
        FeedForward(nnx.Rngs(0)),
        jax.random.normal(jax.random.key(1), (4, 16, 64), jnp.float32),
    )
    before = model(x)
    with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("tensor",))):
        parallelize(model, {"up": Column(), "down": Row()})
        after = overlap_jit(lambda model, x: model(x))(model, x)
    assert abs(after - before).max() < 1e-5


@pytest.mark.parametrize("pattern", ["", "*"])
def test_a_linear_layer_that_is_the_model_is_refused(pattern: str, mesh: Mesh) -> None:
    """The layer would have to become another object."""
    message = rf"plan\['{re.escape(pattern)}'\]: the model itself is the Linear, which cannot be"
    with pytest.raises(ValueError, match=message):
        parallelize(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), {pattern: Column()}, mesh=mesh)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("", "'' is a Conv, defined in flax"), ("*", "the model has no nnx layers that Column")],
)
def test_a_model_that_is_another_layer_is_refused(pattern: str, message: str, mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=message):
        parallelize(nnx.Conv(4, 4, (3,), rngs=nnx.Rngs(0)), {pattern: Column()}, mesh=mesh)
