"""Einsums as matmuls: the reshapes in between, and the contractions of their gradients.

Shapes are local to one device. Along the label, a whole array has D times as much as a shard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from collective_matmul.operands import multiply
from collective_matmul.operands.arithmetic import einsum
from collective_matmul.operands.chunked import Chunked, Gathered
from collective_matmul.ops.matmul.equation import Equation


def contract(equation: Equation, a: Any, b: Any) -> jax.Array:
    """The einsum of whole arrays, undivided; either may be what was gathered along the label."""
    if not equation.is_weight_gradient:
        return einsum(equation, *map(_whole, (equation.a, equation.b), (a, b), 2 * equation.label))
    rows = len(equation.contracted)
    columns = [_any_chunk(array).shape[rows:] for array in (a, b)]
    a, b = (_map_chunks(lambda chunk: _join_from(rows, chunk), array) for array in (a, b))
    if not equation.y.startswith(equation.rows):
        a, b, columns = b, a, columns[::-1]
    (y,) = multiply.contract(a, [b], dimension=equation.contracted.index(equation.label))
    return y.reshape(*columns[0], *columns[1])


def as_matrices(equation: Equation, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Operands of a matmul, x [..., K] and w [K, N], or [N, K] if it is stored transposed."""
    order, _ = equation.matrices
    transpose_w = equation.is_stored_transposed
    if not transpose_w:
        b = lax.transpose(b, [equation.b.index(label) for label in order])
    left = len(equation.columns if transpose_w else equation.contracted)
    w = b.reshape(math.prod(b.shape[:left]), math.prod(b.shape[left:]))
    return _join_from(len(equation.rows), a), w


def split_result(equation: Equation, y: jax.Array, b: jax.Array) -> jax.Array:
    """The result of an einsum, from that of its matmul [..., N]."""
    columns = [b.shape[equation.b.index(label)] for label in equation.columns]
    return y.reshape(*y.shape[:-1], *columns)


def split_rows(gathered: Gathered, contracted: Sequence[int]) -> Gathered:
    """A gathered operand, from that of its matmul [..., K]."""
    return _map_chunks(lambda chunk: chunk.reshape(*chunk.shape[:-1], *contracted), gathered)


def _join_from(dimension: int, array: jax.Array) -> jax.Array:
    """Joins all dimensions from this one on."""
    return array.reshape(*array.shape[:dimension], math.prod(array.shape[dimension:]))


def _any_chunk(array: Any) -> jax.Array:
    return array.chunks[0] if isinstance(array, Chunked) else array


def _map_chunks(fun: Callable[[jax.Array], jax.Array], array: Any) -> Any:
    """`fun` of an array, of the chunks of a gathered one, or of nothing."""
    if isinstance(array, Chunked):
        return dataclasses.replace(array, chunks=[fun(chunk) for chunk in array.chunks])
    return None if array is None else fun(array)


def _whole(labels: str, array: Any, label: str) -> jax.Array:
    return array.whole(labels.index(label)) if isinstance(array, Chunked) else array
