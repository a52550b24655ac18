"""`expert_mlp`: a mixture of experts whose communication is hidden under its products.

A device has some of the experts. Every device's tokens visit all devices: while the experts of a
device work on the tokens of one, those of the next travel, and results go home. See
`collective_matmul.ops.experts.work` for the derivation of gradients.

Bytes that each of D devices sends, for T tokens of h features of b bytes: (D - 1) T h b for the
tokens and as many for the results, whatever k is; 1.5 times that in the backward pass. The numbers
and weights of experts are 8 (D - 1) T k bytes, or twice that for tokens of float64. With `fp8`,
tokens travel in 8 bits with their scales; in a backward pass tokens and gradients of results do if
weight gradients can be computed from them, and else they travel as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from collective_matmul.dispatch.branches import divergent_axes
from collective_matmul.operands.arithmetic import accumulator
from collective_matmul.operands.quantized import Quantized
from collective_matmul.operands.varying import pvary_all
from collective_matmul.ops.experts import checks
from collective_matmul.ops.experts.backends import BACKENDS
from collective_matmul.ops.experts.biases import ExpertBiases, added_once
from collective_matmul.ops.experts.gradients import (
    ExpertCall,
    devices_of,
    routed_experts,
)
from collective_matmul.ops.experts.grouped.backends import GROUPED_BACKENDS
from collective_matmul.ops.experts.prequantize_experts import checked_weights
from collective_matmul.ops.experts.stored_weights import ExpertWeights
from collective_matmul.ops.matmul.api import CHECKPOINT_NAME
from collective_matmul.ops.matmul.checks import RecipeName
from collective_matmul.source_location import calling_location


def expert_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    w_gate: jax.Array | Quantized,
    w_up: jax.Array | Quantized,
    w_down: jax.Array | Quantized,
    axis_name: str | tuple[str, ...],
    *,
    hidden_axis_name: str | None = None,
    activation: str = "silu",
    recompute_hidden: bool = False,
    fp8: RecipeName | None = None,
    weight_axis_name: str | None = None,
    weight_dimension: int = 1,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    implementation: str | Sequence[str] | None = None,
    grouped_implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """Applies to each token the experts that a router chose for it, and adds the weighted results.

    Call it inside `jax.shard_map`. An expert is ``(σ(x w_gate) * (x w_up)) w_down``, with a bias
    after each product if there are any. With E experts on the D devices of `axis_name`, expert e is
    at index ``e // (E/D)``. No token is dropped, whatever the router does, and shapes are static: a
    device has room for all pairs of a token and an expert.

    Sums over devices are added at home, in a fixed order and in at least float32, from terms in x's
    dtype.
    Weight gradients are added in the weights' dtype, one device's tokens after the other's.

    Args:
      x: [T, h], this device's tokens. Devices along all axes of the op have different tokens.
      expert_ids: whole numbers [T, k]: each token's experts, from 0 to E - 1. Other numbers stand
        for no expert. An expert that a token has twice counts twice.
      expert_weights: [T, k], computed with in float32, or in float64 for an x of float64.
      w_gate: [E/D, h, f], of this device's experts, in x's dtype; or all three weights are results
        of `prequantize_experts`, with the same `fp8`, `weight_axis_name` and `weight_dimension`.
      w_up: [E/D, h, f].
      w_down: [E/D, f, h].
      axis_name: the mesh axis that experts are divided over, or several in the order in which
        experts are numbered, or ``()``.
      hidden_axis_name: a mesh axis that divides f, the hidden features, or None. Its devices
        exchange tokens too.
      activation: σ: "silu", "gelu" (by tanh) or "relu". Or "gpt_oss", whose gate and up are clamped
        and not multiplied as they are: ``g sigmoid(1.702 g) (u + 1)`` with g at most 7, u from -7
        to 7.
      recompute_hidden: whether the backward pass computes ``x w_gate`` and ``x w_up`` again. Else
        they are kept, with the checkpoint name `HIDDEN_CHECKPOINT_NAME`: 2 D T k f numbers.
      fp8: None, or the recipe by which operands are quantized, or the name of a registered format.
        Each token and each expert's matrix has scales of its own; x is not float64. Arrays of
        weights are quantized after they are gathered, in each pass; those that were quantized
        before travel in 8 bits.
      weight_axis_name: a further mesh axis that shards the weights, as in fully sharded data
        parallelism: the op takes shards of any dtype, and gathers them in x's. None: they are
        whole.
      weight_dimension: the dimension of each weight that `weight_axis_name` shards.
      b_gate: [E/D, f], the biases of gate, of any floating dtype, or None. They are added in at
        least float32, and so are their gradients. `weight_axis_name` does not shard biases.
      b_up: [E/D, f], likewise.
      b_down: [E/D, h], likewise; the same on all devices of `hidden_axis_name`.
      implementation: None chooses per shape; or the name of a backend, or several, of which the
        first that can is used; see `collective_matmul.ops.experts.backends`.
      grouped_implementation: likewise, what multiplies the rows of each expert; see
        `collective_matmul.ops.experts.grouped.backends`.

    Returns:
      [T, h], in x's dtype.

    Raises:
      ValueError, TypeError: for arguments that do not fit, before anything is compiled.
      NameError: if an axis is not one of an enclosing `shard_map`.
    """
    names = checks.axis_names(axis_name)
    hidden_axis = checks.other_axis(hidden_axis_name, "hidden_axis_name", names)
    used = names if hidden_axis is None else (*names, hidden_axis)
    weight_axis = checks.other_axis(weight_axis_name, "weight_axis_name", used)
    checks.routing(x, expert_ids, expert_weights)
    dimension, stored = checks.weight_dimension(weight_dimension), checks.fp8(fp8, x)
    ws = checked_weights(ExpertWeights(w_gate, w_up, w_down), stored, weight_axis, dimension, x)
    biases = ExpertBiases(b_gate, b_up, b_down)
    call = ExpertCall(
        axis_names=names,
        all_axes=checks.in_mesh_order(used),
        experts=_local_experts(x, ws, biases, weight_axis, dimension) * devices_of(names),
        activation=checks.activation(activation),
        recompute_hidden=checks.recompute_hidden(recompute_hidden),
        format=stored,
        weight_axis_name=weight_axis,
        weight_dimension=dimension,
        implementation=BACKENDS.requested(implementation),
        grouped_implementation=GROUPED_BACKENDS.requested(grouped_implementation),
        divergent_axes=divergent_axes(*used),
        source=calling_location(),
    )
    if not x.size:
        return jnp.zeros_like(x)
    axes = used if weight_axis is None else (*used, weight_axis)
    weights, ids = expert_weights.astype(accumulator(x.dtype)), _within(expert_ids, call.experts)
    x, weights, ws, biases, ids = pvary_all(axes, (x, weights, ws, biases, ids))
    biases = biases._replace(down=added_once(biases.down, hidden_axis))
    return checkpoint_name(_routed(x, weights, ws, biases, ids, call), CHECKPOINT_NAME)


def _local_experts(
    x: jax.Array, ws: ExpertWeights, biases: ExpertBiases, weight_axis: str | None, dimension: int
) -> int:
    """The number of this device's experts, whose weights and biases are checked."""
    checks.arrays(**{f"w_{n}": w for n, w in ws._asdict().items() if not isinstance(w, Quantized)})
    shards = 1 if weight_axis is None else devices_of((weight_axis,))
    checks.weights(x, ws, shards, dimension, sharded=weight_axis is not None)
    experts, _, hidden = (
        size * (shards if place == dimension else 1) for place, size in enumerate(ws.gate.shape)
    )
    checks.biases(biases, (experts, x.shape[1], hidden))
    return experts


def _routed(
    x: jax.Array,
    weights: jax.Array,
    ws: ExpertWeights,
    biases: ExpertBiases,
    ids: jax.Array,
    call: ExpertCall,
) -> jax.Array:
    """`routed_experts`, with a helpful error under `jax.vmap`."""
    try:
        return routed_experts(x, weights, ws, biases, ids, call)
    except NotImplementedError as error:
        if "ragged_dot vmap" not in str(error):
            raise
        raise NotImplementedError(
            "jax.vmap of expert_mlp with grouped_implementation='xla': jax.lax.ragged_dot cannot be"
            " mapped over one operand alone; use jax.lax.map, or join the mapped dimension and the"
            " tokens"
        ) from error


def _within(ids: jax.Array, experts: int) -> jax.Array:
    """The numbers in int32, -1 for those of no expert, so that none wraps around."""
    is_one = (ids >= 0) & (ids < experts)
    return jnp.where(is_one, ids, 0).astype(jnp.int32) - jnp.where(is_one, 0, 1).astype(jnp.int32)
