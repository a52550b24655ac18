"""Which programs `overlap_jit` allows kernels that address peers' memory, and what explain says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, explain, overlap, overlap_jit, record_decisions
from collective_matmul.dispatch.contract import HIDDEN_SHARE
from collective_matmul.dispatch.run_counts import PROCESS_COUNTER
from collective_matmul.dispatch.tables import table_files
from collective_matmul.dispatch.tables.table import Table
from collective_matmul.explain import Explanation
from collective_matmul.jit.peer_decision import MARGIN, PeerKernelDecision, decide_once
from collective_matmul.layers import ColumnParallelLinear, RowParallelLinear
from collective_matmul.mosaic_gpu.peers import shared_memory
from collective_matmul.peer_access import UNDECIDED, peer_kernels_allowed
from tests.dispatch.sites import BFLOAT16, H200
from tests.dispatch.tables.example_tables import KIND, entry
from tests.explained import arguments, blocks, flat_arguments, gram, on, plain
from tests.hopper import needs_kernels
from tests.reference import AXIS

pytestmark = needs_kernels

#: Llama 3 8B.
WIDTHS = 4096, 14336
FEW = arguments(64, *WIDTHS, dtype=BFLOAT16)
PEERS = {"one_shot", "fused"}


def mesh_of(**sizes: int) -> AbstractMesh:
    shape = {AXIS: 4, **sizes}
    types = (AxisType.Auto,) * len(shape)
    return AbstractMesh(tuple(shape.values()), tuple(shape), types, abstract_device=H200)


def sharded(body: Callable, mesh: AbstractMesh, **options: Any) -> Callable:
    """`body` on a stack of few rows; its result is sharded as the stack's."""
    specs = (P(AXIS), [(P(None, AXIS), P(AXIS))] * 2)
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(AXIS), **options)


def decision_for(fun: Callable, *shapes: Any) -> PeerKernelDecision:
    """The decision of `overlap_jit`, which is that of `explain`."""
    with peer_kernels_allowed(UNDECIDED):
        decision = decide_once(jax.jit(fun).trace(*shapes).jaxpr.jaxpr)
    explained = explain(fun)(*shapes).peer_kernels
    assert str(explained) == str(decision)
    assert explained.gain_seconds == pytest.approx(decision.gain_seconds)
    assert explained.cost_seconds == pytest.approx(decision.cost_seconds)
    return decision


def backends_of(explanation: Explanation) -> set[str]:
    return {decision.implementation for decision in explanation.decisions}


def test_a_forward_stack_of_few_rows_gets_them() -> None:
    decision = decision_for(on(mesh_of()), *FEW)
    assert decision.allowed
    assert decision.cost_seconds == 0
    with_them = explain(on(mesh_of()), peer_kernels=True)(*FEW).decisions
    gains = [(each.reference_seconds or 0) - (each.seconds or 0) for each in with_them]
    assert decision.gain_seconds == pytest.approx(sum(gains))
    assert str(decision) == (
        "kernels that address peers' memory are allowed: they are predicted to save"
        f" {decision.gain_seconds * 1e6:.0f} of {decision.seconds_without * 1e6:.0f} µs of all ops,"
        " and no other collective loses by them"
    )
    assert backends_of(explain(on(mesh_of()))(*FEW)) <= PEERS


@pytest.mark.parametrize("rows", [2048, 8192])
def test_more_rows_get_them_where_predictions_say_so(rows: int) -> None:
    shapes = arguments(rows, *WIDTHS, dtype=BFLOAT16)
    decision = decision_for(on(mesh_of()), *shapes)
    with_them = explain(on(mesh_of()), peer_kernels=True)(*shapes)
    assert decision.allowed == bool(backends_of(with_them) & PEERS)


def test_float32_has_none() -> None:
    explanation = explain(on(mesh_of()))(*arguments(64, *WIDTHS, dtype=jnp.float32))
    assert not explanation.peer_kernels.allowed
    assert explanation.peer_kernels.reason == "no op of the program would use them"
    assert "peers" not in explanation.table()


