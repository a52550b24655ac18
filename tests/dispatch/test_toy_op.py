"""A new op is a request, backends, and one registration: all else follows from their answers.

The op is no matmul: the softmax, row by row, of a gathered x times w. It was written from
docs/contributing/add_an_op.md. It has a reference, a ring that walks a schedule, and a backward
pass that is a request of its own. Nothing of the library is changed here but by `register_op`.

Local shapes: x [m, K], w [K, N] -> [D*m, N].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import explain, tune
from collective_matmul.dispatch import selection
from collective_matmul.dispatch.branches import divergent_axes, no_permutes_reason
from collective_matmul.dispatch.contract import (
    COMPUTE_ONLY,
    HIDDEN_SHARE,
    Backend,
    Direction,
    Prediction,
    Request,
    size_above_zero,
)
from collective_matmul.dispatch.registry import OPS, Op, Registry, register_op, unregister_op
from collective_matmul.dispatch.repetitions import AXIS, Repetitions
from collective_matmul.dispatch.selection import UnsupportedSiteError, choose
from collective_matmul.dispatch.tables.table import Table
from collective_matmul.dispatch.tables.table_files import cache_path, read_users, save
from collective_matmul.hardware import rates
from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import Rows
from collective_matmul.operands.chunked import empty_like, read, write
from collective_matmul.operands.varying import pvary_all
from collective_matmul.schedule.walk import Gather, Ring, walk_gather, walk_scatter
from collective_matmul.source_location import SourceLocation, calling_location
from tests.conftest import MeshFactory
from tests.dispatch.sites import H200
from tests.dispatch.tables.example_tables import entry
from tests.dispatch.tables.example_tables import layer as matmul_layer

NAME = "gathered_softmax"
SOFTMAXES = Registry(renamed={"spiral": "ring"})


@dataclass(frozen=True)
class SoftmaxRequest(Request):
    """The softmax of each row of a gathered x [rows, K] times w [K, N], or its backward pass."""

    sizes: tuple[int, int, int]
    dtype: str
    axis_name: str
    axis_size: int
    # Another operation than the forward pass, so tables must tell them apart.
    is_backward: bool = False
    divergent_axes: tuple[str, ...] = field(default=(), compare=False)
    source: SourceLocation | None = field(default=None, compare=False)

    op = NAME
    backends = property(lambda self: SOFTMAXES)
    rows = property(lambda self: self.sizes[0])
    layer = property(lambda self: self.sizes[1:])
    kind = property(lambda self: (self.axis_size, self.dtype, self.is_backward))
    order = property(lambda self: (*self.kind, *self.layer, self.rows))
    flat = property(lambda self: replace(self, axis_name=""))
    remarks = property(lambda self: ("all ones",) if self.layer[1] == 1 else ())

    @property
    def direction(self) -> Direction:
        return "backward" if self.is_backward else "forward"

    @property
    def flops(self) -> int:
        # The backward pass multiplies for x and for w.
        return 2 * self.axis_size * math.prod(self.sizes) * (2 if self.is_backward else 1)

    @property
    def bytes_communicated(self) -> int:
        shard = jnp.dtype(self.dtype).itemsize * math.prod(self.sizes[:2])
        return (self.axis_size - 1) * shard * (2 if self.is_backward else 1)

    def line_dtypes(self, multiplied: tuple[str, str] | None) -> str:
        return f"multiplies {self.dtype}"

    @property
    def shapes(self) -> str:
        rows, k, n = self.sizes
        axis = f"{self.axis_name or 'devices'}={self.axis_size}"
        return f"{self.dtype} softmax [{rows},{k}]@[{k},{n}] over {axis}"

    def fields(self) -> dict[str, Any]:
        fields = {"op": NAME, "devices": self.axis_size, "dtype": self.dtype}
        return {**fields, "sizes": list(self.sizes), "backward": self.is_backward}

    def doublings(self, other: SoftmaxRequest) -> float:
        return sum(abs(math.log2(a / b)) for a, b in zip(self.sizes, other.sizes, strict=True))


def request_of(fields: Mapping[str, Any]) -> SoftmaxRequest:
    rows, k, n = map(size_above_zero, fields["sizes"])
    dtype, devices = jnp.dtype(fields["dtype"]).name, size_above_zero(fields["devices"])
    return SoftmaxRequest((rows, k, n), dtype, "", devices, bool(fields["backward"]))


def softmax_gradient(y: jax.Array, dy: jax.Array) -> jax.Array:
    """The gradient of the logits."""
    return y * (dy - jnp.sum(dy * y, axis=-1, keepdims=True))


class SoftmaxInXla(Backend):
    """The collective and the computation, one after the other."""

    name = "xla"

    def execute(self, request: SoftmaxRequest, *operands: jax.Array) -> Any:
        return (self.backward if request.is_backward else self.forward)(request, *operands)

    def forward(self, request: SoftmaxRequest, x: jax.Array, w: jax.Array) -> jax.Array:
        gathered = lax.all_gather(x, request.axis_name, axis=0, tiled=True)
        return jax.nn.softmax(gathered @ w, axis=-1)

    def backward(
        self, request: SoftmaxRequest, x: jax.Array, w: jax.Array, y: jax.Array, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        dz = softmax_gradient(y, dy)
        dx = lax.psum_scatter(dz @ w.T, request.axis_name, scatter_dimension=0, tiled=True)
        return dx, lax.all_gather(x, request.axis_name, axis=0, tiled=True).T @ dz

    def unsupported_reason(self, request: SoftmaxRequest) -> str | None:
        return None

    def predict(self, request: SoftmaxRequest) -> Prediction | None:
        gpu = rates()
        if gpu is None:
            return None
        seconds = request.flops / gpu.sustained_flops + request.communication_seconds
        return Prediction(seconds, 0.0, "sum of rates")


class SoftmaxRing(SoftmaxInXla):
    """Half of each shard travels in either direction; the rows of a chunk are a softmax's."""

    name = "ring"

    def forward(self, request: SoftmaxRequest, x: jax.Array, w: jax.Array) -> jax.Array:
        gather = Gather(x, "two_way", request.axis_name, 0)

        def softmax(chunk: Any, rows: jax.Array, operands: Any, y: jax.Array) -> jax.Array:
            place = Rows(y, gather.start(chunk), gather.size(chunk))
            return write(place, jax.nn.softmax(rows @ w, axis=-1), 0)

        y = empty_like(x, {0: request.axis_size * request.rows, 1: w.shape[1]}, w)
        return walk_gather(gather, softmax, (), y)

    def backward(
        self, request: SoftmaxRequest, x: jax.Array, w: jax.Array, y: jax.Array, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        dz = softmax_gradient(y, dy)
        scatter = Ring("scatter", "two_way", request.axis_name, 0, request.rows)
        gather = Gather(x, "two_way", request.axis_name, 0, co_gathered=True)

        def term(chunk: Any, operands: Any) -> jax.Array:
            (dz,) = operands
            return read(Rows(dz, scatter.start(chunk), scatter.size(chunk)), 0) @ w.T

        dx = walk_scatter(scatter, gather, term, (dz,))
        return dx, gather.gathered().whole(0).T @ dz

    def unsupported_reason(self, request: SoftmaxRequest) -> str | None:
        if reason := no_permutes_reason(request):
            return reason
        # For these tests alone: a schedule takes any number of rows.
        return f"a shard has {request.rows} rows, which is odd" if request.rows % 2 else None

    def predict(self, request: SoftmaxRequest) -> Prediction | None:
        gpu = rates()
        if gpu is None:
            return None
        seconds = max(request.flops / gpu.sustained_flops, request.communication_seconds)
        return Prediction(seconds, 0.05, "the slower of two rates")


for _backend in (SoftmaxInXla(), SoftmaxRing()):
    SOFTMAXES.register(_backend)


class Operands(NamedTuple):
    x: Any
    others: Any
    weights: Sequence[Any]


class WithoutCommunication(SoftmaxInXla):
    """The computation on an x that is gathered already."""

    def forward(self, request: SoftmaxRequest, x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.softmax(x @ w, axis=-1)

    def backward(
        self, request: SoftmaxRequest, x: jax.Array, w: jax.Array, y: jax.Array, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        dz = softmax_gradient(y, dy)
        return dz @ w.T, x.T @ dz


class Measured(Repetitions):
    """The request, repeated with weights of its own."""

    bound = WithoutCommunication()

    def __init__(self, request: SoftmaxRequest, devices: Sequence[Any]):
        super().__init__(request, devices, seconds=1e-4)

    def plain_operands(self, implementation: str) -> Operands:
        request: Any = self.request
        rows, k, n = request.sizes
        whole = request.axis_size * rows
        x = self.shards(whole if implementation == COMPUTE_ONLY else rows, k, request.dtype)
        y = self.shards(whole, n, request.dtype)
        w = self.shards(k, n, request.dtype)
        return Operands(x, (y, y) if request.is_backward else (), [w] * self.repetitions)

    def execute(self, backend: Backend, operands: Operands, weights: Any) -> tuple[Any, Any]:
        request: Any = replace(self.request, axis_name=AXIS)  # pyright: ignore
        return backend.execute(request, operands.x, weights, *operands.others), ()


OP = Op(NAME, SOFTMAXES, request_of, Measured, has_bound=True)


class Call(NamedTuple):
    """The user's call, as both passes know it. It is hashable, as a static argument must be."""

    axis_name: str
    implementation: tuple[str, ...] | None
    divergent_axes: tuple[str, ...]
    source: SourceLocation | None

    def execute(self, is_backward: bool, *operands: jax.Array) -> Any:
        x, w = operands[:2]
        request = SoftmaxRequest(
            (*x.shape, w.shape[1]),  # type: ignore[arg-type]
            x.dtype.name,
            self.axis_name,
            lax.axis_size(self.axis_name),
            is_backward,
            self.divergent_axes,
            self.source,
        )
        return choose(request, self.implementation).execute(request, *operands)


def gathered_softmax(x: Any, w: Any, axis_name: str, implementation: Any = None) -> Any:
    """x [m, K], w [K, N] -> [D*m, N], whose rows add up to 1, inside `jax.shard_map`."""
    names = SOFTMAXES.requested(implementation)
    call = Call(axis_name, names, divergent_axes(axis_name), calling_location())
    return _gathered_softmax(call, *pvary_all(axis_name, (x, w)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered_softmax(call: Call, x: Any, w: Any) -> Any:
    return call.execute(False, x, w)


def _forward(call: Call, x: Any, w: Any) -> Any:
    y = call.execute(False, x, w)
    return y, (x, w, y)


def _backward(call: Call, kept: Any, dy: Any) -> Any:
    return call.execute(True, *kept, dy)


_gathered_softmax.defvjp(_forward, _backward)


# The tests.

ROWS, K, N = 4, 6, 5  # of a shard


@pytest.fixture(autouse=True)
def _registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLLECTIVE_MATMUL_CACHE_DIR", str(tmp_path))
    register_op(OP)
    yield
    unregister_op(NAME)


def layer(mesh: Mesh | AbstractMesh, implementation: Any = None) -> Any:
    return jax.shard_map(
        lambda x, w: gathered_softmax(x, w, "tensor", implementation),
        mesh=mesh,
        in_specs=(P("tensor"), P(None, "tensor")),
        out_specs=P(None, "tensor"),
    )


def loss_gradients(mesh: Mesh | AbstractMesh, implementation: Any = None) -> Any:
    """(x, w, c) -> the softmax y, and the gradients of ``sum(c * y)``."""

    def loss(x: Any, w: Any, c: Any) -> Any:
        y = layer(mesh, implementation)(x, w)
        return jnp.sum(c * y), y

    return jax.grad(loss, argnums=(0, 1), has_aux=True)


def random_arrays(devices: int) -> tuple[np.ndarray, ...]:
    shapes = (devices * ROWS, K), (K, devices * N), (devices * ROWS, devices * N)
    generator = np.random.default_rng(devices)
    return tuple(generator.normal(size=shape).astype(np.float32) for shape in shapes)


def described(devices: int, rows: int = ROWS) -> list[jax.ShapeDtypeStruct]:
    shapes = (devices * rows, K), (K, devices * N)
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]


def expected(devices: int, x: Any, w: Any, c: Any) -> tuple[np.ndarray, ...]:
    """y, dx, dw of the unsharded computation in float64: a softmax of each device's columns."""
    x, w, c = (np.asarray(array, np.float64) for array in (x, w, c))
    ys, dws, dx = [], [], np.zeros_like(x)
    for w_shard, c_shard in zip(np.split(w, devices, 1), np.split(c, devices, 1), strict=True):
        exponentials = np.exp(x @ w_shard)
        y = exponentials / exponentials.sum(1, keepdims=True)
        dz = y * (c_shard - (c_shard * y).sum(1, keepdims=True))
        ys.append(y)
        dx += dz @ w_shard.T
        dws.append(x.T @ dz)
    return np.concatenate(ys, 1), dx, np.concatenate(dws, 1)


def softmax_of(rows: int) -> SoftmaxRequest:
    """The flat request of `described`."""
    return SoftmaxRequest((rows, K, N), "float32", "", 4)


def save_for(mesh: Mesh, entries: Any) -> None:
    """Saves a table for the devices of a mesh where decisions read it."""
    kind = mesh.devices.flat[0].device_kind
    path = cache_path(kind)
    assert path is not None
    save(path, kind, entries)


def decisions(fun: Any, *args: Any) -> list[tuple[str, str, str]]:
    explained = explain(fun)(*args).decisions
    return [(d.site.direction, d.implementation, d.reason) for d in explained]


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_values_and_gradients_are_those_of_float64(devices: int, make_mesh: MeshFactory) -> None:
    mesh, arrays = make_mesh({"tensor": devices}), random_arrays(devices)

    @jax.jit
    def of_both(*arrays: Any) -> Any:
        return [loss_gradients(mesh, name)(*arrays) for name in ("xla", "ring")]

    for (dx, dw), y in of_both(*arrays):
        for result, reference in zip((y, dx, dw), expected(devices, *arrays), strict=True):
            # float32 sums of at most 40 products of numbers near 1.
            np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-5)


def test_the_ring_communicates_by_permutes_only(make_mesh: MeshFactory) -> None:
    mesh, arrays = make_mesh({"tensor": 4}), random_arrays(4)
    text = str(jax.make_jaxpr(loss_gradients(mesh, "ring"))(*arrays))
    assert "ppermute" in text
    assert "all_gather" not in text
    assert "reduce_scatter" not in text


def test_a_name_is_a_request(make_mesh: MeshFactory) -> None:
    mesh = make_mesh({"tensor": 4})
    for names, chosen in (("xla", "xla"), ("ring", "ring"), (("ring", "xla"), "ring")):
        [(direction, name, reason)] = decisions(layer(mesh, names), *described(4))
        assert (direction, name) == ("forward", chosen)
        assert "requested" in reason


def test_names_that_the_op_does_not_have_are_refused(make_mesh: MeshFactory) -> None:
    mesh = make_mesh({"tensor": 4})
    with pytest.raises(ValueError, match=r"^implementation='one_shot': expected .* of xla, ring"):
        jax.eval_shape(layer(mesh, "one_shot"), *described(4))
    with pytest.warns(DeprecationWarning, match="'spiral' is now called 'ring'"):
        jax.eval_shape(layer(mesh, "spiral"), *described(4))


def test_odd_rows_are_refused_with_the_reason(make_mesh: MeshFactory) -> None:
    mesh = make_mesh({"tensor": 4})
    with pytest.raises(UnsupportedSiteError, match="'ring': a shard has 3 rows, which is odd; "):
        jax.eval_shape(layer(mesh, "ring"), *described(4, rows=3))
    [(_, chosen, reason)] = decisions(layer(mesh, ("ring", "xla")), *described(4, rows=3))
    assert chosen == "xla"
    assert "3 rows" in reason


@pytest.mark.parametrize("names", [None, ("ring", "xla")])
def test_no_ring_in_a_branch_that_devices_may_not_share(names: Any, make_mesh: MeshFactory) -> None:
    def in_branch(flag: Any, x: Any, w: Any) -> Any:
        def softmax(x: Any, w: Any) -> Any:
            return gathered_softmax(x, w, "tensor", names)

        return lax.cond(flag.any(), softmax, lambda x, w: softmax(2 * x, w), x, w)

    op = jax.shard_map(
        in_branch,
        mesh=make_mesh({"data": 2, "tensor": 2}),
        in_specs=(P("data"), P(("data", "tensor")), P(None, "tensor")),
        out_specs=P("data", "tensor"),
    )
    shapes = [jax.ShapeDtypeStruct((2,), "bool"), *described(4)]
    explained = explain(jax.grad(lambda *args: op(*args).sum(), argnums=1))(*shapes)
    assert {d.implementation for d in explained.decisions} == {"xla"}
    assert {d.site.divergent_axes for d in explained.decisions} == {("data",)}
    assert {d.site.direction for d in explained.decisions} == {"forward", "backward"}


def test_another_axis_has_parts_of_x_and_the_whole_w(make_mesh: MeshFactory) -> None:
    """The gradient of w is summed over that axis."""
    x, w = random_arrays(2)[:2]
    x = np.concatenate((x, x + 1))
    c = np.random.default_rng(0).normal(size=(len(x), w.shape[1])).astype(np.float32)
    op = jax.shard_map(
        lambda x, w: gathered_softmax(x, w, "tensor", "ring"),
        mesh=make_mesh({"data": 2, "tensor": 2}),
        in_specs=(P(("data", "tensor")), P(None, "tensor")),
        out_specs=P("data", "tensor"),
    )
    dw = jax.jit(jax.grad(lambda w: jnp.sum(c * op(x, w))))(w)
    # float32 sums of at most 40 products of numbers near 1.
    np.testing.assert_allclose(dw, expected(2, x, w, c)[2], rtol=1e-5, atol=1e-5)


def test_nothing_is_chosen_where_nothing_is_known(make_mesh: MeshFactory) -> None:
    [(_, chosen, _)] = decisions(layer(make_mesh({"tensor": 4})), *described(4))
    assert chosen == "xla"
    [(_, chosen, reason)] = decisions(layer(make_mesh({"tensor": 1})), *described(1))
    assert (chosen, reason) == ("xla", "one device: nothing to communicate")


def test_a_saved_table_chooses_in_each_pass_by_itself(make_mesh: MeshFactory) -> None:
    mesh, arrays = make_mesh({"tensor": 4}), random_arrays(4)
    fun = loss_gradients(mesh)
    forward, backward = (d.site.flat for d in explain(fun)(*arrays).decisions)
    assert forward != backward
    save_for(mesh, {forward: entry(xla=3, ring=2), backward: entry(xla=3, ring=4)})

    chosen = decisions(fun, *arrays)
    assert [entry[:2] for entry in chosen] == [("forward", "ring"), ("backward", "xla")]
    assert all("measured" in reason for *_, reason in chosen)


def test_similar_requests_are_decided_alike(make_mesh: MeshFactory) -> None:
    """Between two entries of a layer, and near one of another layer; not of another kind."""
    mesh = make_mesh({"tensor": 4})
    ends = {softmax_of(rows): entry(xla=2 * rows, ring=rows / 2) for rows in (2, 8)}
    save_for(mesh, ends)
    near = "near what was measured (your table)"
    [(_, chosen, reason)] = decisions(layer(mesh), *described(4))
    assert chosen == "ring"
    assert reason.startswith(f"{near}: 8 µs xla, 2 µs ring")
    wider = jax.ShapeDtypeStruct((K, 8 * N), "float32")
    [(_, _, reason)] = decisions(layer(mesh), described(4, rows=2)[0], wider)
    assert reason.startswith(near)
    [(_, chosen, _)] = decisions(layer(make_mesh({"tensor": 2})), *described(2))
    assert chosen == "xla"


def test_a_model_chooses_on_devices_that_it_knows() -> None:
    mesh = AbstractMesh((4,), ("tensor",), (AxisType.Auto,), abstract_device=H200)
    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((4096, 1024), (1024, 8192))]
    [decision] = explain(layer(mesh))(*shapes).decisions
    assert decision.implementation == "ring"
    assert "the slower of two rates" in decision.reason
    assert decision.seconds is not None
    assert decision.reference_seconds is not None
    assert decision.seconds < decision.reference_seconds
    assert decision.communication_seconds == decision.site.communication_seconds


def test_what_is_missed_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(selection, "warn_once", warned.append)
    mesh = AbstractMesh((4,), ("tensor",), (AxisType.Auto,), abstract_device=H200)
    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((4100, 1024), (1024, 8192))]
    [(_, chosen, reason)] = decisions(layer(mesh), *shapes)
    missed = "ring is not possible: a shard has 1025 rows, which is odd"
    assert chosen == "xla"
    assert reason.startswith(f"fallback: {missed}; the slower of two rates")
    assert warned == [f"{NAME} falls back to xla: {missed}"]


def test_what_xla_hides_is_the_requests_own() -> None:
    forward = softmax_of(ROWS)
    assert forward.overlapped_seconds == 0
    backward = replace(forward, is_backward=True)
    assert backward.overlapped_seconds == HIDDEN_SHARE * backward.communication_seconds > 0


def test_explain_has_a_line_for_each_pass(make_mesh: MeshFactory) -> None:
    explained = explain(loss_gradients(make_mesh({"tensor": 4}), "ring"))(*random_arrays(4))
    lines = [line for line in explained.table(400).splitlines() if NAME in line]
    assert ["forward" in line for line in lines] == [True, False]
    assert ["backward" in line for line in lines] == [False, True]
    shapes = "float32 softmax [4,6]@[6,5] over tensor=4"
    for part in (shapes, " ring ", f"{Path(__file__).name}:", "multiplies float32"):
        assert all(part in line for line in lines)
    # Both passes are those of one call.
    assert len({decision.site.source for decision in explained.decisions}) == 1


def test_explain_counts_runs_and_shows_remarks(make_mesh: MeshFactory) -> None:
    op = layer(make_mesh({"tensor": 4}))

    def repeated(x: Any, w: Any) -> Any:
        return lax.scan(lambda carry, _: (carry, op(x, w)), 0, length=3)

    explained = explain(repeated)(described(4)[0], jax.ShapeDtypeStruct((K, 4), "float32"))
    [decision] = explained.decisions
    assert decision.reason.startswith("all ones; ")
    assert [*explained.runs.values()] == [3]
    assert "3 runs of collective matmuls" in str(explained)


def test_tune_measures_both_passes_and_its_table_decides(
    make_mesh: MeshFactory, tmp_path: Path
) -> None:
    mesh, arrays = make_mesh({"tensor": 2}), random_arrays(2)
    fun = loss_gradients(mesh)
    table = tune(fun, *arrays, devices=jax.devices()[:2], groups=1, seconds_per_group=1e-4)
    assert table.path is not None
    assert table.path.parent == tmp_path
    assert {request.is_backward for request in table.entries} == {False, True}
    for measured in table.entries.values():
        assert set(measured.seconds) == {"xla", "ring", COMPUTE_ONLY}
    saved = read_users(table.path)
    assert saved is not None
    assert saved.entries.keys() == table.entries.keys()
    for _, _, reason in decisions(fun, *arrays):
        assert "measured" in reason


def test_tables_hold_several_ops(tmp_path: Path) -> None:
    softmaxes = [softmax_of(rows) for rows in (4, 2)]
    matmul = matmul_layer(512).flat
    entries = {key: entry(xla=1.0) for key in (*softmaxes, matmul)}
    text = save(tmp_path / "table.jsonl", "cpu", entries).to_text()
    read = Table.from_text(text)
    assert read.entries == entries
    assert [*read.entries] == [matmul, *reversed(softmaxes)]
    for damaged in ("0", '"4"', "null"):
        with pytest.raises(ValueError, match="expected a whole number above zero"):
            Table.from_text(text.replace('"sizes": [4', f'"sizes": [{damaged}'))


def test_entries_of_ops_that_a_program_does_not_have_stay_in_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They hide no entry of another op, and are read again where the op is registered."""
    path, others = tmp_path / "table.jsonl", [matmul_layer(rows).flat for rows in (512, 1024)]
    measured = entry(xla=3.5, ring=1.0)
    save(path, "cpu", {softmax_of(ROWS): measured, others[0]: measured})
    unregister_op(NAME)
    try:
        assert NAME not in OPS
        read = read_users(path)
        assert read is not None
        assert [*read.entries] == [others[0]]
        save(path, "cpu", {others[1]: measured})
    finally:
        register_op(OP)
    read = read_users(path)
    assert read is not None
    assert read.entries == dict.fromkeys((*others, softmax_of(ROWS)), measured)
    assert [*tmp_path.iterdir()] == [path]
    assert not caplog.records


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"^op.name='{NAME}': it is taken"):
        register_op(OPS[NAME])
