"""``python -m benchmarks ops``: each op alone, over the shapes of Llama 3, beside bulk.

An op is repeated in one executable, each time with other weights; a repetition starts when the one
before has ended. Legend of global shapes: M rows, K contracted, N columns; an all-gather shards M
and N, a reduce-scatter K, and M of its result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks import comparison
from benchmarks import contenders as taking_part
from benchmarks.communication import COLUMNS, ROWS, Communication
from benchmarks.comparison import Comparison
from benchmarks.contenders import Contender
from benchmarks.programs import Direction, Operands, Program, place
from benchmarks.report import Report
from benchmarks.settings import check_names
from models import config as models
from models.config import LlamaConfig

Op = Literal["all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class Projection:
    """A matmul of a model: K contracted, and N for each weight."""

    name: str
    op: Op
    contracted: int
    columns: tuple[int, ...]


def projections(model: str, config: LlamaConfig) -> dict[str, Projection]:
    """The projections of a Llama's block that communicate, by name."""
    k, f = config.features, config.hidden_features
    heads, shared = config.num_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    operands: dict[str, tuple[Op, int, tuple[int, ...]]] = {
        "qkv": ("all_gather", k, (heads, shared, shared)),
        "attention output": ("reduce_scatter", heads, (k,)),
        "gate and up": ("all_gather", k, (f, f)),
        "up": ("all_gather", k, (f,)),
        "down": ("reduce_scatter", f, (k,)),
    }
    return {name: Projection(f"{model} {name}", *sizes) for name, sizes in operands.items()}


LLAMAS = {
    "debug": models.debug(),
    "8B": models.llama3_8b(),
    "70B": models.llama3_70b(),
    "405B": models.llama3_405b(),
}

#: Sizes that fill no tile or no wave: N not a multiple of 128 per device, K = 5120.
AWKWARD = (
    Projection("K=5120", "all_gather", 5120, (13_824,)),
    Projection("K=5120", "reduce_scatter", 13_824, (5120,)),
    Projection("N=11000", "all_gather", 4096, (11_000,)),
    Projection("K=11000", "reduce_scatter", 11_000, (4096,)),
)


@dataclass(frozen=True)
class OpCase:
    """One op of one shape, repeated."""

    projection: Projection
    rows: int
    direction: Direction
    repetitions: int

    @property
    def name(self) -> str:
        return f"{self.projection.name} {self.projection.op} M={self.rows} {self.direction}"

    @property
    def divided_sizes(self) -> dict[str, int]:
        if self.projection.op == "reduce_scatter":
            return {"rows": self.rows, "contracted": self.projection.contracted}
        columns = {f"columns[{i}]": n for i, n in enumerate(self.projection.columns)}
        return {"rows": self.rows, **columns}

    def describe(self, operands: Operands) -> dict[str, Any]:
        return asdict(self)

    def build(self, operands: Operands, contender: Contender) -> Program:
        """The program: see `build`."""
        return build(self, operands, contender)


