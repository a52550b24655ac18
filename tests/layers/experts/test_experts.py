"""`ExpertMLP` equals a dense mixture of experts, on local shards and on global arrays."""

from __future__ import annotations

import contextlib
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import CHECKPOINT_NAME, record_decisions
from collective_matmul.layers import (
    ExpertMLP,
    RouterStatistics,
    load_balancing_loss,
    router_z_loss,
)
from collective_matmul.log import warn_once
from tests.conftest import MeshFactory
from tests.layers.experts.expert_reference import dense_experts, dense_losses, dense_router
from tests.layers.reference import CONTEXTS, assert_close, exhaustive, pure, random

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

BATCH, SEQUENCE, FEATURES, HIDDEN, EXPERTS, CHOICES = 4, 6, 8, 6, 4, 2
BOTH = ("fsdp", "tensor")
SHARDED = P(*BOTH)
MASK = np.random.default_rng(1).random((BATCH, SEQUENCE)) < 0.8

#: How axes divide experts, by name.
DIVISIONS: dict[str, dict[str, Any]] = {
    "tensor": dict(axis_name="tensor", data_axis_name="fsdp"),
    "fsdp": dict(axis_name="fsdp", token_dimension=0),
    "both": dict(axis_name=BOTH, token_dimension=(0, -2)),
    "hidden": dict(axis_name="fsdp", hidden_axis_name="tensor", token_dimension=(0, -2)),
    "hidden_alone": dict(axis_name=(), hidden_axis_name="tensor"),
    "zero_3": dict(axis_name="tensor", weight_axis_name="fsdp", data_axis_name="fsdp"),
    "none": dict(axis_name=()),
}
#: Each division and each context at least once.
COVERING = {
    ("tensor", "auto"),
    ("fsdp", "local"),
    ("both", "local"),
    ("hidden", "explicit"),
    ("hidden_alone", "auto"),
    ("zero_3", "local_unchecked"),
    ("zero_3", "explicit"),
    ("none", "explicit"),
}
CASES = [
    (division, context) if (division, context) in COVERING else exhaustive((division, context))
    for division in DIVISIONS
    for context in CONTEXTS
]


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({"fsdp": 2, "tensor": 2})


def experts(*, of_gpt_oss: Any = False, **options: Any) -> ExpertMLP:
    """A layer; that of gpt-oss has biases that matter."""
    if of_gpt_oss:
        options |= dict(activation="gpt_oss", use_bias=True, logit_bias=True)
    model = ExpertMLP(FEATURES, HIDDEN, EXPERTS, CHOICES, **options, rngs=nnx.Rngs(0))
    if of_gpt_oss:
        for bias in (model.b_gate, model.b_up, model.b_down, model.router.logit_bias):
            assert bias is not None
            bias[...] = 0.5 * random(*bias.shape)
    return model


def losses_of(statistics: RouterStatistics, whole: RouterStatistics | None = None) -> jax.Array:
    return jnp.stack([load_balancing_loss(statistics, whole), router_z_loss(statistics, whole)])


def objective(y: jax.Array, losses: jax.Array) -> jax.Array:
    weights = np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape)
    return jnp.sum(y.astype(jnp.float32) * weights) + 3 * losses[0] + 5 * losses[1]


def outcome(model: nnx.Module, x: Any, mask: Any, context: str, mesh: Mesh, spec: P) -> Any:
    """The result, the losses of the global batch, and gradients by parameters and x."""
    graph, state = nnx.split(model)
    is_local = context.startswith("local")

    def call(state: nnx.State, x: Any, mask: Any) -> tuple[jax.Array, jax.Array]:
        y, statistics = nnx.merge(graph, state)(x, mask)
        if not is_local:
            return y, losses_of(statistics)
        axes = [axis for axis in spec if axis is not None]
        whole = statistics.sum_over_devices(axes)
        losses = losses_of(statistics, whole)
        for axis in axes:
            losses = jax.lax.psum(losses, axis)
        return y, losses

    around: Any = contextlib.nullcontext()
    if is_local:
        specs = nnx.get_partition_spec(state), spec, spec
        unchecked = context == "local_unchecked"
        call = jax.shard_map(
            call, mesh=mesh, in_specs=specs, out_specs=(spec, P()), check_vma=not unchecked
        )
    else:
        kind = AxisType.Explicit if context == "explicit" else AxisType.Auto
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * 2)
        around = jax.set_mesh(mesh)
        x, mask = (jax.device_put(a, NamedSharding(mesh, P("fsdp"))) for a in (x, mask))
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))

    def loss(state: nnx.State, x: Any) -> tuple[jax.Array, Any]:
        results = call(state, x, mask)
        return objective(*results), results

    with around:
        gradients, results = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(state, x)
    return results, pure(gradients[0]), gradients[1]


