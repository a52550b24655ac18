"""Attention of one token to a cache, beside float64. What the token does not attend to is NaN."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from models.generation import valid_attention
from models.generation.valid_attention import KeyBlocks, attend_to_valid
from tests.kernel_bounds import within_bounds

#: Results have one rounding, relative to the largest; weights have another before they multiply
#: values, and scores are rounded when they are added up.
TOLERANCES = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}


@dataclass(frozen=True)
class CacheCase:
    """Attention of the tokens at `positions`, one of each sequence."""

    positions: tuple[int, ...]
    capacity: int
    heads: int = 2
    group: int = 4
    size: int = 64
    dtype: str = "bfloat16"
    window: int | None = None
    sinks: bool = False
    blocks: KeyBlocks | None = None
    scores: float = 1.0
    """The scale of scores. If it is not 1, they are whole multiples of 1 / sqrt(size)."""

    def check(self, *, interpret: bool = False) -> None:
        """Asserts that the kernel's result is that of float64."""
        query, key, value, sinks = self._drawn()
        seen = self._seen()[:, None, :, None]
        positions = jnp.array(self.positions, jnp.int32)

        @jax.jit
        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            key, value = (jnp.where(seen, x, jnp.nan).astype(self.dtype) for x in (key, value))
            return attend_to_valid(
                query,
                key,
                value,
                positions,
                self.window,
                sinks,
                blocks=self.blocks,
                interpret=interpret,
            )

        checked = within_bounds(valid_attention) if interpret else contextlib.nullcontext()
        with jax.default_matmul_precision("highest"), checked:
            result = attend(query, key, value)
        expected = self._expected(query, key, value, sinks)
        assert result.dtype == self.dtype and result.shape == expected.shape
        error = np.abs(np.asarray(result, np.float64) - expected)
        assert error.max() <= TOLERANCES[self.dtype] * np.abs(expected).max()

    def _drawn(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        rng = np.random.default_rng(0)
        cache = (len(self.positions), self.heads, self.capacity, self.size)
        shapes = (*cache[:2], self.group, self.size), cache, cache
        drawn = [rng.normal(size=s) for s in shapes]
        if self.scores != 1:
            drawn[:2] = (np.round(x * self.scores**0.5) for x in drawn[:2])
        query, key, value = (jnp.asarray(x, self.dtype) for x in drawn)
        sinks = jnp.asarray(rng.normal(size=(self.heads, self.group)), self.dtype)
        return query, key, value, sinks if self.sinks else None

    def _seen(self) -> np.ndarray:
        """bool [B, C]: the tokens that a sequence's token attends to."""
        places, positions = np.arange(self.capacity), np.array(self.positions)[:, None]
        return (places <= positions) & (places > positions - (self.window or np.inf))

    def _expected(
        self, query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None
    ) -> np.ndarray:
        q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
        scores = np.einsum("bkgh,bkch->bkgc", q, k) / np.sqrt(self.size)
        scores = np.where(self._seen()[:, None, None], scores, -np.inf)
        highest = scores.max(-1, keepdims=True)
        weights = np.exp(scores - highest)
        total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total += np.exp(np.asarray(sinks, np.float64)[..., None] - highest)
        return np.einsum("bkgc,bkch->bkgh", weights / total, v)
