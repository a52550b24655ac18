"""The arguments of a measured program, and their quantization for a site in 8 bits.

Operands in 8 bits are those that the ops give to a backend: see `collective_matmul.fp8_gradients`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from collective_matmul.fp8 import ScaledMatrix, quantize_rows
from collective_matmul.quantized_weights import copies_of
from collective_matmul.site import Site


class StackOperands(NamedTuple):
    """Arguments of a program.

    Attributes:
      xs: x of every pair of operands; one for all pairs of an all-gather. Messages in 8 bits.
      aside: the co-gathered array; or, for a site that keeps the gathered array, x of the weight
        gradient. A message if the weight gradient is in 8 bits.
      weights: w of every pair, for every repetition. Scaled matrices in 8 bits.
      unquantized: what xs are messages of, if the weight gradient is not in 8 bits.
    """

    xs: Sequence[Any]
    aside: Any
    weights: Sequence[Sequence[Any]]
    unquantized: Sequence[Any] = ()


def quantized(site: Site, operands: StackOperands) -> StackOperands:
    """The operands of a flat site in 8 bits, from those in the site's dtype.

    Call it inside `jax.shard_map`.
    """
    recipe, backward = site.recipe, site.has_weight_gradient
    assert recipe is not None
    aside, unquantized = operands.aside, ()
    if backward and recipe.weight_gradient_in_fp8:
        (aside,) = quantize_rows([aside], recipe)
    elif backward:
        unquantized = operands.xs
    weights = jax.jit(functools.partial(_scaled_matrices, site))  # Traced once for all repetitions.
    return StackOperands(
        quantize_rows(operands.xs, recipe, recipe.gradient_dtype if backward else recipe.dtype),
        aside,
        [weights(ws) for ws in operands.weights],
        unquantized,
    )


def _scaled_matrices(site: Site, ws: Sequence[jax.Array]) -> list[ScaledMatrix]:
    """Weights of one repetition. Those of one sum of products have their scales in common."""
    recipe, transposed = site.recipe, site.has_weight_gradient
    assert recipe is not None
    sums = [[w] for w in ws] if site.op == "all_gather_matmul" else [ws]
    return [w for terms in sums for w in copies_of(terms, recipe, None, transposed=transposed)]