@pytest.mark.parametrize("size", [1, 2])
def test_a_large_sum_beside_the_stack(size: int) -> None:
    """Over an axis of one device it costs nothing."""

    def body(x: jax.Array, weights: Any) -> jax.Array:
        total = lax.psum(jnp.ones((2**24,), jnp.float32) * x[0, 0], "data")
        return blocks(x, weights) + total[0].astype(x.dtype)

    fun = sharded(body, mesh_of(data=size), check_vma=False)
    decision = decision_for(fun, *FEW)
    assert decision.allowed == (size == 1)
    assert decision.gain_seconds == pytest.approx(decision_for(on(mesh_of()), *FEW).gain_seconds)
    if size == 1:
        assert decision.cost_seconds == 0
    else:
        # 64 MiB, of which each of two devices sends half, twice, at 376 GB/s.
        assert decision.cost_seconds == pytest.approx(28e-6 + 2**26 / 3.76e11)
        assert decision.reason.endswith(f"µs; in all, they must save {MARGIN:.0%}")
        explanation = explain(fun)(*FEW)
        assert not backends_of(explanation) & PEERS
        assert " ".join(explanation.table().split()).endswith(str(decision))


@pytest.mark.parametrize(
    ("collective", "seconds"),
    [
        (lambda x: lax.psum(x, AXIS), 28e-6 + 2 * 2**20 * 0.75 / 3.76e11),
        (lambda x: lax.pmax(x, AXIS), 28e-6 + 2 * 2**20 * 0.75 / 3.76e11),
        (lambda x: lax.all_gather(x, AXIS), 28e-6 + 4 * 2**20 * 0.75 / 3.76e11),
        (lambda x: lax.psum_scatter(x, AXIS, tiled=True), 28e-6 + 2**20 * 0.75 / 3.76e11),
        (lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True), 28e-6 + 2**20 * 0.75 / 3.76e11),
        (lambda x: lax.ppermute(x, AXIS, [(i, (i + 1) % 4) for i in range(4)]), 0.0),
        (lambda x: lax.axis_index(AXIS) * x, 0.0),
    ],
    ids=["psum", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute", "axis_index"],
)
def test_what_collectives_cost(collective: Callable, seconds: float) -> None:
    def body(x: jax.Array, weights: Any) -> jax.Array:
        y = collective(jnp.full((2**18,), x[0, 0], jnp.float32))  # 1 MiB
        return blocks(x, weights) + jnp.max(y).astype(x.dtype)

    decision = decision_for(sharded(body, mesh_of(), check_vma=False), *FEW)
    assert decision.cost_seconds == pytest.approx(seconds)


def test_what_computes_nothing_that_is_returned_costs_nothing() -> None:
    """XLA executes neither the sum nor the second stack."""

    def body(x: jax.Array, weights: Any) -> jax.Array:
        lax.psum(jnp.full((2**24,), x[0, 0], jnp.float32), AXIS)
        blocks(2 * x, weights)
        return blocks(x, weights)

    decision = decision_for(sharded(body, mesh_of(), check_vma=False), *FEW)
    alone = decision_for(on(mesh_of()), *FEW)
    assert decision.cost_seconds == 0
    assert decision.gain_seconds == pytest.approx(alone.gain_seconds)


@pytest.fixture
def _two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tells this process that there is another one, with which it shares memory."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for name in ("unshared_reason", "unshared_pools_reason"):
        monkeypatch.setattr(shared_memory, name, lambda: None)


@pytest.mark.usefixtures("_two_processes")
def test_across_processes_permutes_cost_too() -> None:
    """NCCL's kernels execute them, which may not run beside ours."""

    def body(x: jax.Array, weights: Any) -> jax.Array:
        y = jnp.full((2**18,), x[0, 0], jnp.float32)  # 1 MiB
        y = lax.ppermute(y, AXIS, [(i, (i + 1) % 4) for i in range(4)])
        return blocks(x, weights) + jnp.max(y).astype(x.dtype)

    decision = decision_for(sharded(body, mesh_of(), check_vma=False), *FEW)
    assert decision.cost_seconds == pytest.approx(28e-6 + 2**20 / 3.76e11)


