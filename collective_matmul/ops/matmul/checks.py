"""Checks of the ops' arguments, before anything is traced into the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collective_matmul.operands.format import FORMATS
from collective_matmul.operands.quantized import Quantized
from collective_matmul.operands.sharded import WeightShards
from collective_matmul.ops.matmul.backends import BACKENDS

#: The name of a registered format, such as one of `collective_matmul.operands.recipes`.
RecipeName = str

#: Type of the argument `implementation`: the name of a backend; several names, of which the first
#: that can execute the op is used; or None to choose per shape.
Implementation = str | Sequence[str] | None

#: Dtypes of the ops. float64 needs 64-bit types, which JAX_ENABLE_X64 enables.
DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)))


def shown(value: Any) -> str:
    """An argument in an error message. Of an array, that is its type and not its elements."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array {value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))}{',' * (len(value) == 1)})"
    return repr(value)


def axis_size(axis_name: str, argument: str = "axis_name") -> int:
    """The size of a mesh axis that the enclosing `shard_map` made manual.

    Raises:
      TypeError: if `axis_name` is not a string.
      NameError: if no enclosing `shard_map` has such an axis.
    """
    if not isinstance(axis_name, str):
        raise TypeError(
            f"{argument}={shown(axis_name)}: expected the name of one mesh axis, a string"
        )
    try:
        return lax.axis_size(axis_name)
    except NameError:
        bound = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        raise NameError(
            f"{argument}={axis_name!r}: no such axis here (there are {bound}); call this inside"
            " jax.shard_map over a mesh with that axis"
        ) from None


def implementation(value: Implementation) -> tuple[str, ...] | None:
    """The names of backends that are requested, best first; None to choose per shape.

    Raises:
      UnknownBackendError: unless `value` is None, the name of a backend, or a sequence of such
        names.
    """
    return BACKENDS.requested(value)


def weight_shards(
    weight_axis_name: str | None, weight_dimension: int, axis_name: str | None = None
) -> WeightShards | None:
    """How the weights of an op are sharded over a second mesh axis; None if they are whole.

    `axis_name` is the op's own axis, or None where there is no op yet.

    Raises:
      ValueError, TypeError: for an axis that is the op's own, or another dimension than 0 and 1.
      NameError: if no enclosing `shard_map` has such an axis.
    """
    if weight_axis_name is None:
        if weight_dimension != 0:
            raise ValueError(
                f"weight_dimension={weight_dimension}: nothing is sharded without weight_axis_name;"
                " name the mesh axis that shards the weights"
            )
        return None
    dimensions = "0, the contracted dimension of w [K, *N], or 1, the first of its features"
    weight_sharding(weight_axis_name, weight_dimension, axis_name, dimensions)
    devices = axis_size(weight_axis_name, "weight_axis_name")
    return WeightShards(weight_axis_name, devices, 1 if weight_dimension else 0)


def weight_sharding(
    weight_axis_name: str, weight_dimension: int, axis_name: str | None, dimensions: str
) -> None:
    """Raises ValueError for an axis that is `axis_name`, or another dimension than 0 and 1.

    `dimensions` says what they are, in the message.
    """
    if weight_axis_name == axis_name:
        raise ValueError(
            f"weight_axis_name={weight_axis_name!r}: that is axis_name too; expected another mesh"
            " axis, such as that of the batch"
        )
    if weight_dimension not in (0, 1):
        raise ValueError(f"weight_dimension={weight_dimension!r}: expected {dimensions}")


def fp8(value: RecipeName | None) -> RecipeName | None:
    """Raises ValueError unless `value` is None or the name of a registered format."""
    if value is not None and not (isinstance(value, str) and value in FORMATS):
        names = ", ".join(map(repr, FORMATS))
        raise ValueError(
            f"fp8={value!r}: expected None (operands keep their dtype), or the name of a registered"
            f" format: {names}"
        )
    return value


def arrays(
    x: jax.Array,
    ws: Sequence[jax.Array | Quantized],
    shards: WeightShards | None = None,
    recipe: RecipeName | None = None,
) -> None:
    """Raises TypeError unless x and every w are arrays of one floating dtype.

    Sharded weights may have a wider dtype than x, to which they are cast.
    """
    for name, array in (("x", x), *(("w", w) for w in ws)):
        if not isinstance(array, jax.Array | np.ndarray | Quantized):
            raise TypeError(f"{name}: a {type(array).__name__}; expected an array")
    for w in ws:
        if shards is not None and w.dtype != ws[0].dtype:
            raise TypeError(
                f"w: a shard is {w.dtype} and another is {ws[0].dtype}; expected one dtype, that of"
                " their gradients; cast one"
            )
        is_cast = shards is not None and w.dtype in DTYPES and w.dtype.itemsize > x.dtype.itemsize
        if x.dtype != w.dtype and not is_cast:
            raise TypeError(
                f"x is {x.dtype} and w is {w.dtype}; cast one, so that what is communicated has"
                " the dtype you mean"
            )
    if x.dtype not in DTYPES:
        names = ", ".join(dtype.name for dtype in DTYPES)
        raise TypeError(f"x and w are {x.dtype}; expected a floating-point dtype: {names}")
    if recipe is not None:
        quantizable("x", x, recipe)


