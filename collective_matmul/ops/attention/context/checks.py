"""Checks of the arguments of `context_attention`, before anything is traced into the program."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np

from collective_matmul.ops.attention.argument_checks import (
    check_heads,
    check_masks,
    check_segments,
)
from collective_matmul.ops.attention.choice import KERNELS
from collective_matmul.ops.attention.context.layout import LAYOUTS, Layout


def arrays(**values: Any) -> None:
    """Checks that arguments are arrays of four dimensions, [B, s, heads, H].

    Raises:
      TypeError, ValueError: for others.
    """
    for name, value in values.items():
        if not isinstance(value, jax.Array | np.ndarray):
            raise TypeError(f"{name} of type {type(value).__name__}: expected an array")
        if value.ndim != 4 or 0 in value.shape[1:]:
            raise ValueError(
                f"{name} of shape {value.shape}: expected [batch, this device's tokens, heads,"
                " head size]"
            )


def shapes(query: Any, key: Any, value: Any, segment_ids: Any, most: int | None) -> None:
    """Checks that queries, keys, values and segments are of the same tokens.

    Raises:
      TypeError, ValueError: if they do not fit.
    """
    check_heads(query, key, value)
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"q of {query.shape[1]} tokens and k of {key.shape[1]}: expected this device's part of"
            " one sequence; pass keys and values of the tokens that have a query"
        )
    if most is not None and segment_ids is None:
        raise ValueError(f"max_segments={most}: expected segment_ids too; leave it out")
    if segment_ids is not None and not isinstance(segment_ids, jax.Array | np.ndarray):
        raise TypeError(
            f"segment_ids of type {type(segment_ids).__name__}: expected an array of integers, the"
            " numbers of this device's tokens' segments"
        )
    check_segments(query, key, segment_ids, most)


def masks(query: Any, key: Any, causal: bool, window: int | None, scale: float | None) -> Any:
    """The window, checked with `causal` and `scale`.

    Raises:
      TypeError, ValueError: for other values.
    """
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"causal={causal!r}: expected True or False")
    return check_masks(query, key, bool(causal), window, scale)


def layout(value: Any, tokens: int, devices: int) -> Layout:
    """The layout, which the number of tokens of a device suits.

    Raises:
      ValueError: for other values.
    """
    if value not in LAYOUTS:
        raise ValueError(f"layout={value!r}: expected {' or '.join(map(repr, LAYOUTS))}")
    if value == "zigzag" and tokens % 2:
        raise ValueError(
            f"layout='zigzag' with {tokens} tokens on a device: expected an even number, two chunks"
            f" of equal length; pad the sequence to a multiple of {2 * devices} tokens, or pass"
            " layout='contiguous'"
        )
    return cast(Layout, value)


def mesh_axes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Mesh axes in the order in which the mesh has them.

    Raises:
      ValueError: for another order, in which permutes do not count devices.
    """
    in_order = tuple(sorted(names, key=jax.sharding.get_abstract_mesh().axis_names.index))
    if names != in_order:
        raise ValueError(
            f"axis_name={names!r}: expected axes in the order of the mesh; shard the sequence over"
            f" {in_order}"
        )
    return names


def kernels(value: Any) -> tuple[str, ...] | None:
    """The names of requested kernels; None: none is requested.

    Raises:
      ValueError: for other values.
    """
    if value is None:
        return None
    names = (value,) if isinstance(value, str) else value
    is_named = isinstance(names, tuple | list) and bool(names)
    if not is_named or not all(isinstance(name, str) and name in KERNELS for name in names):
        raise ValueError(
            f"attention_implementation={value!r}: expected None (choose per shape), or one or"
            f" several of {', '.join(KERNELS)}"
        )
    return tuple(names)