@pytest.mark.usefixtures("_two_processes")
@pytest.mark.parametrize(("nodes", "rate"), [((0, 1), 5e10), ((0, 0), 3.76e11)])
def test_a_sum_between_nodes_costs_what_the_network_takes(
    nodes: tuple[int, int], rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An axis of data over two nodes of four devices each, or over one of eight."""
    devices = [SimpleNamespace(id=n, process_index=n, slice_index=nodes[n // 4]) for n in range(8)]
    kept = jax.devices()[0]
    for each in devices:
        each.platform, each.device_kind = kept.platform, kept.device_kind
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(jax, "device_count", lambda: 8)

    def body(x: jax.Array, weights: Any) -> jax.Array:
        total = lax.psum(jnp.ones((2**24,), jnp.float32) * x[0, 0], "data")
        return blocks(x, weights) + total[0].astype(x.dtype)

    mesh = AbstractMesh((2, 4), ("data", AXIS), (AxisType.Auto,) * 2, abstract_device=H200)
    decision = decision_for(sharded(body, mesh, check_vma=False), *FEW)
    assert decision.cost_seconds == pytest.approx(28e-6 + 2**26 / rate)
    assert decision.gain_seconds > 0  # Its tensor axis stays on a node.


@pytest.mark.usefixtures("_two_processes")
def test_across_processes_a_ring_loses_what_it_hides() -> None:
    def body(x: jax.Array, weights: Any) -> jax.Array:
        ring = all_gather_matmul(x, weights[0][0], AXIS, implementation="ring")
        return blocks(x, weights) + ring[: x.shape[0], : x.shape[1]]

    shapes = arguments(256, 4096, 16_384, dtype=BFLOAT16)
    decision = decision_for(sharded(body, mesh_of(), check_vma=False), *shapes)
    (ring,) = (
        each
        for each in explain(sharded(body, mesh_of(), check_vma=False))(*shapes).decisions
        if each.implementation == "ring"
    )
    assert decision.cost_seconds == pytest.approx(ring.communication_seconds)


@pytest.mark.usefixtures("_two_processes")
@pytest.mark.parametrize("rows", [64, 512, 2048, 8192])
def test_across_processes_kernels_are_chosen_as_within_one(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = arguments(rows, *WIDTHS, dtype=BFLOAT16)
    across = explain(on(mesh_of()))(*shapes)
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    within = explain(on(mesh_of()))(*shapes)
    assert backends_of(across) <= PEERS
    # Nothing is missed by a ring that would not overlap.
    assert not any("fallback" in each.reason for each in across.decisions)
    if rows < 8192:  # Of 8192 rows a ring of copies is as fast.
        assert backends_of(across) == backends_of(within)


@pytest.mark.parametrize("repeat", ["scan", "fori_loop", "while_loop", "cond", "jit", "remat"])
def test_loops_repeat_ops_and_collectives(repeat: str) -> None:
    """Steps of a scan, one step of a loop of unknown length, the longest of all branches."""

    def step(x: jax.Array, weights: Any) -> jax.Array:
        y = blocks(x, weights)
        return y + lax.psum(jnp.max(y), AXIS)

    def body(x: jax.Array, weights: Any) -> jax.Array:
        run = functools.partial(step, weights=weights)
        match repeat:
            case "scan":
                return lax.scan(lambda x, _: (run(x), None), x, length=5)[0]
            case "fori_loop":
                return lax.fori_loop(0, 5, lambda _, x: run(x), x)
            case "while_loop":
                return lax.while_loop(lambda x: x[0, 0] < 1, run, x)
            case "cond":
                return lax.switch(jnp.int32(1), [lambda x: x, run, lambda x: run(x) + 1], x)
            case "jit":
                twice = jax.jit(run)
                return twice(twice(x))
            case _:
                return jax.checkpoint(run)(x)

    once = decision_for(sharded(step, mesh_of(), check_vma=False), *FEW)
    assert once.gain_seconds > 0 and once.cost_seconds > 28e-6
    decision = decision_for(sharded(body, mesh_of(), check_vma=False), *FEW)
    count = {"scan": 5, "fori_loop": 5, "jit": 2}.get(repeat, 1)
    assert decision.cost_seconds == pytest.approx(count * once.cost_seconds)
    assert decision.gain_seconds == pytest.approx(count * once.gain_seconds)


def test_a_training_step_loses_the_overlap_of_its_gradient_sums() -> None:
    """Two devices of data sum the gradients of every layer."""

    def body(x: jax.Array, weights: Any) -> jax.Array:
        gradients = jax.grad(lambda w: jnp.sum(blocks(x, w).astype(jnp.float32)))(weights)
        summed = lax.psum(gradients, "data")
        new = jax.tree.map(lambda w, g: w - g.astype(w.dtype), weights, summed)
        return x + sum(jnp.max(w) for w in jax.tree.leaves(new))

    fun = sharded(body, mesh_of(data=2), check_vma=False)
    decision = decision_for(fun, *arguments(512, *WIDTHS, dtype=BFLOAT16))
    assert not decision.allowed
    assert decision.cost_seconds > decision.gain_seconds > 0


def test_collectives_of_a_backward_pass_that_stay_count() -> None:
    """XLA hides some of them under weight gradients. Float32 has no other kernels."""

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(all_gather_matmul(x, w, AXIS).astype(jnp.float32))

    def body(x: jax.Array, weights: Any, fun: Callable) -> jax.Array:
        x32, w32 = x.astype(jnp.float32), weights[0][0].astype(jnp.float32)
        return blocks(x, weights) + fun(x32, w32)[0].astype(x.dtype)

    costs = []
    for fun in (lambda x, w: (x * loss(x, w),), jax.grad(loss, (0, 1))):
        stack = sharded(functools.partial(body, fun=fun), mesh_of(), check_vma=False)
        decision = decision_for(stack, *FEW)
        assert decision.withheld
        costs.append(decision.cost_seconds)
    forward, backward = costs
    assert forward == 0
    assert backward > HIDDEN_SHARE * 2 * 28e-6  # A gather and a scatter.


@pytest.mark.parametrize("measured", [False, True])
def test_with_them_the_reference_takes_what_xla_hides_elsewhere(
    measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a kernel that is level with the reference of other programs is chosen in these.

    Models never count with what XLA hides. In float32, no kernel that addresses peers has a time
    beside which the reference has another.
    """
    shapes = arguments(64, *WIDTHS, dtype=jnp.float32)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(all_gather_matmul(x, w, AXIS, implementation="xla").astype(jnp.float32))

    fun = sharded(lambda x, ws: jax.grad(loss)(x, ws[0][0]), mesh_of(), check_vma=False)
    sites = [each.site.flat for each in explain(fun)(*shapes).decisions]
    table = Table(KIND, {site: entry(xla=1e-3, ring=2e-3) for site in sites})
    monkeypatch.setattr(table_files, "known", lambda kind: [("here", table)] if measured else [])
    without, with_them = (
        explain(fun, peer_kernels=allowed)(*shapes).decisions for allowed in (False, True)
    )
    assert [each.site.direction for each in without] == ["forward", "backward"]
    for one, other in zip(without, with_them, strict=True):
        assert one.seconds is not None and other.seconds is not None
        hidden = HIDDEN_SHARE * one.site.communication_seconds
        expected = hidden if measured and one.site.direction == "backward" else 0.0
        assert other.seconds - one.seconds == pytest.approx(expected)


CURE = (
    "leave such operations out, or do them in a jax.shard_map over the axis, or after the matmul"
    " that gathers over the axis"
)
AUTO_AXIS = (
    f"may add collectives that the program does not show; {CURE}; where the compiler adds few,"
    " peer_kernels=True may be faster: measure both"
)


def test_work_outside_shard_map_that_the_compiler_divides() -> None:
    """The compiler communicates for products of sharded rows, and not for the sine of each."""
    stack = on(mesh_of())
    for fun in (jnp.sin, lambda y: y.max(1)):
        assert decision_for(lambda *args, fun=fun: fun(stack(*args)), *FEW).allowed
    decision = decision_for(lambda *args: gram(stack(*args)), *FEW)
    assert not decision.allowed
    assert decision.reason.startswith("the compiler divides dot_general at explained.py:")
    assert f"over axis 'tensor' of size 4, and {AUTO_AXIS}; they are predicted to" in str(decision)
    assert not backends_of(explain(lambda *args: gram(stack(*args)))(*FEW)) & PEERS


@pytest.mark.parametrize("times", [1, 3])
def test_what_the_compiler_adds_counts_as_other_collectives(times: int) -> None:
    """A sum over sharded rows is one of the columns, over devices; loops repeat it."""
    stack = on(mesh_of())

    def fun(x: jax.Array, weights: Any) -> jax.Array:
        y = stack(x, weights)
        return lax.scan(lambda sums, _: (sums + y.max(0), None), y[0, :], length=times)[0]

    decision = decision_for(fun, *FEW)
    cut, largest = sorted(decision.causes, key=lambda cause: cause.operation, reverse=True)
    bytes_of_columns = 2 * WIDTHS[0]
    one = 28e-6 + 2 * bytes_of_columns * 0.75 / 3.76e11
    assert largest.seconds == pytest.approx(times * one)
    assert decision.cost_seconds == pytest.approx(sum(each.seconds or 0 for each in (cut, largest)))
    assert decision.allowed == (times == 1)
    words = " ".join(str(decision).split())
    assert f"; about {decision.cost_seconds * 1e6:.0f} µs of that are for collectives that" in words
    assert (
        f"that the compiler may add, as it divides {decision.causes[0]} and {decision.causes[1]}"
        in words
    )
    assert (CURE in words) == (times == 3)


def test_tokens_that_a_model_cuts_are_better_cut_before() -> None:
    """XLA shards them before it cuts them, and permutes a few."""
    stack = on(mesh_of())
    x, weights = FEW
    table = jax.ShapeDtypeStruct((128, x.shape[1]), x.dtype)
    tokens, inputs = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (65, 64))

    def model(table: jax.Array, tokens: jax.Array, weights: Any) -> jax.Array:
        return stack(jnp.take(table, tokens, axis=0), weights)

    decision = decision_for(lambda t, tokens, w: model(t, tokens[:-1], w), table, tokens, weights)
    (cut,) = decision.causes
    assert decision.allowed
    assert cut.operation.startswith("slice at test_peer_decision.py:")
    assert cut.cure == "cut tokens before the program: take inputs and targets as two arguments"
    assert not decision_for(model, table, inputs, weights).causes


