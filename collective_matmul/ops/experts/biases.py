"""Biases of experts, which are added to the rows of grouped matmuls, and their gradients.

Legend: T tokens of a visit, k experts of a token, M = T k pairs in the order of a `Plan`, E experts
of this device, h the width of tokens, f hidden features, p the pairs' weights. With e the expert of
a row::

    G + b_gate[e], U + b_up[e]                [M, f]
    y = sum over a token's pairs of p (A w_down + b_down[e])

    db_gate = sum of DG, db_up = sum of DU    [E, f], over the rows of each expert
    db_down = sum of p DY                     [E, h]
    dp      = ... + DY · b_down[e]

Sums over the rows of an expert are products with a matrix of zeros and ones: unlike additions to
memory by index, they are in a fixed order on GPUs. Such a product is E / h of a weight gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul.operands.arithmetic import accumulator
from collective_matmul.ops.experts.routing import Plan


class ExpertBiases(NamedTuple):
    """The biases of this device's experts, each in any floating dtype, or None for none.

    Attributes:
      gate: [E, f].
      up: [E, f].
      down: [E, h]; zeros on all but one of the devices that divide hidden features.
    """

    gate: Any = None
    up: Any = None
    down: Any = None


def added_once(bias: jax.Array | None, axis_name: str | None) -> jax.Array | None:
    """The bias of down for this device: of devices that divide hidden features, the first has it.

    The sum over these devices then has it once, and so has its gradient.
    """
    if bias is None or axis_name is None:
        return bias
    return jnp.where(lax.axis_index(axis_name) == 0, bias, jnp.zeros_like(bias))


def add_bias(rows: jax.Array, bias: jax.Array | None, plan: Plan) -> jax.Array:
    """Sorted rows [M, N] plus the bias [E, N] of each row's expert, added in at least float32."""
    if bias is None:
        return rows
    wide = accumulator(rows.dtype)
    own = jnp.take(bias, plan.row_experts, axis=0, mode="clip").astype(wide)
    return (rows.astype(wide) + own).astype(rows.dtype)


def bias_products(dy: jax.Array, bias: jax.Array, plan: Plan) -> jax.Array:
    """The product of each token's dy [T, h] with the biases [E, h] of its experts: [T, k]."""
    wide = accumulator(dy.dtype)
    products = _product(dy.astype(wide), bias.astype(wide), 1, 1)  # [T, E]
    experts = jnp.where(plan.is_here, plan.token_experts, 0)
    return jnp.where(plan.is_here, jnp.take_along_axis(products, experts, axis=1), 0)


def bias_gradients(biases: ExpertBiases, dhidden: Any, dy: Any, plan: Plan) -> ExpertBiases:
    """The gradients of the biases that there are, in at least float32.

    Args:
      biases: which there are.
      dhidden: DG and DU, [M, f]; rows of no expert may have any value.
      dy: gradients of results [T, h].
      plan: the order of the pairs.
    """

    def of_rows(rows: jax.Array) -> jax.Array:
        used = lax.iota(jnp.int32, len(rows)) < plan.count
        rows = jnp.where(used[:, None], rows, jnp.zeros_like(rows))
        experts = jax.nn.one_hot(plan.row_experts, len(plan.sizes), dtype=rows.dtype)
        return _product(experts, rows, 0, 0)

    def of_tokens() -> jax.Array:
        wide = accumulator(dy.dtype)
        experts = jax.nn.one_hot(plan.token_experts, len(plan.sizes), dtype=wide)  # [T, k, E]
        weights = jnp.where(plan.is_here, plan.weights, jnp.zeros_like(plan.weights))
        weights = jnp.sum(experts * weights.astype(wide)[..., None], axis=1)
        return _product(weights, dy.astype(wide), 0, 0)

    return ExpertBiases(
        None if biases.gate is None else of_rows(dhidden.gate),
        None if biases.up is None else of_rows(dhidden.up),
        None if biases.down is None else of_tokens(),
    )


def _product(x: jax.Array, y: jax.Array, of_x: int, of_y: int) -> jax.Array:
    """Matrices, contracted over one dimension of each, in at least float32."""
    return lax.dot_general(
        x,
        y,
        (((of_x,), (of_y,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=accumulator(x.dtype),
    )
