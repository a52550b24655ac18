"""Attention to the keys of one device at a time, by calls of static shapes without masked parts.

With the zigzag layout and a causal mask, a device's own tokens are in the order of positions, so it
attends to its own keys by one causal call. Of each other device it attends to two chunks, fully:
the late queries to the early chunk, and, if the other device is earlier, the early queries to the
early chunk, else the late queries to the late chunk. These are of one shape: operands are selected,
and no part is masked away.

With the contiguous layout, later devices' keys are attended to and left out of the sum.

Windows and segments are masks that are made of positions, in XLA's attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collective_matmul._compat import axis_index
from collective_matmul.ops.attention.context.local.alone import kernel_for
from collective_matmul.ops.attention.context.local.masked import (
    Tokens,
    attend_by_positions,
    gradients_by_positions,
)
from collective_matmul.ops.attention.context.local.merging import Attended, joined, merge
from collective_matmul.ops.attention.context.request import ContextRequest
from collective_matmul.ops.attention.kernel import Gradients


class Queries:
    """A device's queries and, in the backward pass, the results of the forward.

    Args:
      request: the request.
      query: [B, s, N, H].
      ids: int32 [B, C, c], numbers of segments of the whole sequence; or None.
      kept: in the backward pass, the result, the log-sum-exp and the gradient of the result.
    """

    def __init__(
        self,
        request: ContextRequest,
        query: jax.Array,
        ids: jax.Array | None,
        kept: Sequence[jax.Array] = (),
    ):
        self.request = request
        self.arrays = (query, *kept)
        self.ids = ids
        self.device = axis_index(request.axis_name)
        self.is_masked = request.window is not None or ids is not None

    def replaced(self, arrays: Sequence[jax.Array]) -> Queries:
        """These queries with other arrays, as a barrier returns them."""
        query, *kept = arrays
        return Queries(self.request, query, self.ids, kept)

    def owner(self, offset: int) -> jax.Array:
        """The device that is some places before this one."""
        devices = np.int32(self.request.axis_size)
        return lax.rem(self.device + devices - np.int32(offset), devices)

    def attend(self, keys: jax.Array, offset: int) -> Attended:
        """Attends to the keys and values [2, B, s, K, H] of the device `offset` places before."""
        key, value = keys
        query = self.arrays[0]
        if self.is_masked:
            tokens = self._tokens(self.device), self._tokens(self.owner(offset))
            return Attended(*attend_by_positions(self.request, query, key, value, *tokens))
        if not offset or not self.request.causal:
            return self._call(query, key, value, causal=self.request.causal)
        is_earlier = self._is_earlier(offset)
        if self.request.chunks.local == 1:
            return self._call(query, key, value, causal=False).where(is_earlier)
        early, late = _halves(query)
        chosen = jnp.where(is_earlier, early, late)
        queries = jnp.concatenate([late, chosen])
        found = self._call(
            queries, *(self._pairs(x, is_earlier) for x in (key, value)), causal=False
        )
        of_late, of_chosen = _in_two(found.out), _in_two(found.log_sum_exp)
        late_term = Attended(of_late[0], of_chosen[0])
        chosen_term = Attended(of_late[1], of_chosen[1])
        return joined(
            chosen_term.where(is_earlier), merge(late_term, chosen_term.where(~is_earlier))
        )

    def gradients(self, keys: jax.Array, offset: int) -> tuple[jax.Array, jax.Array]:
        """The terms of the gradients: of the queries; and of the keys and values, [2, B, s, K, H].

        See `attend`.
        """
        (key, value), (query, out, log_sum_exp, cotangent) = keys, self.arrays
        if self.is_masked:
            tokens = self._tokens(self.device), self._tokens(self.owner(offset))
            kept = out, log_sum_exp, cotangent
            (own, others), request = tokens, self.request
            found = gradients_by_positions(request, query, key, value, own, others, *kept)
            return found[0], jnp.stack(found[1:])
        if not offset or not self.request.causal:
            causal = self.request.causal
            found = self._gradients(self.arrays, key, value, causal=causal)
            return found[0], jnp.stack(found[1:])
        is_earlier = self._is_earlier(offset)
        if self.request.chunks.local == 1:
            found = self._gradients(self.arrays, key, value, causal=False)
            dquery, *dkeys = (jnp.where(is_earlier, x, jnp.zeros_like(x)) for x in found)
            return dquery, jnp.stack(dkeys)
        dimensions = 1, 1, 2, 1
        halves = [_halves(x, n) for x, n in zip(self.arrays, dimensions, strict=True)]
        operands = [
            jnp.concatenate([late, jnp.where(is_earlier, early, late)]) for early, late in halves
        ]
        key, value = (self._pairs(x, is_earlier) for x in (key, value))
        dquery, *dkeys = self._gradients(operands, key, value, causal=False)
        of_late, of_chosen = _in_two(dquery)
        nothing = jnp.zeros_like(of_chosen)
        dearly = jnp.where(is_earlier, of_chosen, nothing)
        dlate = of_late + jnp.where(is_earlier, nothing, of_chosen)
        return (
            jnp.concatenate([dearly, dlate], axis=1),
            jnp.stack([self._unpaired(x, is_earlier) for x in dkeys]),
        )

    def _is_earlier(self, offset: int) -> jax.Array:
        """Whether the device `offset` places before this one comes before it in the sequence."""
        return self.device >= np.int32(offset)

    def _pairs(self, keys: jax.Array, is_earlier: jax.Array) -> jax.Array:
        """[B, s, ...] -> [2 B, c, ...]: the early chunk, and the chosen one."""
        early, late = _halves(keys)
        return jnp.concatenate([early, jnp.where(is_earlier, early, late)])

    def _unpaired(self, gradient: jax.Array, is_earlier: jax.Array) -> jax.Array:
        """The gradient of the argument of `_pairs`."""
        of_early, of_chosen = _in_two(gradient)
        nothing = jnp.zeros_like(of_chosen)
        early = of_early + jnp.where(is_earlier, of_chosen, nothing)
        return jnp.concatenate([early, jnp.where(is_earlier, nothing, of_chosen)], axis=1)

    def _call(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool
    ) -> Attended:
        """The machine's kernel, without windows and segments."""
        attention = self.request.attention(
            batch=len(query), queries=query.shape[1], keys=key.shape[1], causal=causal
        )
        kernel = kernel_for(self.request, attention)
        return Attended(*kernel.forward(query, key, value, None, attention))

    def _gradients(
        self,
        arrays: Sequence[jax.Array],
        key: jax.Array,
        value: jax.Array,
        *,
        causal: bool,
    ) -> Gradients:
        query, out, log_sum_exp, cotangent = arrays
        attention = self.request.attention(
            batch=len(query), queries=query.shape[1], keys=key.shape[1], causal=causal
        )
        kernel = kernel_for(self.request, attention)
        return kernel.backward(query, key, value, out, log_sum_exp, cotangent, None, attention)

    def _tokens(self, device: jax.Array) -> Tokens:
        """The positions of a device's tokens in the sequence."""
        numbers = self.request.chunks.numbers(device)
        positions = self.request.chunks.positions_of_chunks(numbers)
        if self.ids is None:
            return Tokens(positions, None)
        own = [lax.dynamic_index_in_dim(self.ids, n, axis=1, keepdims=False) for n in numbers]
        return Tokens(positions, lax.concatenate(own, 1))


def _halves(array: jax.Array, dimension: int = 1) -> list[jax.Array]:
    return jnp.split(array, 2, axis=dimension)


def _in_two(array: jax.Array) -> list[jax.Array]:
    return jnp.split(array, 2)
