"""Attention of one token to the valid part of its cache, in Pallas for Triton.

XLA reads all of a cache behind a mask. Here a sequence reads the blocks of keys and values that its
token attends to: those up to its position, and within its window. So that all multiprocessors read,
the blocks of a sequence and head are divided into splits, a program each, whose results a second
kernel combines (Dao et al., "Flash-Decoding for long-context inference", 2023). Many sequences have
one split each, and no second kernel. The number of splits is fixed when the kernel is traced; which
blocks are theirs follows from the position.

JAX has such a kernel, `jax.experimental.pallas.ops.gpu.decode_attention`. It is deprecated, does
not type its results inside a `shard_map` that checks over which axes values vary, reads the blocks
before a window that share a split with it, and multiplies what lies after the valid part by 0,
which is NaN if that is.

Legend of local shapes: B is batch, C the capacity of the cache in tokens, K key and value heads of
this device, G query heads for each of them, H head size, P splits.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

#: Programs that read at the rate of the memory: two for each multiprocessor of an H100 or H200.
_READERS = 2 * 132
#: Tensor cores multiply tiles of at least this many rows and columns.
_LEAST_TILE = 16
#: The largest tile of queries, which is kept in registers with the sums of values.
_LARGEST_TILE = 64 * 128
#: Columns that one program combines, of all splits.
_COMBINED_COLUMNS = 32
#: The first number of the compute capability of the oldest GPUs that Triton compiles for in JAX.
_OLDEST_GENERATION = 8
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class KeyBlocks:
    """The sizes of the kernel's blocks.

    Attributes:
      keys: keys of a block.
      splits: programs for each sequence and key head.
      warps: of one program.
      stages: blocks that are loaded at the same time.
    """

    keys: int
    splits: int
    warps: int = 4
    stages: int = 3


def unsupported_reason(
    heads: int, size: int, dtype: jax.typing.DTypeLike, device: Any
) -> str | None:
    """Why the kernel cannot compute an attention; None if it can.

    Args:
      heads: query heads for each key head.
      size: head size.
      dtype: dtype of the heads.
      device: JAX's device.
    """
    generation = str(getattr(device, "compute_capability", "")).partition(".")[0]
    if not generation.isdecimal() or int(generation) < _OLDEST_GENERATION:
        return (
            f"its kernel runs on NVIDIA GPUs of compute capability {_OLDEST_GENERATION}.0 or"
            f" higher, and this is {device.device_kind}"
        )
    name = jnp.dtype(dtype).name
    if name not in _DTYPES:
        return f"its kernel takes {', '.join(_DTYPES)}, not {name}"
    if _tile(heads) * _tile(size) > _LARGEST_TILE:
        return (
            f"its kernel has no place for {heads} query heads of {size} that share a key head; at"
            f" most {_LARGEST_TILE} numbers, after both are rounded up to powers of two"
        )
    return None


def blocks_of(query: jax.Array, key: jax.Array, window: int | None) -> KeyBlocks:
    """The sizes of blocks for queries [B, K, G, H] and a cache [B, K, C, H]."""
    batch, heads, group, size = query.shape
    capacity = key.shape[2]
    most = capacity if window is None else min(window, capacity)
    # A block of keys is 16 KiB, as of values: three programs of three stages fit.
    keys = max(_LEAST_TILE, 16 * 1024 // (_tile(size) * key.dtype.itemsize))
    keys = min(keys, _tile(most))

    def slowness(splits: int) -> float:
        """The time over that of reading all that is seen by all readers, without a break."""
        turns = batch * heads * splits / _READERS
        started = splits * keys / most  # To start a program takes the time of a block.
        combined = 4 * splits * group / (most * key.dtype.itemsize)
        return math.ceil(turns) / turns * (1 + started) + combined

    return KeyBlocks(keys, min(range(1, math.ceil(most / keys) + 1), key=slowness))


def attend_to_valid(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    window: int | None,
    sinks: jax.Array | None = None,
    *,
    blocks: KeyBlocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of one token of each sequence, added up in float32.

    Args:
      query: [B, K, G, H].
      key: [B, K, C, H]. What lies after a sequence's position is not read.
      value: [B, K, C, H], likewise.
      positions: int32 [B], the place of each token, the last that it attends to.
      window: number of tokens that a token attends to, itself included; None: all before it.
      sinks: [K, G], a score for each head that takes part in the softmax and has no value, or None.
      blocks: the sizes of blocks; None: as `blocks_of` returns them.
      interpret: whether to interpret the kernels, on any device.

    Returns:
      [B, K, G, H].
    """
    blocks = blocks or blocks_of(query, key, window)
    batch, heads, group, size = query.shape
    inputs = [positions, query, key, value, *([] if sinks is None else [sinks])]
    typed = functools.partial(jax.ShapeDtypeStruct, **_manual_axes(inputs))
    if blocks.splits == 1:
        shapes = [typed(query.shape, query.dtype)]
    else:
        parts = (batch, heads, blocks.splits, group)
        shapes = [typed((*parts, size), jnp.float32), typed(parts, jnp.float32)]
    attended, *sums = pl.pallas_call(
        functools.partial(_attend_body, window=window, has_sinks=sinks is not None, blocks=blocks),
        out_shape=shapes,
        grid=(batch, heads, blocks.splits),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="attend_to_valid",
    )(*inputs)
    if blocks.splits == 1:
        return attended
    (combined,) = pl.pallas_call(
        _combine_body,
        out_shape=[typed(query.shape, query.dtype)],
        grid=(batch, heads * group, math.ceil(size / _COMBINED_COLUMNS)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="combine_splits",
    )(attended, *sums)
    return combined


def _attend_body(
    positions_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    *refs: Any,
    window: int | None,
    has_sinks: bool,
    blocks: KeyBlocks,
) -> None:
    """One split of a sequence and key head, with the online softmax of FlashAttention.

    With several splits, writes the average of the values, and the logarithm of the sum of the
    weights, by which the averages of all splits are weighted.
    """
    _, _, group, size = query_ref.shape
    sequence, head, split = (pl.program_id(i) for i in range(3))
    rows, columns = _arange(_tile(group)), _arange(_tile(size))
    in_rows, in_columns = rows < group, columns < size
    in_tile = in_rows[:, None] & in_columns[None, :]
    query = plgpu.load(
        query_ref.at[sequence, head, rows[:, None], columns[None, :]], mask=in_tile, other=0
    )
    last = jnp.minimum(positions_ref[sequence], key_ref.shape[2] - 1)
    first = jnp.int32(0) if window is None else jnp.maximum(last - (window - 1), 0)

    def add_block(number: jax.Array, sums: tuple) -> tuple:
        highest, total, attended = sums
        places = number * blocks.keys + _arange(blocks.keys)
        is_seen = (first <= places) & (places <= last)
        at = (sequence, head, places[:, None], columns[None, :])
        mask = is_seen[:, None] & in_columns[None, :]
        key = plgpu.load(key_ref.at[at], mask=mask, other=0)
        scores = _dot(query, key.T) * size**-0.5
        scores = jnp.where(is_seen[None, :], scores, -jnp.inf)
        # Each block has a key that is seen, so the highest score is a number.
        new = jnp.maximum(highest, scores.max(1))
        weights, correction = jnp.exp(scores - new[:, None]), jnp.exp(highest - new)
        value = plgpu.load(value_ref.at[at], mask=mask, other=0)
        attended = attended * correction[:, None] + _dot(weights.astype(value.dtype), value)
        return new, total * correction + weights.sum(1), attended

    sums = (
        jnp.full((_tile(group),), -jnp.inf, jnp.float32),
        jnp.zeros((_tile(group),), jnp.float32),
        jnp.zeros((_tile(group), _tile(size)), jnp.float32),
    )
    if has_sinks:
        scores = plgpu.load(refs[0].at[head, rows], mask=in_rows, other=0).astype(jnp.float32)
        has_sink = split == 0
        sums = (jnp.where(has_sink, scores, sums[0]), sums[1] + has_sink, sums[2])
    keys, splits = jnp.int32(blocks.keys), jnp.int32(blocks.splits)
    begin, end = lax.div(first, keys), lax.div(last, keys) + 1
    share = lax.div(end - begin + (splits - 1), splits)
    begin += split * share
    highest, total, attended = lax.fori_loop(
        begin, jnp.minimum(begin + share, end), add_block, sums
    )
    is_empty = total == 0
    attended /= jnp.where(is_empty, 1, total)[:, None]
    at = (sequence, head) if blocks.splits == 1 else (sequence, head, split)
    out_ref = refs[int(has_sinks)]
    plgpu.store(
        out_ref.at[*at, rows[:, None], columns[None, :]],
        attended.astype(out_ref.dtype),
        mask=in_tile,
    )
    if blocks.splits > 1:
        logarithm = jnp.where(is_empty, -jnp.inf, highest + jnp.log(total))
        plgpu.store(refs[-1].at[*at, rows], logarithm, mask=in_rows)


def _combine_body(parts_ref: Any, logarithms_ref: Any, out_ref: Any) -> None:
    """Columns of the average of all splits of a query head. Empty ones weigh nothing."""
    _, _, splits, group, size = parts_ref.shape
    sequence, number, part = (pl.program_id(i) for i in range(3))
    head, row = lax.div(number, jnp.int32(group)), lax.rem(number, jnp.int32(group))
    numbers = _arange(pl.next_power_of_2(splits))
    columns = part * _COMBINED_COLUMNS + _arange(_COMBINED_COLUMNS)
    is_split, in_columns = numbers < splits, columns < size
    logarithms = plgpu.load(
        logarithms_ref.at[sequence, head, numbers, row], mask=is_split, other=-jnp.inf
    )
    weights = jnp.exp(logarithms - logarithms.max(0))
    parts = plgpu.load(
        parts_ref.at[sequence, head, numbers[:, None], row, columns[None, :]],
        mask=is_split[:, None] & in_columns[None, :],
        other=0,
    )
    average = (parts * weights[:, None]).sum(0) / weights.sum(0)
    place = out_ref.at[sequence, head, row, columns]
    plgpu.store(place, average.astype(out_ref.dtype), mask=in_columns)


def _tile(count: int) -> int:
    """The size of a tile that has place for `count` rows or columns."""
    return max(_LEAST_TILE, pl.next_power_of_2(count))


def _arange(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def _manual_axes(inputs: list[jax.Array]) -> dict[str, Any]:
    """The part of the results' type that says over which mesh axes they vary."""
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in inputs))
    return {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)} if axes else {}