def test_all_causes_are_named_at_once() -> None:
    """Each once, and most of many counted."""
    stack = on(mesh_of())

    def fun(x: jax.Array, weights: Any) -> list[jax.Array]:
        y = stack(x, weights)
        twice = [gram(y + i) for i in range(2)]  # Of one line.
        sums = [y.max(0), y.min(0), y.sum(0), y.prod(0), y.argmax(0)]
        return [*twice, *sums, y @ y.T]

    decision = decision_for(fun, *FEW)
    unknown = [str(each) for each in decision.causes if each.seconds is None]
    known = [str(each) for each in decision.causes if each.seconds is not None]
    assert [name.split(" ")[0] for name in unknown] == ["dot_general"] * 2
    names = {name.split(" ")[0] for name in known}
    assert names == {"reduce_max", "reduce_min", "reduce_sum", "reduce_prod", "argmax"}
    assert decision.reason.startswith(f"the compiler divides {unknown[0]} and {unknown[1]} over")
    named = f"{', '.join(known[:4])} over axis 'tensor' of size 4 and 1 more (peer_kernels.causes"
    assert named.replace(f", {known[3]}", f" and {known[3]}") in decision.reason


def test_what_the_compiler_divides_has_a_cure_which_helps() -> None:
    """Rows that are cut before the next op gathers them, after it, or in a `shard_map`."""
    mesh = mesh_of()
    up = jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, AXIS),
        mesh=mesh,
        in_specs=(P(AXIS), P(None, AXIS)),
        out_specs=P(None, AXIS),
        check_vma=False,
    )
    last = jax.shard_map(
        lambda x: lax.all_gather(x[-1:], AXIS, tiled=True),
        mesh=mesh,
        in_specs=P(AXIS),
        out_specs=P(),
        check_vma=False,
    )
    stack = on(mesh)
    (cut,) = decision_for(lambda x, ws: up(stack(x, ws)[:32], ws[0][0]), *FEW).causes
    assert cut.operation.startswith("slice at ") and cut.cure == CURE
    assert not decision_for(lambda x, ws: up(stack(x, ws), ws[0][0])[:32], *FEW).causes
    assert decision_for(lambda *args: stack(*args)[-1], *FEW).causes
    assert not decision_for(lambda *args: last(stack(*args))[-1], *FEW).causes


