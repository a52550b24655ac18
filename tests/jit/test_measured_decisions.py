"""The decision about peers' kernels, for every stack whose time with and without them was reported.

Run as a program, it prints the table: ``python -m tests.jit.test_measured_decisions``. Legend of a
layer: M rows over D devices, K features, F hidden features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, explain, matmul_reduce_scatter
from collective_matmul.explain import Explanation
from collective_matmul.mosaic_gpu.peers import shared_memory
from tests.dispatch.sites import BFLOAT16
from tests.hopper import needs_kernels
from tests.reference import AXIS

H100, H200 = (
    AbstractDevice(name, num_cores=132, platform="gpu")
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
)
WIDTHS = {"8B": (4096, 14_336), "70B": (8192, 28_672), "square": (8192, 8192)}
#: Medians of groups repeat within this share from run to run.
NOISE = 0.02


@dataclass(frozen=True)
class Measured:
    """Times of a stack in a report: of the fastest program without peers' kernels, and with them.

    Any unit; the name of the report lacks its date.
    """

    report: str
    rows: int
    without: float
    with_them: float
    device: AbstractDevice = H100
    devices: int = 2
    processes: int = 1
    widths: str = "8B"
    direction: str = "forward"

    def __str__(self) -> str:
        many = f"{self.devices} × {self.device.device_kind.split()[1]}, {self.processes} proc."
        return f"{self.report}, {many}, {self.widths} M={self.rows} {self.direction}"

    @property
    def saved(self) -> float:
        """The share of the time that they saved."""
        return 1 - self.with_them / self.without


def of_processes(rows: int, without: float, with_them: float, **more: Any) -> Measured:
    return Measured("processes-2-h100", rows, without, with_them, processes=2, **more)


FEW = "few-rows-2-h100"
STACKS = "stack-2-h200"
STACKS_FEW = "stack-few-2-h200"
BOXES = "fused-boxes-2-h200"
FOUR = "fused-meeting-4-h200"
CELLS = [
    of_processes(8192, 1.213, 1.046),
    of_processes(2048, 1.279, 1.042),
    of_processes(512, 1.571, 1.229),
    of_processes(128, 1.583, 1.230),
    of_processes(24, 1.613, 1.204),
    # XLA's collectives of the library took 1.147.
    of_processes(8192, 1.103, 1.068, direction="with gradients"),
    of_processes(2048, 1.197, 1.098, direction="with gradients"),
    Measured(FEW, 24, 83.6, 58.6),
    Measured(FEW, 36, 92.7, 62.2),
    Measured(FEW, 54, 79.4, 65.9),
    Measured(FEW, 82, 116.0, 71.8),
    Measured(FEW, 122, 101.2, 71.8),
    Measured(FEW, 182, 103.4, 72.1),
    Measured(FEW, 274, 131.3, 87.2),
    Measured(FEW, 384, 146.0, 102.2),
    Measured(FEW, 410, 147.3, 115.1),
    Measured(FEW, 616, 188.6, 162.3),
    Measured(FEW, 924, 254.4, 209.3),
    Measured(STACKS_FEW, 512, 1.210, 1.025, H200),
    Measured(STACKS_FEW, 1024, 1.851, 1.845, H200),
    Measured(BOXES, 512, 1.319, 0.985, H200),
    Measured(BOXES, 1024, 2.197, 1.761, H200),
    Measured(BOXES, 4096, 7.273, 7.216, H200, widths="square"),
    Measured(STACKS, 8192, 49.602, 50.686, H200, widths="70B"),
    Measured(STACKS, 8192, 13.190, 13.590, H200),
    Measured(STACKS, 4096, 7.432, 7.989, H200, widths="square"),
    Measured(FOUR, 512, 1.075, 0.654, H200, devices=4),
    Measured(FOUR, 1024, 1.547, 1.075, H200, devices=4),
]


def explained(cell: Measured, layers: int = 2) -> Explanation:
    """The explanation of the stack, whose decision does not depend on the number of layers."""
    mesh = AbstractMesh((cell.devices,), (AXIS,), (AxisType.Auto,), abstract_device=cell.device)
    gelu = jax.checkpoint(jax.nn.gelu)

    def forward(x: jax.Array, weights: Any) -> jax.Array:
        for up, down in weights:
            x += matmul_reduce_scatter(gelu(all_gather_matmul(x, up, AXIS)), down, AXIS)
        return x

    def with_gradients(x: jax.Array, weights: Any) -> tuple:
        y, vjp = jax.vjp(forward, x, weights)
        return y, *vjp(y)

    (k, f), specs = WIDTHS[cell.widths], [(P(None, AXIS), P(AXIS))] * layers
    shapes = (cell.rows, k), (k, f), (f, k)
    x, up, down = (jax.ShapeDtypeStruct(shape, BFLOAT16) for shape in shapes)
    fun: Callable[..., Any] = forward
    out_specs: Any = P(AXIS)
    if cell.direction != "forward":
        fun, out_specs = with_gradients, (P(AXIS), P(AXIS), specs)
    sharded = jax.shard_map(fun, mesh=mesh, in_specs=(P(AXIS), specs), out_specs=out_specs)
    return explain(sharded)(x, [(up, down)] * layers)


def pretend_processes(patch: pytest.MonkeyPatch, cell: Measured) -> None:
    patch.setattr(jax, "process_count", lambda: cell.processes)
    for name in ("unshared_reason", "unshared_pools_reason"):
        patch.setattr(shared_memory, name, lambda: None)


@needs_kernels
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_faster_program_is_chosen(cell: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_processes(monkeypatch, cell)
    allowed = explained(cell).peer_kernels.allowed
    assert allowed == (cell.saved > 0) or abs(cell.saved) <= NOISE


def table() -> str:
    """The table of choices, predictions and measurements, a line for each cell."""
    lines = ["| stack | chosen | predicted to save | measured |", "| --- | --- | ---: | ---: |"]
    for cell in CELLS:
        with pytest.MonkeyPatch.context() as patch:
            pretend_processes(patch, cell)
            found = explained(cell)
        decision, names = found.peer_kernels, Counter(d.implementation for d in found.decisions)
        chosen = ", ".join(f"{number} {name}" for name, number in names.items())
        predicted = decision.gain_seconds - decision.cost_seconds
        share = f"{predicted / decision.seconds_without:.1%}" if decision.withheld else "–"
        lines.append(f"| {cell} | {chosen} | {share} | {cell.saved:.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
