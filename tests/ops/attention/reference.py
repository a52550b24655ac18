"""Attention and its gradients in float64 NumPy, and how far a kernel's may be from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from collective_matmul import dot_product_attention

SEGMENTS = 4


class Attended(NamedTuple):
    """The result and the gradients of queries, keys, values and sinks."""

    out: Any
    dquery: Any
    dkey: Any
    dvalue: Any
    dsinks: Any


@dataclass(frozen=True)
class AttentionCase:
    """A call of `dot_product_attention`.

    Attributes:
      queries: S.
      groups: query heads of each key and value head.
      size: H.
      more_keys: T - S.
      segments: whether each sequence has up to `SEGMENTS` segments.
      sinks: whether each head has a sink.
    """

    queries: int = 24
    groups: int = 2
    size: int = 16
    dtype: str = "float32"
    causal: bool = True
    window: int | None = None
    segments: bool = False
    sinks: bool = False
    more_keys: int = 0
    batch: int = 2
    key_value_heads: int = 2
    implementation: str | None = None
    scale: float | None = None

    @property
    def heads(self) -> int:
        return self.groups * self.key_value_heads

    def arrays(self, seed: int = 0) -> tuple[list[Any], Any]:
        """Query, key, value and sinks, normally distributed; and the cotangent of the result."""
        rng = np.random.default_rng(seed)
        query = (self.batch, self.queries, self.heads, self.size)
        key = (self.batch, self.queries + self.more_keys, self.key_value_heads, self.size)
        shapes = query, key, key, (self.heads,), query
        *operands, cotangent = (
            rng.standard_normal(shape).astype(jnp.dtype(self.dtype)) for shape in shapes
        )
        return operands, cotangent

    def ids(self, seed: int = 0) -> np.ndarray | None:
        """Ids that are not decreasing; not all numbers occur."""
        if not self.segments:
            return None
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, SEGMENTS, (self.batch, self.queries))
        return np.sort(ids, axis=1).astype(np.int32) * 3

    def attend(self, *operands: Any, ids: Any = None) -> jax.Array:
        """Calls the op with query, key, value and sinks."""
        query, key, value, sinks = operands
        return dot_product_attention(
            query,
            key,
            value,
            causal=self.causal,
            window=self.window,
            segment_ids=ids,
            max_segments=None if ids is None else SEGMENTS,
            sinks=sinks if self.sinks else None,
            scale=self.scale,
            implementation=self.implementation,
        )

    def run(self, seed: int = 0, jit: Callable = jax.jit) -> Attended:
        """The result and the gradients, out of one program."""
        operands, cotangent = self.arrays(seed)
        ids = self.ids(seed)

        def both(operands: Any, ids: Any, cotangent: Any) -> Attended:
            out, pullback = jax.vjp(lambda *x: self.attend(*x, ids=ids), *operands)
            return Attended(out, *pullback(cotangent))

        return jit(both)(operands, ids, cotangent)

    def expected(self, seed: int = 0) -> tuple[Attended, Attended]:
        """In float64; and the magnitudes of the terms that each element is a sum of."""
        (query, key, value, sinks), dout = self.arrays(seed)
        query, key, value, sinks, dout = (
            np.asarray(x, np.float64) for x in (query, key, value, sinks, dout)
        )
        key, value = (np.repeat(x, self.groups, axis=2) for x in (key, value))
        scale = self.size**-0.5 if self.scale is None else self.scale
        scores = np.einsum("bsnh,btnh->bnst", query, key) * scale
        scores = np.where(self._seen(seed), scores, -np.inf)
        sink = np.where(self.sinks, sinks, -np.inf)[None, :, None, None]
        largest = np.maximum(scores.max(axis=-1, keepdims=True), sink)
        weights = np.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - largest)
        weights, of_sink = weights / total, (np.exp(sink - largest) / total)[..., 0]

        def results(v: Any, dy: Any, k: Any, q: Any, *, magnitudes: bool) -> Attended:
            out = np.einsum("bnst,btnh->bsnh", weights, v)
            dweights = np.einsum("bsnh,btnh->bnst", dy, v)
            dot = np.einsum("bsnh,bsnh->bns", dy, out)
            sign = 1 if magnitudes else -1
            dscores = weights * (dweights + sign * dot[..., None]) * scale
            grouped = (*key.shape[:2], self.key_value_heads, self.groups, self.size)
            return Attended(
                out,
                np.einsum("bnst,btnh->bsnh", dscores, k),
                np.einsum("bnst,bsnh->btnh", dscores, q).reshape(grouped).sum(3),
                np.einsum("bnst,bsnh->btnh", weights, dy).reshape(grouped).sum(3),
                sign * (of_sink * dot).sum(axis=(0, 2)),
            )

        exact = results(value, dout, key, query, magnitudes=False)
        return exact, results(*map(abs, (value, dout, key, query)), magnitudes=True)

    def _seen(self, seed: int) -> np.ndarray:
        keys = self.queries + self.more_keys
        rows, columns = np.arange(self.queries)[:, None] + self.more_keys, np.arange(keys)[None]
        seen = np.ones((self.queries, keys), bool)
        if self.causal:
            seen &= columns <= rows
        if self.window is not None:
            seen &= columns > rows - self.window
        seen = np.broadcast_to(seen, (self.batch, 1, *seen.shape))
        ids = self.ids(seed)
        if ids is not None:
            seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
        return seen

    def check(self, actual: Attended, seed: int = 0) -> None:
        """Every element is within its bound; NaN never is.

        In float32 a score is off by at most H u |q|·|k|, u = 2⁻²⁴, and a weight by as much
        relative to itself; sums over tokens add their number times u. Weights, the gradients of
        scores and results are rounded to the dtype, each relative to the terms' magnitudes.
        """
        (query, key, *_), _ = self.arrays(seed)
        largest = np.abs(np.asarray(query, np.float64)).max()
        largest *= np.abs(np.asarray(key, np.float64)).max()
        largest *= self.size * (self.size**-0.5 if self.scale is None else self.scale)
        u = float(jnp.finfo("float64" if self.dtype == "float64" else "float32").eps) / 2
        terms = self.queries + self.more_keys + self.batch * self.queries
        relative = (2 * self.size * largest + terms * self.groups) * u
        relative += 4 * float(jnp.finfo(self.dtype).eps)
        exact, magnitudes = self.expected(seed)
        for name, value, wanted, magnitude in zip(
            Attended._fields, actual, exact, magnitudes, strict=True
        ):
            assert value.dtype == jnp.dtype(self.dtype), name
            error = np.abs(np.asarray(value).astype(np.float64) - wanted)
            bound = relative * magnitude + float(jnp.finfo(self.dtype).smallest_subnormal)
            wrong = ~(error <= bound)
            assert not wrong.any(), (
                f"{name}: {wrong.sum()} of {wrong.size} elements are off, by up to"
                f" {np.max(error / bound):.3g} of what is allowed"
            )
