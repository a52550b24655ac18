"""JAX's primitives in NumPy, on arrays stacked over devices.

Small arrays take NumPy a few microseconds, and need no compilation. A primitive that is not here is
compiled once for each shape, and mapped over the devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from collective_matmul.jaxprs.graph import type_of

Stacks = Sequence[np.ndarray]
Operation = Callable[..., Any]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (np.tanh(0.5 * x) + 1)


def _truncated(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if np.issubdtype(x.dtype, np.integer):
        return np.trunc(x / np.where(y == 0, 1, y))
    return x / y


_ELEMENTWISE: dict[str, Operation] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and, "ceil": np.ceil,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "copy": np.array, "cos": np.cos, "div": _truncated, "eq": np.equal, "exp": np.exp,
    "expm1": np.expm1, "floor": np.floor, "ge": np.greater_equal, "gt": np.greater,
    "is_finite": np.isfinite, "le": np.less_equal, "log": np.log, "log1p": np.log1p,
    "logistic": _sigmoid, "lt": np.less, "max": np.maximum, "min": np.minimum,
    "mul": np.multiply, "ne": np.not_equal, "neg": np.negative, "not": np.invert,
    "or": np.bitwise_or, "pow": np.power, "rem": np.fmod, "sign": np.sign, "sin": np.sin,
    "sqrt": np.sqrt, "square": np.square, "stop_gradient": np.array, "sub": np.subtract,
    "tanh": np.tanh, "xor": np.bitwise_xor,
}  # fmt: skip
_REDUCTIONS: dict[str, Operation] = {
    "reduce_and": np.all,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_or": np.any,
    "reduce_prod": np.prod,
    "reduce_sum": np.sum,
}


def execute(equation: JaxprEqn, operands: Stacks, devices: int, float64: bool) -> Stacks:
    """Executes a primitive on arrays [devices, ...].

    Args:
      equation: an equation that neither executes jaxprs nor communicates.
      operands: its operands, stacked over the devices.
      devices: how many there are.
      float64: whether all floating-point arrays are held in float64, whatever their dtype.
    """
    name = equation.primitive.name
    dtypes = [stored(type_of(var).dtype, float64) for var in equation.outvars]
    if name in _ELEMENTWISE:
        rank = max((operand.ndim for operand in operands), default=0)
        aligned = [x.reshape(x.shape + (1,) * (rank - x.ndim)) for x in operands]
        results = [_ELEMENTWISE[name](*aligned)]
    elif name in _REDUCTIONS:
        axes = tuple(axis + 1 for axis in equation.params["axes"])
        results = [_REDUCTIONS[name](operands[0], axis=axes)]
    elif name in _SHAPED:
        results = _SHAPED[name](operands, equation, devices)
        results = results if isinstance(results, list) else [results]
    else:
        return _compiled(equation, operands, devices, float64)
    return [_cast(result, dtype) for result, dtype in zip(results, dtypes, strict=True)]


def stored(dtype: Any, float64: bool) -> np.dtype:
    """The dtype that an array of this dtype is held in."""
    return np.dtype(np.float64 if float64 and jnp.issubdtype(dtype, np.floating) else dtype)


def _cast(array: Any, dtype: np.dtype) -> np.ndarray:
    return array if array.dtype == dtype else array.astype(dtype)


# Primitives with parameters that name dimensions.


def _dot(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    x, w = operands
    subscripts = _subscripts(x.ndim, w.ndim, equation.params["dimension_numbers"])
    if x.dtype != np.float64:
        x, w = x.astype(np.float32), w.astype(np.float32)
    return np.einsum(subscripts, x, w)


@functools.cache
def _subscripts(x_rank: int, w_rank: int, numbers: Any) -> str:
    (x_contracted, w_contracted), (x_batch, w_batch) = numbers
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    x, w = [next(letters) for _ in range(x_rank)], [next(letters) for _ in range(w_rank)]
    w[0] = x[0]
    pairs = [*zip(x_contracted, w_contracted, strict=True), *zip(x_batch, w_batch, strict=True)]
    for i, j in pairs:
        w[j + 1] = x[i + 1]
    batch = [x[i + 1] for i in x_batch]
    x_free = [c for i, c in enumerate(x[1:]) if i not in (*x_contracted, *x_batch)]
    w_free = [c for i, c in enumerate(w[1:]) if i not in (*w_contracted, *w_batch)]
    return f"{''.join(x)},{''.join(w)}->{''.join([x[0], *batch, *x_free, *w_free])}"


def _reshape(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    return operands[0].reshape(devices, *type_of(equation.outvars[0]).shape)


def _broadcast(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    shape = type_of(equation.outvars[0]).shape
    sizes = [1] * len(shape)
    for i, size in zip(equation.params["broadcast_dimensions"], operands[0].shape[1:], strict=True):
        sizes[i] = size
    return np.broadcast_to(operands[0].reshape(devices, *sizes), (devices, *shape))


def _transpose(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    return operands[0].transpose(0, *(i + 1 for i in equation.params["permutation"]))


def _concatenate(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    return np.concatenate(operands, equation.params["dimension"] + 1)


def _slice(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    p = equation.params
    strides = p["strides"] or (1,) * len(p["start_indices"])
    bounds = zip(p["start_indices"], p["limit_indices"], strides, strict=True)
    return operands[0][(slice(None), *(slice(*bound) for bound in bounds))]


def _pad(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    array, value = operands
    shape = type_of(equation.outvars[0]).shape
    padded = np.empty((devices, *shape), array.dtype)
    padded[...] = value.reshape(devices, *(1 for _ in shape))
    target, source = [slice(None)], [slice(None)]
    for (low, _, interior), size, whole in zip(
        equation.params["padding_config"], array.shape[1:], shape, strict=True
    ):
        places = low + (interior + 1) * np.arange(size)
        kept = [i for i in range(size) if 0 <= places[i] < whole]
        first, last = (kept[0], kept[-1] + 1) if kept else (0, 0)
        source.append(slice(first, last))
        start = low + (interior + 1) * first
        target.append(slice(start, start + (interior + 1) * (last - first), interior + 1))
    padded[tuple(target)] = array[tuple(source)]
    return padded


def _starts(array: np.ndarray, indices: Stacks, sizes: Sequence[int], device: int) -> tuple:
    """The slices of one device, moved inside of the array as XLA moves them."""
    places = []
    for index, size, whole in zip(indices, sizes, array.shape[1:], strict=True):
        start = min(max(int(index[device]), 0), whole - size)
        places.append(slice(start, start + size))
    return (device, *places)


def _dynamic_slice(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    array, *indices = operands
    sizes = equation.params["slice_sizes"]
    return np.stack([array[_starts(array, indices, sizes, d)] for d in range(devices)])


def _dynamic_update_slice(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    array, update, *indices = operands
    array = np.array(array)
    for device in range(devices):
        array[_starts(array, indices, update.shape[1:], device)] = update[device]
    return array


def _select(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    which, *cases = operands
    which = which.reshape(which.shape + (1,) * (cases[0].ndim - which.ndim))
    return functools.reduce(
        lambda result, case: np.where(which == case[0], case[1], result),
        enumerate(cases[1:], 1),
        np.broadcast_to(cases[0], cases[0].shape),
    )


def _split(operands: Stacks, equation: JaxprEqn, devices: int) -> list[np.ndarray]:
    ends = np.cumsum(equation.params["sizes"])[:-1]
    return np.split(operands[0], ends, equation.params["axis"] + 1)


def _iota(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    shape, dimension = type_of(equation.outvars[0]).shape, equation.params["dimension"]
    sizes = [size if i == dimension else 1 for i, size in enumerate(shape)]
    return np.broadcast_to(np.arange(math.prod(sizes)).reshape(sizes), (devices, *shape))


def _bitcast(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    """The bytes of each element as one of another size: of a smaller one, a dimension of them."""
    # Arrays that are held in float64 have the bytes of their own dtype.
    array = operands[0].astype(type_of(equation.invars[0]).dtype)
    result = type_of(equation.outvars[0])
    if result.dtype.itemsize < array.dtype.itemsize:
        array = array[..., None]
    return np.ascontiguousarray(array).view(result.dtype).reshape(devices, *result.shape)


def _same(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    return operands[0]


def _stack(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    return np.stack(operands, equation.params["axis"] + 1)


def _unstack(operands: Stacks, equation: JaxprEqn, devices: int) -> list[np.ndarray]:
    return [*np.moveaxis(operands[0], equation.params["axis"] + 1, 0)]


def _empty(operands: Stacks, equation: JaxprEqn, devices: int) -> np.ndarray:
    return np.zeros((devices, *type_of(equation.outvars[0]).shape), np.float32)


_SHAPED: dict[str, Operation] = {
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "convert_element_type": _same,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "empty": _empty,
    "empty2": _empty,
    "expand_dims": _reshape,
    "integer_pow": lambda operands, equation, _: operands[0] ** equation.params["y"],
    "iota": _iota,
    "layout_constraint": _same,
    "pad": _pad,
    "reduce_precision": _same,
    "reshape": _reshape,
    "rev": lambda operands, equation, _: np.flip(
        operands[0], tuple(i + 1 for i in equation.params["dimensions"])
    ),
    "rsqrt": lambda operands, *_: 1 / np.sqrt(operands[0]),
    "select_n": _select,
    "sharding_constraint": _same,
    "slice": _slice,
    "split": _split,
    "squeeze": _reshape,
    "stack": _stack,
    "transpose": _transpose,
    "unstack": _unstack,
}


# Other primitives.


def _compiled(equation: JaxprEqn, operands: Stacks, devices: int, float64: bool) -> Stacks:
    primitive = equation.primitive
    operation = _operation(primitive, bool(operands), tuple(equation.params.items()))
    with jax.enable_x64(float64):
        results = operation(*operands)
        results = results if primitive.multiple_results else [results]
        results = [np.asarray(result) for result in results]
    if not operands:
        results = [np.broadcast_to(result, (devices, *result.shape)) for result in results]
    dtypes = [stored(type_of(var).dtype, float64) for var in equation.outvars]
    return [_cast(x, dtype) for x, dtype in zip(results, dtypes, strict=True)]


@functools.cache
def _operation(primitive: Any, mapped: bool, parameters: tuple) -> Callable:
    bind = functools.partial(primitive.bind, **dict(parameters))
    return jax.jit(jax.vmap(bind) if mapped else bind)