def quantizable(argument: str, array: jax.Array, recipe: RecipeName) -> None:
    """Raises TypeError for float64, whose range is larger than that of the scales."""
    if array.dtype == jnp.float64:
        raise TypeError(
            f"{argument}: float64 with fp8={recipe!r}, whose scales are float32; cast it to float32"
            " or leave fp8 out"
        )


def weights(ws: Sequence[jax.Array]) -> None:
    """Raises unless they are arrays [K, *N] of one floating dtype, at least one."""
    if not ws:
        raise ValueError("w=(): expected a weight or a sequence of at least one")
    for w in ws:
        if not isinstance(w, jax.Array | np.ndarray):
            raise TypeError(f"w: a {type(w).__name__}; expected an array")
        if len(w.shape) < 2:
            raise ValueError(f"w: shape {w.shape}; expected [K, *N] with at least 2 dimensions")
        if w.dtype != ws[0].dtype or w.dtype not in DTYPES:
            names = ", ".join(dtype.name for dtype in DTYPES)
            raise TypeError(f"w: {w.dtype}, the first is {ws[0].dtype}; expected one of {names}")


def operands(
    x: jax.Array,
    ws: Sequence[jax.Array | Quantized],
    shards: WeightShards | None = None,
    recipe: RecipeName | None = None,
) -> None:
    """Raises unless x [..., K] and every w [K, *N] can be multiplied in one floating dtype."""
    if not ws:
        raise ValueError("w=(): expected a weight or a sequence of at least one")
    arrays(x, ws, shards, recipe)
    parts = shards.axis_size if shards is not None and shards.dimension == 0 else 1
    if x.ndim < 2:
        raise ValueError(
            f"x: shape {x.shape} has {x.ndim} dimension(s); expected [..., m, ..., K] with at"
            " least 2; add a leading dimension"
        )
    for w in ws:
        if len(w.shape) < 2:
            raise ValueError(f"w: shape {w.shape}; expected [K, *N] with at least 2 dimensions")
        if x.shape[-1] != w.shape[0] * parts:
            times = f" × {parts} shards" if parts > 1 else ""
            raise ValueError(
                f"w: shape {w.shape} has {w.shape[0]}{times} rows, x {x.shape} has {x.shape[-1]}"
                " columns; expected the contracted dimension, x's last and w's first, to agree"
            )


def dimension(argument: str, value: int, x: jax.Array) -> int:
    """`value` as a dimension from the front, if x can be sharded along it.

    x can be sharded along any dimension but the contracted one. The dimension must not be empty:
    XLA has no collectives of empty arrays.

    Raises:
      ValueError, TypeError: if x cannot be sharded along it.
    """
    if not isinstance(value, int | np.integer):
        raise TypeError(
            f"{argument}={value!r}: expected a whole number, a dimension of x {x.shape}"
        )
    if not -x.ndim <= value < x.ndim:
        raise ValueError(
            f"{argument}={value}: x has shape {x.shape}; expected a dimension from 0 to"
            f" {x.ndim - 2}"
        )
    if value % x.ndim == x.ndim - 1:
        raise ValueError(
            f"{argument}={value}: that is the contracted dimension of x {x.shape}; expected one"
            f" from 0 to {x.ndim - 2}"
        )
    if x.shape[value] == 0:
        raise ValueError(
            f"{argument}={value}: size 0 in x {x.shape}; expected at least 1 on every device; leave"
            " the op out where there is nothing to communicate"
        )
    return value % x.ndim


def divisible(argument: str, value: int, x: jax.Array, axis_name: str) -> None:
    """Raises ValueError unless the axis divides dimension `value` of x."""
    size, devices = x.shape[value], lax.axis_size(axis_name)
    if size % devices:
        raise ValueError(
            f"{argument}={value}: size {size} is not divisible by axis {axis_name!r} of size"
            f" {devices}; pad it to {-(-size // devices) * devices}"
        )
