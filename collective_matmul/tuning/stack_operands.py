"""The arguments of a measured program, in the format of a site.

They are those that the ops give to a backend: see `collective_matmul.gradients`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from collective_matmul.operands.multiply import contracted
from collective_matmul.site import Site


class StackOperands(NamedTuple):
    """Arguments of a program.

    Attributes:
      xs: x of every pair of operands; one for all pairs of an all-gather. Rows in the format.
      aside: the co-gathered rows; or, for a site that keeps what it gathered, x of the weight
        gradient. Rows in the format if it packs gradients.
      weights: w of every pair, for every repetition. Matrices in the format.
    """

    xs: Sequence[Any]
    aside: Any
    weights: Sequence[Sequence[Any]]


def in_format(site: Site, operands: StackOperands) -> StackOperands:
    """The operands of a flat site in its format, from arrays. Call it inside `jax.shard_map`."""
    stored, backward = site.format, site.has_weight_gradient
    aside = operands.aside
    if backward:
        (rows,) = stored.rows([aside])
        aside = contracted(rows)
    weights = jax.jit(functools.partial(_matrices, site))  # Traced once for all repetitions.
    rows = stored.rows(operands.xs, of_gradient=backward)
    return StackOperands(rows, aside, [weights(ws) for ws in operands.weights])


def _matrices(site: Site, ws: Sequence[jax.Array]) -> list[Any]:
    """Weights of one repetition, converted together if they are those of one sum of products."""
    transposed = site.has_weight_gradient
    sums = [[w] for w in ws] if site.op == "all_gather_matmul" else [ws]
    return [w for terms in sums for w in site.format.matrices(terms, transposed=transposed)]
