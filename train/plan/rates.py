"""Measured rates that step times are predicted from, by kind of GPU.

Matmuls of a whole step are slower than one alone: the chip is limited by its power, and colder
after passes over memory. So `matmul_flops` is what is left of measured steps after all other parts,
and the rates of 8 bits are relative to it. Rates are per second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class AttentionRate(NamedTuple):
    """FLOP/s of a kernel of causal attention for heads of 128.

    Attributes:
      peak: for very long sequences.
      half_length: tokens of a sequence at which it reaches half of that.
    """

    peak: float
    half_length: int

    def at(self, length: int) -> float:
        """FLOP/s for sequences of this length."""
        return self.peak / (1 + self.half_length / length)


class AttentionRates(NamedTuple):
    """Both passes of a kernel of attention."""

    forward: AttentionRate
    backward: AttentionRate


@dataclass(frozen=True)
class DeviceRates:
    """Rates that programs reach on one kind of GPU.

    Attributes:
      matmul_flops: long matmuls of bfloat16 within a training step.
      tile_flops: one full wave of tiles of 128 × 256; what is left of the last wave is lost.
      multiprocessors: tiles of a wave.
      fp8_speedup: matmuls of 8 bits over those of bfloat16, without quantisation.
      float32_flops: matmuls of float32, of routers.
      grouped_matmul_flops: the grouped matmuls of experts.
      attention: each kernel of attention.
      memory_bytes: a pass over memory: bytes read and written.
      link_bytes: copies between two GPUs of a node, in one direction.
      collective_bytes: NCCL's collectives within a node.
      collective_seconds: to start and end a collective.
      copy_seconds: to start and end a copy between two GPUs.
      host_seconds: host time of a permute, which limits rings with few rows.
      collective_slowdown: share of the time of an NCCL collective by which it delays the matmuls
        beside it, as it takes multiprocessors from them.
    """

    matmul_flops: float
    tile_flops: float
    multiprocessors: int
    fp8_speedup: float
    float32_flops: float
    grouped_matmul_flops: float
    attention: dict[str, AttentionRates]
    memory_bytes: float
    link_bytes: float
    collective_bytes: float
    collective_seconds: float
    copy_seconds: float
    host_seconds: float
    collective_slowdown: float


#: Reports: train-8b-2-h200, train-2-h100 and attention-step-2-h100 for matmuls; fp8-matmuls-1-h200;
#: attention-1-h100; experts-2-h100; rings-h200 for links, collectives and the host.
_H100 = DeviceRates(
    matmul_flops=6.5e14,
    tile_flops=8.4e14,
    multiprocessors=132,
    fp8_speedup=1.85,
    float32_flops=4.5e13,
    grouped_matmul_flops=5.6e14,
    attention={
        "flash3": AttentionRates(AttentionRate(7.3e14, 450), AttentionRate(6.15e14, 1500)),
        "cudnn": AttentionRates(AttentionRate(6.3e14, 2500), AttentionRate(5.55e14, 1900)),
        "xla": AttentionRates(AttentionRate(8e13, 0), AttentionRate(8e13, 0)),
    },
    memory_bytes=3.0e12,
    link_bytes=3.76e11,
    collective_bytes=2.5e11,
    collective_seconds=28e-6,
    copy_seconds=10e-6,
    host_seconds=50e-6,
    collective_slowdown=0.8,
)

#: Rates by JAX's names of kinds of device. An H200 is an H100 with faster memory. Nothing was
#: measured on an A100: its rates are the shares that H100 reaches of its data sheet.
RATES = {
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H200": replace(_H100, memory_bytes=4.3e12),
    "NVIDIA A100-SXM4-80GB": replace(
        _H100,
        matmul_flops=2.3e14,
        tile_flops=2.7e14,
        multiprocessors=108,
        fp8_speedup=1.0,
        float32_flops=1.5e13,
        grouped_matmul_flops=1.8e14,
        attention={
            "flash3": AttentionRates(AttentionRate(2.1e14, 1500), AttentionRate(1.7e14, 1500)),
            "cudnn": AttentionRates(AttentionRate(2.1e14, 1500), AttentionRate(1.7e14, 1500)),
            "xla": AttentionRates(AttentionRate(4e13, 0), AttentionRate(4e13, 0)),
        },
        memory_bytes=1.7e12,
        link_bytes=2.5e11,
        collective_bytes=2.0e11,
    ),
}
