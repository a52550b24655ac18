"""`AttentionRequest`: one call of attention as data, with all that the choice of a kernel needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True)
class AttentionRequest:
    """An attention and its local shapes.

    Attributes:
      batch: sequences.
      queries: tokens with a query, in each sequence.
      keys: tokens with a key and a value, in each sequence.
      heads: query heads.
      key_value_heads: key and value heads, which divide the query heads.
      head_size: size of a head.
      dtype: of queries, keys and values.
      causal: whether a token attends to those before it alone. The last query attends to all keys.
      window: number of tokens that a token attends to, itself included; None: all.
      scale: what scores are multiplied with before the softmax.
      segments: the largest number of segments in a sequence; None: each sequence is one.
      differentiated: whether the backward follows.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    key_value_heads: int
    head_size: int
    dtype: np.dtype
    causal: bool
    window: int | None
    scale: float
    segments: int | None = None
    differentiated: bool = False

    @classmethod
    def of(
        cls,
        query: jax.Array | jax.ShapeDtypeStruct,
        key: jax.Array | jax.ShapeDtypeStruct,
        *,
        causal: bool,
        window: int | None,
        scale: float | None,
        segments: int | None,
    ) -> AttentionRequest:
        """The request of a query [B, S, N, H] and a key [B, T, K, H]."""
        batch, queries, heads, size = query.shape
        keys, key_value_heads = key.shape[1:3]
        return cls(
            batch,
            queries,
            keys,
            heads,
            key_value_heads,
            size,
            np.dtype(query.dtype),
            causal,
            None if window is not None and window >= keys else window,
            size**-0.5 if scale is None else float(scale),
            # One segment is the whole sequence.
            None if segments == 1 else segments,
        )

    @property
    def is_half(self) -> bool:
        """Whether the dtype is bfloat16 or float16."""
        return self.dtype.name in ("bfloat16", "float16")

    @property
    def attends_to_itself(self) -> bool:
        """Whether queries and keys are of the same tokens."""
        return self.queries == self.keys

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward, without those that masks leave out.

        Segments are not counted: their lengths are not known.
        """
        pairs = self.queries * self.keys
        if self.causal:
            pairs -= math.comb(self.queries, 2)
        if self.window is not None:
            pairs = min(pairs, self.queries * self.window)
        return 4 * self.batch * self.heads * self.head_size * pairs

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.key_value_heads} heads of {self.head_size}"
        lengths = f"{self.queries}" if self.attends_to_itself else f"{self.queries} to {self.keys}"
        masks = [
            "causal" if self.causal else "",
            f"window {self.window}" if self.window is not None else "",
            f"up to {self.segments} segments" if self.segments is not None else "",
        ]
        return ", ".join(
            filter(None, (f"{self.dtype.name} {self.batch}×{lengths} tokens, {heads}", *masks))
        )
