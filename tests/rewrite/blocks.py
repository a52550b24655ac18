"""Transformer layers written with `shard_map` and JAX's own collectives, without this library.

x [B, S, D] is sharded along S between blocks, and weights along heads, features or their rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.reference import AXIS
from tests.rewrite.programs import Program

BATCH, SEQUENCE, MODEL, HEADS, HEAD, FEATURES = 2, 4, 8, 4, 2, 12
gather = functools.partial(lax.all_gather, axis_name=AXIS, axis=1, tiled=True)
scatter = functools.partial(lax.psum_scatter, axis_name=AXIS, scatter_dimension=1, tiled=True)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale.reshape(1, 1, -1)


def rotary(x: jax.Array) -> jax.Array:
    """Rotates pairs of features of [B, S, H, K] by their position."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1], dtype=jnp.float32).reshape(1, -1, 1, 1)
    angle = angle / 10 ** jnp.arange(half, dtype=jnp.float32).reshape(1, 1, 1, -1)
    sine, cosine = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / math.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool)).reshape(1, 1, *scores.shape[-2:])
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9).astype(jnp.float32)).astype(q.dtype)
    return jnp.einsum("bhst,bthk->bshk", weights, v)


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """A feed-forward of two matmuls, sharded as in Megatron-LM."""
    return scatter(jax.nn.gelu(gather(x) @ up) @ down)


def attention(x, wq, wk, wv, wo) -> jax.Array:
    """Causal attention; wq, wk and wv are [D, H, K], and wo is [H, K, D]."""
    whole = gather(x)
    q, k, v = (jnp.einsum("bsd,dhk->bshk", whole, w) for w in (wq, wk, wv))
    return scatter(jnp.einsum("bshk,hkd->bsd", attend(rotary(q), rotary(k), v), wo))


def gated(x, gate, up, down) -> jax.Array:
    whole = gather(x)
    return scatter((jax.nn.silu(whole @ gate) * (whole @ up)) @ down)


def llama(x, scales, wq, wk, wv, wo, gate, up, down) -> jax.Array:
    x = x + attention(rms_norm(x, scales[0]), wq, wk, wv, wo)
    return x + gated(rms_norm(x, scales[1]), gate, up, down)


def llama_stack(x, *weights) -> jax.Array:
    """Two blocks that the backward recomputes."""
    return lax.scan(
        lambda x, layer: (jax.checkpoint(llama)(x, *layer), None),
        x,
        jax.tree.map(lambda w: jnp.stack([w, w / 2]), weights),
    )[0]


def _program(body: Callable, shapes: list, specs: list, dtype: str) -> Program:
    x = P(None, AXIS)
    return Program(body, [(BATCH, SEQUENCE, MODEL), *shapes], [x, *specs], x, dtype)


def programs(dtype: str = "float32") -> dict[str, tuple[Program, int]]:
    """Each block, and the number of gathers and scatters in its forward."""
    columns, rows = P(None, AXIS), P(AXIS)
    heads, output = (MODEL, HEADS, HEAD), (HEADS, HEAD, MODEL)
    wide, narrow = (MODEL, FEATURES), (FEATURES, MODEL)
    attention_weights = [heads, heads, heads, output], [columns] * 3 + [rows]
    gated_weights = [wide, wide, narrow], [columns, columns, rows]
    llama_weights = (
        [(2, MODEL), *attention_weights[0], *gated_weights[0]],
        [P(), *attention_weights[1], *gated_weights[1]],
    )
    return {
        "mlp": (_program(mlp, [wide, narrow], [columns, rows], dtype), 2),
        "attention": (_program(attention, *attention_weights, dtype), 2),
        "llama": (_program(llama, *llama_weights, dtype), 4),
        "llama stack": (_program(llama_stack, *llama_weights, dtype), 4),
    }
