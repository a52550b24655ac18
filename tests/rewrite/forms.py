"""Forms of programs that `overlap` rewrites, each with a similar one that it leaves alone."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from tests.reference import AXIS
from tests.rewrite import rounding_forms
from tests.rewrite.programs import Form, Program, gathering, scattering

gather = functools.partial(lax.all_gather, axis_name=AXIS, axis=1, tiled=True)
scatter = functools.partial(lax.psum_scatter, axis_name=AXIS, scatter_dimension=1, tiled=True)


def _untiled(x, w):
    return lax.all_gather(x, AXIS, axis=1).reshape(2, 4, 4) @ w


def _untiled_scatter(h, w):
    return lax.psum_scatter(h @ w, AXIS, scatter_dimension=1)


def _two_weights(x, w, v):
    whole = gather(x)
    return whole @ w, whole @ v


def _cast_twice(x, w, v):
    whole = gather(x)
    return whole.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), whole @ v


def _also_used_whole(x, w):
    whole = gather(x)
    return whole @ w + jnp.sum(jnp.sin(whole))


def _used_whole_by_the_weight(x, w):
    whole = gather(x)
    return whole @ (w * jnp.max(jnp.sin(whole) @ w))


def _times_itself(x, w):
    whole = gather(x)
    return jnp.tensordot(whole, whole, ((2,), (2,)))[0] @ w


def _weight_made_of_product(x, w, v):
    """Makes the second weight of the first product."""
    whole = gather(x)
    first = whole @ w
    return first, whole @ (v * jnp.mean(first))


def _scaled(h, w):
    return scatter((h @ w) * 0.5 / 3.0)


def _into_heads(x, w):
    """[b, s, d] times [d, h, k] to [b, h, s, k], as in attention."""
    return jnp.einsum("bsd,dhk->bhsk", gather(x), w.reshape(4, 3, 1))


def _out_of_heads(h, w):
    return scatter(jnp.einsum("bshk,hkd->bsd", h.reshape(2, 4, 3, 1), w.reshape(3, 1, 4)))


def _batched_scatter(h, w):
    return scatter(jnp.einsum("bsk,bkd->bsd", h, jnp.stack([w, w / 2])))


def _batched_gather(x, w):
    return jnp.einsum("bsd,bdf->bsf", gather(x), jnp.stack([w, w / 2]))


def _batched_and_used_whole(x, w):
    whole, ws = gather(x), jnp.stack([w, w / 2])
    return jnp.einsum("bsd,bdf->bsf", whole, ws) * jnp.mean(whole)


def _batch_dimension_gathered(x, w):
    """One matmul for each index of the gathered dimension, as in experts."""
    return jnp.einsum("bsd,sdf->bsf", gather(x), jnp.stack([w, w / 2, w / 3, w / 4]))


def _merged_rows(x, w):
    """Merges batch and sequence before the matmul, as many layers do."""
    return (gather(x).reshape(8, 4) @ w).reshape(2, 4, -1)


def _merged_rows_scatter(h, w):
    return scatter((h.reshape(8, 3) @ w).reshape(2, 4, 4))


def _merged_into_contraction(x, w):
    """Merges the gathered dimension into the contracted one, as its outer part."""
    return gather(x).reshape(2, 16) @ jnp.tile(w, (4, 1))


def _partly_merged_into_contraction(x, w):
    """Merges half of the gathered dimension into the contracted one."""
    return gather(x).reshape(4, 8) @ jnp.tile(w, (2, 1))


def _reshaped_across_columns(h, w):
    return lax.psum_scatter((h @ w).reshape(4, 8), AXIS, scatter_dimension=1, tiled=True)


def _bias_after(h, w):
    return scatter(h @ w) + jnp.arange(4, dtype=h.dtype).reshape(1, 1, 4)


def _bias_before(h, w):
    return scatter(h @ w + jnp.arange(4, dtype=h.dtype).reshape(1, 1, 4))


def _sum_of_two_matmuls(h, w):
    return scatter(h @ w + jnp.sin(h) @ jnp.cos(w))


def _product_used_twice(h, w):
    product = h @ w
    return scatter(product) + jnp.sum(product)


def _checkpoint_name(h, w):
    return scatter(checkpoint_name(h @ w, "partial"))


def _barrier_before(h, w):
    return scatter(lax.optimization_barrier(h @ w))


def _barrier_with_operand(h, w):
    return scatter(lax.optimization_barrier((h @ w, h))[0])


def _scaled_by_rows(h, w):
    return scatter((h @ w) * jnp.arange(1.0, 5.0).reshape(1, 4, 1))


def _activated(h, w):
    return scatter(jnp.tanh(h @ w))


def _barrier_with_weight(x, w):
    """Ties the weight to the gathered array, which then would wait for more than the gather."""
    whole, w = lax.optimization_barrier((gather(x), w))
    return whole @ w


def _barrier_and_name(x, w):
    return lax.optimization_barrier(checkpoint_name(gather(x), "whole")) @ w


def _all_reduced(h, w):
    return lax.psum(h @ w, AXIS)


def _all_reduced_batches(h, w):
    return lax.psum(jnp.einsum("bsk,bkd->bsd", h, jnp.stack([w, w])), AXIS)


def _all_reduced_scalar(h, w):
    return lax.psum(jnp.sum(h @ w), AXIS)


def _transposed(x, w):
    """Keeps x as [s, b, d] until it is multiplied."""
    return jnp.swapaxes(lax.all_gather(jnp.swapaxes(x, 0, 1), AXIS, axis=0, tiled=True), 0, 1) @ w


def _transposed_scatter(h, w):
    y = lax.psum_scatter(jnp.swapaxes(h @ w, 0, 1), AXIS, scatter_dimension=0, tiled=True)
    return jnp.swapaxes(y, 0, 1)


def _highest_precision(x, w):
    return jnp.matmul(gather(x), w, precision="highest")


def _contracted(x, w):
    """Contracts the gathered dimension, so the products of chunks are added."""
    return jnp.tensordot(w, gather(x), ((0,), (1,)))


def _contracted_and_used_whole(x, w):
    whole = gather(x)
    return jnp.tensordot(w, whole, ((0,), (1,))) + jnp.mean(whole)


def _weight_gradient(x, w):
    """Uses the gathered array for a weight gradient only, like a backward with saved products."""
    whole = gather(x)
    return jnp.tensordot(
        whole, jnp.ones((2, 4, 1), w.dtype) * w[0].reshape(1, 1, -1), ((0, 1), (0, 1))
    )


def _weight_gradient_of_merged_rows(x, w):
    rows = jnp.ones((8, 1), w.dtype) * w[:1]
    return jnp.tensordot(rows, gather(x).reshape(8, 4), ((0,), (0,)))


def _transposed_after_reshape(x, w):
    """Merges the gathered dimension with another before the transpose."""
    return jnp.tensordot(gather(x).reshape(8, 4).T, w, ((0,), (0,)))


TWO = {"out_specs": (P(None, None, AXIS),) * 2}
GATHERS = {
    "plain": Form(gathering(lambda x, w: gather(x) @ w)),
    "dimension 0": Form(
        Program(
            lambda x, w: lax.all_gather(x, AXIS, tiled=True) @ w,
            [(4, 3), (3, 6)],
            [P(AXIS), P(None, AXIS)],
            P(None, AXIS),
        )
    ),
    "untiled": Form(gathering(_untiled)),
    "several": Form(gathering(_two_weights, (4, 6), (4, 2), **TWO)),
    "several, one cast": Form(
        gathering(_cast_twice, (4, 6), (4, 2), **TWO), 0, "in another dtype or layout"
    ),
    "several, one after the other": Form(gathering(_weight_made_of_product, (4, 6), (4, 2), **TWO)),
    "kept": Form(gathering(_also_used_whole)),
    "needed before": Form(gathering(_used_whole_by_the_weight), 0, "its weight is made after"),
    "cast": Form(
        gathering(
            lambda x, w: gather(x).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), rounds="bfloat16"
        )
    ),
    "reshaped": Form(gathering(_merged_rows)),
    "reshaped into the contraction": Form(
        gathering(_merged_into_contraction, out_specs=P(None, AXIS))
    ),
    "reshaped partly into the contraction": Form(
        gathering(_partly_merged_into_contraction, out_specs=P(None, AXIS)),
        0,
        "contracts the gathered dimension",
    ),
    "transposed": Form(gathering(_transposed)),
    "transposed after a reshape": Form(
        gathering(_transposed_after_reshape, out_specs=P(None, AXIS)),
        0,
        "transpose mixes the gathered",
    ),
    "scaled": Form(gathering(lambda x, w: (gather(x) * 0.5) @ w)),
    "shifted": Form(
        gathering(lambda x, w: (gather(x) + 0.5) @ w), 0, "add uses the gathered array"
    ),
    "scaled by an array": Form(
        gathering(lambda x, w: (gather(x) * w[:, :1].reshape(1, 1, 4)) @ w),
        0,
        "mul uses the gathered array",
    ),
    "barrier and name": Form(gathering(_barrier_and_name)),
    "barrier of two": Form(
        gathering(_barrier_with_weight), 0, "optimization_barrier uses the gathered array"
    ),
    "heads": Form(gathering(_into_heads, out_specs=P(None, AXIS))),
    "by itself": Form(gathering(_times_itself), 0, "multiplied by itself"),
    "contracted": Form(gathering(_contracted, out_specs=P(AXIS))),
    "contracted, and kept": Form(
        gathering(_contracted_and_used_whole, out_specs=P(AXIS)), 0, "dimension and reduce_sum uses"
    ),
    "weight gradient": Form(gathering(_weight_gradient, out_specs=P(None, AXIS))),
    "weight gradient of joined rows": Form(
        gathering(_weight_gradient_of_merged_rows, out_specs=P(AXIS))
    ),
    "last dimension": Form(
        Program(
            lambda x, w: lax.all_gather(x, AXIS, axis=2, tiled=True) @ w,
            [(2, 3, 4), (4, 6)],
            [P(None, None, AXIS), P(None, AXIS)],
            P(None, None, AXIS),
        )
    ),
    "batch dimensions": Form(gathering(_batched_gather)),
    "batch dimensions, and kept": Form(gathering(_batched_and_used_whole), 0, "batch dimensions"),
    "batch dimension gathered": Form(gathering(_batch_dimension_gathered)),
    "precise": Form(gathering(_highest_precision), 0, "precision"),
    "unused": Form(gathering(lambda x, w: gather(x), out_specs=P(AXIS)), 0, "is a result"),
}
SCATTERS = {
    "plain": Form(scattering(lambda h, w: scatter(h @ w))),
    "untiled": Form(
        Program(
            _untiled_scatter,
            [(2, 2, 6), (6, 4)],
            [P(None, None, AXIS), P(AXIS)],
            P((AXIS,)),
        )
    ),
    "scaled": Form(scattering(_scaled)),
    "scaled in float16": Form(scattering(_scaled, dtype="float16"), 0, "scaled in float16"),
    "bias after": Form(scattering(_bias_after)),
    "bias before": Form(scattering(_bias_before), 0, "something is added"),
    "of several": Form(scattering(_sum_of_two_matmuls)),
    "subtracted": Form(scattering(lambda h, w: scatter(1.0 - h @ w)), 0, "something is added"),
    "reshaped": Form(scattering(_merged_rows_scatter)),
    "reshaped across columns": Form(
        scattering(_reshaped_across_columns, P(None, AXIS)), 0, "mixes the scattered dimension"
    ),
    "transposed": Form(scattering(_transposed_scatter)),
    "heads": Form(scattering(_out_of_heads)),
    "batch dimensions": Form(scattering(_batched_scatter)),
    "named": Form(scattering(_checkpoint_name)),
    "barrier": Form(scattering(_barrier_before)),
    "barrier of two": Form(scattering(_barrier_with_operand), 0, "comes from optimization_barrier"),
    "scaled by rows": Form(scattering(_scaled_by_rows), 0, "comes from mul, not"),
    "activated": Form(scattering(_activated), 0, "comes from tanh"),
    "used twice": Form(scattering(_product_used_twice), 0, "also used elsewhere"),
    "columns": Form(
        scattering(
            lambda h, w: lax.psum_scatter(h @ w, AXIS, scatter_dimension=2, tiled=True),
            P(None, None, AXIS),
        )
    ),
}
SUMS = {
    "psum": Form(scattering(_all_reduced, P())),
    "psum with batch dimensions": Form(
        scattering(_all_reduced_batches, P()), 0, "batch dimensions"
    ),
    "psum of a scalar": Form(scattering(_all_reduced_scalar, P()), 0, "comes from reduce_sum"),
    "psum with a bias after": Form(scattering(lambda h, w: lax.psum(h @ w, AXIS) + 1.0, P())),
    "psum of a sum": Form(scattering(lambda h, w: lax.psum(h @ w + jnp.sin(h) @ w, AXIS), P())),
    "psum of a difference": Form(
        scattering(lambda h, w: lax.psum(h @ w / 2 - jnp.sin(h) @ w - jnp.cos(h) @ w, AXIS), P())
    ),
}
FORMS: dict[str, Form] = {
    **{f"gather: {name}": form for name, form in (GATHERS | rounding_forms.GATHERS).items()},
    **{f"scatter: {name}": form for name, form in (SCATTERS | rounding_forms.SCATTERS).items()},
    **SUMS,
}
