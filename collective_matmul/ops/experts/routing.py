"""The rows for each of a device's experts: the plan of each visit.

Pairs of a token and one of its experts are sorted by the expert. A device has some of the experts;
pairs of others, and of no expert at all, come last, and nothing is computed for them. So the number
of rows is static, whatever the router does.

Legend: T tokens of a visit, k experts of each token, M = T k pairs, E experts of this device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Routing(NamedTuple):
    """The decision of a router about some tokens.

    Attributes:
      ids: int32 [T, k], the numbers of experts.
      weights: [T, k], in float32, or in float64 for tokens of float64.
    """

    ids: jax.Array
    weights: jax.Array

    @property
    def packed(self) -> jax.Array:
        """One array that can travel, [T, 2 k], of whole numbers as wide as a weight.

        In a row of zeros there is no expert.
        """
        whole = np.dtype(f"int{8 * self.weights.dtype.itemsize}")
        bits = lax.bitcast_convert_type(self.weights, whole)
        return lax.concatenate([(self.ids + 1).astype(whole), bits], 1)

    def unpacked(self, rows: jax.Array) -> Routing:
        """The routing in rows of what `packed` returned for one like this."""
        choices = self.ids.shape[1]
        ids = rows[:, :choices].astype(self.ids.dtype) - 1
        return Routing(ids, lax.bitcast_convert_type(rows[:, choices:], self.weights.dtype))


class Plan(NamedTuple):
    """The order in which a device multiplies pairs of tokens and its experts.

    Attributes:
      tokens: int32 [M], the token of each sorted pair.
      places: int32 [T, k], where each pair is in the sorted order.
      sizes: int32 [E], the number of pairs of each expert.
      count: int32 scalar, the number of pairs of all of them.
      weights: [T, k], as in `Routing`.
    """

    tokens: jax.Array
    places: jax.Array
    sizes: jax.Array
    count: jax.Array
    weights: jax.Array

    @property
    def is_here(self) -> jax.Array:
        """Bool [T, k]: whether a pair's expert is on this device."""
        return self.places < self.count

    @property
    def row_experts(self) -> jax.Array:
        """int32 [M], the expert of each sorted pair; of pairs of no expert, the last one here."""
        place = lax.iota(jnp.int32, self.tokens.size)
        ends = jnp.cumsum(self.sizes[:-1], dtype=jnp.int32)
        return jnp.sum(place[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)

    @property
    def token_experts(self) -> jax.Array:
        """int32 [T, k], likewise, of each pair as tokens have them."""
        return self.row_experts[self.places]

    @property
    def row_weights(self) -> jax.Array:
        """[M], the weight of each sorted pair."""
        rows = jnp.zeros(self.tokens.shape, self.weights.dtype)
        flat = self.places.reshape(-1)
        return rows.at[flat].set(self.weights.reshape(-1), unique_indices=True)

    def of_tokens(self, values: jax.Array) -> jax.Array:
        """[T, k] from a value of each sorted pair, [M]; 0 for experts of other devices."""
        is_here = self.is_here
        return jnp.where(is_here, values[jnp.where(is_here, self.places, 0)], 0)


def plans_of(routings: Sequence[Routing], first: jax.Array, experts: int) -> list[Plan]:
    """The plans of all visits.

    Args:
      routings: what the router decided about the tokens of each visit.
      first: int32 scalar, the number of this device's first expert.
      experts: the number of experts that it has.
    """
    # One sort for all visits: each takes its place in the order, and within it the experts do.
    keys = []
    for number, routing in enumerate(routings):
        local = routing.ids.reshape(-1) - first
        is_here = (local >= 0) & (local < experts)
        keys.append(jnp.where(is_here, local, experts) + number * (experts + 1))
    key = jnp.concatenate(keys)
    order = stable_order(key, len(routings) * (experts + 1))
    inverse = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    )
    plans, start = [], 0
    for number, routing in enumerate(routings):
        tokens, k = routing.ids.shape
        pairs = slice(start, start + tokens * k)
        sizes = _counts(key[pairs] - number * (experts + 1), experts)
        plans.append(
            Plan(
                (order[pairs] - start) // k,
                inverse[pairs].reshape(tokens, k) - start,
                sizes,
                sizes.sum(dtype=jnp.int32),
                routing.weights,
            )
        )
        start += tokens * k
    return plans


def stable_order(keys: jax.Array, limit: int) -> jax.Array:
    """The indices that sort int32 keys below `limit`; equal keys keep their order."""
    if limit * keys.size < 2**31:
        # Numbers alone are sorted several times as fast as pairs of numbers.
        numbers = keys * keys.size + lax.iota(jnp.int32, keys.size)
        return lax.rem(lax.sort(numbers), jnp.int32(keys.size))
    return jnp.argsort(keys, stable=True).astype(jnp.int32)


def _counts(keys: jax.Array, experts: int) -> jax.Array:
    """int32 [experts]: how often each number occurs."""
    if not keys.size:
        return jnp.zeros((experts,), jnp.int32)
    numbers = lax.iota(jnp.int32, experts)
    return jnp.sum(keys[:, None] == numbers[None, :], axis=0, dtype=jnp.int32)