@cache
def dense_outcome(sequence: int = SEQUENCE, *, of_gpt_oss: bool = False) -> Any:
    parameters = pure(nnx.state(experts(axis_name=(), of_gpt_oss=of_gpt_oss)))

    def loss(parameters: Any, x: Any) -> tuple[jax.Array, Any]:
        flat = x.reshape(-1, FEATURES)
        routed = dense_router(x=flat, choices=CHOICES, **parameters["router"])
        y = dense_experts(parameters, flat, routed[-1]).reshape(x.shape)
        losses = jnp.stack(dense_losses(routed, MASK[:, :sequence].reshape(-1)))
        return objective(y, losses), (y, losses)

    x = random(BATCH, sequence, FEATURES)
    gradients, results = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(parameters, x)
    return results, *gradients


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_results_losses_and_gradients_equal_those_of_dense_experts(
    case: tuple[str, str], mesh: Mesh
) -> None:
    division, context = case
    model, x = experts(**DIVISIONS[division]), random(BATCH, SEQUENCE, FEATURES)
    assert_close(outcome(model, x, MASK, context, mesh, SHARDED), dense_outcome())


@pytest.mark.parametrize(
    "case",
    [
        ("hidden", "local"),
        ("zero_3", "local_unchecked"),
        exhaustive(("hidden_alone", "auto")),
        exhaustive(("both", "explicit")),
        exhaustive(("zero_3", "explicit")),
    ],
    ids="-".join,
)
def test_experts_with_biases(case: tuple[str, str], mesh: Mesh) -> None:
    division, context = case
    model = experts(of_gpt_oss=True, **DIVISIONS[division])
    actual = outcome(model, random(BATCH, SEQUENCE, FEATURES), MASK, context, mesh, SHARDED)
    assert_close(actual, dense_outcome(of_gpt_oss=True))


def test_devices_that_divide_hidden_features_of_the_same_tokens_add_a_bias_once(mesh: Mesh) -> None:
    model, x = experts(of_gpt_oss=True, **DIVISIONS["hidden"]), random(BATCH, 1, FEATURES)
    actual = outcome(model, x, MASK[:, :1], "local", mesh, P("fsdp"))
    assert_close(actual, dense_outcome(1, of_gpt_oss=True))


@pytest.mark.parametrize(
    "case",
    [("both", "local"), ("hidden", "auto"), exhaustive(("both", "auto"))],
    ids="-".join,
)
def test_tokens_that_an_axis_does_not_divide_are_the_same_on_its_devices(
    case: tuple[str, str], mesh: Mesh
) -> None:
    """The tokens of a decoding step. Axes that divide their batch exchange them."""
    division, context = case
    model, x = experts(**DIVISIONS[division]), random(BATCH, 1, FEATURES)
    actual = outcome(model, x, MASK[:, :1], context, mesh, P("fsdp"))
    assert_close(actual, dense_outcome(1))


def test_tokens_on_experts_over_axes_in_any_order(make_mesh: MeshFactory) -> None:
    """Along the axis in the middle, all devices have the same tokens."""
    mesh, axes = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}), ("fsdp", "tensor", "data")
    options: Any = dict(axis_name=axes, token_dimension=(0, -2, 0), mesh=mesh, rngs=nnx.Rngs(0))
    model, x = ExpertMLP(FEATURES, HIDDEN, 8, 3, **options), random(4, 1, FEATURES)
    y, _ = jax.jit(lambda model, x: model(x))(model, x)
    flat, parameters = x.reshape(-1, FEATURES), pure(nnx.state(model))
    weights = dense_router(parameters["router"]["kernel"], flat, 3)[-1]
    assert_close(y.reshape(flat.shape), dense_experts(parameters, flat, weights))


@pytest.mark.parametrize("division", ["tensor", "both"])
def test_tokens_that_are_sharded_stay_sharded(division: str, mesh: Mesh) -> None:
    model = experts(**DIVISIONS[division], implementation="ring", mesh=mesh)
    graph, state = nnx.split(model)
    state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
    x = jax.device_put(random(BATCH, SEQUENCE, FEATURES), NamedSharding(mesh, SHARDED))
    compiled = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, x).compile()
    assert compiled.output_shardings[0].spec == SHARDED
    assert not re.findall("all-gather|all-to-all", str(compiled.as_text()))


def test_a_shared_expert_is_added_and_may_be_gated(make_mesh: MeshFactory) -> None:
    mesh, x = make_mesh({"tensor": 2}), random(2, 4, FEATURES)
    model = experts(mesh=mesh, shared_features=HIDDEN, shared_gate=True)

    @jax.jit
    def parts(model: ExpertMLP, x: Any) -> tuple[jax.Array, ...]:
        y, _ = model(x)
        model.shared, shared = None, model.shared
        assert shared is not None and shared.gate is not None
        routed, _ = model(x)
        return y, routed, shared.feed_forward(x), jax.nn.sigmoid(x @ shared.gate[...])

    y, routed, shared, weight = parts(model, x)
    assert_close(y, routed + weight * shared)


