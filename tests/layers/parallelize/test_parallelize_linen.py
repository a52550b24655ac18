"""`parallelize` on linen modules."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import pytest
from flax import linen
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import explain
from collective_matmul.layers import Column, Row
from collective_matmul.layers.parallelize.parallelize import parallelize
from tests.conftest import MeshFactory
from tests.dispatch.sites import H200
from tests.layers.reference import assert_close, assert_identical, random, result_and_gradients

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

FEATURES, HIDDEN = 12, 16
PLAN = {"*.up": Column(), "*.down": Row()}


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({"data": 2, "tensor": 4})


class FeedForward(linen.Module):
    options: Any = linen.FrozenDict()

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options = dict(self.options)
        hidden = linen.Dense(HIDDEN, name="up", **options)(x)
        return x + linen.Dense(FEATURES, name="down", **options)(jax.nn.gelu(hidden))


class Model(linen.Module):
    """Dense layers made inline and in `setup`, used twice, rematerialized and scanned."""

    def setup(self) -> None:
        self.twice = FeedForward()
        self.remat = linen.remat(FeedForward)()
        self.norm = linen.LayerNorm()
        self.head = linen.DenseGeneral((2, 3))
        self.stack = FeedForward()

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.remat(self.twice(self.norm(self.twice(x))))
        scan = linen.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, _ = scan(self.stack, x, None)
        return self.head(x)

    def encode(self, x: jax.Array) -> jax.Array:
        return self.twice(x)


X = random(4, 8, FEATURES)


@cache
def variables() -> Any:
    """Variables of the plain module, with biases that are not zero."""
    return jax.tree.map(lambda leaf: leaf + 0.01, initial_variables())


@cache
def initial_variables() -> Any:
    return jax.jit(Model().init)(jax.random.key(0), X)


@cache
def expected_outcome() -> Any:
    return result_and_gradients(Model().apply, variables(), X)


@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_results_on_global_arrays_stay_the_same(
    implementation: str, make_mesh: MeshFactory
) -> None:
    model = parallelize(Model(), PLAN, mesh=make_mesh({"tensor": 4}), implementation=implementation)
    assert_close(result_and_gradients(model.apply, variables(), X), expected_outcome())


@pytest.mark.parametrize("check_vma", [True, False])
def test_results_on_local_shards_stay_the_same(check_vma: bool, mesh: Mesh) -> None:
    model = parallelize(Model(), PLAN, implementation="ring")
    spec = P("data", "tensor")
    apply = jax.shard_map(
        model.apply,
        mesh=mesh,
        in_specs=(model.partition_specs(variables()), spec),
        out_specs=spec,
        check_vma=check_vma,
    )
    assert_close(result_and_gradients(apply, variables(), X), expected_outcome())


@pytest.mark.parametrize("local", [False, True])
def test_several_devices_compute_the_same_columns(local: bool, mesh: Mesh) -> None:
    module = linen.DenseGeneral((2, 3), bias_init=linen.initializers.normal(1.0))
    model = parallelize(module, {"": Column(heads=2)}, mesh=mesh, implementation="ring")
    variables = module.init(jax.random.key(0), X)
    jax.eval_shape(model.init, jax.random.key(0), X)  # Of a kernel with several output features.
    specs = model.partition_specs(variables)
    assert set(jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, P))) == {
        P(None, None, None),
        P(None, None),
    }
    apply = model.apply
    if local:
        spec = P("data", None, "tensor")
        apply = jax.shard_map(
            apply, mesh=mesh, in_specs=(specs, P("data", "tensor")), out_specs=spec
        )
    y = jax.jit(apply)(variables, X)
    expected: Any = module.apply(variables, X)
    assert_close(y, expected.repeat(2, -2))
    wrong = parallelize(module, {"": Column(heads=1)}, mesh=mesh)
    with pytest.raises(ValueError, match=r"heads=1: the first of out_features=\(2, 3\)"):
        jax.eval_shape(wrong.apply, variables, X)


def test_init_returns_the_variables_of_the_module(mesh: Mesh) -> None:
    made = jax.jit(parallelize(Model(), PLAN, mesh=mesh).init)(jax.random.key(0), X)
    assert_identical(made, initial_variables())


def test_only_layers_of_the_plan_permute(mesh: Mesh) -> None:
    def permutes(plan: Any) -> int:
        model = parallelize(FeedForward(), plan, mesh=mesh, implementation="ring")
        shapes = jax.eval_shape(model.init, jax.random.key(0), X)
        return str(jax.make_jaxpr(model.apply)(shapes, X)).count("ppermute")

    assert permutes({"up": Column()}) == 3
    assert permutes({"up": Column(), "down": Row()}) == 3 + 3


def test_a_module_is_explained_for_devices_that_are_not_here() -> None:
    mesh = AbstractMesh((4,), ("tensor",), axis_types=(AxisType.Auto,), abstract_device=H200)
    model = parallelize(FeedForward(), {"up": Column(), "down": Row()}, mesh=mesh)
    x = jax.ShapeDtypeStruct((1, 64, FEATURES), "float32")
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    found = explain(model.apply)(shapes, x).decisions
    assert [each.site.op for each in found] == ["all_gather_matmul", "matmul_reduce_scatter"]
    assert all(each.seconds for each in found)  # Unknown for the CPUs that are here.


def test_partition_specs_shard_features_over_the_axis() -> None:
    model = parallelize(Model(), PLAN)
    specs = model.partition_specs(jax.eval_shape(Model().init, jax.random.key(0), X))["params"]
    assert specs["twice"] == {
        "up": {"kernel": P(None, "tensor"), "bias": P("tensor")},
        "down": {"kernel": P("tensor", None), "bias": P(None)},
    }
    assert specs["stack"]["up"] == {
        "kernel": P(None, None, "tensor"),
        "bias": P(None, "tensor"),
    }
    assert specs["norm"] == {"scale": P(), "bias": P()}


def test_a_method_that_calls_only_some_layers(mesh: Mesh) -> None:
    model = parallelize(Model(), {"twice.up": Column(), "remat.up": Column()}, mesh=mesh)
    compiled = jax.jit(
        lambda variables: [each.apply(variables, X, method="encode") for each in (model, Model())]
    )
    assert_close(*compiled(variables()))


@pytest.mark.parametrize("local", [False, True])
def test_boxed_parameters_compute_the_same(local: bool, mesh: Mesh) -> None:
    boxed = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "tensor"))
    module = FeedForward({"kernel_init": boxed})
    made = jax.jit(module.init)(jax.random.key(0), X)
    expected = module.apply(made, X)
    model = parallelize(module, {"up": Column(), "down": Row()}, mesh=mesh)
    apply = model.apply
    if local:
        specs = (model.partition_specs(made), P("data", "tensor"))
        apply = jax.shard_map(apply, mesh=mesh, in_specs=specs, out_specs=specs[1])
    with jax.set_mesh(mesh):
        assert_close(jax.jit(apply)(made, X), expected)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no match": (
        Model(),
        {"*.up": Column(), "mlp.*": Row()},
        "plan['mlp.*']: matches no layer; the linen layers here are ",
    ),
    "not a dense": (
        Model(),
        {"norm": Column()},
        "plan['norm']: 'norm' is a LayerNorm, defined in flax.linen.normalization; Column() takes"
        " linen.Dense and linen.DenseGeneral. Narrow the pattern so that it matches only such",
    ),
    "two patterns": (
        Model(),
        {"twice.*": Column(), "*.up": Column()},
        "plan: 'twice.*' and '*.up' both match 'twice.up'; narrow one of them",
    ),
    "precision": (
        FeedForward({"precision": "highest"}),
        {"up": Column()},
        "plan['up']: 'up' has precision='highest', which a collective matmul cannot honour;"
        " construct it with precision=None and set jax.default_matmul_precision around the step",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("call", ["init", "apply"])
def test_the_first_call_refuses_a_plan_that_does_not_fit(name: str, call: str, mesh: Mesh) -> None:
    module, plan, sentence = REFUSED[name]
    model = parallelize(module, plan, mesh=mesh)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        if call == "init":
            jax.eval_shape(model.init, jax.random.key(0), X)
        else:
            jax.eval_shape(model.apply, jax.eval_shape(module.init, jax.random.key(0), X), X)


def test_a_refusal_lists_the_paths_of_the_module(mesh: Mesh) -> None:
    model = parallelize(Model(), {"mlp": Row()}, mesh=mesh)
    paths = "head, remat.down, remat.up, stack.down, stack.up, twice.down, twice.up"
    with pytest.raises(ValueError, match=re.escape(paths)):
        model.partition_specs(variables())


def test_sizes_that_do_not_divide_are_refused_with_the_layer(make_mesh: MeshFactory) -> None:
    model = parallelize(Model(), {"*.down": Column()}, mesh=make_mesh({"tensor": 8}))
    with pytest.raises(ValueError, match=r"'twice.down': out_features=12: 12 .* size 8"):
        jax.eval_shape(model.apply, variables(), X)


def test_inside_shard_map_a_global_kernel_is_refused(mesh: Mesh) -> None:
    call = jax.shard_map(
        parallelize(Model(), PLAN).apply,
        mesh=mesh,
        in_specs=(P(), P(None, "tensor")),
        out_specs=P(None, "tensor"),
    )
    with pytest.raises(ValueError, match=r"'twice.up': kernel: shape \(12, 16\).* partition_specs"):
        jax.eval_shape(call, variables(), X)


def test_a_model_that_is_another_layer_is_refused(mesh: Mesh) -> None:
    model = parallelize(linen.Conv(4, (3,)), {"": Column()}, mesh=mesh)
    with pytest.raises(ValueError, match="'' is a Conv, defined in flax"):
        jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 4, 4), "float32"))
