"""The collective matmuls, with checked arguments and derived gradients.

Call them inside `jax.shard_map` on per-device arrays. D is the size of `axis_name`; shapes are
local unless noted otherwise. The operands share one dtype (float32, bfloat16 or float16). The
result and everything communicated have that dtype too; each matmul accumulates in float32.

Mesh axes that stay automatic or explicit inside the `shard_map` may shard any dimension. Over
explicit axes, a result is sharded as x's rows and w's columns.

The backward pass of each op is the other op, so that gradients hide their communication too. A
gathered array is not stored between the passes: the backward pass gathers it again, in the loop
that computes the other gradient. The weight gradient is then one undivided matmul.

The rings need all devices of the program: a permute blocks until every device reaches it, also
those of other groups along further mesh axes. XLA's collectives, "one_shot" and "fused" need the
devices of the group only. Inside `jax.lax.cond`, `switch` or `while_loop`, on a mesh with further
manual axes, the predicate may differ between groups, and a ring would wait for ever. There, rings
are neither chosen nor taken from a sequence of names. Naming a single ring asserts that all devices
take the same branch and the same number of steps; a warning says so once.

With `weight_axis_name`, a second mesh axis of size F shards the weights too, as in fully sharded
data parallelism. Along that axis devices have different x. An op then takes this device's shard,
[K/F, *N] or [K, N_0/F, ...], of each weight that it needs. It casts the shard to x's dtype, gathers
it while it multiplies, and keeps only the shard for the backward pass, which gathers again::

    W  [K, *N]   = all_gather(w.astype(x.dtype))    over weight_axis_name
    dw [K/F, *N] = reduce_scatter(dW)               over weight_axis_name, in w's dtype

So float32 shards of bfloat16 matmuls have gradients that are summed in float32: the terms are the
rounded results of matmuls, which travel in x's dtype in rings, and in w's with "xla".

With `fp8`, operands are quantized to 8 bits by a recipe of `collective_matmul.operands.recipes`:
"tensorwise", "rowwise" or "blockwise"; or they are stored in a format that the program registered
by `collective_matmul.operands.format.register_format`. What is gathered travels in 8 bits, with its
scales. What is summed between devices, and results, keep x's dtype, and so does a weight gradient
unless the recipe is "tensorwise". Shards of weights are quantized, with the scales of the whole
weights, and then gathered by XLA, not in the op's own loop. A weight or its shard may be a
`Quantized`, which `prequantize` made before: the op then multiplies with its matrices, and the
gradient is that of its array. Without an array it is frozen, and has none.

Results have the checkpoint name `CHECKPOINT_NAME`. With the policy
`jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME)`, `jax.checkpoint` saves them
instead of communicating again. Beside it, `SCALE_CHECKPOINT_NAME` saves the one scale of each x
with `fp8="tensorwise"`, a number: the backward then quantizes x again without a search for its
largest magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.operands.quantized import Quantized
from collective_matmul.operands.sharded import WeightShards
from collective_matmul.operands.varying import pvary_all
from collective_matmul.ops.matmul import checks, gradients
from collective_matmul.ops.matmul.call import call_here
from collective_matmul.ops.matmul.checks import Implementation, RecipeName
from collective_matmul.ops.matmul.gradients import gather_matmul, matmul_scatter
from collective_matmul.ops.matmul.prequantize import checked_weights, operands_of

#: Name of the results of the ops, for policies of `jax.checkpoint`.
CHECKPOINT_NAME = "collective_matmul"


@overload
def all_gather_matmul(
    x: jax.Array,
    w: jax.Array | Quantized,
    axis_name: str,
    *,
    gather_dimension: int = 0,
    weight_axis_name: str | None = None,
    weight_dimension: int = 0,
    fp8: RecipeName | None = None,
    implementation: Implementation = None,
) -> jax.Array: ...
@overload
def all_gather_matmul(
    x: jax.Array,
    w: Sequence[jax.Array | Quantized],
    axis_name: str,
    *,
    gather_dimension: int = 0,
    weight_axis_name: str | None = None,
    weight_dimension: int = 0,
    fp8: RecipeName | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, ...]: ...
def all_gather_matmul(
    x,
    w,
    axis_name,
    *,
    gather_dimension=0,
    weight_axis_name=None,
    weight_dimension=0,
    fp8=None,
    implementation=None,
):
    """Gathers x along one dimension and multiplies it by w: ``all_gather(x) @ w``.

    Backward, with X the gathered x, [..., D*m, ..., K]::

        y  [..., D*m, ..., N] = X w
        dx [..., m, ..., K]   = reduce_scatter(dy wᵀ)    x is co-gathered in the same loop
        X                     = all_gather(x)            and returned whole
        dw [K, N]             = Xᵀ dy                    one matmul, contracted over all rows

    Several weights share one gather; their dx are summed, reduced and scattered once.

    Args:
      x: [..., m, ..., K], this device's shard along `gather_dimension`.
      w: [K, *N], or a sequence of such; or their shards over `weight_axis_name`.
      axis_name: the mesh axis to gather over.
      gather_dimension: the dimension of x that is sharded; any but the last.
      weight_axis_name: a second mesh axis, which shards the weights, as described for
        `collective_matmul.ops.matmul.api`. None: they are whole.
      weight_dimension: the dimension of every w that `weight_axis_name` shards, 0 or 1.
      fp8: None, or the recipe by which operands are quantized, or the name of a registered format;
        see `collective_matmul.ops.matmul.api`.
      implementation: None chooses per shape; or the name of a backend, or several, of which the
        first that can is used; see `collective_matmul.ops.matmul.backends`.

    Returns:
      [..., D*m, ..., *N], or a tuple of such, one for each weight.

    Raises:
      ValueError, TypeError: for arguments that do not fit, before anything is compiled.
      NameError: if `axis_name` is not an axis of an enclosing `shard_map`.
    """
    devices = checks.axis_size(axis_name)
    requested, recipe = checks.implementation(implementation), checks.fp8(fp8)
    shards = checks.weight_shards(weight_axis_name, weight_dimension, axis_name)
    ws = tuple(w) if isinstance(w, Sequence) else (w,)
    ws = checked_weights(ws, recipe, shards, x)
    checks.operands(x, ws, shards, recipe)
    dimension = checks.dimension("gather_dimension", gather_dimension, x)
    x, matrices = _varying(axis_name, shards, x, operands_of(ws, recipe, shards))
    if x.size:
        ys, _ = gather_matmul(x, matrices, call_here(axis_name, dimension, requested))
    else:
        rows = x.shape[dimension] * devices
        ys = [_product_of_nothing(x, matrix, {dimension: rows}) for matrix in matrices]
    ys = tuple(named(split_columns(y, weight, shards)) for y, weight in zip(ys, ws, strict=True))
    return ys if isinstance(w, Sequence) else ys[0]


def matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array | Quantized,
    axis_name: str,
    *,
    scatter_dimension: int = 0,
    mean: bool = False,
    weight_axis_name: str | None = None,
    weight_dimension: int = 0,
    fp8: RecipeName | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Multiplies, sums over the axis and scatters: ``reduce_scatter(x @ w)``.

    Backward, with dY the gathered dy, [..., M, ..., N]::

        y  [..., M/D, ..., N] = reduce_scatter(x w)
        dx [..., M, ..., k]   = all_gather(dy) wᵀ        the loop keeps the gathered dy:
        dY                    = all_gather(dy)
        dw [k, N]             = xᵀ dY                    one matmul, contracted over all rows

    Args:
      x: [..., M, ..., k], with k this device's slice of the contraction.
      w: [k, *N].
      axis_name: the mesh axis to sum and scatter over.
      scatter_dimension: the dimension of x, and of the result, to scatter; any but the last.
      mean: average over the axis instead of summing: the sum is divided by D at the end, so in
        float16 it must not overflow before.
      weight_axis_name: a second mesh axis, which shards the weights, as described for
        `collective_matmul.ops.matmul.api`. None: they are whole.
      weight_dimension: the dimension of w that `weight_axis_name` shards, 0 or 1.
      fp8: None, or the recipe by which operands are quantized, or the name of a registered format;
        see `collective_matmul.ops.matmul.api`.
      implementation: None chooses per shape; or the name of a backend, or several, of which the
        first that can is used; see `collective_matmul.ops.matmul.backends`.

    Returns:
      [..., M/D, ..., *N], this device's shard along `scatter_dimension`.

    Raises:
      ValueError, TypeError: for arguments that do not fit, before anything is compiled; among them
        a dimension that the axis does not divide.
      NameError: if `axis_name` is not an axis of an enclosing `shard_map`.
    """
    devices = checks.axis_size(axis_name)
    requested, recipe = checks.implementation(implementation), checks.fp8(fp8)
    shards = checks.weight_shards(weight_axis_name, weight_dimension, axis_name)
    (w,) = checked_weights((w,), recipe, shards, x)
    checks.operands(x, (w,), shards, recipe)
    dimension = checks.dimension("scatter_dimension", scatter_dimension, x)
    checks.divisible("scatter_dimension", dimension, x, axis_name)
    x, (matrix,) = _varying(axis_name, shards, x, operands_of((w,), recipe, shards))
    if x.size:
        y = matmul_scatter((x,), (matrix,), call_here(axis_name, dimension, requested))
    else:
        y = _product_of_nothing(x, matrix, {dimension: x.shape[dimension] // devices})
    return named(split_columns(y / devices if mean else y, w, shards))


def matmul_all_reduce(
    x: jax.Array,
    w: jax.Array | Quantized,
    axis_name: str,
    *,
    weight_axis_name: str | None = None,
    weight_dimension: int = 0,
    fp8: RecipeName | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Multiplies and sums over the axis: ``psum(x @ w)``.

    Backward: every device has the whole dy, so neither gradient communicates::

        y  [..., N] = psum(x w)
        dx [..., k] = dy wᵀ
        dw [k, N]   = xᵀ dy

    Where `shard_map` runs with ``check_vma=False``, JAX's convention is that cotangents of one
    replicated value are summed over its copies, as for `lax.psum`; dy is summed first.

    Args:
      x: [..., k], with k this device's slice of the contraction.
      w: [k, *N].
      axis_name: the mesh axis to sum over.
      weight_axis_name: a second mesh axis, which shards the weights, as described for
        `collective_matmul.ops.matmul.api`. None: they are whole.
      weight_dimension: the dimension of w that `weight_axis_name` shards, 0 or 1.
      fp8: None, or the recipe by which operands are quantized, or the name of a registered format;
        see `collective_matmul.ops.matmul.api`.
      implementation: None chooses per shape; or the name of a backend, or several, of which the
        first that can is used; see `collective_matmul.ops.matmul.backends`.

    Returns:
      [..., *N], the same on every device of the axis.

    Raises:
      ValueError, TypeError: for arguments that do not fit, before anything is compiled.
      NameError: if `axis_name` is not an axis of an enclosing `shard_map`.
    """
    checks.axis_size(axis_name)
    requested, recipe = checks.implementation(implementation), checks.fp8(fp8)
    shards = checks.weight_shards(weight_axis_name, weight_dimension, axis_name)
    (w,) = checked_weights((w,), recipe, shards, x)
    checks.operands(x, (w,), shards, recipe)
    x, (matrix,) = _varying(axis_name, shards, x, operands_of((w,), recipe, shards))
    if x.size:
        y = gradients.matmul_all_reduce((x,), (matrix,), call_here(axis_name, None, requested))
    else:
        y = _product_of_nothing(x, matrix, {}, summed_over=axis_name)
    return named(split_columns(y, w, shards))


def _varying(axis_name: str, shards: WeightShards | None, *operands: Any) -> Any:
    """The operands, typed as varying over all axes of the op; see `pvary_all`."""
    operands = pvary_all(axis_name, operands)
    return operands if shards is None else pvary_all(shards.axis_name, operands)


def _product_of_nothing(
    x: jax.Array, w: Any, sizes: dict[int, int], summed_over: str | None = None
) -> jax.Array:
    """The product of an x without elements, which XLA can neither gather nor sum over devices.

    Args:
      x: [..., K], with K or another size 0.
      w: [K, N], in any form.
      sizes: the sizes of dimensions of the result that differ from x's.
      summed_over: an axis over which the result does not vary.
    """
    shape = [sizes.get(i, size) for i, size in enumerate((*x.shape[:-1], w.shape[1]))]
    zeros = jnp.zeros(shape, x.dtype)
    return vary_over(zeros, varying_axes(x) - {summed_over})


def split_columns(y: jax.Array, w: Any, shards: WeightShards | None) -> jax.Array:
    """[..., N] -> [..., *N], with w [K, *N], or a shard of it."""
    return y.reshape(*y.shape[:-1], *_features(w, shards))


def _features(w: Any, shards: WeightShards | None) -> tuple[int, ...]:
    """The sizes *N of a weight [K, *N], of which w may be a shard."""
    first, *others = w.shape[1:]
    if shards is not None and shards.dimension == 1:
        first *= shards.axis_size
    return first, *others


def named(y: jax.Array) -> jax.Array:
    """The result of an op, with its name for policies of `jax.checkpoint`."""
    return checkpoint_name(y, CHECKPOINT_NAME)
