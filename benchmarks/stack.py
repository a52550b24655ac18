"""``python -m benchmarks stack``: feed-forward layers in one executable, each with its own weights.

A layer is all-gather → matmul → gelu → matmul → reduce-scatter, added to the residual. Legend of
global shapes: M rows, sharded between layers; K features; F hidden features, sharded within one.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

import jax

from benchmarks import contenders as taking_part
from benchmarks.communication import COLUMNS, ROWS
from benchmarks.contenders import Contender
from benchmarks.measuring import Case, prepare
from benchmarks.programs import Direction, Operands, Program, place, with_gradients
from benchmarks.report import Report
from benchmarks.settings import Settings, check, check_names, make_mesh


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


@dataclass(frozen=True, kw_only=True)
class Stack(Settings):
    """A stack of feed-forward layers."""

    shapes: tuple[str, ...] = ("70B", "8B", "small")
    """Which layers: 70B, 8B, small, tiny."""
    directions: tuple[Direction, ...] = ("forward", "forward_backward")
    contenders: tuple[str, ...] = ()
    """Who takes part; default: all."""
    layers: int = 0
    """Layers of every stack; default: 8 forward, 4 forward and backward."""
    sweep_m: tuple[int, ...] = ()
    """Rows to try each shape with, instead of its own."""
    try_options: bool = True
    """Whether to try sets of XLA options for the contenders that are XLA's own."""

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
    check(settings)
    check_names("shapes", settings.shapes, list(SHAPES))
    check_names("contenders", settings.contenders, taking_part.names())
    mesh = make_mesh(settings)
    for case in settings.cases():
        _check_divisible(case.shape, mesh.devices.size)
    report = Report("stack", settings)
    contenders = [
        taking_part.make(name, mesh, try_options=settings.try_options)
        for name in taking_part.in_order(settings.contenders)
    ]
    operands = Operands(mesh, settings.array_dtype)
    for stack in settings.cases():
        if report.out_of_time():
            break
        case = Case(contenders, functools.partial(build, stack, operands))
        prepare([case], settings.compile_threads)
        results = case.measure(settings.groups, settings.group_seconds)
        report.add(_describe(stack, operands), results)
    return report


def _check_divisible(shape: FeedForward, devices: int) -> None:
    for name in ("rows", "hidden_features"):
        size = getattr(shape, name)
        if size % devices:
            raise ValueError(
                f"{name}={size} of shape {shape.name!r}: not divisible by {devices} devices;"
                " choose other --shapes, --sweep-m or --devices"
            )


def _describe(case: StackCase, operands: Operands) -> dict[str, Any]:
    devices = operands.mesh.devices.size
    chunk = case.shape.rows // devices * case.shape.features
    return {
        **asdict(case),
        "name": case.name,
        "devices": devices,
        "chunk_bytes": chunk * operands.dtype.itemsize,
    }


def build(case: StackCase, operands: Operands, contender: Contender) -> Program:
    """The case as a contender's program.

    Forward it maps (x, weights) to the result; forward and backward it maps (x, weights, cotangent
    of the result) to (result, gradient of x, gradients of weights).
    """
    communication, shape = contender.communication, case.shape
    m, k, f = shape.rows, shape.features, shape.hidden_features
    weights = [
        (
            operands.weight(COLUMNS, k, f, seed=layer),
            operands.weight(ROWS, f, k, seed=layer),
        )
        for layer in range(case.layers)
    ]

    def forward(x, weights):
        for up, down in weights:
            (hidden,) = communication.all_gather_matmul(x, (up,))
            scattered = communication.matmul_reduce_scatter(jax.nn.gelu(hidden), down)
            x = communication.add(x, scattered)
        return x

    fun, arguments = forward, (operands.rows(communication, m, k), weights)
    specs: tuple[Any, ...] = (ROWS, [(COLUMNS, ROWS)] * case.layers)
    in_specs, out_specs = specs, ROWS
    if case.direction == "forward_backward":
        cotangent = operands.rows(communication, m, k, seed=1)
        fun, arguments = with_gradients(forward), (*arguments, cotangent)
        in_specs, out_specs = (*specs, ROWS), (ROWS, *specs)
    return Program(place(communication, operands.mesh, fun, in_specs, out_specs), arguments)
