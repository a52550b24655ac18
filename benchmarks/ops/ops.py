"""``python -m benchmarks ops``: each op alone, over shapes of Llama 3, beside XLA and others.

An op is repeated in one executable, each time with other weights; a repetition starts when the one
before it has ended. Legend of global shapes: M rows, K contracted, N columns. An all-gather shards
M and N, a reduce-scatter K, and M of its result; an all-reduce shards K.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.comparison import candidates, comparing
from benchmarks.comparison.candidates import Candidate
from benchmarks.comparison.communication import COLUMNS, REPLICATED, ROWS
from benchmarks.comparison.comparing import Comparison
from benchmarks.comparison.operands import Operands
from benchmarks.comparison.programs import Direction, Program, make_program
from benchmarks.internals import COMPUTE_ONLY, LAYERS, REFERENCE, Layer
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import check_least, check_names
from benchmarks.ops import ops_tables
from benchmarks.pytorch import runner

Op = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]


@dataclass(frozen=True)
class OpCase:
    """One op of one shape, repeated. K and N of `layer` are global."""

    model: str
    layer: Layer
    op: Op
    rows: int
    direction: Direction
    repetitions: int

    @property
    def name(self) -> str:
        return f"{self.op} {self.model} {self.layer.name} M={self.rows} {self.direction}"

    @property
    def divided_sizes(self) -> dict[str, int]:
        if self.op == "matmul_all_reduce":
            return {"contracted": self.layer.contracted}
        if self.op == "matmul_reduce_scatter":
            return {"rows": self.rows, "contracted": self.layer.contracted}
        columns = {f"columns[{i}]": n for i, n in enumerate(self.layer.columns)}
        return {"rows": self.rows, **columns}

    def describe(self, operands: Operands) -> dict[str, Any]:
        return asdict(self)

    def for_pytorch(self) -> dict[str, Any] | None:
        """See `benchmarks.pytorch.runner.PytorchCase`."""
        if self.direction != "forward" or len(self.layer.columns) > 1:
            return None
        sizes = self.layer.contracted, *self.layer.columns
        features, hidden = sizes if self.layer.kind == "gather" else sizes[::-1]
        return {
            "op": self.op,
            "rows": self.rows,
            "features": features,
            "hidden_features": hidden,
            "layers": self.repetitions,
        }

    def build(self, operands: Operands, candidate: Candidate) -> Program:
        """The program of a candidate.

        Forward it maps (xs, weights) to results, one for each repetition. Forward and backward it
        maps (xs, weights, cotangents) to (results, gradients of xs, gradients of weights).
        """
        communication = candidate.communication
        op = _repetition(self, operands, communication)
        weights = [
            tuple(
                operands.weight(op.w_spec, self.layer.contracted, n, seed)
                for n in self.layer.columns
            )
            for seed in range(self.repetitions)
        ]

        def forward(xs, weights):
            results: list[Any] = []
            for x, ws in zip(xs, weights, strict=True):
                if results:
                    x, ended = lax.optimization_barrier((x, results[-1]))
                    # A barrier's result is not known to be replicated; a backward needs it.
                    results[-1] = results[-1] if self.op == "matmul_all_reduce" else ended
                results.append(op.call(x, ws))
            return results

        def forward_backward(xs, weights, cotangents):
            results, vjp = jax.vjp(forward, xs, weights)
            x_gradients, weight_gradients = vjp(cotangents)
            return results, [op.gradient(x) for x in x_gradients], weight_gradients

        arguments = ([op.x] * self.repetitions, weights)
        if self.direction == "forward":
            return make_program(communication, forward, arguments, op.y_spec)
        cotangents = [op.y] * self.repetitions
        out_specs = (op.y_spec, op.x_spec, op.w_spec)
        return make_program(communication, forward_backward, (*arguments, cotangents), out_specs)


@dataclass(frozen=True, kw_only=True)
class Ops(Comparison):
    """Each op alone, over shapes of Llama 3 and awkward ones."""

    models: tuple[str, ...] = ("llama3-8b", "llama3-70b", "llama3-405b", "awkward")
    """Whose layers, as for `python -m collective_matmul tune --shapes`."""
    layers: tuple[str, ...] = ()
    """Which of a model's layers, as "up" or "attention output"; default: all."""
    ops: tuple[Op, ...] = ("all_gather_matmul", "matmul_reduce_scatter")
    """Which ops. An all-reduce is what decoding does instead of a reduce-scatter: forward only."""
    rows: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
    """M to try each layer with."""
    directions: tuple[Direction, ...] = ("forward", "forward_backward")
    cases: int = 96
    """Measure that many cases, drawn from all there are; 0 measures all."""
    candidates: tuple[str, ...] = (REFERENCE.name, "auto", COMPUTE_ONLY)
    repetitions: int = 4
    """Repetitions in one executable at 8192 rows; up to four times as many where rows are fewer,
    and down to half as many where they are more."""
    noise_checks: int = 8
    compile_cases: int = 24
    compile_threads: int = 32
    groups: int = 5
    pytorch: bool = False
    """Afterwards time PyTorch on the forward cases of one weight, in processes of its own; it needs
    20 GB of each GPU left: XLA_PYTHON_CLIENT_MEM_FRACTION=0.7."""

    def chosen_cases(self) -> list[OpCase]:
        """The cases to measure, in an order that leaves a fair choice wherever it is cut off."""
        cases = [
            OpCase(model, layer, op, rows, direction, self._repetitions(rows))
            for model in self.models
            for layer in LAYERS[model]
            if not self.layers or layer.name in self.layers
            for op in self.ops
            if (op == "all_gather_matmul") == (layer.kind == "gather")
            for rows in self.rows
            for direction in self.directions
            if direction == "forward" or op != "matmul_all_reduce"
        ]
        return random.Random(0).sample(cases, min(self.cases or len(cases), len(cases)))

    def _repetitions(self, rows: int) -> int:
        # The host takes as long to call a program of few rows as one of many.
        fewest, most = max(1, self.repetitions // 2), 4 * self.repetitions
        return min(max(fewest, self.repetitions * 8192 // rows), most)


def run(settings: Ops) -> Report:
    """Measures every case; returns the report.

    Raises:
      ValueError: for settings that do not fit together or to the devices.
    """
    check_names("models", settings.models, list(LAYERS))
    known = {layer.name: None for model in settings.models for layer in LAYERS[model]}
    check_names("layers", settings.layers, list(known))
    check_names("ops", settings.ops, get_args(Op))
    check_least(settings, 1, "repetitions")
    cases = settings.chosen_cases()
    report = comparing.run("ops", settings, cases, candidates.names(), ops_tables.SECTIONS)
    if settings.pytorch:
        runner.add_times(report, settings, cases)
    return report


class _Repetition(NamedTuple):
    """One repetition: its operand x, its result y, and how both and the weights are sharded."""

    call: Callable[[Any, Sequence[jax.Array]], Any]
    gradient: Callable[[Any], jax.Array]
    x: Any
    y: Any
    x_spec: P
    w_spec: P
    y_spec: P


def _repetition(case: OpCase, operands: Operands, communication: Any) -> _Repetition:
    contracted, columns = case.layer.contracted, case.layer.columns
    if case.op == "all_gather_matmul":
        return _Repetition(
            call=communication.all_gather_matmul,
            gradient=communication.shard,
            x=communication.rows(*operands.both(case.rows, contracted)),
            y=tuple(operands.activations(COLUMNS, case.rows, n, seed=1) for n in columns),
            x_spec=ROWS,
            w_spec=COLUMNS,
            y_spec=COLUMNS,
        )
    if case.op == "matmul_reduce_scatter":
        call, y_spec = communication.matmul_reduce_scatter, ROWS
        y = communication.scattered(*operands.both(case.rows, columns[0], seed=1))
    else:
        call, y_spec = communication.matmul_all_reduce, communication.all_reduce_spec
        y = operands.activations(REPLICATED, case.rows, columns[0], seed=1)
    return _Repetition(
        call=lambda x, ws: call(x, ws[0]),
        gradient=lambda gradient: gradient,
        x=operands.activations(COLUMNS, case.rows, contracted),
        y=y,
        x_spec=COLUMNS,
        w_spec=ROWS,
        y_spec=y_spec,
    )