def test_experts_and_the_shared_expert_have_operands_in_8_bits(make_mesh: MeshFactory) -> None:
    """A router does not: the same experts are chosen. Values are those of the op."""
    mesh, x = make_mesh({"tensor": 2}), random(2, 4, FEATURES)
    options: dict[str, Any] = dict(mesh=mesh, shared_features=HIDDEN, shared_gate=True)
    run = jax.jit(lambda model, x: model(x))
    with record_decisions() as decisions:
        y, statistics = run(experts(**options, fp8="rowwise"), x)
    sites: Any = [decision.site for decision in decisions]
    assert {site.fp8 for site in sites} == {"rowwise"}
    assert {"expert_mlp", "grouped_matmul", "all_gather_matmul"} <= {site.op for site in sites}
    wanted, unrounded = run(experts(**options), x)
    jax.tree.map(np.testing.assert_array_equal, statistics, unrounded)
    # Operands are off by 2⁻⁴ at most, and by a third of it in the mean.
    difference = np.linalg.norm(y - wanted) / np.linalg.norm(wanted)
    assert 1e-3 < difference < 0.1


class Residual(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.experts = ExpertMLP(FEATURES, HIDDEN, EXPERTS, CHOICES, axis_name=(), rngs=rngs)

    def __call__(self, x: Any) -> tuple[jax.Array, RouterStatistics]:
        y, statistics = self.experts(x)
        return x + y, statistics


@pytest.mark.parametrize("names", [(), (CHECKPOINT_NAME,)], ids=["full", "dots"])
def test_statistics_pass_through_scans_and_checkpoints(names: tuple[str, ...]) -> None:
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    graph = nnx.graphdef(Residual(nnx.Rngs(0)))
    states = [nnx.state(Residual(nnx.Rngs(seed))) for seed in range(2)]
    x = random(10, FEATURES)

    def block(x: Any, state: Any) -> Any:
        return nnx.merge(graph, state)(x)

    def one_by_one(states: Any, x: Any) -> tuple[jax.Array, Any]:
        x, total = block(x, states[0])
        for state in states[1:]:
            x, statistics = block(x, state)
            total += statistics
        return objective(x, losses_of(total)), total

    def scanned(states: Any, x: Any) -> tuple[jax.Array, Any]:
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *states)
        x, statistics = jax.lax.scan(jax.checkpoint(block, policy=policy), x, stacked)
        total = statistics.sum_over_layers()
        return objective(x, losses_of(total)), total

    differentiated = (
        jax.jit(jax.value_and_grad(fun, (0, 1), has_aux=True)) for fun in (scanned, one_by_one)
    )
    actual, expected = (fun(states, x) for fun in differentiated)
    assert_close(actual, expected)


def test_partition_specs_shard_experts_and_their_features() -> None:
    def specs(**options: Any) -> dict[str, Any]:
        return pure(nnx.get_partition_spec(nnx.state(experts(**options))))

    both = specs(axis_name=BOTH, selection_bias=True)
    assert both == {
        "router": {"kernel": P(None, None), "bias": P(None)},
        "w_gate": P(BOTH, None, None),
        "w_up": P(BOTH, None, None),
        "w_down": P(BOTH, None, None),
    }
    all_axes = specs(
        axis_name="expert", hidden_axis_name="tensor", weight_axis_name="fsdp", use_bias=True
    )
    assert all_axes["b_gate"] == all_axes["b_up"] == P("expert", "tensor")
    assert all_axes["b_down"] == P("expert", None)
    assert all_axes["w_gate"] == all_axes["w_up"] == P("expert", "fsdp", "tensor")
    assert all_axes["w_down"] == P("expert", ("tensor", "fsdp"), None)


def test_experts_begin_with_the_variance_of_their_inputs() -> None:
    model = ExpertMLP(64, 32, 16, 2, rngs=nnx.Rngs(0))
    for w, inputs in ((model.w_gate, 64), (model.w_up, 64), (model.w_down, 32)):
        # 32,768 numbers: their deviation is within 2 % of the expected one.
        np.testing.assert_allclose(np.std(w[...]) * inputs**0.5, 1, rtol=0.02)
    assert not np.array_equal(model.w_gate[0], model.w_gate[1])


