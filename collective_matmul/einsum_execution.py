"""Einsums of what is gathered, and einsums whose sum over devices is scattered.

An equation that is a matmul is carried out by the implementation's own function. Any other is
walked chunk by chunk, in lockstep as in `collective_matmul.backends.ring`: a chunk is a
slice of every array that has the label, and each gets an einsum of its own. The products of chunks
stand side by side in the result; if the label is contracted they are summed in float32.

Shapes are local to one device. Along the label, a whole array has D times as much as a shard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul.backends import IMPLEMENTATIONS, RINGS
from collective_matmul.backends.chunked_array import ChunkedArray, empty_like, read, write
from collective_matmul.backends.ring.schedule import Chunk
from collective_matmul.backends.ring.walk import Gather, Ring, walk_gather, walk_scatter
from collective_matmul.equation import Equation
from collective_matmul.mosaic_gpu.chunk_matmul import Rows


def gather_einsum(
    implementation: str,
    equation: Equation,
    a: jax.Array,
    b: jax.Array,
    axis_name: str,
    *,
    keep_gathered: bool = False,
) -> tuple[jax.Array, Any]:
    """Gathers a along the label, for its einsum with b.

    Args:
      implementation: by name.
      equation: labels of a, b and the result.
      a: a shard along the label.
      b: whole along the label, if it has it.
      axis_name: the mesh axis to gather over.
      keep_gathered: whether the gathered a, as `contract` takes it, is a result too, else None.
    """
    dimension = equation.a.index(equation.label)
    if equation.is_matmul:
        x, w, transpose_w = _as_matrices(equation, a, b)
        (y,), gathered = IMPLEMENTATIONS[implementation].all_gather_matmul(
            x,
            (w,),
            axis_name,
            dimension=dimension,
            transpose_w=transpose_w,
            keep_gathered=keep_gathered,
        )
        contracted = a.shape[x.ndim - 1 :]
        gathered = _map_chunks(lambda chunk: _split_last(chunk, contracted), gathered)
        return _split_last(y, _columns(equation, b)), gathered
    pattern = RINGS.get(implementation)
    if pattern is None:
        whole = lax.all_gather(a, axis_name, axis=dimension, tiled=True)
        return _einsum(equation, whole, b), whole if keep_gathered else None
    gather = Gather(a, pattern, axis_name, dimension)
    y = _gather_in_ring(equation, b, gather)
    return y, gather.gathered() if keep_gathered else None


def scatter_einsum(
    implementation: str,
    equation: Equation,
    a: jax.Array,
    b: jax.Array,
    axis_name: str,
    *,
    co_gathered: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Sums the einsum over the axis and scatters it along the label.

    Args:
      implementation: by name.
      equation: labels of a, b and the result.
      a: whole along the label; its einsum with b is this device's term of the sum.
      b: whole along the label, if it has it.
      axis_name: the mesh axis to sum and scatter over.
      co_gathered: a shard with the result's labels, gathered in the same loop to be a result too, as
        `contract` takes it.
    """
    dimension = equation.y.index(equation.label)
    if equation.is_matmul:
        x, w, transpose_w = _as_matrices(equation, a, b)
        y, gathered = IMPLEMENTATIONS[implementation].matmul_reduce_scatter(
            [x],
            [w],
            axis_name,
            dimension=dimension,
            transpose_w=transpose_w,
            co_gathered=co_gathered,
        )
        return _split_last(y, _columns(equation, b)), gathered
    pattern = RINGS.get(implementation)
    if pattern is None:
        product = _einsum(equation, a, b)
        y = lax.psum_scatter(product, axis_name, scatter_dimension=dimension, tiled=True)
        if co_gathered is None:
            return y, None
        return y, lax.all_gather(co_gathered, axis_name, axis=dimension, tiled=True)
    rows = a.shape[equation.a.index(equation.label)] // lax.axis_size(axis_name)
    scatter = Ring("scatter", pattern, axis_name, dimension, rows)
    gather = (
        None
        if co_gathered is None
        else Gather(co_gathered, pattern, axis_name, dimension, co_gathered=True)
    )
    y = _scatter_in_ring(equation, a, b, scatter, gather)
    return y, None if gather is None else gather.gathered()


def contract(
    implementation: str,
    equation: Equation,
    a: jax.Array | ChunkedArray,
    b: jax.Array | ChunkedArray,
) -> jax.Array:
    """The einsum of whole arrays, undivided; either may be what was gathered along the label."""
    if not equation.is_weight_gradient:
        return _einsum(equation, *map(_whole, (equation.a, equation.b), (a, b), 2 * equation.label))
    rows = len(equation.contracted)
    columns = [_any_chunk(array).shape[rows:] for array in (a, b)]
    a, b = (_map_chunks(lambda chunk: _join_from(rows, chunk), array) for array in (a, b))
    if not equation.y.startswith(equation.rows):
        a, b, columns = b, a, columns[::-1]
    way: Any = IMPLEMENTATIONS[implementation]
    (y,) = way.weight_gradients(a, [b], dimension=equation.contracted.index(equation.label))
    return y.reshape(*columns[0], *columns[1])


