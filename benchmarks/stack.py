"""``python -m benchmarks stack``: feed-forward layers in one executable, each with its own weights.

A layer is all-gather → matmul → gelu → matmul → reduce-scatter, added to the residual. Legend of
global shapes: M rows, sharded between layers; K features; F hidden features, sharded within one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from benchmarks import contenders as taking_part
from benchmarks.communication import COLUMNS, ROWS, Communication
from benchmarks.contenders import Contender
from benchmarks.measuring import Program, measure_case
from benchmarks.report import Report
from benchmarks.settings import Settings, check, check_names, make_mesh

Direction = Literal["forward", "forward_backward"]


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
        return [
            StackCase(direction, self.layers or LAYERS[direction], shape)
            for direction in self.directions
            for shape in self._shapes()
        ]

    def _shapes(self) -> list[FeedForward]:
        shapes = [SHAPES[name] for name in self.shapes]
        if not self.sweep_m:
            return shapes
        return [
            FeedForward(f"{s.name} M={rows}", rows, s.features, s.hidden_features)
            for s in shapes
            for rows in self.sweep_m
        ]


@dataclass(frozen=True)
class StackCase:
    """One program that all contenders write their own way."""

    direction: Direction
    layers: int
    shape: FeedForward

    def describe(self) -> dict[str, Any]:
        name = f"{self.shape.name} {self.direction}"
        return {**asdict(self), "name": name}


def run(settings: Stack) -> Report:
    """Measures every case; returns the report.

    Raises:
      ValueError: for settings that do not fit together or to the devices.
    """
    check(settings)
    check_names("shapes", settings.shapes, list(SHAPES))
    check_names("contenders", settings.contenders, taking_part.names())
    mesh = make_mesh(settings)
    _check_divisible(settings, mesh.devices.size)
    report = Report("stack", settings)
    contenders = [
        taking_part.make(name, mesh, try_options=settings.try_options)
        for name in taking_part.in_order(settings.contenders)
    ]
    for case in settings.cases():
        if report.out_of_time():
            break
        operands = Operands(case, mesh, settings.array_dtype)
        results = measure_case(
            contenders, operands.program, groups=settings.groups, threads=settings.compile_threads
        )
        report.add({**case.describe(), "devices": mesh.devices.size}, results)
    return report


def _check_divisible(settings: Stack, devices: int) -> None:
    for case in settings.cases():
        for name in ("rows", "hidden_features"):
            size = getattr(case.shape, name)
            if size % devices:
                raise ValueError(
                    f"{name}={size} of shape {case.shape.name!r}: not divisible by {devices}"
                    " devices; choose other --shapes, --sweep-m or --devices"
                )


class Operands:
    """The arrays of one case, on the mesh, shared by all contenders.

    Attributes:
      weights: for every layer up [K, F] and down [F, K].
      shards: x and the cotangent of the result, [M, K], sharded.
      wholes: the same with all M rows on every device, [D*M, K].
    """

    def __init__(self, case: StackCase, mesh: Mesh, dtype: jnp.dtype):
        self.case, self.mesh = case, mesh
        shape, devices = case.shape, mesh.devices.size
        m, k, f = shape.rows, shape.features, shape.hidden_features

        def random(seed: int, spec, size: tuple[int, int], scale: float) -> jax.Array:
            def make():
                return jax.random.normal(jax.random.key(seed), size, dtype) * scale

            return jax.jit(make, out_shardings=NamedSharding(mesh, spec))()

        self.weights = [
            (
                random(2 * layer, COLUMNS, (k, f), 1 / math.sqrt(k)),
                random(2 * layer + 1, ROWS, (f, k), 1 / math.sqrt(f)),
            )
            for layer in range(case.layers)
        ]
        self.shards = [random(seed, ROWS, (m, k), 1.0) for seed in (-1, -2)]
        self.wholes = [random(seed, ROWS, (devices * m, k), 1.0) for seed in (-3, -4)]

    def program(self, contender: Contender) -> Program:
        """The case as this contender writes it."""
        communication = contender.communication
        x, cotangent = map(communication.state, self.shards, self.wholes)
        fun, arguments = make_forward(communication), (x, self.weights)
        specs = (ROWS, [(COLUMNS, ROWS)] * self.case.layers)
        in_specs, out_specs = specs, ROWS
        if self.case.direction == "forward_backward":
            fun, arguments = with_gradients(fun), (*arguments, cotangent)
            in_specs, out_specs = (*specs, ROWS), (ROWS, *specs)
        if communication.on_shards:
            fun = jax.shard_map(fun, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        return Program(fun, arguments)


def make_forward(communication: Communication) -> Callable:
    """``(state, weights) -> state`` through all layers."""

    def forward(state, weights: Sequence[tuple[jax.Array, jax.Array]]):
        for up, down in weights:
            (hidden,) = communication.all_gather_matmul(state, (up,))
            state = communication.matmul_reduce_scatter_add(state, jax.nn.gelu(hidden), down)
        return state

    return forward


def with_gradients(forward: Callable) -> Callable:
    """``(state, weights, cotangent) -> (state, gradient of state, gradients of weights)``."""

    def forward_backward(state, weights, cotangent):
        result, vjp = jax.vjp(forward, state, weights)
        return result, *vjp(cotangent)

    return forward_backward
