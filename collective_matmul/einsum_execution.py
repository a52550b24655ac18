"""Einsums on a backend: with its op if the equation is a matmul, else with its own einsum.

Shapes are local to one device. Along the label, a whole array has D times as much as a shard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from collective_matmul.backends.arithmetic import einsum
from collective_matmul.backends.base import Backend, EinsumBackend, GatherResidual
from collective_matmul.backends.chunked_array import ChunkedArray, weight_gradients
from collective_matmul.equation import Equation


def gather_einsum(
    backend: Backend,
    equation: Equation,
    a: jax.Array,
    b: jax.Array,
    axis_name: str,
    *,
    keep_gathered: bool = False,
) -> tuple[jax.Array, GatherResidual]:
    """Gathers a along the label, for its einsum with b.

    Args:
      backend: the backend.
      equation: labels of a, b and the result.
      a: a shard along the label.
      b: whole along the label, if it has it.
      axis_name: the mesh axis to gather over.
      keep_gathered: whether the gathered a, in a form that `contract` takes, is a result too.
    """
    if not equation.is_matmul:
        assert isinstance(backend, EinsumBackend)
        return backend.gather_einsum(equation, a, b, axis_name, keep_gathered=keep_gathered)
    x, w, transpose_w = _as_matrices(equation, a, b)
    (y,), gathered = backend.all_gather_matmul(
        x,
        (w,),
        axis_name,
        dimension=equation.a.index(equation.label),
        transpose_w=transpose_w,
        keep_gathered=keep_gathered,
    )
    contracted = a.shape[x.ndim - 1 :]
    gathered = _map_chunks(lambda chunk: _split_last(chunk, contracted), gathered)
    return _split_last(y, _columns(equation, b)), gathered


def scatter_einsum(
    backend: Backend,
    equation: Equation,
    a: jax.Array,
    b: jax.Array,
    axis_name: str,
    *,
    co_gathered: jax.Array | None = None,
) -> tuple[jax.Array, GatherResidual]:
    """Sums the einsum over the axis and scatters it along the label.

    Args:
      backend: the backend.
      equation: labels of a, b and the result.
      a: whole along the label; its einsum with b is this device's term of the sum.
      b: whole along the label, if it has it.
      axis_name: the mesh axis to sum and scatter over.
      co_gathered: a shard with the result's labels, gathered in the same loop; it too is a result,
        as `contract` takes it.
    """
    if not equation.is_matmul:
        assert isinstance(backend, EinsumBackend)
        return backend.scatter_einsum(equation, a, b, axis_name, co_gathered=co_gathered)
    x, w, transpose_w = _as_matrices(equation, a, b)
    y, gathered = backend.matmul_reduce_scatter(
        [x],
        [w],
        axis_name,
        dimension=equation.y.index(equation.label),
        transpose_w=transpose_w,
        co_gathered=co_gathered,
    )
    return _split_last(y, _columns(equation, b)), gathered


def contract(
    equation: Equation, a: jax.Array | ChunkedArray, b: jax.Array | ChunkedArray
) -> jax.Array:
    """The einsum of whole arrays, undivided; either may be what was gathered along the label."""
    if not equation.is_weight_gradient:
        return einsum(equation, *map(_whole, (equation.a, equation.b), (a, b), 2 * equation.label))
    rows = len(equation.contracted)
    columns = [_any_chunk(array).shape[rows:] for array in (a, b)]
    a, b = (_map_chunks(lambda chunk: _join_from(rows, chunk), array) for array in (a, b))
    if not equation.y.startswith(equation.rows):
        a, b, columns = b, a, columns[::-1]
    (y,) = weight_gradients(a, [b], dimension=equation.contracted.index(equation.label))
    return y.reshape(*columns[0], *columns[1])


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
    """Joins all dimensions from this one on."""
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
