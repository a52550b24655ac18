"""Matmul and reduce-scatter, or all-reduce, in one launch: what is supported, and the arrays.

The kernel itself is `collective_matmul.ops.matmul.fused.reduce_scatter_kernel`.
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
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import ITEMSIZE, ROW_MULTIPLE
from collective_matmul.mosaic_gpu.peers.symmetric_workspace import workspace_pointers
from collective_matmul.operands.multiply import product_dtype
from collective_matmul.operands.scaled.scaled_chunks import column_scales, row_scales
from collective_matmul.ops.matmul.fused.config_search import KernelCall
from collective_matmul.ops.matmul.fused.reduce_scatter_config import (
    ReduceScatterConfig,
    ReduceScatterProblem,
)
from collective_matmul.ops.matmul.fused.reduce_scatter_kernel import (
    GemmReduceScatter,
    ScaledGemmReduceScatter,
)
from collective_matmul.ops.matmul.fused.reduce_scatter_search import (
    candidate_all_reduce_configs,
    candidate_reduce_scatter_configs,
    choose_reduce_scatter_config,
)
from collective_matmul.ops.matmul.fused.weights import (
    AnyWeight,
    Weight,
    array_of,
    contracted_axis,
    in_8_bits,
    operands_reason,
    scaled_parts,
    sizes_of,
    values_of,
    wanted_sizes,
)


def matmul_reduce_scatter(
    xs: Sequence[Any],
    ws: Sequence[Weight],
    axis_name: str,
    *,
    dimension: int,
    transpose_w: bool = False,
    race_delays: bool = False,
    config: ReduceScatterConfig | None = None,
) -> jax.Array:
    """``reduce_scatter(sum over p of xs[p] @ ws[p])`` in one launch, inside `jax.shard_map`.

    Products are sent in the result's dtype. Each is rounded once, and added in float32 to the
    owner's own product, in the order of the devices after it: the same bits every time.

    Args:
      xs: each [..., M, ..., K_p]; all bfloat16 or all float16, or packed rows.
      ws: each [K_p, N], or [N, K_p] if `transpose_w`, of the same dtype. With packed rows,
        scaled matrices.
      axis_name: a mesh axis of D devices of one node.
      dimension: the scattered dimension of the xs, M, a multiple of D.
      transpose_w: whether the ws are contracted along their last dimension.
      race_delays: makes consumers wait for random times, up to 16 µs, before they send, so that
        races show. For tests.
      config: one of `candidate_reduce_scatter_configs`; None chooses the best known.

    Returns:
      [..., M/D, ..., N].

    Raises:
      ValueError: if the kernel cannot do this; see `reduce_scatter_unsupported_reason`.
    """
    devices = lax.axis_size(axis_name)
    reason = reduce_scatter_unsupported_reason(
        xs, ws, devices, dimension=dimension, transpose_w=transpose_w
    )
    if reason is not None:
        raise ValueError(f"{reason}; use 'ring' or 'xla'")
    config = config or _scatter_config(xs, ws, devices, dimension, transpose_w)
    assert config is not None
    problem, shape = config.problem, list(xs[0].shape)
    shape[dimension] //= problem.devices
    shape[-1] = problem.n
    rows = math.prod(shape[dimension:-1])

    def owned_rows_padded(x: Any) -> jax.Array:
        x = array_of(x)
        x = x.reshape(problem.planes, problem.devices, rows, x.shape[-1])
        x = jnp.pad(x, ((0, 0), (0, 0), (0, problem.m - rows), (0, 0)))
        return x.reshape(problem.planes, problem.all_rows, x.shape[-1])

    arrays = list(map(owned_rows_padded, xs))
    y = _launch(config, axis_name, race_delays, arrays, ws, xs[0].dtype)
    return y[:, :rows].reshape(shape)


def matmul_all_reduce(
    x: Any,
    w: Weight,
    axis_name: str,
    *,
    race_delays: bool = False,
    config: ReduceScatterConfig | None = None,
) -> jax.Array:
    """``all_reduce(x @ w)`` in one launch, inside `jax.shard_map`: the same bits on all devices.

    Args:
      x: [..., K]; bfloat16, float16, or packed rows.
      w: [K, N], of the same dtype; with packed rows, a scaled matrix.
      axis_name: a mesh axis of D devices of one node.
      race_delays: as for `matmul_reduce_scatter`.
      config: one of `candidate_all_reduce_configs`; None chooses the best known.

    Returns:
      [..., N], typed as replicated over the axis.

    Raises:
      ValueError: if the kernel cannot do this; see `all_reduce_unsupported_reason`.
    """
    devices = lax.axis_size(axis_name)
    reason = all_reduce_unsupported_reason(x, w, devices)
    if reason is not None:
        raise ValueError(f"{reason}; use 'ring' or 'xla'")
    config = config or _all_reduce_config(x, w, devices)
    assert config is not None
    rows, sent = math.prod(x.shape[:-1]), array_of(x)
    matrix = jnp.pad(sent.reshape(rows, sent.shape[-1]), ((0, -rows % ROW_MULTIPLE), (0, 0)))
    y = _launch(config, axis_name, race_delays, [matrix[None]], [w], x.dtype)
    return y.reshape(-1, w.shape[1])[:rows].reshape(*x.shape[:-1], w.shape[1])


def reduce_scatter_unsupported_reason(
    xs: Sequence[Any],
    ws: Sequence[AnyWeight],
    devices: int,
    *,
    dimension: int,
    transpose_w: bool,
) -> str | None:
    """Why `matmul_reduce_scatter` cannot do this on `devices` devices, in words; None if it can.

    The xs and ws may be arrays or `jax.ShapeDtypeStruct`s, all local.
    """
    return operands_reason(devices, xs, ws) or _no_config_reason(
        _scatter_config(xs, ws, devices, dimension, transpose_w), xs, ws
    )


def all_reduce_unsupported_reason(x: Any, w: AnyWeight, devices: int) -> str | None:
    """Why `matmul_all_reduce` cannot do this on `devices` devices, in words; None if it can.

    x and w may be arrays or `jax.ShapeDtypeStruct`s, both local.
    """
    return operands_reason(devices, [x], [w]) or _no_config_reason(
        _all_reduce_config(x, w, devices), [x], [w]
    )


def reduce_scatter_predicted_seconds(
    xs: Sequence[Any],
    ws: Sequence[AnyWeight],
    devices: int,
    *,
    dimension: int,
    transpose_w: bool,
) -> float:
    """Predicted seconds of a supported `matmul_reduce_scatter`."""
    call = reduce_scatter_call(xs, ws, devices, dimension=dimension, transpose_w=transpose_w)
    return _predicted_seconds(call)


def all_reduce_predicted_seconds(x: Any, w: AnyWeight, devices: int) -> float:
    """Predicted seconds of a supported `matmul_all_reduce`."""
    return _predicted_seconds(all_reduce_call(x, w, devices))


def _predicted_seconds(call: KernelCall) -> float:
    config = choose_reduce_scatter_config(call.problem, call.multiprocessors)
    assert config is not None
    return 1e-6 * call.predicted_microseconds(config)


def _no_config_reason(
    config: ReduceScatterConfig | None, xs: Sequence[Any], ws: Sequence[AnyWeight]
) -> str | None:
    if config is not None:
        return None
    terms = ", ".join(f"{x.shape} times {w.shape}" for x, w in zip(xs, ws, strict=True))
    wanted = wanted_sizes(ws[0], "every K, and N, to be a multiple of 32")
    return f"{terms}: the fused kernel wants {wanted}; pad them"


def reduce_scatter_call(
    xs: Sequence[Any], ws: Sequence[AnyWeight], devices: int, *, dimension: int, transpose_w: bool
) -> KernelCall:
    """The kernel call of a `matmul_reduce_scatter`, which its configuration is looked up by."""
    shape = xs[0].shape
    problem = ReduceScatterProblem(
        kind="scatter",
        devices=devices,
        planes=math.prod(shape[:dimension]),
        m=math.prod(shape[dimension:-1]) // devices,
        k=tuple(sizes_of(w, transpose_w)[0] for w in ws),
        n=sizes_of(ws[0], transpose_w)[1],
        w_contracted_axis=contracted_axis(ws[0], transpose_w),
        scales=scaled_parts(ws[0]),
    )
    return KernelCall("matmul_reduce_scatter", problem, _multiprocessors())


def all_reduce_call(x: Any, w: AnyWeight, devices: int) -> KernelCall:
    """The kernel call of a `matmul_all_reduce`, which its configuration is looked up by."""
    rows = math.prod(x.shape[:-1])
    contracted, columns = sizes_of(w, transpose_w=False)
    problem = ReduceScatterProblem(
        kind="one_shot",
        devices=devices,
        planes=1,
        m=rows,
        k=(contracted,),
        n=columns,
        w_contracted_axis=contracted_axis(w, transpose_w=False),
        scales=scaled_parts(w),
    )
    return KernelCall("matmul_all_reduce", problem, _multiprocessors())


def reduce_scatter_configs(
    xs: Sequence[Any], ws: Sequence[AnyWeight], devices: int, *, dimension: int, transpose_w: bool
) -> tuple[ReduceScatterConfig, ...]:
    """All configurations for a `matmul_reduce_scatter`, the likeliest to be fastest first."""
    call = reduce_scatter_call(xs, ws, devices, dimension=dimension, transpose_w=transpose_w)
    return candidate_reduce_scatter_configs(call.problem, call.multiprocessors)


def all_reduce_configs(x: Any, w: AnyWeight, devices: int) -> tuple[ReduceScatterConfig, ...]:
    """All configurations for a `matmul_all_reduce`, the likeliest to be fastest first."""
    call = all_reduce_call(x, w, devices)
    return candidate_all_reduce_configs(call.problem, call.multiprocessors)


def _scatter_config(
    xs: Sequence[Any], ws: Sequence[AnyWeight], devices: int, dimension: int, transpose_w: bool
) -> ReduceScatterConfig | None:
    call = reduce_scatter_call(xs, ws, devices, dimension=dimension, transpose_w=transpose_w)
    return choose_reduce_scatter_config(call.problem, call.multiprocessors)


def _all_reduce_config(x: Any, w: AnyWeight, devices: int) -> ReduceScatterConfig | None:
    call = all_reduce_call(x, w, devices)
    return choose_reduce_scatter_config(call.problem, call.multiprocessors)


def _multiprocessors() -> int:
    target = device.target()
    assert target is not None
    return target.multiprocessors


def _launch(
    config: ReduceScatterConfig,
    axis_name: str,
    race_delays: bool,
    xs: Sequence[jax.Array],
    ws: Sequence[Weight],
    x_dtype: Any,
) -> jax.Array:
    """Launches the kernel on planes [planes, rows, ...]; `x_dtype` is that of their numbers."""
    scales, first_scale, matrices = [], 0, in_8_bits(ws)
    dtype = product_dtype(xs[0], ws[0])
    if matrices is not None:
        problem, tiling = config.problem, config.tiling
        in_blocks = problem.scales == "blocks"
        x_scales, first_scale = row_scales(xs, problem.k, tiling, in_blocks=in_blocks)
        scales = [x_scales, column_scales([[w] for w in matrices], config.tiling)]
        # The bytes of scales, at the ends of rows, become numbers that are not multiplied.
        xs = [lax.bitcast_convert_type(x, x_dtype) for x in xs]
    launch = _shared_launch(config, axis_name, race_delays, dtype, first_scale, device.target())
    return launch(list(xs), list(map(values_of, ws)), scales)


@functools.cache
def _shared_launch(
    config: ReduceScatterConfig,
    axis_name: str,
    race_delays: bool,
    dtype: jnp.dtype,
    first_scale: int,
    target: Any,
) -> Any:
    """A function that equal launches share, so that it is traced, lowered and compiled once.

    Returns:
      ``launch(xs, ws, scales) -> y``: xs [planes, all rows, K_p], ws [1, K_p, N] or [1, N, K_p],
      and y [planes, owned rows, N], or for "two_shot" [planes * D, owned rows, N], of the given
      dtype. For operands in 8 bits, `scales` are those of the xs and of the ws; else it is empty.
    """
    problem, width = config.problem, config.tiling.epilogue_tile_n
    blocked = problem.n // width, problem.m, width

    @sequential_vmap
    def launch(
        xs: Sequence[jax.Array], ws: Sequence[jax.Array], scales: Sequence[jax.Array]
    ) -> jax.Array:
        axes = frozenset().union(*map(varying_axes, (*xs, *ws, *scales)))
        replicated = axes - {axis_name}

        def empty(axes: frozenset[str], *shape: int) -> jax.Array:
            return vary_over(lax.empty(shape, dtype), axes)

        if problem.kind == "two_shot":
            y = empty(replicated, problem.planes * problem.devices, *blocked)
        else:
            y_axes = axes if problem.kind == "scatter" else replicated
            y = empty(y_axes, problem.planes, problem.m, problem.n)
        partials = empty(axes, problem.planes * config.sources, *blocked)
        body = GemmReduceScatter
        if scales:
            body = functools.partial(ScaledGemmReduceScatter, first_scale=first_scale)
        gemm = body(config, race_delays, xs, ws, dtype)
        kernel = gemm.kernel([y, partials], f"matmul_{problem.kind}", target.multiprocessors)
        y = kernel(workspace_pointers(axis_name, of_arrays=True), *scales, *xs, *ws)[0]
        return in_rows(y, config.tiling.swizzle) if problem.kind == "two_shot" else y

    return jax.jit(launch)


def in_rows(blocks: jax.Array, swizzle: int) -> jax.Array:
    """Undoes the swizzle of blocks [planes, epilogue tiles, rows, columns of an epilogue tile].

    In swizzled shared memory, 8 rows are divided into tiles of `swizzle` bytes across. In each
    tile, units of 16 bytes have changed places within their row.

    Returns:
      [planes, rows, columns].
    """
    planes, count, rows, width = blocks.shape
    unit = 16 // ITEMSIZE
    tiles = rows // 8, width * ITEMSIZE // swizzle, 8, swizzle // 16, unit
    row, column = np.ogrid[:8, : swizzle // 16]
    y = blocks.reshape(planes, count, *tiles).at[..., row, column ^ (row * swizzle // 128), :]
    y = y.get(mode="promise_in_bounds", wrap_negative_indices=False)
    return y.transpose(0, 2, 4, 1, 3, 5, 6).reshape(planes, rows, count * width)
