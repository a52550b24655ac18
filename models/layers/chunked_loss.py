"""Head and loss in chunks of tokens, so that the logits of all tokens never exist at one time.

Legend of local shapes: B is batch, S is the sequence of all devices of the tensor axis, D is their
number, s = S/D, n is the number of chunks, and c the tokens of each device in one, so that a chunk
has C = D*c tokens of each sequence.

The forward keeps the input of the head alone. The backward computes the logits of each chunk again,
which costs one matmul of the head more, and sums the gradients of the weights in float32, whatever
their dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul import Quantized
from models.blocks.barriers import tied
from models.parameters.use import Tree, arrays_of, as_varying

#: Maps weights, the input of the head [B, c, features] and targets [B, C] to losses [B, C].
ChunkLoss = Callable[[Tree, jax.Array, jax.Array], jax.Array]

#: Rows of a tile of a matmul.
_ROWS = 128


def loss_in_chunks(
    fun: ChunkLoss, weights: Tree, x: jax.Array, targets: jax.Array, tokens: int
) -> jax.Array:
    """Computes ``fun(weights, x, targets)`` of chunks of the sequence, one after the other.

    A sequence that is no multiple of the chunks is filled up with tokens whose losses are dropped.

    Args:
      fun: the loss of each target of some tokens, each of which depends on its own token alone.
      weights: a tree of arrays and `Quantized`.
      x: [B, s, features], this device's part of the sequence.
      targets: int32 [B, S], the whole sequence: its parts in the order of the devices.
      tokens: the most tokens of a sequence in a chunk, over all devices; at least one per device.

    Returns:
      float32 [B, S].
    """
    batch, own = x.shape[:2]
    devices = targets.shape[1] // own
    size = chunk_size(own * devices, devices, tokens) // devices
    count = -(-own // size)
    filled = ((0, 0), (0, count * size - own), (0, 0))
    # [n, B, c, features], and [n, B, D*c]: the same tokens, of all devices.
    cut = jnp.moveaxis(jnp.pad(x, filled).reshape(batch, count, size, -1), 1, 0)
    ids = targets.reshape(batch * devices, own, 1)
    ids = jnp.pad(ids, filled).reshape(batch, devices, count, size)
    ids = jnp.moveaxis(ids, 2, 0).reshape(count, batch, devices * size)
    # Else each chunk would sum the gradients of weights over devices.
    axes = jax.typeof(x).manual_axis_type.varying
    weights = jax.tree.map(lambda leaf: as_varying(leaf, axes), weights)
    losses: Any = _chunks(fun, arrays_of(weights), weights, cut, ids)
    losses = losses.reshape(count, batch, devices, size)
    losses = jnp.moveaxis(losses, 0, 2).reshape(batch, devices, count * size)
    return losses[:, :, :own].reshape(batch, devices * own)


def chunk_size(length: int, devices: int, tokens: int) -> int:
    """The number of tokens of each chunk of a sequence. Chunks are alike, and where they are large
    each device has a multiple of what kernels multiply at one time.

    Args:
      length: the tokens of the sequence, which `devices` divides.
      devices: the number of devices that have parts of it.
      tokens: the most tokens in a chunk.
    """
    own, most = length // devices, max(tokens // devices, 1)
    unit = _ROWS if most >= _ROWS else 1
    count = -(-own // (most // unit * unit))
    return devices * min(-(-own // (count * unit)) * unit, own)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunks(
    fun: ChunkLoss, arrays: Tree, weights: Tree, x: jax.Array, targets: jax.Array
) -> jax.Array:
    """[n, B, c, features] and int32 [n, B, C] -> float32 [n, B, C]. `arrays` of `weights` have
    their gradients."""
    whole = _with_arrays(weights, arrays)

    def step(_: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        return None, fun(whole, *chunk)

    return lax.scan(step, None, (x, targets))[1]


def _forward(
    fun: ChunkLoss, arrays: Tree, weights: Tree, x: jax.Array, targets: jax.Array
) -> tuple[jax.Array, tuple]:
    losses = _chunks(fun, arrays, weights, x, targets)
    # Else XLA may compute losses after the whole backward, and keep x and the weights until then.
    losses, x = tied(losses, x)
    return losses, (arrays, weights, x, targets)


def _backward(fun: ChunkLoss, kept: tuple, gradients: jax.Array) -> tuple:
    arrays, weights, x, targets = kept

    def step(total: Tree, chunk: tuple[jax.Array, ...]) -> tuple[Tree, jax.Array]:
        x, targets, gradient = chunk

        def loss(arrays: Tree, x: jax.Array) -> jax.Array:
            return fun(_with_arrays(weights, arrays), x, targets)

        own, dx = jax.vjp(loss, arrays, x)[1](gradient)
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, own), dx

    def zeros(array: jax.Array) -> jax.Array:
        return as_varying(
            jnp.zeros(array.shape, jnp.float32), jax.typeof(array).manual_axis_type.varying
        )

    total, dx = lax.scan(step, jax.tree.map(zeros, arrays), (x, targets, gradients))
    total = jax.tree.map(lambda sum_, array: sum_.astype(array.dtype), total, arrays)
    return total, None, dx, None


_chunks.defvjp(_forward, _backward)


def _with_arrays(weights: Tree, arrays: Tree) -> Tree:
    """Weights with other arrays, which have the gradients."""

    def one(weight: Any, array: jax.Array) -> Any:
        return weight.with_array(array) if isinstance(weight, Quantized) else array

    return jax.tree.map(one, weights, arrays, is_leaf=lambda leaf: isinstance(leaf, Quantized))
