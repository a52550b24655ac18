"""Kernels that convert stacks of matrices to 8 bits, for Hopper GPUs, in Pallas for Triton.

XLA reads a stack twice, once for the scales. Here a program has whole columns or rows: it finds
their scales, and what it reads again is still in the cache or in registers. In float32, what is
computed is what `scaling` computes.

Legend: G matrices, K contracted, N columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from collective_matmul._compat import on_one_device, varying_axes
from collective_matmul.mosaic_gpu import device
from collective_matmul.operands.scaled.scaling import Array, magnitude, rounded

#: The scale of numbers of which this is the largest magnitude.
Scale = Callable[[jax.Array], jax.Array]

#: Columns of a program, and how many of their numbers it reads at a time. Half of the columns'
#: bytes fill sectors of memory; the columns of all programs that run at once fit into the cache.
_COLUMNS, _STEP = 32, 512
#: Offsets are 32-bit numbers.
_ELEMENTS = 2**31
#: The numbers of the rows of one program; and the longest row that it has registers for.
_ROW_NUMBERS, LONGEST_ROW = 4096, 16384


def can_convert(ws: Sequence[Array]) -> bool:
    """Whether the kernels convert these stacks: on a Hopper GPU, where XLA divides no arrays."""
    fit = all(w.size < _ELEMENTS and w.shape[-1] <= LONGEST_ROW for w in ws)
    return device.target() is not None and on_one_device() and fit


def in_columns(
    w: Array, scale: Scale, dtype: Any, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The values [G, N, K] of a stack [G, K, N], and the scale of each column, float32 [G, N]."""
    groups, contracted, columns = w.shape
    blocks = math.ceil(columns / _COLUMNS)
    step = min(_STEP, pl.next_power_of_2(contracted))

    def body(w_ref: Any, values_ref: Any, scales_ref: Any) -> None:
        group = pl.program_id(0) // blocks
        ns = pl.program_id(0) % blocks * _COLUMNS + jnp.arange(_COLUMNS, dtype=jnp.int32)
        in_columns = ns < columns

        def block(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            ks = i * step + jnp.arange(step, dtype=jnp.int32)
            mask = in_columns[:, None] & (ks < contracted)[None, :]
            numbers = plgpu.load(w_ref.at[group, ks[None, :], ns[:, None]], mask=mask, other=0)
            return ks, mask, numbers.astype(jnp.float32)

        def largest(i: jax.Array, before: jax.Array) -> jax.Array:
            return jnp.maximum(before, jnp.max(magnitude(block(i)[-1]), axis=1))

        steps = math.ceil(contracted / step)
        found = lax.fori_loop(0, steps, largest, jnp.zeros((_COLUMNS,), jnp.float32))
        scales = scale(found)
        plgpu.store(scales_ref.at[group, ns], scales, mask=in_columns)

        def write(i: jax.Array, nothing: jax.Array) -> jax.Array:
            ks, mask, numbers = block(i)
            values = rounded(or_nan(numbers), scales[:, None], dtype)
            plgpu.store(values_ref.at[group, ns[:, None], ks[None, :]], values, mask=mask)
            return nothing

        lax.fori_loop(0, steps, write, jnp.int32(0))

    shapes = [((groups, columns, contracted), dtype), ((groups, columns), jnp.float32)]
    values, scales = _call(body, shapes, [w], groups * blocks, 16, interpret)
    return values, scales


def in_rows(
    ws: Sequence[Array], scale: Scale, dtype: Any, *, interpret: bool = False
) -> tuple[Sequence[jax.Array], jax.Array]:
    """The values [G, K, N] of stacks, and the scale of each row of all, float32 [G, K]."""
    groups, contracted, columns = ws[0].shape
    rows = [w.reshape(-1, columns) for w in ws]
    width = pl.next_power_of_2(columns)
    height = max(1, _ROW_NUMBERS // width)

    def body(*refs: Any) -> None:
        place = pl.program_id(0) * height + jnp.arange(height, dtype=jnp.int32)
        is_row, ns = place < rows[0].shape[0], jnp.arange(width, dtype=jnp.int32)
        mask = is_row[:, None] & (ns < columns)[None, :]
        at = (place[:, None], ns[None, :])
        numbers = [
            plgpu.load(ref.at[at], mask=mask, other=0).astype(jnp.float32)
            for ref in refs[: len(ws)]
        ]
        largest = [jnp.max(magnitude(each), axis=1) for each in numbers]
        scales = scale(functools.reduce(jnp.maximum, largest))
        for ref, each in zip(refs[len(ws) : -1], numbers, strict=True):
            plgpu.store(ref.at[at], rounded(or_nan(each), scales[:, None], dtype), mask=mask)
        plgpu.store(refs[-1].at[place], scales, mask=is_row)

    shapes = [*[(rows[0].shape, dtype)] * len(ws), ((rows[0].shape[0],), jnp.float32)]
    warps = max(8, width // 1024)
    *values, scales = _call(
        body, shapes, rows, math.ceil(rows[0].shape[0] / height), warps, interpret
    )
    return [each.reshape(ws[0].shape) for each in values], scales.reshape(groups, contracted)


def or_nan(numbers: jax.Array) -> jax.Array:
    """The numbers, NaN for infinity, which Triton would round to the largest number of 8 bits."""
    return jnp.where(jnp.abs(numbers) < jnp.inf, numbers, jnp.nan)


def _call(
    body: Callable,
    shapes: Sequence[tuple[tuple[int, ...], Any]],
    inputs: Sequence[Array],
    programs: int,
    warps: int,
    interpret: bool,
) -> Sequence[jax.Array]:
    arrays = [*map(jnp.asarray, inputs)]
    axes = frozenset[str]().union(*map(varying_axes, arrays))
    typed: dict[str, Any] = {}
    if axes:
        typed = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)}
    return pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(*shape, **typed) for shape in shapes],
        grid=(programs,),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
        name="convert_stack",
    )(*arrays)