@dataclass(frozen=True, kw_only=True)
class Ops(Comparison):
    """Each op alone, over shapes of Llama 3 and awkward ones."""

    models: tuple[str, ...] = ("8B", "70B", "405B")
    """Whose projections: 8B, 70B, 405B."""
    projections: tuple[str, ...] = ()
    """Which of a model's, as "up" or "attention output"; default: all, and the awkward shapes."""
    rows: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
    """M to try each projection with."""
    awkward_rows: tuple[int, ...] = (3072, 8192)
    """M to try the awkward shapes with."""
    directions: tuple[Direction, ...] = ("forward", "forward_backward")
    cases: int = 96
    """Measure that many cases, drawn from all there are; 0 measures all."""
    contenders: tuple[str, ...] = ("xla", "auto", "ceiling")
    repetitions: int = 4
    """Of the op in one executable at 8192 rows; up to four times as many where rows are fewer, and
    down to half as many where they are more."""
    try_options: bool = False
    noise_checks: int = 8
    compile_cases: int = 24
    compile_threads: int = 32
    groups: int = 5

    def chosen_cases(self) -> list[OpCase]:
        """The cases to measure, in an order that leaves a fair choice wherever it is cut off."""
        llama = [
            projection
            for model in self.models
            for name, projection in projections(model, LLAMAS[model]).items()
            if not self.projections or name in self.projections
        ]
        awkward = () if self.projections else AWKWARD
        shapes = [(projection, rows) for projection in llama for rows in self.rows]
        shapes += [(projection, rows) for projection in awkward for rows in self.awkward_rows]
        cases = [
            OpCase(projection, rows, direction, self._repetitions(rows))
            for projection, rows in shapes
            for direction in self.directions
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
    check_names("models", settings.models, list(LLAMAS))
    check_names("projections", settings.projections, list(projections("", LLAMAS["debug"])))
    if settings.repetitions < 1:
        raise ValueError(f"repetitions={settings.repetitions}: expected at least 1")
    return comparison.run("ops", settings, settings.chosen_cases(), taking_part.names())


def build(case: OpCase, operands: Operands, contender: Contender) -> Program:
    """The case as a contender's program.

    Forward it maps (xs, weights) to results, one for each repetition; forward and backward it maps
    (xs, weights, cotangents) to (results, gradients of xs, gradients of weights).
    """
    communication = contender.communication
    gathers = case.projection.op == "all_gather"
    op = (_all_gather if gathers else _reduce_scatter)(case, operands, communication)
    weights = [
        tuple(
            operands.weight(op.w_spec, case.projection.contracted, n, seed)
            for n in case.projection.columns
        )
        for seed in range(case.repetitions)
    ]

    def forward(xs, weights):
        results: list[Any] = []
        for x, ws in zip(xs, weights, strict=True):
            if results:
                x, results[-1] = lax.optimization_barrier((x, results[-1]))
            results.append(op.call(x, ws))
        return results

    def forward_backward(xs, weights, cotangents):
        results, vjp = jax.vjp(forward, xs, weights)
        x_gradients, weight_gradients = vjp(cotangents)
        return results, [op.gradient(x) for x in x_gradients], weight_gradients

    arguments = ([op.x] * case.repetitions, weights)
    if case.direction == "forward":
        return place(communication, forward, arguments, op.y_spec)
    cotangents = [op.y] * case.repetitions
    out_specs = (op.y_spec, op.x_spec, op.w_spec)
    return place(communication, forward_backward, (*arguments, cotangents), out_specs)


class _Op(NamedTuple):
    """One repetition: its operand x, its result y, and where both and the weights lie."""

    call: Callable[[Any, Sequence[jax.Array]], Any]
    gradient: Callable[[Any], jax.Array]
    x: Any
    y: Any
    x_spec: P
    w_spec: P
    y_spec: P


def _all_gather(case: OpCase, operands: Operands, communication: Communication) -> _Op:
    columns = case.projection.columns
    return _Op(
        call=communication.all_gather_matmul,
        gradient=communication.shard,
        x=communication.rows(*operands.both(case.rows, case.projection.contracted)),
        y=tuple(operands.activations(COLUMNS, case.rows, n, seed=1) for n in columns),
        x_spec=ROWS,
        w_spec=COLUMNS,
        y_spec=COLUMNS,
    )


def _reduce_scatter(case: OpCase, operands: Operands, communication: Communication) -> _Op:
    (columns,) = case.projection.columns
    return _Op(
        call=lambda x, ws: communication.matmul_reduce_scatter(x, ws[0]),
        gradient=lambda gradient: gradient,
        x=operands.activations(COLUMNS, case.rows, case.projection.contracted),
        y=communication.scattered(*operands.both(case.rows, columns, seed=1)),
        x_spec=COLUMNS,
        w_spec=ROWS,
        y_spec=ROWS,
    )
