"""Matmuls that are summed over devices by the same kernel: which it can do, and how it sees them.

The kernel itself is `collective_matmul.backends.fused.reduce_scatter_kernel`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap

from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.backends.fused.reduce_scatter_config import (
    Plan,
    Shapes,
    make_plan,
    predicted_plan_microseconds,
)
from collective_matmul.backends.fused.reduce_scatter_kernel import Scattering
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.requirements import Array, unsupported_reason
from collective_matmul.mosaic_gpu.symmetric_workspace import workspace_pointers
from collective_matmul.mosaic_gpu.tiling import ITEMSIZE, ROW_MULTIPLE


def matmul_reduce_scatter(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    axis_name: str,
    *,
    dimension: int,
    transpose_w: bool = False,
    delays: bool = False,
    plan: Plan | None = None,
) -> jax.Array:
    """``reduce_scatter(sum over p of xs[p] @ ws[p])`` in one launch, inside `jax.shard_map`.

    Products travel in the operands' dtype. Each is rounded once, and added in float32 to what the
    owner itself computed, in the order of the devices behind it: the same bits every time.

    Args:
      xs: each [..., M, ..., K_p]; all bfloat16 or all float16.
      ws: each [K_p, N], or [N, K_p] if `transpose_w`, of the same dtype.
      axis_name: a mesh axis of D devices, all driven by this process.
      dimension: of the xs, scattered: that of M, a multiple of D.
      transpose_w: whether the ws are contracted along their last dimension.
      delays: has consumers wait for random times, up to 16 µs, before what they send, so that races
        show. For tests.
      plan: how the kernel is cut, one of `scatter_plan.candidates`; None takes the best known.

    Returns:
      [..., M/D, ..., N].

    Raises:
      ValueError: where the kernel cannot do this; see `why_not_reduce_scatter`.
    """
    devices = lax.axis_size(axis_name)
    reason = why_not_reduce_scatter(xs, ws, devices, dimension=dimension, transpose_w=transpose_w)
    if reason is not None:
        raise ValueError(f"{reason}; use 'ring' or 'xla'")
    plan = plan or _scatter_plan(xs, ws, devices, dimension, transpose_w)
    assert plan is not None
    shapes, shape = plan.shapes, list(xs[0].shape)
    shape[dimension] //= shapes.devices
    shape[-1] = shapes.columns
    rows = math.prod(shape[dimension:-1])

    def owned_rows_padded(x: jax.Array) -> jax.Array:
        x = x.reshape(shapes.planes, shapes.devices, rows, x.shape[-1])
        x = jnp.pad(x, ((0, 0), (0, 0), (0, shapes.rows - rows), (0, 0)))
        return x.reshape(shapes.planes, shapes.all_rows, x.shape[-1])

    y = _launch(plan, axis_name, delays, list(map(owned_rows_padded, xs)), ws)
    return y[:, :rows].reshape(shape)


def matmul_all_reduce(
    x: jax.Array,
    w: jax.Array,
    axis_name: str,
    *,
    delays: bool = False,
    plan: Plan | None = None,
) -> jax.Array:
    """``all_reduce(x @ w)`` in one launch, inside `jax.shard_map`: the same bits on all devices.

    Args:
      x: [..., K]; bfloat16 or float16.
      w: [K, N], of the same dtype.
      axis_name: a mesh axis of D devices, all driven by this process.
      delays: as for `matmul_reduce_scatter`.
      plan: how the kernel is cut, one of `scatter_plan.all_reduce_candidates`; None takes the best
        known.

    Returns:
      [..., N], typed as replicated over the axis.

    Raises:
      ValueError: where the kernel cannot do this; see `why_not_all_reduce`.
    """
    devices = lax.axis_size(axis_name)
    reason = why_not_all_reduce(x, w, devices)
    if reason is not None:
        raise ValueError(f"{reason}; use 'ring' or 'xla'")
    plan = plan or _reduce_plan(x, w, devices)
    assert plan is not None
    rows = math.prod(x.shape[:-1])
    matrix = jnp.pad(x.reshape(rows, x.shape[-1]), ((0, -rows % ROW_MULTIPLE), (0, 0)))
    y = _launch(plan, axis_name, delays, [matrix[None]], [w])
    return y.reshape(-1, w.shape[1])[:rows].reshape(*x.shape[:-1], w.shape[1])


def why_not_reduce_scatter(
    xs: Sequence[Array],
    ws: Sequence[Array],
    devices: int,
    *,
    dimension: int,
    transpose_w: bool,
) -> str | None:
    """Why `matmul_reduce_scatter` cannot do this on so many devices, in words; None if it can.

    Of the xs and ws, shapes and dtypes are enough.
    """
    return unsupported_reason(devices, *xs, *ws) or _no_plan(
        _scatter_plan(xs, ws, devices, dimension, transpose_w), xs, ws
    )


def why_not_all_reduce(x: Array, w: Array, devices: int) -> str | None:
    """Why `matmul_all_reduce` cannot do this on so many devices, in words; None if it can.

    Of x and w, shapes and dtypes are enough.
    """
    return unsupported_reason(devices, x, w) or _no_plan(_reduce_plan(x, w, devices), [x], [w])


def predicted_reduce_scatter_microseconds(
    xs: Sequence[Array],
    ws: Sequence[Array],
    devices: int,
    *,
    dimension: int,
    transpose_w: bool,
) -> float:
    """What the matmul that `why_not_reduce_scatter` allows should take by its plan."""
    return _predicted(_scatter_plan(xs, ws, devices, dimension, transpose_w))


def predicted_all_reduce_microseconds(x: Array, w: Array, devices: int) -> float:
    """What the matmul that `why_not_all_reduce` allows should take by its plan."""
    return _predicted(_reduce_plan(x, w, devices))


def _predicted(plan: Plan | None) -> float:
    target = device.target()
    assert target is not None and plan is not None
    return predicted_plan_microseconds(plan, target.multiprocessors)


def _no_plan(plan: Plan | None, xs: Sequence[Array], ws: Sequence[Array]) -> str | None:
    if plan is not None:
        return None
    terms = ", ".join(f"{x.shape} times {w.shape}" for x, w in zip(xs, ws, strict=True))
    return f"{terms}: the fused kernel wants every K, and N, to be a multiple of 32; pad them"


def _scatter_plan(
    xs: Sequence[Array], ws: Sequence[Array], devices: int, dimension: int, transpose_w: bool
) -> Plan | None:
    target = device.target()
    assert target is not None
    shape = xs[0].shape
    shapes = Shapes(
        kind="scatter",
        devices=devices,
        planes=math.prod(shape[:dimension]),
        rows=math.prod(shape[dimension:-1]) // devices,
        contracted=tuple(x.shape[-1] for x in xs),
        columns=ws[0].shape[0 if transpose_w else 1],
        w_contracted=2 if transpose_w else 1,
    )
    return make_plan(shapes, target.multiprocessors)


def _reduce_plan(x: Array, w: Array, devices: int) -> Plan | None:
    target = device.target()
    assert target is not None
    rows = math.prod(x.shape[:-1])
    shapes = Shapes("one_shot", devices, 1, rows, (x.shape[-1],), w.shape[1])
    return make_plan(shapes, target.multiprocessors)


def _launch(
    plan: Plan, axis_name: str, delays: bool, xs: Sequence[jax.Array], ws: Sequence[jax.Array]
) -> jax.Array:
    launch = _shared_launch(plan, axis_name, delays, device.target())
    return launch(list(xs), [w[None] for w in ws])


@functools.cache
def _shared_launch(plan: Plan, axis_name: str, delays: bool, target: Any) -> Any:
    """One function for all launches alike, so that they are traced, lowered and compiled once.

    Returns:
      ``launch(xs, ws) -> y``: xs [planes, all rows, K_p], ws [1, K_p, N] or [1, N, K_p], and y
      [planes, owned rows, N], or for "two_step" [planes * D, owned rows, N].
    """
    shapes, width = plan.shapes, plan.tiles.strip_columns
    blocked = shapes.columns // width, shapes.rows, width

    @sequential_vmap
    def launch(xs: Sequence[jax.Array], ws: Sequence[jax.Array]) -> jax.Array:
        axes = frozenset().union(*map(varying_axes, (*xs, *ws)))
        replicated = axes - {axis_name}

        def empty(axes: frozenset[str], *shape: int) -> jax.Array:
            return vary_over(lax.empty(shape, xs[0].dtype), axes)

        if shapes.kind == "two_step":
            y = empty(replicated, shapes.planes * shapes.devices, *blocked)
        else:
            y_axes = axes if shapes.kind == "scatter" else replicated
            y = empty(y_axes, shapes.planes, shapes.rows, shapes.columns)
        partials = empty(axes, shapes.planes * plan.sources, *blocked)
        work = Scattering(plan, delays, xs, ws)
        kernel = work.kernel([y, partials], f"matmul_{shapes.kind}", target.multiprocessors)
        y = kernel(workspace_pointers(axis_name), *xs, *ws)[0]
        return in_rows(y, plan.tiles.swizzle) if shapes.kind == "two_step" else y

    return jax.jit(launch)


def in_rows(blocks: jax.Array, swizzle: int) -> jax.Array:
    """Images of swizzled shared memory, [planes, strips, rows, columns of a strip], put in order.

    There, groups of 8 rows are cut into tiles of `swizzle` bytes across, in which 16 bytes at a
    time have changed places within their row.

    Returns:
      [planes, rows, columns].
    """
    planes, strips, rows, width = blocks.shape
    unit = 16 // ITEMSIZE
    tiles = rows // 8, width * ITEMSIZE // swizzle, 8, swizzle // 16, unit
    row, column = np.ogrid[:8, : swizzle // 16]
    y = blocks.reshape(planes, strips, *tiles).at[..., row, column ^ (row * swizzle // 128), :]
    y = y.get(mode="promise_in_bounds", wrap_negative_indices=False)
    return y.transpose(0, 2, 4, 1, 3, 5, 6).reshape(planes, rows, strips * width)
