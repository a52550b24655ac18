"""The predicted step time of one run with its kernel of attention, beside what was measured."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh

from collective_matmul import AttentionDecision, explain_attention
from train.config.config import Config, MeshSizes
from train.log.metrics import Record
from train.plan.step_time import (
    Prediction,
    milliseconds,
    predict,
    unpredicted_reason,
)


def predict_run(config: Config, sizes: MeshSizes, device_kind: str, attention: str) -> Prediction:
    """The prediction for a configuration, which says how fast the network is.

    Args:
      config: the configuration, which fits the mesh.
      sizes: the mesh.
      device_kind: JAX's name of the GPU.
      attention: the kernel of attention.

    Raises:
      ValueError: if nothing is predicted for it.
    """
    reason = unpredicted_reason(config, device_kind)
    if reason is not None:
        raise ValueError(f"no step time is predicted: {reason}")
    config = dataclasses.replace(config, model=config.model.padded_for(sizes.tensor))
    return predict(
        config, sizes, device_kind, network_bytes=config.network_bytes, attention=attention
    )


def describe_step_time(prediction: Prediction, records: Sequence[Record]) -> str:
    """The predicted step time and the median of what was measured.

    The first interval has the first steps, which take longer; it counts if there is no other.
    """
    measured = [record.step_seconds for record in records[1:] or records]
    line = f"step time: predicted {milliseconds(prediction.time.total)}"
    line += f", measured {milliseconds(statistics.median(measured))}"
    if prediction.extrapolated:
        line += f" (extrapolated: {prediction.extrapolated})"
    return line


def attention_kernel(config: Config, sizes: MeshSizes, mesh: AbstractMesh) -> str:
    """The kernel of attention in the layers that see the most tokens."""
    return attention_decision(config, sizes, mesh).implementation


def attention_decision(config: Config, sizes: MeshSizes, mesh: AbstractMesh) -> AttentionDecision:
    """That kernel, and why."""
    windows = [config.model.window_of(number) for number in range(config.model.layer_period)]
    widest = None if None in windows else max(filter(None, windows))
    return attention_of(config, sizes, mesh, widest)


def attention_of(
    config: Config, sizes: MeshSizes, mesh: AbstractMesh, window: int | None
) -> AttentionDecision:
    """The kernel of attention with a sliding window, and why; for a sequence of one document."""
    model, dtype = config.model, config.compute_dtype
    groups = sizes.data * sizes.fsdp * config.gradient_accumulation_steps
    tokens = config.batch_size // groups, config.sequence_length
    copies = model.key_value_copies(sizes.tensor)
    query, key = (
        jax.ShapeDtypeStruct((*tokens, heads // sizes.tensor, model.head_dim), dtype)
        for heads in (model.num_heads, model.num_key_value_heads * copies)
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return explain_attention(
            query,
            key,
            window=window,
            implementation=None if config.attention == "auto" else config.attention,
        )
