"""Predicted time of a training step, part by part."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from train.config.config import ONE_DEVICE, Config, MeshSizes
from train.log.metrics import model_flops_per_token, peak_flops
from train.plan.communication import Communication
from train.plan.computation import Computation
from train.plan.rates import RATES
from train.plan.rings import GPUS_OF_A_NODE
from train.plan.shapes import Shapes

#: Seconds of a step in which no kernel runs.
_IDLE_SECONDS = 0.7e-3
#: Bytes per second that a GPU sends to other nodes, if nothing is said: one port of 400 Gbit/s.
NETWORK_BYTES = 50e9
#: How the parts of a `StepTime` are announced.
BY_PART = "part by part in ms, with the communication that nothing hides"


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step on each device, by part; they add up to `total`."""

    matmuls: float
    adapters: float
    attention: float
    experts: float
    quantization: float
    passes: float
    optimizer: float
    tensor_communication: float
    weight_gathers: float
    gradient_sums: float
    key_and_token_exchange: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.by_part.values())

    @property
    def by_part(self) -> dict[str, float]:
        """The parts by name, in words."""
        return {each.name.replace("_", " "): getattr(self, each.name) for each in fields(self)}

    def __str__(self) -> str:
        """The parts, the largest first, which add up to the total as they are printed."""
        decimals = _decimals(self.total)
        done, shown, texts = 0.0, 0.0, []
        for name, seconds in sorted(self.by_part.items(), key=lambda part: -part[1]):
            done += 1e3 * seconds
            part = round(round(done, decimals) - shown, decimals)
            shown = round(done, decimals)
            texts += [f"{name} {part:,.{decimals}f}"] if part else []
        return f"{' + '.join(texts)} = {milliseconds(self.total)}"


@dataclass(frozen=True)
class Prediction:
    """The speed of a configuration.

    Attributes:
      time: the step.
      tokens_per_second: of each device.
      mfu: model FLOP/s over the device's peak, 0 to 1.
      extrapolated: what nothing was measured of, in words; empty if all was.
    """

    time: StepTime
    tokens_per_second: float
    mfu: float
    extrapolated: str = ""

    def __str__(self) -> str:
        line = f"predicted step: {milliseconds(self.time.total)}, {self.tokens_per_second:,.0f}"
        line += f" tokens/s/GPU, MFU {self.mfu:.1%}"
        return f"{line} (extrapolated: {self.extrapolated})" if self.extrapolated else line


def milliseconds(seconds: float) -> str:
    """Seconds as text."""
    return f"{1e3 * seconds:,.{_decimals(seconds)}f} ms"


def _decimals(seconds: float) -> int:
    """The digits of milliseconds after the point."""
    return 1 if seconds < 0.0995 else 0


def unpredicted_reason(config: Config, device_kind: str) -> str | None:
    """Why no step time is predicted, or None."""
    if device_kind not in RATES:
        return f"no rates of {device_kind} are known"
    return None


def predict(
    config: Config,
    sizes: MeshSizes,
    device_kind: str,
    *,
    network_bytes: float = NETWORK_BYTES,
    attention: str | None = None,
) -> Prediction:
    """Predicts a step.

    Args:
      config: the configuration, which fits the mesh.
      sizes: the mesh.
      device_kind: JAX's name of the GPU, one of `RATES`.
      network_bytes: bytes per second that each GPU sends to other nodes.
      attention: the kernel of attention; default: that of the configuration, or cudnn.
    """
    named = "cudnn" if config.attention == "auto" else config.attention
    computation = Computation(Shapes(config, sizes), RATES[device_kind], attention or named)
    time = _step_time(computation, Communication(computation, network_bytes))
    tokens = config.batch_size * config.sequence_length / sizes.devices
    rate, peak = tokens / time.total, peak_flops(device_kind) or math.inf
    why = _extrapolated(config, sizes, device_kind, network_bytes)
    return Prediction(time, rate, rate * _flops_per_token(config) / peak, why)


def _step_time(computation: Computation, communication: Communication) -> StepTime:
    shapes = computation.shapes
    count = shapes.microbatches
    blocks = count * shapes.model.num_layers
    matmuls = computation.block_forward + computation.block_backward
    once = computation.casts() + computation.accumulation() + _IDLE_SECONDS
    return StepTime(
        matmuls=blocks * matmuls + count * computation.head,
        adapters=blocks * computation.adapters,
        attention=blocks * (computation.attention_forward + computation.attention_backward),
        experts=blocks * (computation.experts_forward + computation.experts_backward),
        quantization=count * computation.quantization(),
        passes=count * computation.passes() + once,
        optimizer=computation.optimizer(),
        tensor_communication=count * communication.tensor(),
        weight_gathers=communication.weights(),
        gradient_sums=communication.gradients(),
        key_and_token_exchange=blocks * (communication.keys() + communication.tokens()),
    )


def _flops_per_token(config: Config) -> float:
    model, whole = config.model, Shapes(config, ONE_DEVICE)
    linears = [*model.num_layers * whole.block, whole.head]
    adapters = sum(linear.adapter_weights for linear in linears)
    return model_flops_per_token(
        matmul_parameters=model.matmul_parameters + adapters,
        frozen_parameters=sum(each.weights for each in linears if not each.is_trained),
        layers=model.num_layers,
        heads=model.num_heads,
        head_dim=model.head_dim,
        sequence_length=config.sequence_length,
    )


def _extrapolated(config: Config, sizes: MeshSizes, device_kind: str, network_bytes: float) -> str:
    """The part of a prediction that was measured on no machine of this kind."""
    reasons = []
    if sizes.devices > 4:
        reasons.append("steps were measured on up to 4 GPUs")
    if sizes.devices > GPUS_OF_A_NODE:
        reasons.append(f"{network_bytes / 1e9:g} GB/s per GPU between nodes are assumed")
    if "A100" in device_kind:
        reasons.append("rates of A100 are its data sheet's")
    if config.model.num_experts is not None and Shapes(config, sizes).expert_shards > 1:
        reasons.append("no steps were measured that gather experts")
    if config.optimizer.kind != "adamw":
        reasons.append("steps were measured with AdamW")
    if config.freeze:
        reasons.append("no steps were measured with --freeze")
    if config.compute_dtype != "bfloat16":
        reasons.append("steps were measured in bfloat16")
    if config.separate_documents or config.chat:
        reasons.append("as if each sequence were one document")
    return "; ".join(reasons)
