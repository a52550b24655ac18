"""The names of collective_matmul that benchmarks use and that are not public.

No other module of benchmarks imports such names. Timing, random operands and the shapes of models
are those of `collective_matmul.tune`: benchmarks and tables of measurements mean the same.
"""

from __future__ import annotations

from collective_matmul.backends import BACKENDS
from collective_matmul.dispatch.recording import Decision, record_decisions
from collective_matmul.tuning.model_sites import LAYERS, Layer
from collective_matmul.tuning.repeated_site import filler
from collective_matmul.tuning.timing import Timing, measure

__all__ = [
    "LAYERS",
    "Decision",
    "Layer",
    "Timing",
    "backend_names",
    "filler",
    "measure",
    "record_decisions",
    "uses_peer_kernels",
]


def backend_names() -> tuple[str, ...]:
    """The names that ``implementation=`` takes."""
    return tuple(BACKENDS)


def uses_peer_kernels(name: str) -> bool:
    """Whether a backend's kernels address the memory of peer GPUs."""
    return BACKENDS[name].uses_peer_kernels
