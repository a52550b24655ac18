"""One device's part of a case: arrays, program and expected result; and CUDA graphs of programs."""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.pytorch.torch_communication import TorchCommunication

Run = Callable[[], Any]
#: Arrays of a case by their numbers.
Arrays = dict[int, Tensor]


class Failure(Exception):
    """A step failed on some device; the message is the first one's."""


@dataclass(frozen=True)
class TorchCase:
    """Layers in a direction, or as many single ops; sizes are global."""

    name: str
    layers: int
    rows: int
    features: int
    hidden_features: int
    op: str = ""
    direction: str = ""


@dataclass(frozen=True)
class Place:
    """One process of several."""

    rank: int
    devices: int
    device: torch.device


class Measuring(Protocol):
    """The part of a worker that programs use. All devices do each of these together."""

    place: Place
    compiler: str | None

    def captured(self, run: Run) -> Run: ...
    def together(self, step: Callable[[], Any]) -> Any: ...
    def measure(self, runs: dict[str, Run], groups: int) -> dict[str, list[float]]: ...
    def largest(self, value: float) -> float: ...
    def out_of_time(self) -> bool: ...
    def log(self, line: str) -> None: ...


class TorchProgram(ABC):
    """One device's part of a case. Every device can draw the shards of all devices.

    Attributes:
      case: the case.
      arrays: this device's arrays that were drawn, which programs of one case share.
      overlaps: whether anything may run beside a reduce-scatter.
      tolerance: largest relative error of a right result.
    """

    overlaps = False
    # Relative to the reference's norm. Rounding to bfloat16 between operators leaves about 0.005; a
    # chunk that is missing or out of place, at least 0.1.
    tolerance = 0.02

    def __init__(
        self,
        case: TorchCase,
        place: Place,
        dtype: torch.dtype,
        seed: int,
        arrays: Arrays | None = None,
    ):
        self.case: Any = case
        self.place, self.dtype, self.seed = place, dtype, seed
        self.arrays = {} if arrays is None else arrays

    @property
    def operators(self) -> Counter[str]:
        """The number of each fused operator in the programs that were compiled."""
        return Counter()

    @abstractmethod
    def arguments(self, layers: int) -> tuple[Any, ...]:
        """This device's arrays, for this number of layers."""

    @abstractmethod
    def run(self, communication: TorchCommunication, *arguments: Any) -> list[Tensor]:
        """All results."""

    def bind(self, communication: TorchCommunication, layers: int) -> Run:
        """A function without arguments that computes all results of this number of layers."""
        return functools.partial(self.run, communication, *self.arguments(layers))

    @abstractmethod
    def reference(self, layers: int) -> list[Tensor]:
        """The expected result of `run` on this device, from the whole arrays in float32."""

    def normal(self, number: int, rank: int, *size: int, scale: float = 1.0) -> Tensor:
        """A normal array: a device's shard of one of the case's arrays. It must not be changed."""
        if number in self.arrays and rank == self.place.rank:
            return self.arrays[number]
        device = self.place.device
        generator = torch.Generator(device)
        generator.manual_seed((self.seed * 1000 + number) * 1000 + rank)
        array = torch.randn(size, generator=generator, dtype=self.dtype, device=device).mul_(scale)
        if rank == self.place.rank:
            self.arrays[number] = array
        return array


def relative_error(values: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative error of the arrays, each by its Euclidean norm."""
    pairs = zip(values, expected, strict=True)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)


def computed(
    fun: Callable[..., Tensor], leaves: Sequence[Tensor], dy: Tensor | None
) -> list[Tensor]:
    """The result of a function; given its gradient, also those of all leaves."""
    if dy is None:
        with torch.no_grad():
            return [fun(*leaves)]
    result = fun(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, dy)]


def require_right(error: float, tolerance: float, reference: str) -> None:
    """Raises Failure for what is wrong."""
    if not error < tolerance:
        raise Failure(f"wrong: relative error {error:.3g} to {reference}")


class GraphPool:
    """Memory of CUDA graphs of which one runs after the other, in any order."""

    def __init__(self) -> None:
        self._open()

    def captured(self, run: Run) -> Run:
        """One CUDA graph that computes what `run` does, without its results."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # NCCL's watchdog asks for events from a thread of its own, which other modes forbid.
            with torch.cuda.graph(graph, self._first.pool(), capture_error_mode="thread_local"):
                run()
        except Exception:
            self._open()  # A capture that failed may leave its pool unusable.
            raise

        def replay(kept: Run = run) -> None:
            del kept  # It keeps the arguments alive, which the graph reads.
            graph.replay()

        return replay

    def _open(self) -> None:
        """Begins a pool with a graph that keeps it alive."""
        self._first = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._first, capture_error_mode="thread_local"):
            torch.zeros(1, device="cuda")