def test_arrays_that_neighbours_shard_otherwise_have_a_cure_which_helps() -> None:
    """One `shard_map` returns sharded rows, and the next one takes sharded columns."""
    stack = on(mesh_of())

    def after(spec: P) -> Callable:
        negated = jax.shard_map(jnp.negative, mesh=mesh_of(), in_specs=spec, out_specs=spec)
        return lambda *args: negated(stack(*args))

    reason = decision_for(after(P(None, AXIS)), *FEW).reason
    assert reason.startswith("the compiler divides shard_map")
    assert "show; shard arrays over the axis as the operations around do; where" in reason
    assert decision_for(after(P(AXIS)), *FEW).allowed


@pytest.mark.parametrize("tokens", [1, 64])
def test_layers_of_a_flax_model(tokens: int) -> None:
    """Each enters `shard_map` itself, and XLA divides what is between them."""
    mesh, (features, hidden) = mesh_of(), WIDTHS

    def feed_forward(x: jax.Array, kernels: Any) -> jax.Array:
        keywords = {"mesh": mesh, "use_bias": False, "dtype": BFLOAT16, "param_dtype": BFLOAT16}
        rngs = nnx.Rngs(0)
        up = ColumnParallelLinear(features, hidden, rngs=rngs, **keywords)
        down = RowParallelLinear(hidden, features, rngs=rngs, **keywords)
        up.kernel[...], down.kernel[...] = kernels
        norm = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True))
        return x + down(nnx.gelu(up(norm)))

    _, [kernels, _] = FEW
    x = jax.ShapeDtypeStruct((2, tokens, features), BFLOAT16)
    decision = decision_for(feed_forward, x, kernels)
    assert decision.allowed
    assert decision.cost_seconds == 0
    assert backends_of(explain(feed_forward)(x, kernels)) & PEERS


