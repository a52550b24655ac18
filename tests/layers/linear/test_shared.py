"""Column-parallel layers of one module that share a gather: `Shared` and `shared_gather`."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import pytest
from flax import linen, nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import explain
from collective_matmul.explain import Explanation
from collective_matmul.layers import (
    Column,
    Row,
    Shared,
    parallelize,
    prequantize_kernels,
    shared_gather,
)
from collective_matmul.log import warn_once
from tests.conftest import MeshFactory
from tests.layers.reference import (
    assert_close,
    assert_identical,
    exhaustive,
    outcome,
    pure,
    random,
    result_and_gradients,
    unsharded_outcome,
)

FEATURES, HIDDEN = 12, 16
X = random(4, 8, FEATURES)
PLAN = {"": Shared("gate", "up"), "down": Row()}


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({"data": 2, "tensor": 4})


class Gated(nnx.Module):
    """Separate projections; `together` says whether it calls `shared_gather` itself."""

    def __init__(self, together: bool = False, **options: Any):
        rngs = nnx.Rngs(0)
        self.gate = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.up = nnx.Linear(FEATURES, HIDDEN, use_bias=False, rngs=rngs, **options)
        self.down = nnx.Linear(HIDDEN, FEATURES, rngs=rngs)
        self.together = together

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.together:
            gate, up = shared_gather(x, [self.gate, self.up])
        else:
            gate, up = self.gate(x), self.up(x)
        return self.down(jax.nn.silu(gate) * up)


class LinenGated(linen.Module):
    together: bool = False

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = [
            linen.Dense(HIDDEN, name="gate"),
            linen.DenseGeneral(HIDDEN, use_bias=False, name="up"),
        ]
        if self.together:
            gate, up = shared_gather(x, layers)
        else:
            gate, up = (layer(x) for layer in layers)
        return linen.Dense(FEATURES, name="down")(jax.nn.silu(gate) * up)


def permutes(fun: Any, *arguments: Any) -> int:
    return str(jax.make_jaxpr(fun)(*arguments)).count("ppermute")


@pytest.mark.parametrize(
    "context", ["auto", exhaustive("explicit"), "local", exhaustive("local_unchecked")]
)
def test_layers_called_one_by_one_share_a_gather(context: str, mesh: Mesh) -> None:
    model = parallelize(Gated(), PLAN, implementation="ring")
    with jax.set_mesh(mesh):
        assert permutes(model, X) == 3 + 3
    assert isinstance(model, Gated)
    assert_identical(pure(nnx.state(model)), pure(nnx.state(Gated())))
    assert_close(outcome(model, X, context, mesh), unsharded_outcome(Gated(), X))


def test_a_shared_gather_of_a_model_works_before_and_after(mesh: Mesh) -> None:
    model = Gated(together=True)
    expected = unsharded_outcome(Gated(), X)
    assert_close(unsharded_outcome(model, X), expected)
    plan = {"gate": Column(), "up": Column(), "down": Row()}
    model = parallelize(model, plan, mesh=mesh, implementation="ring")
    assert permutes(model, X) == 3 + 3
    assert_close(outcome(model, X, "auto", mesh), expected)


PLANS = {
    False: {"": Shared("gate", "up"), "down": Row()},
    True: {"gate": Column(), "up": Column(), "down": Row()},
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("local", [False, exhaustive(True)])
def test_linen_layers_share_a_gather(
    together: bool, local: bool, mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    module = LinenGated(together)
    model = parallelize(module, PLANS[together], mesh=mesh, implementation="ring")
    variables = jax.jit(module.init)(jax.random.key(0), X)
    warn_once.cache_clear()
    assert_identical(jax.jit(model.init)(jax.random.key(0), X), variables)
    assert caplog.text == ""
    expected = result_and_gradients(LinenGated().apply, variables, X)
    assert_close(result_and_gradients(module.apply, variables, X), expected)
    assert permutes(model.apply, variables, X) == 3 + 3
    apply, spec = model.apply, P("data", "tensor")
    if local:
        specs = model.partition_specs(variables)
        assert specs["params"]["up"]["kernel"] == P(None, "tensor")
        apply = jax.shard_map(apply, mesh=mesh, in_specs=(specs, spec), out_specs=spec)
    assert_close(result_and_gradients(apply, variables, X), expected)


class LinenProjections(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        names = {"query": 8, "key": 2, "value": 2}
        layers = [linen.DenseGeneral((heads, 3), name=name) for name, heads in names.items()]
        query, key, value = shared_gather(x, layers)
        return query * (key * value).repeat(query.shape[-2] // key.shape[-2], -2)


@pytest.mark.parametrize("local", [False, True])
def test_linen_heads_that_several_devices_compute_share_the_gather(local: bool, mesh: Mesh) -> None:
    module, copied = LinenProjections(), Column(heads=2)
    plan = {"query": Column(), "key": copied, "value": copied}
    model = parallelize(module, plan, mesh=mesh, implementation="ring")
    variables = jax.jit(model.init)(jax.random.key(0), X)
    apply = model.apply
    if local:
        specs = model.partition_specs(variables), P("data", "tensor")
        apply = jax.shard_map(apply, mesh=mesh, in_specs=specs, out_specs=P("data", None, "tensor"))
    assert permutes(apply, variables, X) == 3
    assert_close(jax.jit(apply)(variables, X), module.apply(variables, X))


class Attention(nnx.Module):
    """Queries, keys and values by layers of their own, and a feed-forward network beside them."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.query = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.key = nnx.Linear(FEATURES, 8, rngs=rngs)
        self.value = nnx.Linear(FEATURES, 8, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, FEATURES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        keys = self.key(x) * self.value(x)
        return self.out(self.query(x) * jax.numpy.tile(keys, 2))


def test_a_block_permutes_as_often_as_calls_of_the_shared_op(mesh: Mesh) -> None:
    model = nnx.List([Attention(), Gated()])
    plan = {
        "0": Shared("query", "key", "value"),
        "0.out": Row(),
        "1": Shared("gate", "up"),
        "1.down": Row(),
    }
    parallelize(model, plan, mesh=mesh, implementation="ring")
    assert permutes(lambda x: model[1](model[0](x)), X) == 12


def test_one_call_may_visit_several_inputs(mesh: Mesh) -> None:
    class Twice(Gated):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(super().__call__(x))

    model = parallelize(Twice(), PLAN, mesh=mesh, implementation="ring")
    assert permutes(model, X) == 4 * 3
    assert_close(jax.jit(lambda x: model(x))(X), Twice()(X))


def test_layers_with_adapters_share_a_gather(mesh: Mesh) -> None:
    def adapted() -> Gated:
        model: Any = Gated()
        for name in ("gate", "up"):
            base, rngs = getattr(model, name), nnx.Rngs(1)
            layer = nnx.LoRA(FEATURES, 2, HIDDEN, base_module=base, rngs=rngs)
            setattr(model, name, layer)
        return model

    model = parallelize(adapted(), PLAN, mesh=mesh, implementation="ring")
    # x, and what the adapters make of it, travel once.
    assert permutes(model, X) == 3 * (1 + 2) + 3
    assert_close(jax.jit(lambda x: model(x))(X), adapted()(X))


class Wrong(Gated):
    def __init__(self, kind: str, **options: Any):
        super().__init__(**options)
        self.kind = kind

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = self.gate(x)
        if self.kind in ("one", "moved"):
            return gate if self.kind == "one" else gate * self.gate(x + 0)
        if self.kind == "again":
            return gate * self.up(x) + self.gate(x)
        return gate * self.up(x + 0)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("two", "Wrong: 'up' is called on another array than 'gate'"),
        ("one", "Wrong: 'up' was not called on the array that it shares with 'gate'"),
        ("moved", "Wrong: 'up' was not called on the array that it shares with 'gate'"),
        ("again", "Wrong: 'gate' is called more often than 'up' on the array that they share"),
    ],
)
def test_calls_that_share_no_input_are_refused(kind: str, sentence: str, mesh: Mesh) -> None:
    model = parallelize(Wrong(kind), {"": Shared("gate", "up")}, mesh=mesh)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        jax.eval_shape(model, X)


