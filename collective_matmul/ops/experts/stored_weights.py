"""`ExpertWeights`: the weights of experts as they are stored, and what a pass has of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from collective_matmul.operands.format import Format
from collective_matmul.operands.grouped import as_array, matrix_stacks
from collective_matmul.operands.quantized import Quantized, is_trained


class ExpertWeights(NamedTuple):
    """The weights of this device's experts, arrays or `Quantized`.

    Attributes:
      gate: [E, h, f].
      up: [E, h, f].
      down: [E, f, h].
    """

    gate: Any
    up: Any
    down: Any


def stacks_of_pass(
    stored: Format, ws: Sequence[Any], *, transposed: bool = False
) -> tuple[Any, ...]:
    """Whole weights [E, K_i, N] in a format; as `matrix_stacks`.

    Args:
      stored: the format.
      ws: operands of one sum of products: arrays, or `Quantized`, whose matrices these are. A
        transpose that is missing is made of the numbers that the matrix stands for.
      transposed: whether the results are [E, N, K_i].
    """
    if isinstance(ws[0], Quantized):
        made = tuple(w.backward if transposed else w.forward for w in ws)
        if made[0] is not None:
            return made
        ws = [as_array(w.forward, w.forward.product_dtype) for w in ws]
    return matrix_stacks(stored, ws, transposed=transposed)


def are_trained(ws: ExpertWeights) -> bool:
    """Whether the weights have gradients."""
    return is_trained(ws.gate)


def read_by_pass(ws: ExpertWeights, *, forward: bool, backward: bool) -> ExpertWeights:
    """The weights that a pass reads: arrays as they are, and only the matrices that it needs.

    Args:
      ws: the weights.
      forward: whether the pass computes hidden products, and then the results in a forward pass.
      backward: whether it is a backward pass.
    """

    def read(w: Any, into: bool) -> Any:
        if not isinstance(w, Quantized):
            return w
        kept = into or (backward and w.backward is None)
        return dataclasses.replace(
            w,
            array=None,
            forward=w.forward if kept else None,
            backward=w.backward if backward else None,
        )

    of_down = forward and not backward
    return ExpertWeights(read(ws.gate, forward), read(ws.up, forward), read(ws.down, of_down))