@pytest.mark.parametrize("size", [1, 2])
def test_shard_map_that_leaves_an_axis_to_the_compiler(size: int) -> None:
    def double(x: jax.Array, weights: Any) -> jax.Array:
        return 2 * x

    mesh = mesh_of(data=size)
    partly = sharded(double, mesh, axis_names={AXIS}, check_vma=False)
    whole = sharded(blocks, mesh)
    decision = decision_for(lambda *args: whole(partly(*args), args[1]), *FEW)
    assert decision.allowed == (size == 1)
    assert (f"over axis 'data' of size 2, and {AUTO_AXIS}" in decision.reason) == (size == 2)


@pytest.mark.parametrize(
    "around",
    [
        jax.jit,
        lambda fun: lambda x, w: fun(x.astype(jnp.float32).astype(x.dtype), w),
        lambda fun: lambda x, w: (fun(x, w), jnp.arange(5), jnp.float32(1) + 2),
        lambda fun: lambda x, w: lax.scan(lambda x, _: (fun(x, w), None), x, length=2)[0],
        lambda fun: lambda x, w: jax.checkpoint(fun)(fun(x, w), w),
    ],
    ids=["jit", "cast", "constants", "scan", "checkpoint"],
)
def test_calls_of_shard_map_alone_are_shown(around: Callable) -> None:
    assert decision_for(around(on(mesh_of())), *FEW).allowed


