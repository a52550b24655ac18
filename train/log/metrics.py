"""Metrics of a run: model FLOPs, and one record per logged step."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

Batch = TypeVar("Batch")

# Dense bfloat16 tensor-core peak in FLOP/s, by the device name in CUDA. NVIDIA's data sheets print
# twice these numbers where they count 2:4 sparsity.
_PEAK_FLOPS = {
    # A100 Tensor Core GPU data sheet.
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    # H100 Tensor Core GPU Architecture whitepaper, table 2; NVL: H100 data sheet.
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835.5e12,
    # H200 Tensor Core GPU data sheet: the same compute dies as H100.
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835.5e12,
}


class Device(Protocol):
    """The part of ``jax.Device`` that is used here."""

    @property
    def device_kind(self) -> str: ...

    def memory_stats(self) -> Mapping[str, int] | None: ...


def model_flops_per_token(
    *,
    matmul_parameters: int,
    layers: int,
    heads: int,
    head_dim: int,
    sequence_length: int,
    frozen_parameters: int = 0,
) -> int:
    """FLOPs per token of the model's forward and backward, without recomputation.

    ``6 · matmul_parameters - 2 · frozen_parameters
    + 12 · layers · heads · head_dim · sequence_length / 2``

    A matmul parameter costs one multiply and one add in the forward, and twice that in the
    backward; once that if it is frozen. The two matmuls of attention cost
    ``4 · heads · head_dim · sequence_length`` per layer in the forward, and three times that with
    the backward; the causal mask halves it. Chowdhery et al., PaLM (2022), appendix B, which
    ignores the mask.

    Args:
        matmul_parameters: parameters that multiply activations: all but norms and the embedding
          table. The output head counts, tied or not, and so do adapters.
        layers: number of transformer blocks.
        heads: number of query heads.
        head_dim: size of one head.
        sequence_length: number of tokens that attend to each other.
        frozen_parameters: those of the matmul parameters that have no gradient.
    """
    return (
        6 * matmul_parameters
        - 2 * frozen_parameters
        + 6 * layers * heads * head_dim * sequence_length
    )


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 peak of one device in FLOP/s, or None if unknown.

    Args:
        device_kind: ``jax.Device.device_kind``.
    """
    return _PEAK_FLOPS.get(device_kind)


def peak_memory_bytes(device: Device) -> int | None:
    """The maximum number of bytes in use on the device so far, or None if unknown."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


@dataclass(frozen=True)
class Record:
    """A logged step; the field names are the keys of the log file.

    Rates and times are means over the steps since the previous record. None means unknown.
    """

    step: int
    """Number of optimizer steps done."""
    loss: float
    """Mean cross-entropy per token, in nats."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    learning_rate: float
    """Learning rate of the step."""
    tokens_per_second_per_device: float
    tflops_per_device: float
    """Model TFLOP/s, 10^12 FLOP/s."""
    mfu: float | None
    """Model FLOP/s over the device's peak, 0 to 1."""
    memory_bytes: int | None
    """Peak bytes in use on the first device."""
    step_seconds: float
    """Wall time per step, including waits and saves."""
    data_seconds: float
    """Part of that spent waiting for the batch."""
    balance_loss: float | None = None
    """Loss that balances experts, before its weight: the number of experts of a token if they are
    balanced. None for a model without experts, as the next two."""
    router_z_loss: float | None = None
    """Mean square of the log of the sum of exponentials of a router's logits, before its weight."""
    largest_over_mean: float | None = None
    """Tokens of the expert with most of them over the mean of its layer, of the worst layer."""

    def values(self) -> dict[str, float | None]:
        """The fields by name; those of experts only if the model has some."""
        fields = dataclasses.asdict(self)
        if self.balance_loss is None:
            for name in ("balance_loss", "router_z_loss", "largest_over_mean"):
                del fields[name]
        return fields


@dataclass(frozen=True)
class Evaluation:
    """Losses of held-out text; the field names are the keys of the log file."""

    loss: float
    """Mean cross-entropy per token, in nats."""
    perplexity: float
    """The exponential of the loss."""
    tokens: int
    """Number of tokens that were predicted and count."""
    seconds: float
    """Wall time."""


class Meter:
    """Turns times and counts into records.

    Args:
      tokens_per_step: tokens of one step, on all devices.
      flops_per_token: model FLOPs, forward and backward.
      devices: number of devices of the run, of one kind.
      device: one of them that this process drives.
      clock: returns seconds.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int,
        flops_per_token: float,
        devices: int,
        device: Device,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._tokens = tokens_per_step / devices
        self._flops_per_token = flops_per_token
        self._device = device
        self._clock = clock
        self.start()

    def start(self) -> None:
        """Starts an interval."""
        self._started, self._data_seconds, self._steps = self._clock(), 0.0, 0

    def read(self, batches: Iterator[Batch]) -> Batch:
        """The next batch. The time it takes counts as waiting for data."""
        started = self._clock()
        batch = next(batches)
        self._data_seconds += self._clock() - started
        return batch

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time inside out of the interval."""
        started = self._clock()
        yield
        self._started += self._clock() - started

    def step_done(self) -> None:
        """Counts a step whose result has arrived."""
        self._steps += 1

    def record(
        self, step: int, loss: float, grad_norm: float, learning_rate: float, **routers: float
    ) -> Record:
        """The record of the interval that ends with `step`. Starts the next interval. `routers` are
        the fields that only models with experts have."""
        seconds = (self._clock() - self._started) / self._steps
        data_seconds = self._data_seconds / self._steps
        self.start()
        tokens_per_second = self._tokens / seconds
        flops = tokens_per_second * self._flops_per_token
        peak = peak_flops(self._device.device_kind)
        return Record(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens_per_second_per_device=tokens_per_second,
            tflops_per_device=flops / 1e12,
            mfu=None if peak is None else flops / peak,
            memory_bytes=peak_memory_bytes(self._device),
            step_seconds=seconds,
            data_seconds=data_seconds,
            **routers,
        )
