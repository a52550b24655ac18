"""Requests for tests that call a backend without the op around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from collective_matmul.ops.matmul.request import Op, Site
from tests.reference import AXIS


def request_of(op: Op, xs: Sequence[Any], ws: Sequence[Any], **attributes: Any) -> Site:
    """The request of an op over `AXIS`, inside of its shard_map or vmap."""
    transposed = attributes.get("transpose_w", False)
    shapes = [w.shape[::-1] if transposed else w.shape for w in ws]
    operands = tuple(zip([x.shape for x in xs] * (len(ws) // len(xs)), shapes, strict=True))
    return Site(op, operands, xs[0].dtype, AXIS, lax.axis_size(AXIS), **attributes)