def test_a_shard_map_within_another_shows_its_collectives() -> None:
    mesh = mesh_of(data=2)

    def outer(x: jax.Array, weights: Any) -> jax.Array:
        inner = jax.shard_map(
            blocks,
            in_specs=(P(AXIS), [(P(None, AXIS), P(AXIS))] * 2),
            out_specs=P(AXIS),
            axis_names={AXIS},
            check_vma=False,
        )
        return inner(x, weights)

    fun = jax.shard_map(
        outer, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    assert decision_for(fun, *FEW).allowed


def test_programs_of_overlap() -> None:
    """A psum of one number stays. For plain programs explain says what overlap would do."""
    shapes = flat_arguments(64, *WIDTHS, dtype=BFLOAT16)
    decision = decision_for(overlap(plain(mesh_of())), *shapes)
    assert decision.allowed
    assert decision.cost_seconds == pytest.approx(28e-6, rel=0.01)
    assert backends_of(explain(overlap(plain(mesh_of())))(*shapes)) <= PEERS
    explanation = explain(plain(mesh_of()))(*shapes)
    assert not explanation.peer_kernels.allowed
    chosen = [site.decision.implementation for site in explanation.plain if site.decision]
    assert set(chosen) <= PEERS


def test_what_jax_has_traced_before_counts() -> None:
    """JAX takes a jitted block from its cache, where nothing is decided again."""
    block = jax.jit(on(mesh_of()))
    gains = []
    for calls in (1, 2):

        def program(x: jax.Array, weights: Any, calls: int = calls) -> jax.Array:
            for _ in range(calls):
                x = block(x, weights)
            return x

        gains.append(decision_for(program, *FEW).gain_seconds)
    assert gains[1] == pytest.approx(2 * gains[0])


def test_decisions_are_numbered_only_while_they_are_undecided() -> None:
    before = len(PROCESS_COUNTER.decisions)
    for value in (False, True):
        text = str(overlap_jit(on(mesh_of()), peer_kernels=value).trace(*FEW).jaxpr)
        assert "collective_matmul.decision" not in text
    assert len(PROCESS_COUNTER.decisions) == before


def test_requests_that_were_not_allowed_say_why() -> None:
    fun = on(mesh_of(), implementation=("fused", "ring"))
    assert backends_of(explain(fun)(*FEW)) <= {"fused", "ring"}
    explanation = explain(lambda *args: gram(fun(*args)))(*FEW)
    assert backends_of(explanation) == {"ring"}
    for decision in explanation.decisions:
        assert decision.reason.startswith(
            "fallback: fused is not possible: overlap_jit does not allow kernels to address peers'"
            " memory: the compiler divides dot_general at "
        )


@pytest.mark.parametrize("allowed", [True, False])
def test_a_decided_program_records_its_own_decisions(allowed: bool) -> None:
    """Once, and not those from which was decided."""
    stack = on(mesh_of())
    fun = overlap_jit(stack if allowed else lambda *args: gram(stack(*args)))
    with record_decisions() as recorded:
        program = fun.decided(*FEW)
    assert program.peer_kernels.allowed == allowed
    assert list(program.decisions) == recorded
    assert len(recorded) == 4
    chosen = {decision.implementation for decision in recorded}
    assert chosen <= PEERS if allowed else not chosen & PEERS


@pytest.mark.usefixtures("_two_processes")
def test_kernels_without_preallocation_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many rows only the kernels can take that store to arrays of peers."""
    monkeypatch.setattr(shared_memory, "unshared_pools_reason", lambda: "nothing is preallocated")
    explanation = explain(on(mesh_of()))(*arguments(8192, *WIDTHS, dtype=BFLOAT16))
    decision = explanation.peer_kernels
    assert not decision.allowed and decision.matters
    assert decision.reason == (
        "no op of the program would use them; fused is not possible: 2 processes: these kernels"
        " address peers' memory, which these processes cannot share: nothing is preallocated; a"
        " single process with all GPUs of a node need not"
    )
    assert " ".join(explanation.table().split()).endswith(str(decision))
    assert backends_of(explanation) == {"xla"}
