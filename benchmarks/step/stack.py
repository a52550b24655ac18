"""``python -m benchmarks stack``: feed-forward layers in one executable, each with its own weights.

A layer is all-gather → matmul → gelu → matmul → reduce-scatter, added to the residual. Legend of
global shapes: M rows, sharded between layers; K features; F hidden features, sharded within one.
All candidates compute the gradient of the gelu from its operand, as PyTorch's compiler does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax

from benchmarks import pytorch
from benchmarks.comparison import candidates, comparing
from benchmarks.comparison.candidates import Candidate
from benchmarks.comparison.communication import COLUMNS, ROWS
from benchmarks.comparison.comparing import Fp8Comparison
from benchmarks.comparison.operands import Operands
from benchmarks.comparison.programs import Direction, Program, make_program
from benchmarks.internals import RecipeName
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import check_names
from benchmarks.pytorch import runner


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
#: JAX alone would keep three arrays of the gelu's size for its gradient.
_gelu = jax.checkpoint(jax.nn.gelu)
LAYERS: dict[Direction, int] = {"forward": 8, "forward_backward": 4}


@dataclass(frozen=True)
class StackCase:
    """A program that each candidate implements in its own way."""

    shape: FeedForward
    direction: Direction
    layers: int
    fp8: tuple[RecipeName, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.shape.name} {self.direction}"

    @property
    def divided_sizes(self) -> dict[str, int]:
        return {"rows": self.shape.rows, "hidden_features": self.shape.hidden_features}

    def describe(self, operands: Operands) -> dict[str, Any]:
        chunk = self.shape.rows // operands.mesh.devices.size * self.shape.features
        return {**asdict(self), "chunk_bytes": chunk * operands.dtype.itemsize}

    def for_pytorch(self) -> dict[str, Any]:
        """See `benchmarks.pytorch.runner.PytorchCase`."""
        sizes = asdict(self.shape)
        del sizes["name"]
        recipes = [recipe for recipe in self.fp8 if recipe in pytorch.FLOAT8_RECIPES]
        names = [f"{name}_fp8_{recipe}" for recipe in recipes for name in pytorch.NAMES]
        described = {"direction": self.direction, "layers": self.layers, **sizes}
        return described | ({"candidates": [*pytorch.NAMES, *names]} if names else {})

    def build(self, operands: Operands, candidate: Candidate) -> Program:
        """The program of a candidate.

        Forward it maps (x, weights) to the result. Forward and backward it maps (x, weights,
        cotangent of the result) to (result, gradient of x, gradients of weights).
        """
        communication, shape = candidate.communication, self.shape
        m, k, f = shape.rows, shape.features, shape.hidden_features
        if communication.has_explicit_axes:
            operands = operands.with_explicit_axes()

        def through_layers(x, weights):
            for up, down in weights:
                (hidden,) = communication.all_gather_matmul(x, (up,))
                scattered = communication.matmul_reduce_scatter(_gelu(hidden), down)
                x = communication.add(x, scattered)
            return x

        overlapped = communication.overlapped(through_layers, sites=2 * self.layers)

        def forward(x, weights):
            return communication.shard(overlapped(x, weights))

        def forward_backward(x, weights, cotangent):
            result, vjp = jax.vjp(overlapped, x, weights)
            dx, dweights = vjp(cotangent)
            return communication.shard(result), communication.shard(dx), dweights

        weights = [
            (operands.weight(COLUMNS, k, f, seed), operands.weight(ROWS, f, k, seed))
            for seed in range(self.layers)
        ]
        x = communication.rows(*operands.both(m, k))
        if self.direction == "forward":
            return make_program(communication, forward, (x, weights), ROWS)
        arguments = x, weights, communication.rows(*operands.both(m, k, seed=1))
        out_specs = ROWS, ROWS, [(COLUMNS, ROWS)] * self.layers
        return make_program(communication, forward_backward, arguments, out_specs)


@dataclass(frozen=True, kw_only=True)
class Stack(Fp8Comparison):
    """A stack of feed-forward layers."""

    shapes: tuple[str, ...] = ("70B", "8B", "small")
    """Which layers: 70B, 8B, small, tiny."""
    directions: tuple[Direction, ...] = ("forward", "forward_backward")
    layers: int = 0
    """Layers of every stack; default: 8 forward, 4 forward and backward."""
    sweep_m: tuple[int, ...] = ()
    """Rows to try each shape with, instead of its own."""
    pytorch: bool = False
    """Afterwards time PyTorch on the same cases, in processes of its own; it needs 40 GB of each
    GPU left: XLA_PYTHON_CLIENT_MEM_FRACTION=0.7 with 141 GB, 0.35 with 80 GB. With --fp8 also
    torchao's float8."""

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
            StackCase(shape, direction, self.layers or LAYERS[direction], self.fp8)
            for direction in self.directions
            for shape in shapes
        ]


def run(settings: Stack) -> Report:
    """Measures every case; returns the report.

    Raises:
      ValueError: for settings that do not fit together or to the devices.
    """
    check_names("shapes", settings.shapes, list(SHAPES))
    cases, names = settings.cases(), candidates.with_fp8(candidates.layer_names(), settings.fp8)
    report = comparing.run("stack", settings.with_fp8(), cases, names)
    if settings.pytorch:
        runner.add_times(report, settings, cases)
    return report