def test_dtype_is_that_of_the_result_and_statistics_are_float32(make_mesh: MeshFactory) -> None:
    model = experts(dtype=jnp.bfloat16, mesh=make_mesh({"tensor": 2}))
    x = jax.ShapeDtypeStruct((2, 4, FEATURES), jnp.float32)
    y, statistics = jax.eval_shape(model, x)
    assert y.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(statistics)} == {np.dtype(np.float32)}


def test_bfloat16_beside_an_axis_that_is_left_to_the_compiler(mesh: Mesh) -> None:
    model = experts(axis_name="tensor", dtype=jnp.bfloat16, implementation="xla")
    x = random(BATCH, SEQUENCE, FEATURES)
    actual, expected = outcome(model, x, MASK, "auto", mesh, SHARDED), dense_outcome()
    assert_close(actual[0][1], expected[0][1])  # Losses are those of the router, in float32.
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # Numbers have 8 bits, and three products follow each other.
        assert np.max(np.abs(np.asarray(a, np.float32) - b)) <= 4 * 2**-8 * np.max(np.abs(b))


def test_a_sequence_that_could_be_padded_is_reported(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    model = experts(mesh=mesh)
    jax.eval_shape(model, random(4, 1, FEATURES))
    assert not caplog.messages
    jax.eval_shape(model, random(4, 7, FEATURES))
    assert "size 7 of dimension 1 is not divisible by 2, so all devices along axis 'tensor'" in (
        caplog.text
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(axis_name=("fsdp", "fsdp")), "('fsdp', 'fsdp') has an axis twice"),
        (dict(weight_axis_name="tensor"), "('tensor', 'tensor') has an axis twice"),
        (dict(axis_name="expert"), "'expert': the mesh has the axes ('fsdp', 'tensor')"),
        (dict(token_dimension=(0, 1)), "token_dimension=(0, 1): expected one dimension, or one"),
        (
            dict(axis_name=BOTH, experts=6),
            "experts=6: 6 is not divisible by axis 'fsdp and tensor'",
        ),
        (dict(hidden_axis_name="fsdp", hidden_features=5), "hidden_features=5: 5 is not divisible"),
        (dict(activation="tanh"), "activation='tanh': expected one of 'silu', 'gelu', 'relu'"),
        (
            dict(activation="gpt_oss", shared_features=4),
            "activation='gpt_oss': a shared expert has one of 'silu', 'gelu', 'relu'",
        ),
        (dict(shared_gate=True), "shared_gate=True: shared_features=0, so there is no shared"),
        (dict(in_features=0), "in_features=0: expected a whole number of at least 1"),
        (dict(implementation="rings"), "rings"),
        (dict(fp8="int9"), "fp8='int9': expected None"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_options_that_do_not_fit_are_refused(
    options: dict[str, Any], expected: str, mesh: Mesh
) -> None:
    sizes: dict[str, Any] = dict(
        in_features=FEATURES, hidden_features=HIDDEN, experts=EXPERTS, choices=CHOICES
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        ExpertMLP(**(sizes | options), mesh=mesh, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("options", "arguments", "expected"),
    [
        ({}, dict(x=random(4, 2, 5)), "x: shape (4, 2, 5); expected [..., 8]"),
        ({}, dict(mask=MASK[:2]), "mask of shape (2, 6): expected (4, 6), one number for each"),
        (dict(token_dimension=2), {}, "token_dimension=2: there are 2 dimension(s) before"),
        (dict(data_axis_name="batch"), {}, "data_axis_name='batch': the mesh has the axes"),
        (dict(mesh=None), {}, "axis_name='tensor': there is no mesh here"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_calls_that_do_not_fit_are_refused(
    options: dict[str, Any], arguments: dict[str, Any], expected: str, mesh: Mesh
) -> None:
    model = experts(**(dict(mesh=mesh) | options))
    with pytest.raises(ValueError, match=re.escape(expected)):
        model(**(dict(x=random(BATCH, SEQUENCE, FEATURES), mask=MASK) | arguments))


def test_a_shard_map_over_some_of_the_axes_or_with_other_shards_is_refused(mesh: Mesh) -> None:
    graph, state = nnx.split(experts(axis_name=BOTH))

    def call(axes: set[str]) -> None:
        spec = P("fsdp")
        fun = lambda state, x: nnx.merge(graph, state)(x)[0]  # noqa: E731
        local = jax.shard_map(fun, mesh=mesh, in_specs=(P(), spec), out_specs=spec, axis_names=axes)
        jax.eval_shape(local, state, random(BATCH, SEQUENCE, FEATURES))

    with pytest.raises(ValueError, match="over all of its axes, or over none of them"):
        call({"fsdp"})
    expected = "w_gate: shape (4, 8, 6); expected (1, 8, 6), this device's shard of the global"
    with pytest.raises(ValueError, match=re.escape(expected)):
        call({"fsdp", "tensor"})
