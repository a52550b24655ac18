"""A new op is a request, backends, and one registration: all else follows from their answers.

The op is no matmul: the softmax, row by row, of a gathered x times w. Nothing of the library is
changed here but by `register_op`.

Local shapes: x [m, K], w [K, N] -> [D*m, N].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, explain, record_decisions, tune
from collective_matmul.dispatch import selection, table_files
from collective_matmul.dispatch.contract import (
    Backend,
    Direction,
    Prediction,
    Request,
    size_above_zero,
)
from collective_matmul.dispatch.registry import OPS, Op, Registry, register_op, unregister_op
from collective_matmul.dispatch.repetitions import AXIS as TUNED_AXIS
from collective_matmul.dispatch.repetitions import Repetitions
from collective_matmul.dispatch.selection import UnsupportedSiteError, choose
from collective_matmul.dispatch.table import Table
from collective_matmul.source_location import SourceLocation, calling_location
from tests.conftest import MeshFactory
from tests.dispatch.sites import H200, tracing_for
from tests.dispatch.tables import RUN, entry, layer
from tests.reference import AXIS

NAME = "gathered_softmax"
SOFTMAXES = Registry(renamed={"padded": "summed"})


@dataclass(frozen=True)
class SoftmaxRequest(Request):
    """Softmax over N of a gathered x [tokens, features] times w [features, classes]."""

    tokens: int
    features: int
    classes: int
    axis_name: str
    axis_size: int
    op: str = NAME
    divergent_axes: tuple[str, ...] = field(default=(), compare=False)
    direction: Direction = field(default="forward", compare=False)
    source: SourceLocation | None = field(default=None, compare=False)
    replaces: str | None = field(default=None, compare=False)

    @property
    def backends(self) -> Registry:
        return SOFTMAXES

    @property
    def flops(self) -> int:
        return 2 * self.axis_size * self.tokens * self.features * self.classes

    @property
    def bytes_communicated(self) -> int:
        return 4 * (self.axis_size - 1) * self.tokens * self.features

    @property
    def communication_seconds(self) -> float:
        return self.bytes_communicated * 1e-9

    @property
    def flat(self) -> SoftmaxRequest:
        return replace(self, axis_name="")

    def fields(self) -> dict[str, Any]:
        sizes = {"tokens": self.tokens, "features": self.features, "classes": self.classes}
        return {"op": self.op, "shards": self.axis_size, **sizes}

    @property
    def kind(self) -> int:
        return self.axis_size

    @property
    def layer(self) -> tuple[int, int]:
        return self.features, self.classes

    @property
    def rows(self) -> int:
        return self.tokens

    @property
    def order(self) -> tuple:
        return self.axis_size, self.features, self.classes, self.tokens

    def doublings(self, other: SoftmaxRequest) -> float:
        pairs = zip(self.order[1:], other.order[1:], strict=True)
        return max(abs(math.log2(own / others)) for own, others in pairs)

    @property
    def shapes(self) -> str:
        return f"[{self.tokens},{self.features}] to {self.classes} classes over {self.axis_size}"

    @property
    def remarks(self) -> Sequence[str]:
        return ("one class alone",) if self.classes == 1 else ()

    def line_dtypes(self, multiplied: Any) -> str:
        return "multiplies float32"

    def __str__(self) -> str:
        return f"{self.op} {self.shapes}"


def request_of(fields: Any) -> SoftmaxRequest:
    sizes = (size_above_zero(fields[name]) for name in ("tokens", "features", "classes", "shards"))
    tokens, features, classes, shards = sizes
    return SoftmaxRequest(tokens, features, classes, "", shards)


class Gathering(Backend):
    """The reference."""

    name = "xla"

    def execute(self, request: SoftmaxRequest, x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.softmax(lax.all_gather(x, request.axis_name, tiled=True) @ w)

    def unsupported_reason(self, request: SoftmaxRequest) -> str | None:
        return None

    def predict(self, request: SoftmaxRequest) -> Prediction | None:
        return Prediction(2e-6, 0.0, "a guess")


class Summing(Backend):
    """Gathers by a sum of padded shards. Claims to be twice as fast with few tokens."""

    name = "summed"

    def execute(self, request: SoftmaxRequest, x: jax.Array, w: jax.Array) -> jax.Array:
        start = lax.axis_index(request.axis_name) * request.tokens
        whole = lax.full((request.axis_size * request.tokens, x.shape[1]), 0, x.dtype)
        padded = lax.dynamic_update_slice_in_dim(whole, x, start, 0)
        return jax.nn.softmax(lax.psum(padded, request.axis_name) @ w)

    def unsupported_reason(self, request: SoftmaxRequest) -> str | None:
        return "it adds an odd number of tokens" if request.tokens % 2 else None

    def predict(self, request: SoftmaxRequest) -> Prediction | None:
        seconds = 1e-6 if request.tokens < 64 else 4e-6
        return Prediction(seconds, 0.1, "a hope")


class SoftmaxOperands(NamedTuple):
    """Arguments of a measured program."""

    x: Any
    weights: Any


class SoftmaxRepetitions(Repetitions):
    """A request, repeated."""

    def __init__(self, request: SoftmaxRequest, devices: Sequence[Any]):
        super().__init__(request, devices, seconds=1.0)
        self.sizes = request

    def plain_operands(self, implementation: str) -> SoftmaxOperands:
        tokens, features, classes = self.sizes.tokens, self.sizes.features, self.sizes.classes
        w = self.shards(features, classes, np.float32)
        return SoftmaxOperands(self.shards(tokens, features, np.float32), [w] * self.repetitions)

    def execute(self, backend: Backend, operands: SoftmaxOperands, weights: Any) -> Any:
        request = replace(self.sizes, axis_name=TUNED_AXIS)
        return backend.execute(request, operands.x, weights), ()


OP = Op(NAME, SOFTMAXES, request_of, SoftmaxRepetitions)
ENTRY = entry(xla=2.0, ring=1.0)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_op(OP)
    yield
    unregister_op(NAME)


for _backend in (Gathering(), Summing()):
    SOFTMAXES.register(_backend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def gathered_softmax(
    x: jax.Array, w: jax.Array, axis_name: str, implementation: str | None = None
) -> jax.Array:
    """What users call. `overlap` and `explain` leave what is in a custom_vjp to it."""
    (tokens, features), classes = x.shape, w.shape[1]
    devices, source = lax.axis_size(axis_name), calling_location()
    request = SoftmaxRequest(tokens, features, classes, axis_name, devices, source=source)
    backend = choose(request, SOFTMAXES.requested(implementation))
    return backend.execute(request, x, w)


def _no_gradient(*_: Any) -> Any:
    raise NotImplementedError("gathered_softmax has no gradient")


gathered_softmax.defvjp(_no_gradient, _no_gradient)


Program = Any
X, W = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), np.eye(8, 6, dtype=np.float32)


@pytest.fixture
def program(make_mesh: MeshFactory) -> Any:
    def make(implementation: str | None = None, devices: int = 2) -> Program:
        return jax.shard_map(
            lambda x, w: gathered_softmax(x, w, AXIS, implementation),
            mesh=make_mesh({AXIS: devices}),
            in_specs=(P(AXIS), P()),
            out_specs=P(),
            check_vma=False,
        )

    return make


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x.astype(np.float64))
    return exponentials / exponentials.sum(-1, keepdims=True)


@pytest.mark.parametrize("name", ["xla", "summed"])
def test_a_backend_is_requested_by_name(program: Any, name: Literal["xla", "summed"]) -> None:
    with record_decisions() as decisions:
        y = jax.jit(program(name))(X, W)
    # Rounding of float32.
    np.testing.assert_allclose(y, softmax(X @ W), rtol=1e-6)
    (decision,) = decisions
    assert (decision.implementation, decision.reason) == (name, "requested")
    assert decision.site.op == NAME


def test_names_of_other_ops_and_requests_that_cannot_be_are_refused(program: Any) -> None:
    with pytest.raises(ValueError, match=r"^implementation='ring': expected .* of xla, summed"):
        jax.eval_shape(program("ring"), X, W)
    with pytest.raises(UnsupportedSiteError, match=r"^implementation='summed': it adds an odd"):
        jax.eval_shape(program("summed"), X[:6], W)
    with pytest.warns(DeprecationWarning, match="'padded' is now called 'summed'"):
        jax.eval_shape(program("padded"), X, W)


def test_a_model_chooses(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "known", lambda kind: [])
    (few,) = explain(program())(X, W).decisions
    assert (few.implementation, few.seconds, few.reference_seconds) == ("summed", 1e-6, 2e-6)
    assert few.reason == "a hope: 2 µs xla, 1 µs summed"
    (many,) = explain(program())(np.zeros((128, 8), np.float32), W).decisions
    assert (many.implementation, many.seconds) == ("xla", 2e-6)
    (alone,) = explain(program(devices=1))(X, W).decisions
    assert alone.reason == "one device: nothing to communicate"


def test_what_is_missed_is_a_warning(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(selection, "warn_once", warned.append)
    (odd,) = explain(program())(X[:6], W).decisions
    missed = "summed is not possible: it adds an odd number of tokens"
    assert odd.implementation == "xla"
    assert odd.reason.startswith(f"fallback: {missed}; a hope")
    assert warned == [f"{NAME} falls back to xla: {missed}"]


def test_explain_has_a_line_and_its_runs(program: Any) -> None:
    def repeated(x: jax.Array, w: jax.Array) -> Any:
        return lax.scan(lambda carry, _: (carry, program()(x, w)), 0, length=3)

    explanation = explain(repeated)(X, W[:, :1])
    (decision,) = explanation.decisions
    assert decision.reason.startswith("one class alone; ")
    assert [*explanation.runs.values()] == [3]
    text = str(explanation)
    for part in (NAME, decision.site.shapes, "multiplies float32", "test_toy_op.py", "summed"):
        assert part in text
    assert "3 collective matmuls; of 3 the times are predicted" in text


def test_communication_and_what_hides_it_are_the_requests_own() -> None:
    request = SoftmaxRequest(4, 8, 6, AXIS, 4)
    with tracing_for(H200), record_decisions() as decisions:
        choose(request)
    assert decisions[0].communication_seconds == request.communication_seconds
    assert request.overlapped_seconds == 0
    backward = replace(request, direction="backward")
    assert backward.overlapped_seconds == request.communication_seconds


def test_it_is_tuned_and_the_table_chooses(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLECTIVE_MATMUL_CACHE_DIR", str(tmp_path))
    options: Any = {"groups": 1, "seconds_per_group": 1e-4}
    table = tune(program(), X, W, **options)
    (request,) = table.entries
    assert request == SoftmaxRequest(4, 8, 6, "", 2)
    assert set(table.entries[request].seconds) == {"xla", "summed"}
    kind = jax.devices()[0].device_kind
    path = table_files.cache_path(kind)
    assert path is not None
    for summed, chosen in ((1.0, "summed"), (3.0, "xla")):
        table_files.save(path, kind, {request: entry(xla=2.0, summed=summed)})
        (decision,) = explain(program())(X, W).decisions
        assert decision.implementation == chosen
        assert decision.reason.startswith("measured (your table): 2 µs xla, ")


def test_similar_requests_are_decided_alike(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two entries of a layer, and near one of another layer; not of another kind."""
    ends = {SoftmaxRequest(n, 8, 6, "", 2): entry(xla=2.0 * n, summed=n / 2) for n in (2, 8)}
    monkeypatch.setattr(table_files, "known", lambda kind: [("here", Table(kind, {**ends}))])
    (between,) = explain(program())(X, W).decisions
    assert between.reason.startswith("near what was measured (here): 8 µs xla, 2 µs summed")
    (wider,) = explain(program())(X, np.eye(8, 12, dtype=np.float32)).decisions
    assert wider.reason.startswith("near what was measured (here)")
    (other,) = explain(program(devices=4))(X, W).decisions
    assert other.reason.startswith("a hope")


