"""Sites to decide about."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from collective_matmul.ops.matmul.request import Op, Site
from tests.reference import AXIS

BFLOAT16 = np.dtype(jax.numpy.bfloat16)
H200 = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")


def site_of(
    op: Op, rows: int, contracted: int, columns: int, devices: int = 4, **facts: Any
) -> Site:
    """A layer of global sizes [rows, contracted] @ [contracted, columns], as one device sees it."""
    if op == "all_gather_matmul":
        shapes = (rows // devices, contracted), (contracted, columns // devices)
    else:
        shapes = (rows, contracted // devices), (contracted // devices, columns)
    return Site(op, (shapes,), BFLOAT16, AXIS, devices, **facts)


def tracing_for(device: AbstractDevice, **sizes: int) -> Any:
    """Traces as in a shard_map over a mesh of these devices: the axis is manual, others are not."""
    types = (AxisType.Manual, *[AxisType.Auto] * len(sizes))
    mesh = AbstractMesh((4, *sizes.values()), (AXIS, *sizes), types, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
