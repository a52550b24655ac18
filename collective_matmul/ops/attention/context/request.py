"""`ContextRequest`: one pass of attention over a sharded sequence as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from collective_matmul.dispatch.contract import Direction, Request, size_above_zero
from collective_matmul.dispatch.registry import Registry
from collective_matmul.ops.attention.context.layout import LAYOUTS, Chunks, Layout
from collective_matmul.ops.attention.request import AttentionRequest
from collective_matmul.source_location import SourceLocation
from collective_matmul.transport import (
    Transport,
    described_transport,
    transport_fields,
    transport_of_fields,
)

#: The backends of the op; `collective_matmul.ops.attention.context.backends` fills it.
BACKENDS = Registry(substitute="gather", reference_differs="stores all scores")

#: The name of the op.
OP = "context_attention"


@dataclass(frozen=True)
class ContextRequest(Request):
    """One pass of attention over a sharded sequence.

    Attributes:
      batch: B, sequences.
      tokens: s, tokens of each sequence that this device has.
      heads: N, query heads.
      key_value_heads: K, key and value heads.
      head_size: H.
      dtype: of queries, keys and values.
      axis_name: the mesh axis, or axes, that divide the sequence.
      axis_size: D.
      layout: which tokens a device has.
      causal: whether a token attends to those before it and itself alone.
      window: number of tokens that a token attends to, itself included; None: all.
      segments: the largest number of segments in a sequence; None: each sequence is one.
      scale: what scores are multiplied with.
      kernels: names of the requested local kernels, best first, or None.
      op: name of the op.
      transport: who moves its bytes.
      divergent_axes: further mesh axes along which devices may execute the request a different
        number of times, because it is inside a branch or a loop.
      direction: whether this is the forward or the backward pass.
      source: where the user called the op.
      remarks: what `explain` says of the call before the reason of a decision.
      replaces: None: `collective_matmul.overlap` replaces nothing by this op.
    """

    batch: int
    tokens: int
    heads: int
    key_value_heads: int
    head_size: int
    dtype: np.dtype
    axis_name: tuple[str, ...]
    axis_size: int
    layout: Layout = "zigzag"
    causal: bool = True
    window: int | None = None
    segments: int | None = None
    kernels: tuple[str, ...] | None = None
    scale: float = field(default=1.0, compare=False)
    op: str = OP
    direction: Direction = "forward"
    transport: Transport = "peer_copies"
    divergent_axes: tuple[str, ...] = field(default=(), compare=False)
    source: SourceLocation | None = field(default=None, compare=False)
    replaces: str | None = field(default=None, compare=False)
    remarks: tuple[str, ...] = field(default=(), compare=False)

    @property
    def backends(self) -> Registry:
        """The backends of the op."""
        return BACKENDS

    @property
    def chunks(self) -> Chunks:
        """The chunks of the sequence."""
        return Chunks(self.layout, self.axis_size, self.tokens)

    @property
    def length(self) -> int:
        """S, the tokens of the sequence."""
        return self.tokens * self.axis_size

    def attention(self, **changed: Any) -> AttentionRequest:
        """The local attention of these tokens alone; `changed` are other attributes of it."""
        own = AttentionRequest(
            batch=self.batch,
            queries=self.tokens,
            keys=self.tokens,
            heads=self.heads,
            key_value_heads=self.key_value_heads,
            head_size=self.head_size,
            dtype=np.dtype(self.dtype),
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            segments=self.segments,
            differentiated=self.direction == "backward",
        )
        return replace(own, **changed)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key of the device that has most of them, in one sequence.

        Segments are not counted: their lengths are not known.
        """
        if not self.causal:
            return self.tokens * self.length
        window = self.length if self.window is None else self.window

        def before(position: int) -> int:
            """Pairs of the queries before a position."""
            full = min(position, window)
            return full * (full + 1) // 2 + (position - full) * window

        size = self.chunks.size
        of_chunk = [before((i + 1) * size) - before(i * size) for i in range(self.chunks.count)]
        return max(sum(of_chunk[i] for i in own) for own in self.chunks.numbers_by_device())

    @property
    def flops(self) -> int:
        """Floating-point operations of the device that has most, without what masks leave out."""
        products = 2 if self.direction == "forward" else 5
        return 2 * products * self.batch * self.heads * self.head_size * self.pairs

    @property
    def bytes_of_keys(self) -> int:
        """Bytes of this device's keys and values."""
        numbers = 2 * self.batch * self.tokens * self.key_value_heads * self.head_size
        return numbers * np.dtype(self.dtype).itemsize

    @property
    def bytes_of_ids(self) -> int:
        """Bytes of this device's numbers of segments."""
        return 0 if self.segments is None else 4 * self.batch * self.tokens

    @property
    def bytes_communicated(self) -> int:
        """Bytes that each device sends if all keys and values go to all devices.

        Backward, their gradients come home too.
        """
        sent = self.bytes_of_keys * (1 if self.direction == "forward" else 2)
        return (self.axis_size - 1) * (sent + self.bytes_of_ids)

    @property
    def collectives(self) -> int:
        """Keys and values travel in one; their gradients come home in another."""
        if not self.communicates:
            return 0
        return 1 if self.direction == "forward" else 2

    @property
    def overlapped_seconds(self) -> float:
        """0: attention waits for the keys, and what precedes it in the backward for the sums."""
        return 0.0

    @property
    def flat(self) -> ContextRequest:
        """The request without the names of its axes."""
        return replace(self, axis_name=(), dtype=np.dtype(self.dtype))

    def fields(self) -> dict[str, Any]:
        """The key of a table's entry."""
        return {
            "op": self.op,
            "devices": self.axis_size,
            "dtype": np.dtype(self.dtype).name,
            "batch": self.batch,
            "tokens": self.tokens,
            "heads": self.heads,
            "key_value_heads": self.key_value_heads,
            "head_size": self.head_size,
            "layout": self.layout,
            "causal": self.causal,
            "window": self.window,
            "segments": self.segments,
            "kernels": None if self.kernels is None else list(self.kernels),
            "direction": self.direction,
            **transport_fields(self.transport),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ContextRequest:
        """The flat request that `fields` describes.

        Raises:
          ValueError, LookupError, TypeError: for other values.
        """
        if fields["op"] != OP or fields["direction"] not in ("forward", "backward"):
            raise ValueError(f"op {fields['op']!r}, direction {fields['direction']!r}")
        if fields["layout"] not in LAYOUTS:
            raise ValueError(f"the layout {fields['layout']!r}, expected one of {LAYOUTS}")
        names = ("batch", "tokens", "heads", "key_value_heads", "head_size")
        sizes: dict[str, Any] = {name: size_above_zero(fields[name]) for name in names}
        optional: dict[str, Any] = {
            name: None if fields[name] is None else size_above_zero(fields[name])
            for name in ("window", "segments")
        }
        kernels = fields["kernels"]
        return cls(
            axis_name=(),
            axis_size=size_above_zero(fields["devices"]),
            dtype=np.dtype(fields["dtype"]),
            layout=cast(Layout, fields["layout"]),
            causal=bool(fields["causal"]),
            kernels=None if kernels is None else tuple(map(str, kernels)),
            scale=sizes["head_size"] ** -0.5,
            direction=cast(Direction, fields["direction"]),
            transport=transport_of_fields(fields),
            **sizes,
            **optional,
        )

    @property
    def kind(self) -> tuple:
        """All but the sizes."""
        masks = self.layout, self.causal, self.window is None, self.segments is None
        dtype = np.dtype(self.dtype).name
        return self.axis_size, dtype, *masks, self.kernels, self.direction, self.transport

    @property
    def layer(self) -> tuple:
        """All sizes but the tokens."""
        masks = self.window or 0, self.segments or 0
        return self.batch, self.heads, self.key_value_heads, self.head_size, *masks

    @property
    def rows(self) -> int:
        """The tokens of a sequence that this device has."""
        return self.tokens

    @property
    def order(self) -> tuple:
        """The sort key of entries in a file."""
        return (*map(str, self.kind), *self.layer, self.tokens)

    def doublings(self, other: ContextRequest) -> float:
        """The distance of two requests: the sum of those of their sizes."""
        sizes = zip((*self.layer, self.tokens), (*other.layer, other.tokens), strict=True)
        return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in sizes)

    @property
    def shapes(self) -> str:
        """Local shapes, dtype, masks and axes as text."""
        axes = f"{' and '.join(self.axis_name) or 'devices'}={self.axis_size}"
        axes += described_transport(self.transport)
        heads = f"{self.heads}/{self.key_value_heads} heads of {self.head_size}"
        masks = [
            "causal" if self.causal else "",
            self.layout,
            f"window {self.window}" if self.window is not None else "",
            f"up to {self.segments} segments" if self.segments is not None else "",
        ]
        tokens = f"{np.dtype(self.dtype).name} {self.batch}×{self.tokens} tokens"
        return f"{', '.join(filter(None, (tokens, heads, *masks)))} over {axes}"
