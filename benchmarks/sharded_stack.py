"""``python -m benchmarks sharded_stack``: feed-forward layers with sharded weights, as in FSDP.

A layer is matmul → gelu → matmul, added to the residual. Every device has M rows of its own, and a
shard of both weights. Legend: D devices, K features, F hidden features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.comparison import comparing as comparison
from benchmarks.comparison.candidates import Candidate
from benchmarks.comparison.communication import AXIS, CollectiveMatmul, NoCommunication
from benchmarks.comparison.comparing import Comparison
from benchmarks.comparison.operands import Operands
from benchmarks.comparison.programs import Direction, Program, make_program
from benchmarks.internals import COMPUTE_ONLY
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import check_names
from benchmarks.step.stack import LAYERS, SHAPES
from collective_matmul import all_gather_matmul

#: The axis that the ops gather x over. It has one device.
_SINGLE = "single"
_ROWS, _COLUMNS = P((AXIS, _SINGLE), None), P(None, (AXIS, _SINGLE))

#: The candidates: XLA's collectives of the weights, the ops, and whole weights.
CANDIDATES = ("baseline", "xla", "ring", "auto", COMPUTE_ONLY)

Multiply = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class ShardedStackCase:
    """A program that each candidate implements in its own way.

    Attributes:
      shape: name of the widths, in `SHAPES`.
      rows: M, of each device.
      direction: whether there are gradients.
      layers: number of layers.
    """

    shape: str
    rows: int
    direction: Direction
    layers: int

    @property
    def name(self) -> str:
        return f"{self.shape} {self.rows} rows per device {self.direction}"

    @property
    def divided_sizes(self) -> dict[str, int]:
        shape = SHAPES[self.shape]
        return {"features": shape.features, "hidden_features": shape.hidden_features}

    def describe(self, operands: Operands) -> dict[str, Any]:
        return asdict(self)

    def build(self, operands: Operands, candidate: Candidate) -> Program:
        """The program of a candidate.

        Forward it maps (x, weights) to the result. Forward and backward it maps (x, weights,
        cotangent of the result) to (result, gradient of x, gradients of weights). Without
        communication, each device has the gradient of its own rows.
        """
        communication, devices = candidate.communication, operands.mesh.devices
        mesh = Mesh(devices[:, None], (AXIS, _SINGLE), axis_types=(AxisType.Auto,) * 2)
        operands = Operands(mesh, operands.dtype)
        multiply = _multiplication(communication)
        is_whole = isinstance(communication, NoCommunication)

        def forward(x, weights):
            for up, down in weights:
                x += multiply(jax.nn.gelu(multiply(x, up)), down)
            return x

        def forward_backward(x, weights, cotangent):
            if is_whole:  # Typed so that JAX sums no gradients.
                weights = lax.pcast(weights, (AXIS, _SINGLE), to="varying")
            result, vjp = jax.vjp(forward, x, weights)
            return result, *vjp(cotangent)

        shape, spec = SHAPES[self.shape], P(None, None) if is_whole else _COLUMNS
        k, f, rows = shape.features, shape.hidden_features, devices.size * self.rows
        weights = [
            (operands.weight(spec, k, f, seed), operands.weight(spec, f, k, seed))
            for seed in range(self.layers)
        ]
        x = operands.activations(_ROWS, rows, k)
        if self.direction == "forward":
            return make_program(communication, forward, (x, weights), _ROWS)
        arguments = x, weights, operands.activations(_ROWS, rows, k, seed=1)
        gradient = _ROWS if is_whole else _COLUMNS
        out_specs = _ROWS, _ROWS, [(gradient, gradient)] * self.layers
        return make_program(communication, forward_backward, arguments, out_specs)


def _multiplication(communication: Any) -> Multiply:
    """The product of rows and a weight, of which a candidate has a shard [K, F/D]."""
    if isinstance(communication, NoCommunication):
        return lambda x, w: x @ w
    if isinstance(communication, CollectiveMatmul):
        return lambda x, w: all_gather_matmul(
            x,
            w,
            _SINGLE,
            weight_axis_name=AXIS,
            weight_dimension=1,
            implementation=communication.implementation,
        )
    return lambda x, w: x @ lax.all_gather(w, AXIS, axis=1, tiled=True)


@dataclass(frozen=True, kw_only=True)
class ShardedStack(Comparison):
    """A stack of feed-forward layers whose weights are sharded."""

    shapes: tuple[str, ...] = ("8B",)
    """Widths of the layers: 70B, 8B, small, tiny."""
    rows: tuple[int, ...] = (8192, 2048, 512)
    """Rows of each device."""
    directions: tuple[Direction, ...] = ("forward", "forward_backward")
    layers: int = 0
    """Layers of every stack; default: 8 forward, 4 forward and backward."""


def run(settings: ShardedStack) -> Report:
    """Measures every case; returns the report.

    Raises:
      ValueError: for settings that do not fit together or to the devices.
    """
    check_names("shapes", settings.shapes, list(SHAPES))
    cases = [
        ShardedStackCase(shape, rows, direction, settings.layers or LAYERS[direction])
        for direction in settings.directions
        for shape in settings.shapes
        for rows in settings.rows
    ]
    return comparison.run("sharded_stack", settings, cases, CANDIDATES)
