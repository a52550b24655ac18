"""Programs over Explicit mesh axes, as their authors write them: no `shard_map`, none of ours.

Mesh (2, 2) over "data", which shards the batch, and "tensor". `tests.rewrite.explicit_fsdp` has
programs that shard weights over a second axis.
Legend of shapes: [B, S, D] are activations, F is hidden features, N query heads, K heads of keys
and values, H head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

B, S, D, F, N, K, H = 2, 4, 4, 12, 4, 2, 2
#: Activations with sharded rows, with all rows, with sharded features, with sharded heads.
ROWS, WHOLE = P("data", "tensor"), P("data")
HIDDEN, HEADS = P("data", None, "tensor"), P("data", None, "tensor", None)
UP, DOWN = P(None, "tensor"), P("tensor")
X, SCALE = ((B, S, D), ROWS), ((D,), P())
MLP = (X, ((D, F), UP), ((F, D), DOWN))
ATTENTION = (X, ((D, N, H), UP), ((D, K, H), UP), ((D, K, H), UP), ((N, H, D), DOWN))


class ExplicitForm(NamedTuple):
    """A program and what `overlap` does with it.

    Attributes:
      fun: the program, of global arrays.
      operands: shape and spec of each argument.
      replaced: the number of sites in the forward pass.
      with_gradients: the number of sites in the program that computes all gradients as well.
      reason: part of the reason why something in it is left alone.
      dtype: dtype of the arguments.
      alone: how many of its gathers are left alone: in the forward pass, and with gradients.
      axes: the mesh axes, of two devices each.
    """

    fun: Callable
    operands: Sequence[tuple[tuple[int, ...], P]]
    replaced: int
    with_gradients: int
    reason: str = ""
    dtype: str = "float32"
    alone: tuple[int, int] = (0, 0)
    axes: tuple[str, ...] = ("data", "tensor")

    @property
    def mesh(self) -> Mesh:
        return explicit_mesh((2,) * len(self.axes), self.axes)

    def arguments(self, mesh: Mesh) -> list[jax.Array]:
        generator = np.random.default_rng(0)
        arrays = (generator.standard_normal(shape, np.float32) for shape, _ in self.operands)
        return [
            jax.device_put(array.astype(jnp.dtype(self.dtype)), NamedSharding(mesh, spec))
            for array, (_, spec) in zip(arrays, self.operands, strict=True)
        ]


def explicit_mesh(
    sizes: tuple[int, ...] = (2, 2), axes: tuple[str, ...] = ("data", "tensor")
) -> Mesh:
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, axes, (AxisType.Explicit,) * len(axes), devices=devices)


def mlp(x, up, down):
    h = jax.nn.gelu(reshard(x, WHOLE) @ up)
    return jnp.dot(h, down, out_sharding=ROWS)


def mlp_by_types(x, up, down):
    """The types of the results ask for the gather and for the sum."""
    h = jax.nn.gelu(jnp.dot(x, up, out_sharding=HIDDEN))
    return jnp.einsum("bsf,fd->bsd", h, down, out_sharding=ROWS)


def mlp_reduced(x, up, down):
    """Sums, and scatters afterwards."""
    h = jax.nn.gelu(reshard(x, WHOLE) @ up)
    return reshard(jnp.dot(h, down, out_sharding=WHOLE) / 2, ROWS)


def mlp_unreduced(x, up, down):
    h = jax.nn.gelu(reshard(x, WHOLE) @ up)
    y = jnp.dot(h, down, out_sharding=P("data", unreduced=frozenset({"tensor"})))
    return reshard(y, ROWS)


def all_reduced(x, up, down):
    """Activations are the same on all devices of an axis."""
    return jnp.dot(jax.nn.gelu(reshard(x, WHOLE) @ up), down, out_sharding=WHOLE)


def gated(x, gate, up, down):
    whole = reshard(x, WHOLE)
    return jnp.dot(jax.nn.silu(whole @ gate) * (whole @ up), down, out_sharding=ROWS)


def attention(x, wq, wk, wv, wo):
    """Grouped heads: N / K heads of queries share one of keys and values."""
    whole = reshard(x, WHOLE)
    q, k, v = (jnp.einsum("bsd,dnh->bsnh", whole, w) for w in (wq, wk, wv))
    q = q.reshape(B, -1, K, N // K, H, out_sharding=P("data", None, "tensor", None, None))
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k) * H**-0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None, None]
    scores = jnp.where(causal, scores, -jnp.inf)
    y = jnp.einsum("bkgqs,bskh->bqkgh", jax.nn.softmax(scores), v)
    y = y.reshape(B, -1, N, H, out_sharding=HEADS)
    return jnp.einsum("bsnh,nhd->bsd", y, wo, out_sharding=ROWS)


def norm(x, scale):
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * lax.rsqrt(mean + 1e-5)).astype(x.dtype) * scale[None, None]


def llama_block(x, first, wq, wk, wv, wo, second, gate, up, down):
    x = x + attention(norm(x, first), wq, wk, wv, wo)
    return x + gated(norm(x, second), gate, up, down)


def layers(block, x, *weights):
    """Equal layers in a loop, each recomputed in the backward pass."""

    def step(x, weights):
        return jax.checkpoint(block)(x, *weights), None

    stacked = [jnp.stack([w, w * 0.5]) for w in weights]
    return lax.scan(step, x, stacked)[0]


def in_calls(x, up, down):
    """A call, a branch and a loop."""
    x = jax.jit(mlp)(x, up, down)
    x = lax.cond(jnp.sum(up) > 0, mlp, mlp_by_types, x, up, down)
    return lax.fori_loop(0, 2, lambda _, y: mlp(y, up, down), x)


def reshards_around_calls(x, up, down):
    h = jax.jit(jnp.dot)(reshard(x, WHOLE), up)
    y = jax.jit(lambda h: jnp.dot(h, down, out_sharding=WHOLE))(jax.nn.gelu(h))
    return reshard(y, ROWS)


@jax.custom_vjp
def _scaled_mlp(x, up, down):
    return mlp(x, up, down)


_scaled_mlp.defvjp(lambda *args: (mlp(*args), args), lambda args, y: jax.vjp(mlp, *args)[1](y * 2))


def own_gradient(x, up, down):
    return _scaled_mlp(x, up, down)


def mlp_after_sine(x, up, down):
    h = jax.nn.gelu(jnp.sin(reshard(x, WHOLE)) @ up)
    return jnp.dot(h, down, out_sharding=ROWS)


def attention_of_norm(x, scale, wq, wk, wv, wo):
    """Every device computes the norm of all rows."""
    return attention(norm(reshard(x, WHOLE), scale), wq, wk, wv, wo)


def llama_block_of_norms(x, first, wq, wk, wv, wo, second, gate, up, down):
    x = x + attention_of_norm(x, first, wq, wk, wv, wo)
    return x + gated(norm(reshard(x, WHOLE), second), gate, up, down)


def whole_used_elsewhere(x, w):
    whole = reshard(x, WHOLE)
    return whole @ w + jnp.sum(jnp.sin(whole), -1, keepdims=True)


def gathered_for_no_matmul(x, w):
    return jnp.sin(reshard(x, WHOLE)) @ w


def gathered_for_the_caller(x):
    return reshard(x, WHOLE)


def gathered_wider(x, w):
    return reshard(x, WHOLE).astype(jnp.float32) @ w.astype(jnp.float32)


def two_axes_at_once(x, w):
    return reshard(x, P()) @ w


def one_operand_divided(h, w):
    return jnp.dot(h, w, out_sharding=WHOLE)


def over_two_axes(h, w):
    return jnp.dot(h, w, out_sharding=P())


def summed_in_float32(h, w):
    return jnp.dot(h, w, out_sharding=ROWS, preferred_element_type=jnp.float32)


def precise(x, w):
    return jnp.dot(x, w, out_sharding=HIDDEN, precision=lax.Precision.HIGHEST)


_BLOCK = (X, SCALE, *ATTENTION[1:], SCALE, *MLP[1:2], *MLP[1:])
_UP, _HIDDEN, _DOWN = ((D, F), UP), ((B, S, F), HIDDEN), ((F, D), DOWN)

#: Gradients of weights are summed over "data": each is a site too.
FORMS = {
    "mlp": ExplicitForm(mlp, MLP, 2, 5),
    "mlp_by_types": ExplicitForm(mlp_by_types, MLP, 2, 5),
    "mlp_reduced": ExplicitForm(mlp_reduced, MLP, 2, 5),
    "mlp_unreduced": ExplicitForm(mlp_unreduced, MLP, 2, 5),
    "all_reduced": ExplicitForm(all_reduced, MLP, 2, 5),
    "gated": ExplicitForm(gated, (*MLP[:2], *MLP[1:]), 2, 6),
    "attention": ExplicitForm(attention, ATTENTION, 2, 7),
    "llama_block": ExplicitForm(llama_block, _BLOCK, 4, 13),
    "layers": ExplicitForm(functools.partial(layers, mlp), MLP, 2, 6),
    "in_calls": ExplicitForm(in_calls, MLP, 8, 20),
    "reshards_around_calls": ExplicitForm(reshards_around_calls, MLP, 2, 5),
    "own_gradient": ExplicitForm(own_gradient, MLP, 2, 6),
    "whole_used_elsewhere": ExplicitForm(whole_used_elsewhere, (X, _UP), 1, 2),
}
_NO_MATMUL = "mul at explicit_programs.py uses the gathered array; overlap needs a matmul there"
#: Forms with one difference, and what of them is still replaced.
NEAR_MISSES = {
    "mlp": ExplicitForm(
        mlp_after_sine,
        MLP,
        1,
        0,
        "sin at explicit_programs.py uses the gathered array; overlap needs a matmul there",
    ),
    "attention": ExplicitForm(attention_of_norm, (X, SCALE, *ATTENTION[1:]), 1, 0, _NO_MATMUL),
    "llama_block": ExplicitForm(llama_block_of_norms, _BLOCK, 2, 0, _NO_MATMUL),
    "gathered_for_no_matmul": ExplicitForm(
        gathered_for_no_matmul,
        (X, _UP),
        0,
        0,
        "uses the gathered array; overlap needs a matmul there",
    ),
    "gathered_for_the_caller": ExplicitForm(
        gathered_for_the_caller, (X,), 0, 0, "is a result of the function around it"
    ),
    "gathered_wider": ExplicitForm(
        gathered_wider, (X, _UP), 0, 0, "more would be communicated", "bfloat16"
    ),
    "two_axes_at_once": ExplicitForm(
        two_axes_at_once, (X, _UP), 0, 0, "changes several mesh axes at once"
    ),
    "one_operand_divided": ExplicitForm(
        one_operand_divided, (((B, S, F), WHOLE), _DOWN), 0, 0, "in one operand only"
    ),
    "over_two_axes": ExplicitForm(
        over_two_axes,
        (((B, F), P(None, ("data", "tensor"))), ((F, D), P(("data", "tensor")))),
        0,
        0,
        "and other mesh axes at once",
    ),
    "summed_in_float32": ExplicitForm(
        summed_in_float32,
        (_HIDDEN, _DOWN),
        0,
        0,
        "multiplied in bfloat16 and summed in float32",
        "bfloat16",
    ),
    "precise": ExplicitForm(precise, (X, _UP), 0, 0, "asks for precision"),
}
