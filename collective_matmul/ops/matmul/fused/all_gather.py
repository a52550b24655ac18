"""All-gather and matmul in one launch: what the kernel supports, and the arrays it is given."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.extend.core import jaxpr_as_fun

from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.peers.symmetric_workspace import workspace_pointers
from collective_matmul.operands.multiply import product_dtype
from collective_matmul.operands.scaled.scaled_chunks import column_scales
from collective_matmul.ops.matmul.fused.all_gather_config import (
    AllGatherConfig,
    AllGatherProblem,
)
from collective_matmul.ops.matmul.fused.all_gather_kernel import AllGatherGemm, ScaledAllGatherGemm
from collective_matmul.ops.matmul.fused.all_gather_search import (
    candidate_all_gather_configs,
    choose_all_gather_config,
)
from collective_matmul.ops.matmul.fused.config_search import KernelCall
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


def all_gather_matmul(
    x: Any,
    ws: Sequence[Weight],
    axis_name: str,
    *,
    dimension: int,
    transpose_w: bool = False,
    keep_gathered: bool = False,
    race_delays: bool = False,
    config: AllGatherConfig | None = None,
) -> tuple[tuple[jax.Array, ...], Any]:
    """Multiplies all shards of x by each w in one launch. Called inside `jax.shard_map`.

    Args:
      x: this device's shard, [..., m, ..., K]; bfloat16, float16, or packed rows.
      ws: each [K, N_q], or [N_q, K] if `transpose_w`, of the same dtype. With packed rows, scaled
        matrices.
      axis_name: a mesh axis of D devices of one node.
      dimension: the gathered dimension of x, m.
      transpose_w: whether the ws are contracted along their last dimension.
      keep_gathered: whether to return the gathered x.
      race_delays: makes senders wait for random times, up to 16 µs, before each box they send, so
        that races show. For tests.
      config: one of `candidate_all_gather_configs`; None chooses the best known.

    Returns:
      Each product [..., D*m, ..., N_q]; and the gathered x [..., D*m, ..., K], or None.

    Raises:
      ValueError: if the kernel cannot do this; see `all_gather_unsupported_reason`.
    """
    devices = lax.axis_size(axis_name)
    reason = all_gather_unsupported_reason(
        x, ws, devices, dimension=dimension, transpose_w=transpose_w
    )
    if reason is not None:
        raise ValueError(f"{reason}; use 'ring' or 'xla'")
    target, config = device.target(), config or _config(x, ws, devices, dimension, transpose_w)
    assert target is not None and config is not None
    sent = array_of(x)
    planes, rows = math.prod(sent.shape[:dimension]), math.prod(sent.shape[dimension:-1])
    shard = sent.reshape(planes, rows, sent.shape[-1])
    shard = jnp.pad(shard, ((0, 0), (0, config.problem.m - rows), (0, 0)))
    launch = _shared_launch(
        config, axis_name, keep_gathered, race_delays, product_dtype(x, ws[0]), target
    )
    scales, matrices = [], in_8_bits(ws)
    if matrices is not None:
        # The bytes of scales, at the ends of rows, become numbers that are not multiplied.
        shard = lax.bitcast_convert_type(shard, x.dtype)
        scales = [column_scales([matrices], config.tiling)]
    *products, gathered = launch(shard, list(map(values_of, ws)), scales)
    gathered = lax.bitcast_convert_type(gathered, sent.dtype)
    whole = list(sent.shape)
    whole[dimension] *= config.problem.devices

    def unpadded(array: jax.Array) -> jax.Array:
        columns = array.shape[-1]
        shards = array.reshape(planes, config.problem.devices, config.problem.m, columns)
        return shards[:, :, :rows].reshape(*whole[:-1], columns)

    kept = jax.tree.map(lambda _: unpadded(gathered), x) if keep_gathered else None
    return tuple(map(unpadded, products)), kept


def all_gather_unsupported_reason(
    x: Any, ws: Sequence[AnyWeight], devices: int, *, dimension: int, transpose_w: bool
) -> str | None:
    """Why `all_gather_matmul` cannot do this on `devices` devices, in words; None if it can.

    x and the ws may be arrays or `jax.ShapeDtypeStruct`s, also in scaled matrices; all local.
    """
    if reason := operands_reason(devices, [x] * len(ws), ws):
        return reason
    if _config(x, ws, devices, dimension, transpose_w) is None:
        shapes = f"{x.shape} times {[w.shape for w in ws]}"
        wanted = wanted_sizes(ws[0], "K to be a multiple of 64 and the columns of 32")
        return f"x {shapes}: the fused kernel wants {wanted}; pad them"
    return None


def all_gather_predicted_seconds(
    x: Any, ws: Sequence[AnyWeight], devices: int, *, dimension: int, transpose_w: bool
) -> float:
    """Predicted seconds of a supported `all_gather_matmul`."""
    config = _config(x, ws, devices, dimension, transpose_w)
    assert config is not None
    call = all_gather_call(x, ws, devices, dimension=dimension, transpose_w=transpose_w)
    return 1e-6 * call.predicted_microseconds(config)


def all_gather_call(
    x: Any, ws: Sequence[AnyWeight], devices: int, *, dimension: int, transpose_w: bool
) -> KernelCall:
    """The kernel call of an `all_gather_matmul`, which its configuration is looked up by."""
    problem = AllGatherProblem(
        devices=devices,
        planes=math.prod(x.shape[:dimension]),
        m=math.prod(x.shape[dimension:-1]),
        k=sizes_of(ws[0], transpose_w)[0],
        n=tuple(sizes_of(w, transpose_w)[1] for w in ws),
        w_contracted_axis=contracted_axis(ws[0], transpose_w),
        scales=scaled_parts(ws[0]),
    )
    target = device.target()
    assert target is not None
    return KernelCall("all_gather_matmul", problem, target.multiprocessors)


def all_gather_configs(
    x: Any, ws: Sequence[AnyWeight], devices: int, *, dimension: int, transpose_w: bool
) -> tuple[AllGatherConfig, ...]:
    """All configurations for an `all_gather_matmul`, the likeliest to be fastest first."""
    call = all_gather_call(x, ws, devices, dimension=dimension, transpose_w=transpose_w)
    return candidate_all_gather_configs(call.problem, call.multiprocessors)


def _config(
    x: Any, ws: Sequence[AnyWeight], devices: int, dimension: int, transpose_w: bool
) -> AllGatherConfig | None:
    call = all_gather_call(x, ws, devices, dimension=dimension, transpose_w=transpose_w)
    return choose_all_gather_config(call.problem, call.multiprocessors)


@functools.cache
def _shared_launch(
    config: AllGatherConfig,
    axis_name: str,
    keep_gathered: bool,
    race_delays: bool,
    dtype: jnp.dtype,
    target: device.Target,
) -> Any:
    """A function that equal launches share, so that it is traced, lowered and compiled once.

    Returns:
      ``launch(shard, ws, scales) -> (*products, gathered)``. Products have the given dtype. For
      operands in 8 bits, `scales` is one array, that of the weights; else it is empty.
    """

    @sequential_vmap
    def launch(
        shard: jax.Array, ws: Sequence[jax.Array], scales: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        matmul = config.matmul
        axes = varying_axes(shard).union({axis_name}, *map(varying_axes, (*ws, *scales)))

        def empty(columns: int, dtype: Any) -> jax.Array:
            array = lax.empty((matmul.batch, matmul.m, columns), dtype)
            return vary_over(array, axes)

        def call(
            pointers: jax.Array, shard: jax.Array, ws: Any, scales: Any, outs: Sequence[jax.Array]
        ) -> Any:
            *products, gathered = outs
            body = ScaledAllGatherGemm if scales else AllGatherGemm
            gemm = body(config, keep_gathered, race_delays, gathered, ws, products)
            kernel = gemm.kernel(outs, "all_gather_matmul", target.multiprocessors)
            lines = [shard.reshape(len(shard), -1, config.sent_columns)] if scales else []
            return kernel(pointers, *scales, *lines, shard, *ws)

        outs = [*(empty(n, dtype) for n in matmul.n), empty(config.problem.columns, shard.dtype)]
        operands = shard, list(ws), list(scales), outs
        pointers = workspace_pointers(axis_name, of_arrays=True)
        return _traced_apart(call, pointers, *operands)

    return jax.jit(launch)


def _traced_apart(call: Callable, *operands: Any) -> Any:
    """Calls a function that was traced without the mesh axes over which its operands vary.

    Warps of a kernel take no references to arrays that are typed as varying.
    """
    arrays, tree = jax.tree.flatten(operands)
    types = tree.unflatten(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
    jaxpr = jax.make_jaxpr(call)(*types)
    return jaxpr_as_fun(jaxpr)(*arrays)