def test_a_linen_layer_that_is_called_twice_is_named(mesh: Mesh) -> None:
    class Again(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            gate, up = linen.Dense(HIDDEN, name="gate"), linen.Dense(HIDDEN, name="up")
            return gate(x) + up(x) + gate(x)

    model = parallelize(Again(), {"": Shared("gate", "up")}, mesh=mesh)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    with pytest.raises(ValueError, match="'gate' is called more often than 'up' on the array"):
        jax.eval_shape(model.apply, variables, X)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"": Shared("gate", "left")}, "plan['']: matches no module with layers gate, left; the"),
        ({"": Shared("gate", "up"), "up": Row()}, "drop one entry"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Any, sentence: str, mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parallelize(Gated(), plan, mesh=mesh)
    linen_model = parallelize(LinenGated(), plan, mesh=mesh)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        linen_model.init(jax.random.key(0), X)


def test_layers_of_other_options_are_refused_before_anything_changes(mesh: Mesh) -> None:
    model = Gated(dtype=jax.numpy.bfloat16)
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match=r"layers: they have dtype None, .*bfloat16"):
        parallelize(model, PLAN, mesh=mesh)
    assert nnx.graphdef(model) == before
    for names in (("gate",), ("gate", "gate")):
        with pytest.raises(ValueError, match="expected the names of at least two layers"):
            Shared(*names)
    mixed = parallelize(Gated(together=True), {"gate": Column()}, mesh=mesh)
    with pytest.raises(ValueError, match="layers: one is a Linear; those that share a gather"):
        jax.eval_shape(mixed, X)


