"""Forms of programs that differ from the ops in where they round, or seem to."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.reference import AXIS
from tests.rewrite.programs import Form, gathering, scattering

gather = functools.partial(lax.all_gather, axis_name=AXIS, axis=1, tiled=True)
scatter = functools.partial(lax.psum_scatter, axis_name=AXIS, scatter_dimension=1, tiled=True)


def _accumulated_in_float32(h, w):
    y = lax.dot_general(h, w, (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return scatter(y.astype(h.dtype))


def _summed_in_float32(h, w):
    y = lax.dot_general(h, w, (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return scatter(y).astype(h.dtype)


def _in_float32(x, w):
    """Multiplies widened arrays, and rounds the transposed product."""
    y = jnp.einsum("bsd,df->fbs", x.astype(jnp.float32), w.astype(jnp.float32) / 4)
    return jnp.transpose(y, (1, 2, 0)).astype(jnp.bfloat16)


def _in_float32_with_bias(x, w):
    return (x.astype(jnp.float32) @ w.astype(jnp.float32) + 1.0).astype(x.dtype)


def _float32_heads(x, w):
    """[b, s, d] times [d, h, k] to [b, h, s, k], accumulated in float32."""
    w = w.reshape(4, 3, 1)
    y = jnp.einsum("bsd,dhk->bhsk", gather(x), w, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def _difference(h, w):
    return scatter(h @ w - jnp.sin(h) @ jnp.cos(w))


def _exactly_scaled(h, w):
    return scatter(0.5 * (h @ w) - jnp.sin(h) @ w / 4 - h @ jnp.cos(w))


def _differently_scaled(h, w):
    return scatter(0.3 * (h @ w) - 0.7 * (jnp.sin(h) @ w))


def _added_in_float32(h, w):
    """Rounds once what `overlap` would round twice."""
    first, second = (
        jnp.dot(h, v, preferred_element_type=jnp.float32) for v in (w, (-w).astype(w.dtype) / 3)
    )
    return scatter((first + second).astype(h.dtype))


def _exactly_scaled_uses(x, w):
    """The gathered array, half of it and its negative are multiplied, and it is used whole."""
    whole = gather(x)
    return whole @ w + whole / 2 @ jnp.cos(w) + -(whole * 4) @ jnp.sin(w) + jnp.mean(jnp.sin(whole))


def _scaled_for_float16(x, w):
    """Without the factor, float16 could not hold the array."""
    whole, w = gather(x * 1e6), w.astype(jnp.float16)
    return sum((whole / 2**10).astype(jnp.float16) @ v for v in (w / 2**10, w / 2**9))


def _upcast(x, w):
    return gather(x.astype(jnp.bfloat16)).astype(jnp.float32) @ w


GATHERS = {
    "cast up": Form(gathering(_upcast), 0, "more would be communicated"),
    "scaled exactly": Form(gathering(_exactly_scaled_uses)),
    "scaled for float16": Form(gathering(_scaled_for_float16, rounds="float16")),
    "in float32": Form(gathering(lambda x, w: _in_float32(gather(x), w), dtype="bfloat16")),
    "in float32 with a bias": Form(
        gathering(lambda x, w: _in_float32_with_bias(gather(x), w), dtype="bfloat16"),
        0,
        "more would be communicated",
    ),
    "heads in float32": Form(gathering(_float32_heads, out_specs=P(None, AXIS), dtype="bfloat16")),
}
SCATTERS = {
    "accumulated in float32": Form(scattering(_accumulated_in_float32, dtype="bfloat16")),
    "summed in float32": Form(
        scattering(_summed_in_float32, dtype="bfloat16"),
        0,
        "multiplied in bfloat16 and summed in float32",
    ),
    "multiplied in float32": Form(
        scattering(lambda h, w: scatter(_in_float32(h, w)), dtype="bfloat16")
    ),
    "difference": Form(scattering(_difference)),
    "scaled exactly": Form(scattering(_exactly_scaled)),
    "scaled differently": Form(scattering(_differently_scaled), 0, "scaled or shaped differently"),
    "added in float32": Form(
        scattering(_added_in_float32, dtype="bfloat16"), 0, "rounded from float32 to bfloat16"
    ),
}