def test_tables_hold_several_ops(make_mesh: MeshFactory, tmp_path: Path) -> None:
    softmaxes = [SoftmaxRequest(n, 8, 6, "", 2) for n in (4, 2)]
    with record_decisions() as decisions:
        gather = jax.shard_map(
            lambda x, w: all_gather_matmul(x, w, AXIS),
            mesh=make_mesh({AXIS: 2}),
            in_specs=(P(AXIS), P(None, AXIS)),
            out_specs=P(None, AXIS),
        )
        jax.eval_shape(gather, X, W)
    matmul = decisions[0].site.flat
    path = tmp_path / "table.jsonl"
    entries = {key: entry(RUN, xla=1.0) for key in (*softmaxes, matmul)}
    text = table_files.save(path, "cpu", entries).to_text()
    read = Table.from_text(text)
    assert read.entries == entries
    assert [*read.entries] == [matmul, *reversed(softmaxes)]
    for damaged in ("0", '"4"', "null"):
        with pytest.raises(ValueError, match="expected a whole number above zero"):
            Table.from_text(text.replace('"tokens": 4', f'"tokens": {damaged}'))


def test_entries_of_ops_that_a_program_does_not_have_stay_in_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They hide no entry of another op, and are read again where the op is registered."""
    path, others = tmp_path / "table.jsonl", [layer(512), layer(1024)]
    softmax = SoftmaxRequest(4, 8, 6, "", 2)
    table_files.save(path, "cpu", {softmax: entry(xla=3.3, summed=1.0), others[0].flat: ENTRY})
    unregister_op(NAME)
    try:
        read = table_files.read_users(path)
        assert read is not None and [*read.entries] == [others[0].flat]
        table_files.save(path, "cpu", {others[1].flat: ENTRY})
    finally:
        register_op(OP)
    read = Table.from_text(path.read_text(encoding="utf-8"))
    assert set(read.entries) == {softmax, *(other.flat for other in others)}
    assert read.entries[softmax].seconds == pytest.approx({"xla": 3.3e-6, "summed": 1e-6})
    assert [*tmp_path.iterdir()] == [path] and not caplog.records


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"^op.name='{NAME}': it is taken"):
        register_op(OPS[NAME])
