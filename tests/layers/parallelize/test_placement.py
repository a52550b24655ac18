"""`parallelize` places variables on the mesh, and makes models that no single device could hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul.layers import Column, Heads, Row
from collective_matmul.layers.parallelize.parallelize import parallelize
from tests.conftest import MeshFactory
from tests.layers.reference import assert_close, assert_identical, pure, random

FEATURES, HIDDEN, HEADS, HEAD_DIM = 24, 72, 8, 5
PLAN = {"attention": Heads(), "up": Column(), "down": Row()}
X = random(2, 8, FEATURES)


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({"data": 2, "tensor": 4})


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, FEATURES, HEADS * HEAD_DIM, decode=False, dropout_rate=0.1, rngs=rngs
        )
        self.up = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, FEATURES, rngs=rngs)
        sharded = {"out_sharding": (None, "data"), "eager_sharding": False}
        self.head = nnx.Linear(FEATURES, 2, kernel_metadata=sharded, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x), deterministic=True)
        return self.head(x + self.down(jax.nn.gelu(self.up(x))))


def make_model() -> Model:
    return Model(nnx.Rngs(0))


#: The shapes of the weights that the plan shards, whole.
WHOLE = [
    (FEATURES, HEADS, HEAD_DIM),
    (FEATURES, HEADS * HEAD_DIM),
    (HEADS, HEAD_DIM, FEATURES),
    (HEADS * HEAD_DIM, FEATURES),
    (FEATURES, HIDDEN),
    (HIDDEN, FEATURES),
]


def assert_placed(model: Model, mesh: Mesh) -> None:
    for variable in jax.tree.leaves(
        nnx.state(model), is_leaf=lambda v: isinstance(v, nnx.Variable)
    ):
        assert variable.get_value().sharding.device_set == set(mesh.devices.flat)
    assert shard_shape(model.attention.query.kernel) == (FEATURES, HEADS // 4, HEAD_DIM)
    assert shard_shape(model.attention.out.kernel) == (HEADS // 4, HEAD_DIM, FEATURES)
    assert shard_shape(model.up.kernel) == (FEATURES, HIDDEN // 4)
    assert shard_shape(model.down.kernel) == (HIDDEN // 4, FEATURES)
    assert shard_shape(model.head.kernel) == (FEATURES, 1)
    assert shard_shape(model.norm.scale) == (FEATURES,)


def shard_shape(variable: Any) -> tuple[int, ...]:
    value = variable.get_value() if isinstance(variable, nnx.Variable) else variable
    return value.sharding.shard_shape(value.shape)


def assert_no_device_holds_a_whole_weight(compiled: Any) -> None:
    """No instruction of the partitioned program has the shape of a whole weight."""
    shapes = {
        tuple(map(int, s.split(","))) for s in re.findall(r"\w\[([\d,]+)\]", compiled.as_text())
    }
    assert (FEATURES, HIDDEN // 4) in shapes
    assert not shapes & set(WHOLE)


@pytest.mark.parametrize(
    ("kind", "around"),
    [
        (AxisType.Auto, False),
        (AxisType.Explicit, True),
        pytest.param(AxisType.Auto, True, marks=pytest.mark.exhaustive),
        pytest.param(AxisType.Explicit, False, marks=pytest.mark.exhaustive),
    ],
)
def test_variables_are_placed_when_parallelize_returns(
    kind: AxisType, around: bool, mesh: Mesh
) -> None:
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(kind, kind))
    if around:
        model = make_model()
        with jax.set_mesh(mesh):
            parallelize(model, PLAN)
    else:
        model = parallelize(make_model(), PLAN, mesh=mesh)
    assert_placed(model, mesh)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    assert shard_shape(optimizer.opt_state[0].mu["up"]["kernel"]) == (FEATURES, HIDDEN // 4)


def test_a_variable_that_is_on_the_mesh_stays_there(mesh: Mesh) -> None:
    model: Any = make_model()
    given = NamedSharding(mesh, P("data"))
    model.norm.scale[...] = jax.device_put(model.norm.scale[...], given)
    parallelize(model, PLAN, mesh=mesh)
    assert model.norm.scale[...].sharding == given


def test_weights_made_inside_jit_are_never_whole_on_a_device(mesh: Mesh) -> None:
    @nnx.jit
    def create() -> Model:
        return parallelize(make_model(), PLAN, mesh=mesh)

    assert_no_device_holds_a_whole_weight(
        jax.jit(lambda: nnx.state(parallelize(make_model(), PLAN, mesh=mesh))).lower().compile()
    )
    model = create()
    assert_placed(model, mesh)
    assert_close(pure(nnx.state(model, nnx.Param)), pure(nnx.state(make_model(), nnx.Param)))


def test_a_model_of_shapes_gets_shardings_and_is_restored(mesh: Mesh, tmp_path: Path) -> None:
    whole = make_model()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "whole", pure(nnx.state(whole, nnx.Param)))
    model = parallelize(nnx.eval_shape(make_model), PLAN, mesh=mesh)
    assert_placed(model, mesh)
    shapes = nnx.state(model, nnx.Param)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "whole", pure(shapes))
    nnx.update(model, restored)
    nnx.update(model, nnx.state(whole, nnx.RngState))
    assert_placed_values = pure(nnx.state(model, nnx.Param))
    assert_identical(assert_placed_values, pure(nnx.state(whole, nnx.Param)))
    assert shard_shape(model.up.kernel) == (FEATURES, HIDDEN // 4)
    forward = jax.jit(lambda model, x: model(x))
    assert_close(forward(model, X), forward(whole, X))


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + linen.MultiHeadAttention(HEADS, qkv_features=HEADS * HEAD_DIM, name="attention")(x)
        hidden = jax.nn.gelu(linen.DenseGeneral((HIDDEN // 2, 2), name="up")(x))
        x = x + linen.DenseGeneral(FEATURES, axis=(-2, -1), name="down")(hidden)
        boxed = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "data"))
        return linen.Dense(2, kernel_init=boxed, name="head")(x)


def test_linen_variables_made_inside_jit_are_never_whole_on_a_device(mesh: Mesh) -> None:
    model = parallelize(LinenModel(), PLAN, mesh=mesh)
    compiled = jax.jit(model.init).lower(jax.random.key(0), X).compile()
    text = compiled.as_text() or ""
    assert f"[{FEATURES},{HIDDEN // 4}]" in text or f"[{FEATURES},{HIDDEN // 8},2]" in text
    whole = [*WHOLE, (FEATURES, HIDDEN // 2, 2), (HIDDEN // 2, 2, FEATURES)]
    assert not [s for s in whole if f"[{','.join(map(str, s))}]" in text]
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]
    assert shard_shape(params["up"]["kernel"]) == (FEATURES, HIDDEN // 8, 2)
    assert shard_shape(params["down"]["kernel"]) == (HIDDEN // 8, 2, FEATURES)
    assert shard_shape(params["attention"]["out"]["kernel"]) == (HEADS // 4, HEAD_DIM, FEATURES)
    assert shard_shape(params["head"]["kernel"].value) == (FEATURES, 1)


def test_linen_variables_are_placed_and_restored(mesh: Mesh, tmp_path: Path) -> None:
    whole = linen.unbox(jax.jit(LinenModel().init)(jax.random.key(0), X))
    model = parallelize(LinenModel(), PLAN, mesh=mesh)
    shapes = linen.unbox(jax.eval_shape(model.init, jax.random.key(0), X))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "whole", whole)
    placed_shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        model.shardings(shapes),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "whole", placed_shapes)
    assert_identical(restored, whole)
    assert shard_shape(restored["params"]["up"]["kernel"]) == (FEATURES, HIDDEN // 8, 2)
    assert restored["params"]["attention"]["query"]["bias"].sharding.spec == P("tensor", None)
    assert_close(jax.jit(model.apply)(restored, X), jax.jit(LinenModel().apply)(whole, X))


def test_shardings_need_a_mesh(mesh: Mesh) -> None:
    model = parallelize(LinenModel(), PLAN)
    shapes = jax.eval_shape(LinenModel().init, jax.random.key(0), X)
    with pytest.raises(ValueError, match="mesh=None: there is no mesh here; pass mesh="):
        model.shardings(shapes)
    with jax.set_mesh(mesh):
        specs = jax.tree.map(lambda s: s.spec, model.shardings(shapes))
        assert specs["params"]["head"]["kernel"] == P(None, "data")


def test_several_features_are_told_from_stacked_layers(mesh: Mesh) -> None:
    class Stack(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            scan = linen.scan(
                lambda module, x, _: (module(x).reshape(x.shape), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            return scan(linen.DenseGeneral((FEATURES // 2, 2), name="up"), x, None)[0]

    model = parallelize(Stack(), {"up": Column(None)}, mesh=mesh)
    variables = model.init(jax.random.key(0), X)
    assert model.partition_specs(variables)["params"]["up"] == {
        "kernel": P(None, None, "tensor", None),
        "bias": P(None, "tensor", None),
    }
    assert np.isfinite(jax.jit(model.apply)(variables, X)).all()
