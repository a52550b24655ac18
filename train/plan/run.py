"""The predicted step time of one run, beside what was measured."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

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
