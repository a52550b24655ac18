"""Einsums that are not matmuls, walked chunk by chunk in lockstep.

A chunk is a slice of every array that has the label, and has its own einsum. The result
concatenates the products of chunks; if the label is contracted, they are summed in float32.
"""

from __future__ import annotations

from typing import Any

import jax

from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import Rows
from collective_matmul.operands.arithmetic import accumulator, einsum
from collective_matmul.operands.chunked import empty_like, read, write
from collective_matmul.ops.matmul.equation import Equation
from collective_matmul.schedule.schedules import Chunk
from collective_matmul.schedule.walk import Gather, Ring, walk_gather, walk_scatter


def gather_einsum(equation: Equation, b: jax.Array, gather: Gather) -> jax.Array:
    """Contracts the shards of the gathered operand with b as they arrive."""
    has_slices = equation.label in equation.b

    def multiply(chunk: Chunk, a: jax.Array, sliced: Any, y: jax.Array | None) -> jax.Array:
        product = _product(equation, gather, chunk, a, sliced if has_slices else b)
        if not equation.accumulates:
            return _place(gather, chunk, product, equation.y.index(equation.label), y)
        return product if y is None else y + product

    return walk_gather(gather, multiply, b if has_slices else None, None).astype(b.dtype)


def scatter_einsum(
    equation: Equation, a: jax.Array, b: jax.Array, scatter: Ring, gather: Gather | None
) -> jax.Array:
    """Sums the chunks while their accumulators travel, and the shards of `gather` beside them."""
    has_slices = equation.label in equation.b

    def multiply(chunk: Chunk, operands: tuple[jax.Array, Any]) -> jax.Array:
        a, sliced = operands
        return _product(equation, scatter, chunk, a, sliced if has_slices else b)

    return walk_scatter(scatter, gather, multiply, (a, b if has_slices else None))


def _product(equation: Equation, ring: Ring, chunk: Chunk, a: jax.Array, b: jax.Array) -> jax.Array:
    """The einsum of one chunk, with slices of the operands that are whole along the label.

    The product is in float32 if it is one term of a sum.
    """

    def chunk_of(labels: str, array: jax.Array) -> jax.Array:
        if equation.label not in labels:
            return array
        place = Rows(array, ring.start(chunk), ring.size(chunk))
        return read(place, labels.index(equation.label))

    dtype = accumulator(a.dtype) if equation.accumulates else None
    return einsum(equation, chunk_of(equation.a, a), chunk_of(equation.b, b), dtype)


def _place(
    ring: Ring, chunk: Chunk, product: jax.Array, dimension: int, whole: jax.Array | None
) -> jax.Array:
    """`whole` with a chunk's product in its place; starts an empty one if there is none yet."""
    if whole is None:
        whole = empty_like(product, {dimension: ring.rows * ring.devices})
    return write(Rows(whole, ring.start(chunk), ring.size(chunk)), product, dimension)
