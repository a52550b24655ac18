"""Checks of the arguments of expert ops, before anything is traced into the program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collective_matmul.operands.format import Format, format_named
from collective_matmul.ops.experts.activations import NAMES
from collective_matmul.ops.experts.biases import ExpertBiases
from collective_matmul.ops.experts.stored_weights import ExpertWeights
from collective_matmul.ops.matmul import checks as matmul_checks

#: Dtypes of tokens and weights. float64 needs 64-bit types, which JAX_ENABLE_X64 enables.
DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)))


def axis_names(value: Any, argument: str = "axis_name") -> tuple[str, ...]:
    """The mesh axes that an argument names: one, several, or none.

    Raises:
      TypeError: for other values.
      ValueError: for an axis that is named twice.
      NameError: if no enclosing `shard_map` has such an axis.
    """
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{argument}={matmul_checks.shown(value)}: expected the name of a mesh axis, or a tuple"
            " of such names"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"{argument}={value!r}: an axis twice; name each axis once")
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            bound = tuple(jax.sharding.get_abstract_mesh().manual_axes)
            raise NameError(
                f"{argument}={value!r}: no axis {name!r} here (there are {bound}); call this inside"
                " jax.shard_map over a mesh with that axis"
            ) from None
    return names


def other_axis(value: str | None, argument: str, used: tuple[str, ...]) -> str | None:
    """A further mesh axis, or None.

    Raises:
      TypeError, NameError: as `axis_names`.
      ValueError: for an axis that is in use already.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(
            f"{argument}={matmul_checks.shown(value)}: expected the name of one mesh axis, or None"
        )
    axis_names(value, argument)
    if value in used:
        raise ValueError(
            f"{argument}={value!r}: the op exchanges tokens over this axis already; name another"
        )
    return value


def in_mesh_order(names: tuple[str, ...]) -> tuple[str, ...]:
    """Mesh axes in the order in which the mesh has them."""
    return tuple(sorted(names, key=jax.sharding.get_abstract_mesh().axis_names.index))


def weight_dimension(value: int) -> int:
    """A dimension of weights.

    Raises:
      ValueError: for other values than 0, 1 and 2.
    """
    if value not in (0, 1, 2):
        raise ValueError(
            f"weight_dimension={value!r}: expected 0, the experts, or 1 or 2, the rows or columns"
            " of each matrix"
        )
    return value


def activation(value: str) -> str:
    """The name of an activation.

    Raises:
      ValueError: for other values.
    """
    if not isinstance(value, str) or value not in NAMES:
        names = ", ".join(map(repr, NAMES))
        raise ValueError(f"activation={value!r}: expected one of {names}")
    return value


def fp8(value: str | None, x: jax.Array) -> Format:
    """The format of a name, for tokens x.

    Raises:
      ValueError: for the name of no format.
      TypeError: for tokens of float64.
    """
    name = matmul_checks.fp8(value)
    if name is not None:
        matmul_checks.quantizable("x", x, name)
    return format_named(name)


def recompute_hidden(value: bool) -> bool:
    """Whether hidden products are computed again.

    Raises:
      TypeError: for other values than True and False.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"recompute_hidden={value!r}: expected True or False")
    return bool(value)


def arrays(**values: Any) -> None:
    """Checks that arguments are arrays.

    Raises:
      TypeError: for others.
    """
    for name, value in values.items():
        if not isinstance(value, jax.Array | np.ndarray):
            raise TypeError(f"{name} of type {type(value).__name__}: expected an array")


def routing(x: jax.Array, ids: jax.Array, weights: jax.Array) -> None:
    """Checks the tokens, and what a router decided about them.

    Raises:
      ValueError, TypeError: if they do not fit.
    """
    arrays(x=x, expert_ids=ids, expert_weights=weights)
    if x.ndim != 2:
        raise ValueError(f"x of shape {x.shape}: expected [tokens, features]; join its dimensions")
    if jnp.dtype(x.dtype) not in DTYPES:
        names = ", ".join(dtype.name for dtype in DTYPES)
        raise TypeError(f"x of {jnp.dtype(x.dtype).name}: expected one of {names}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"expert_ids of {ids.dtype}: expected whole numbers, such as int32")
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(f"expert_weights of {weights.dtype}: expected numbers such as float32")
    for name, array in (("expert_ids", ids), ("expert_weights", weights)):
        if array.ndim != 2 or array.shape[0] != x.shape[0] or array.shape[1] == 0:
            raise ValueError(
                f"{name} of shape {array.shape}: expected [{x.shape[0]}, k], the experts of each of"
                f" the {x.shape[0]} tokens of x"
            )
    if ids.shape != weights.shape:
        raise ValueError(
            f"expert_ids of shape {ids.shape} and expert_weights of shape {weights.shape}: expected"
            " a weight for each number"
        )


def weights(x: jax.Array, ws: ExpertWeights, shards: int, dimension: int, *, sharded: bool) -> None:
    """Checks the weights of experts.

    Args:
      x: the tokens.
      ws: the weights, or shards of them.
      shards: the number of shards of each.
      dimension: the dimension that is sharded.
      sharded: whether they are shards, which may have any floating dtype.

    Raises:
      ValueError, TypeError: if they do not fit.
    """
    names = ("w_gate", "w_up", "w_down")
    for name, w in zip(names, ws, strict=True):
        if len(w.shape) != 3:
            order = (
                "[experts, hidden, features]" if name == "w_down" else "[experts, features, hidden]"
            )
            raise ValueError(f"{name} of shape {w.shape}: expected {order}")
        if w.dtype != x.dtype and not sharded:
            raise TypeError(
                f"{name} of {w.dtype} and x of {x.dtype}: expected one dtype; cast one of them"
            )
    whole = [
        tuple(size * (shards if i == dimension else 1) for i, size in enumerate(w.shape))
        for w in ws
    ]
    experts, _, hidden = whole[0]
    expected = [(experts, x.shape[1], hidden)] * 2 + [(experts, hidden, x.shape[1])]
    for name, shape, wanted in zip(names, whole, expected, strict=True):
        if shape != wanted or 0 in shape:
            raise ValueError(
                f"{name} of shape {shape}: expected {wanted}, for x of shape {x.shape} and w_gate"
                f" of shape {whole[0]}; sizes are above 0"
            )


def biases(values: ExpertBiases, sizes: tuple[int, int, int]) -> None:
    """Checks the biases of experts.

    Args:
      values: the biases.
      sizes: the numbers of this device's experts, of features, and of its hidden features.

    Raises:
      ValueError, TypeError: if they do not fit.
    """
    experts, features, hidden = sizes
    for name, bias in zip(values._fields, values, strict=True):
        if bias is None:
            continue
        arrays(**{f"b_{name}": bias})
        expected = experts, features if name == "down" else hidden
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"b_{name} of {bias.dtype}: expected numbers such as float32")
        if bias.shape != expected:
            raise ValueError(
                f"b_{name} of shape {bias.shape}: expected {expected}, a bias for each expert of"
                " this device; weight_axis_name does not shard biases"
            )
