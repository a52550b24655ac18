"""Attention to some keys at a time, and the merge of the results by their log-sum-exp.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018. A term whose log-sum-exp
is minus infinity adds nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul.operands.arithmetic import accumulator


class Attended(NamedTuple):
    """Sums of values over some keys, and the log-sum-exp of their scores.

    Attributes:
      out: [B, S, N, H], float32 or wider once it is a sum of several.
      log_sum_exp: [B, N, S].
    """

    out: jax.Array
    log_sum_exp: jax.Array

    def where(self, chosen: jax.Array) -> Attended:
        """This, where a predicate is true; else what adds nothing."""
        nothing = jnp.full_like(self.log_sum_exp, -jnp.inf)
        return self._replace(log_sum_exp=jnp.where(chosen, self.log_sum_exp, nothing))

    def tokens(self, start: int, stop: int) -> Attended:
        """The part for some queries."""
        return Attended(self.out[:, start:stop], self.log_sum_exp[:, :, start:stop])


def merge(*terms: Attended) -> Attended:
    """Merges terms into attention to the keys of all of them: sums in float32 or wider."""
    rows = jnp.stack([term.log_sum_exp for term in terms])
    total = jax.nn.logsumexp(rows, axis=0)
    finite = jnp.where(jnp.isneginf(total), jnp.zeros_like(total), total)
    sums = []
    for term, row in zip(terms, rows, strict=True):
        weight = jnp.swapaxes(jnp.exp(row - finite), 1, 2)[..., None]
        out = term.out.astype(accumulator(term.out.dtype))
        # A term that adds nothing may hold any number.
        sums.append(jnp.where(weight > 0, out * weight.astype(out.dtype), jnp.zeros_like(out)))
    return Attended(sum(sums[1:], sums[0]), total)


def joined(*parts: Attended) -> Attended:
    """Concatenates the results of several sets of queries."""
    wide = [part.out.astype(accumulator(part.out.dtype)) for part in parts]
    return Attended(
        lax.concatenate(wide, 1), lax.concatenate([part.log_sum_exp for part in parts], 2)
    )