def _gather_in_ring(equation: Equation, b: jax.Array, gather: Gather) -> jax.Array:
    """Multiplies the shards of a as they arrive."""
    has_slices = equation.label in equation.b

    def multiply(chunk: Chunk, a: jax.Array, sliced: Any, y: jax.Array | None) -> jax.Array:
        product = _product(equation, gather, chunk, a, sliced if has_slices else b)
        if not equation.accumulates:
            return _place(gather, chunk, product, equation.y.index(equation.label), y)
        return product if y is None else y + product

    return walk_gather(gather, multiply, b if has_slices else None, None).astype(b.dtype)


def _scatter_in_ring(
    equation: Equation, a: jax.Array, b: jax.Array, scatter: Ring, gather: Gather | None
) -> jax.Array:
    """Sums the chunks while their accumulators travel, and the co_gathered's shards beside them."""
    has_slices = equation.label in equation.b

    def multiply(chunk: Chunk, operands: tuple[jax.Array, Any]) -> jax.Array:
        a, sliced = operands
        return _product(equation, scatter, chunk, a, sliced if has_slices else b)

    return walk_scatter(scatter, gather, multiply, (a, b if has_slices else None))


def _einsum(equation: Equation, a: jax.Array, b: jax.Array, dtype: Any = None) -> jax.Array:
    """Accumulated in float32; in `dtype`, or else that of the operands."""
    return jnp.einsum(str(equation), a, b, preferred_element_type=dtype)


def _product(equation: Equation, ring: Ring, chunk: Chunk, a: jax.Array, b: jax.Array) -> jax.Array:
    """The einsum of a chunk, of the slices of what is whole along the label.

    In float32 if it is one of the terms of a sum.
    """

    def cut(labels: str, array: jax.Array) -> jax.Array:
        if equation.label not in labels:
            return array
        place = Rows(array, ring.start(chunk), ring.size(chunk))
        return read(place, labels.index(equation.label))

    dtype = jnp.promote_types(a.dtype, jnp.float32) if equation.accumulates else None
    return _einsum(equation, cut(equation.a, a), cut(equation.b, b), dtype)


def _place(
    ring: Ring, chunk: Chunk, product: jax.Array, dimension: int, whole: jax.Array | None
) -> jax.Array:
    """`whole` with a chunk's product in its place; an empty one is made if there is none yet."""
    if whole is None:
        whole = empty_like(product, {dimension: ring.rows * ring.devices})
    return write(Rows(whole, ring.start(chunk), ring.size(chunk)), product, dimension)


def _as_matrices(
    equation: Equation, a: jax.Array, b: jax.Array
) -> tuple[jax.Array, jax.Array, bool]:
    """Operands of a matmul, x [..., K] and w [K, N], and whether w is [N, K] instead."""
    order, _ = equation.matrices
    transpose_w = equation.is_stored_transposed
    if not transpose_w:
        b = lax.transpose(b, [equation.b.index(label) for label in order])
    left = len(equation.columns if transpose_w else equation.contracted)
    w = b.reshape(math.prod(b.shape[:left]), math.prod(b.shape[left:]))
    return _join_from(len(equation.rows), a), w, transpose_w


def _columns(equation: Equation, b: jax.Array) -> Sequence[int]:
    return [b.shape[equation.b.index(label)] for label in equation.columns]


def _join_from(dimension: int, array: jax.Array) -> jax.Array:
    """All dimensions from this one on become one."""
    return array.reshape(*array.shape[:dimension], math.prod(array.shape[dimension:]))


def _split_last(array: jax.Array, sizes: Sequence[int]) -> jax.Array:
    return array.reshape(*array.shape[:-1], *sizes)


def _any_chunk(array: jax.Array | ChunkedArray) -> jax.Array:
    return array.chunks[0] if isinstance(array, ChunkedArray) else array


def _map_chunks(fun: Callable[[jax.Array], jax.Array], array: Any) -> Any:
    """`fun` of an array, of the chunks of a gathered one, or of nothing."""
    if isinstance(array, ChunkedArray):
        return dataclasses.replace(array, chunks=[fun(chunk) for chunk in array.chunks])
    return None if array is None else fun(array)


def _whole(labels: str, array: jax.Array | ChunkedArray, label: str) -> jax.Array:
    return array.whole(labels.index(label)) if isinstance(array, ChunkedArray) else array
