"""``python -m benchmarks stack``: feed-forward layers in one executable, each with its own weights.

A layer is all-gather → matmul → gelu → matmul → reduce-scatter, added to the residual. Legend of
global shapes: M rows, sharded between layers; K features; F hidden features, sharded within one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from typing import Any

import jax

from benchmarks import comparison
from benchmarks import contenders as taking_part
from benchmarks.communication import COLUMNS, ROWS
from benchmarks.comparison import Comparison
from benchmarks.contenders import Contender
from benchmarks.measuring import Result
from benchmarks.peers import PEERS, torch_stack
from benchmarks.programs import Direction, Operands, Program, layers_program
from benchmarks.report import Report
from benchmarks.settings import check_names


@dataclass(frozen=True)
class FeedForward:
    """Global sizes of one layer."""

    name: str
    rows: int
    features: int
    hidden_features: int


SHAPES = {
    shape.name: shape
    for shape in (
        FeedForward("70B", 8192, 8192, 28_672),
        FeedForward("8B", 8192, 4096, 14_336),
        FeedForward("small", 4096, 8192, 8192),
        FeedForward("tiny", 64, 32, 64),
    )
}
LAYERS: dict[Direction, int] = {"forward": 8, "forward_backward": 4}


@dataclass(frozen=True)
class StackCase:
    """One program, that every contender writes its own way."""

    shape: FeedForward
    direction: Direction
    layers: int

    @property
    def name(self) -> str:
        return f"{self.shape.name} {self.direction}"

    @property
    def divided_sizes(self) -> dict[str, int]:
        return {"rows": self.shape.rows, "hidden_features": self.shape.hidden_features}

    def describe(self, operands: Operands) -> dict[str, Any]:
        chunk = self.shape.rows // operands.mesh.devices.size * self.shape.features
        return {**asdict(self), "chunk_bytes": chunk * operands.dtype.itemsize}

    def build(self, operands: Operands, contender: Contender) -> Program:
        """The program: see `build`."""
        return build(self, operands, contender)


@dataclass(frozen=True, kw_only=True)
class Stack(Comparison):
    """A stack of feed-forward layers."""

    shapes: tuple[str, ...] = ("70B", "8B", "small")
    """Which layers: 70B, 8B, small, tiny."""
    directions: tuple[Direction, ...] = ("forward", "forward_backward")
    layers: int = 0
    """Layers of every stack; default: 8 forward, 4 forward and backward."""
    sweep_m: tuple[int, ...] = ()
    """Rows to try each shape with, instead of its own."""
    peers: bool = False
    """Afterwards time PyTorch on the same cases, in processes of its own; it needs 20 GB of each
    GPU left: XLA_PYTHON_CLIENT_MEM_FRACTION=0.7."""

    def cases(self) -> list[StackCase]:
        """Every shape × rows × direction."""
        shapes = [SHAPES[name] for name in self.shapes]
        if self.sweep_m:
            shapes = [
                FeedForward(f"{s.name} M={rows}", rows, s.features, s.hidden_features)
                for s in shapes
                for rows in self.sweep_m
            ]
        return [
            StackCase(shape, direction, self.layers or LAYERS[direction])
            for direction in self.directions
            for shape in shapes
        ]


def run(settings: Stack) -> Report:
    """Measures every case; returns the report.

    Raises:
      ValueError: for settings that do not fit together or to the devices.
    """
    check_names("shapes", settings.shapes, list(SHAPES))
    report = comparison.run("stack", settings, settings.cases(), taking_part.of_layers())
    if settings.peers and not report.out_of_time():
        _add_peers(report, settings)
    return report


def _add_peers(report: Report, settings: Stack) -> None:
    measured = {case["name"]: case["devices"] for case in report.content["cases"]}
    cases = {case.name: case for case in settings.cases() if case.name in measured}
    ran = torch_stack(
        list(cases.values()),
        devices=max(measured.values()),
        platform=settings.platform,
        dtype=settings.dtype,
        groups=settings.groups,
        group_seconds=settings.group_seconds,
        limit_seconds=min(report.seconds_left, 300.0),
    )
    names = {field.name for field in dataclasses.fields(Result)}
    peers: dict[tuple[str, str], Result] = {}
    if ran.reason is not None:
        peers = {(case, peer): Result(failure=ran.reason) for case in cases for peer in PEERS}
    for found in ran.results:
        result = Result(**{name: value for name, value in found.items() if name in names})
        peers[f"{found['shape']} {found['direction']}", found["peer"]] = result
    for (case, peer), result in peers.items():
        report.add_peer(case, peer, result)


def build(case: StackCase, operands: Operands, contender: Contender) -> Program:
    """The case as a contender's program: see `layers_program`."""
    communication, shape = contender.communication, case.shape
    m, k, f = shape.rows, shape.features, shape.hidden_features

    def forward(x, weights):
        for up, down in weights:
            (hidden,) = communication.all_gather_matmul(x, (up,))
            scattered = communication.matmul_reduce_scatter(jax.nn.gelu(hidden), down)
            x = communication.add(x, scattered)
        return x

    weights = [
        (
            operands.weight(COLUMNS, k, f, seed=layer),
            operands.weight(ROWS, f, k, seed=layer),
        )
        for layer in range(case.layers)
    ]
    return layers_program(
        communication,
        case.direction,
        forward,
        weights,
        x=operands.both(m, k),
        cotangent=operands.both(m, k, seed=1),
    )