def test_kernels_that_share_a_gather_are_quantized_together(mesh: Mesh) -> None:
    plan = {"": Shared("gate", "up", fp8="rowwise"), "down": Row(fp8="rowwise")}
    graph, state = nnx.split(parallelize(Gated(), plan, implementation="ring"))

    def call(state: nnx.State, x: jax.Array, once: bool) -> jax.Array:
        model = nnx.merge(graph, state)
        return nnx.merge(graph, prequantize_kernels(model))(x) if once else model(x)

    specs, spec = nnx.get_partition_spec(state), P("data", "tensor")

    def outcome_of(once: bool) -> jax.Array:
        fun = functools.partial(call, once=once)
        sharded = jax.shard_map(fun, mesh=mesh, in_specs=(specs, spec), out_specs=spec)
        return jax.jit(sharded)(state, X)

    assert_close(outcome_of(True), outcome_of(False))


def test_explain_counts_what_xla_gathers_once_only_once(mesh: Mesh) -> None:
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    abstract: Any = AbstractMesh(
        (8,), ("tensor",), axis_types=(AxisType.Auto,), abstract_device=device
    )
    x = jax.ShapeDtypeStruct((4, 8, FEATURES), X.dtype)
    separate = {"gate": Column(), "up": Column(), "down": Row()}
    alone, together = (
        explain(parallelize(Gated(), plan, mesh=abstract))(x) for plan in (separate, PLAN)
    )
    assert (alone.merged_by_reference.number, together.merged_by_reference.number) == (1, 0)
    advice = "in 1 run, an op gathers an array that another op gathers too"
    assert (advice in str(alone), advice in str(together)) == (True, False)

    def reference_seconds(explained: Explanation) -> float:
        each = [decision.reference_seconds or 0 for decision in explained.decisions]
        return sum(each) - explained.merged_by_reference.seconds

    gathers = [each for each in alone.decisions if each.site.op == "all_gather_matmul"]
    assert alone.merged_by_reference.seconds == pytest.approx(gathers[0].communication_seconds)
    assert f"{1e3 * reference_seconds(alone):.2f} ms with xla" in str(alone)
