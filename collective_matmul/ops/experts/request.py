"""`ExpertRequest`: one pass of an expert op as data, for the choice of a backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from collective_matmul.dispatch.contract import (
    Direction,
    Request,
    UnregisteredError,
    size_above_zero,
)
from collective_matmul.dispatch.registry import Registry
from collective_matmul.operands.arithmetic import accumulator
from collective_matmul.operands.format import PLAIN, Format, HasFormat, format_of_fields
from collective_matmul.source_location import SourceLocation
from collective_matmul.transport import (
    Transport,
    described_transport,
    transport_fields,
    transport_of_fields,
)

#: The backends of expert ops; `collective_matmul.ops.experts.backends` fills it.
BACKENDS = Registry()

#: The name of the op.
OP = "expert_mlp"


@dataclass(frozen=True)
class ExpertRequest(HasFormat, Request):
    """One pass of an expert op.

    Attributes:
      tokens: T, of this device.
      width: h, of a token.
      hidden: f, the hidden features of an expert that this device has.
      experts: E, of all devices together.
      choices: k, the experts of a token.
      dtype: of tokens and weights, before they are quantized, and of results.
      axis_name: the mesh axes whose devices exchange tokens, in the order of the mesh.
      axis_size: D, the number of these devices.
      expert_devices: the number of devices that experts are divided over; it divides D. If it is
        smaller, the hidden features are divided over the others.
      keeps_hidden: whether the products of gate and up are kept for the backward pass.
      format: how operands are stored while they travel and are multiplied.
      trained: whether weights have gradients. Tables do not tell: they have those of trained ones.
      expert_axes: those of the axes that experts are divided over, in the order of the experts.
      op: name of the op.
      transport: who moves its bytes.
      divergent_axes: further mesh axes along which devices may execute the request a different
        number of times, because it is inside a branch or a loop.
      direction: whether this is the forward or the backward pass.
      source: where the user called the op.
      remarks: what `explain` says of the call before the reason of a decision.
      replaces: the user's program that `collective_matmul.overlap` replaced by this op, or None.
    """

    tokens: int
    width: int
    hidden: int
    experts: int
    choices: int
    dtype: np.dtype
    axis_name: tuple[str, ...]
    axis_size: int
    expert_devices: int
    keeps_hidden: bool = True
    format: Format = PLAIN
    trained: bool = field(default=True, compare=False)
    expert_axes: tuple[str, ...] = field(default=(), compare=False)
    op: str = OP
    direction: Direction = "forward"
    transport: Transport = "peer_copies"
    divergent_axes: tuple[str, ...] = field(default=(), compare=False)
    source: SourceLocation | None = field(default=None, compare=False)
    replaces: str | None = field(default=None, compare=False)
    remarks: tuple[str, ...] = field(default=(), compare=False)

    @property
    def backends(self) -> Registry:
        """The backends of expert ops."""
        return BACKENDS

    @property
    def local_experts(self) -> int:
        """The experts of this device."""
        return self.experts // self.expert_devices

    @property
    def pairs(self) -> int:
        """Pairs of a token and an expert that one device has if all experts have equally many."""
        return max(1, self.axis_size * self.tokens * self.choices // self.expert_devices)

    @property
    def products(self) -> int:
        """Products [pairs, h] with [h, f], or as large, of this pass."""
        if self.direction == "forward":
            return 3
        return 3 + (0 if self.keeps_hidden else 2) + self.weight_gradients

    @property
    def weight_gradients(self) -> int:
        """The number of products of this pass that are gradients of weights."""
        return 3 if self.trained and self.direction == "backward" else 0

    @property
    def flops(self) -> int:
        """Floating-point operations of one device, if all experts have equally many tokens."""
        work = self.tokens * self.choices * self.width * self.hidden * self.experts
        return 2 * self.products * self.pairs * self.width * self.hidden if work else 0

    @property
    def bytes_of_tokens(self) -> int:
        """Bytes of this device's tokens as they travel, or of gradients of their results."""
        stored = self.format if self._sends_rows else PLAIN
        return self.tokens * stored.row_bytes(self.width, np.dtype(self.dtype).itemsize)

    @property
    def bytes_of_results(self) -> int:
        """Bytes of what a device returns for another one's tokens, which are arrays."""
        return self.tokens * self.width * np.dtype(self.dtype).itemsize

    @property
    def _sends_rows(self) -> bool:
        """Whether rows travel in the format. Else arrays do, which weight gradients need."""
        return not self.weight_gradients or self.format.packs_gradients

    @property
    def communicated_dtypes(self) -> tuple[str, ...]:
        """The dtypes in which tokens, gradients of results and results travel, in words."""
        stored = self.format if self._sends_rows else PLAIN
        rows = [stored.wire_dtype(self.dtype, backward=False)]
        if self.direction == "backward":
            rows.append(stored.wire_dtype(self.dtype, backward=True))
        return tuple(dict.fromkeys((*rows, np.dtype(self.dtype).name)))

    @property
    def bytes_of_routing(self) -> int:
        """Bytes of the tokens' experts and of their weights, which are as wide: 4 bytes, or 8."""
        return 2 * accumulator(self.dtype).itemsize * self.tokens * self.choices

    @property
    def bytes_communicated(self) -> int:
        """Bytes that each device sends.

        Forward: tokens and routings go to all others, and sums come home. Backward: tokens, if
        something is computed from them, gradients of the result and, home, gradients of tokens and
        of the routing's weights.
        """
        if self.direction == "forward":
            each = self.bytes_of_tokens + self.bytes_of_routing + self.bytes_of_results
        else:
            rows = 1 if self.keeps_hidden and not self.trained else 2
            each = rows * self.bytes_of_tokens + self.bytes_of_routing // 2 + self.bytes_of_results
        return (self.axis_size - 1) * each

    @property
    def collectives(self) -> int:
        """One for each array of `bytes_communicated`."""
        if not self.communicates:
            return 0
        return 3 if self.direction == "forward" else 4

    @property
    def overlapped_seconds(self) -> float:
        """0: what XLA could hide of a backward pass waits for all of it."""
        return 0.0

    @property
    def flat(self) -> ExpertRequest:
        """The request without the names of its axes."""
        return replace(self, axis_name=(), dtype=np.dtype(self.dtype))

    def fields(self) -> dict[str, Any]:
        """The key of a table's entry."""
        return {
            "op": self.op,
            "devices": self.axis_size,
            "expert_devices": self.expert_devices,
            "dtype": np.dtype(self.dtype).name,
            "tokens": self.tokens,
            "width": self.width,
            "hidden": self.hidden,
            "experts": self.experts,
            "choices": self.choices,
            "direction": self.direction,
            "keeps_hidden": self.keeps_hidden,
            **self.format.fields,
            **transport_fields(self.transport),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ExpertRequest:
        """The flat request that `fields` describes.

        Raises:
          UnregisteredError: if it has a format that this program has not registered.
          ValueError, LookupError, TypeError: for other values.
        """
        if fields["op"] != OP or fields["direction"] not in ("forward", "backward"):
            raise ValueError(f"op {fields['op']!r}, direction {fields['direction']!r}")
        names = ("tokens", "width", "hidden", "experts", "choices", "expert_devices")
        sizes: dict[str, Any] = {name: size_above_zero(fields[name]) for name in names}
        try:
            stored = format_of_fields(fields)
        except LookupError as error:
            raise UnregisteredError(str(error)) from error
        return cls(
            axis_name=(),
            axis_size=size_above_zero(fields["devices"]),
            dtype=np.dtype(fields["dtype"]),
            direction=cast(Direction, fields["direction"]),
            keeps_hidden=bool(fields["keeps_hidden"]),
            format=stored,
            transport=transport_of_fields(fields),
            **sizes,
        )

    @property
    def kind(self) -> tuple:
        """All but the sizes."""
        dtype = np.dtype(self.dtype).name
        devices = self.axis_size, self.expert_devices
        return *devices, dtype, self.direction, self.keeps_hidden, self.transport, self.format

    @property
    def layer(self) -> tuple:
        """All sizes but the tokens."""
        return self.width, self.hidden, self.experts, self.choices

    @property
    def rows(self) -> int:
        """The tokens."""
        return self.tokens

    @property
    def order(self) -> tuple:
        """The sort key of entries in a file."""
        return (*map(str, self.kind[:-1]), self.format.text, *self.layer, self.tokens)

    def doublings(self, other: ExpertRequest) -> float:
        """The distance of two requests: the sum of those of their sizes."""
        sizes = zip((*self.layer, self.tokens), (*other.layer, other.tokens), strict=True)
        return sum(abs(math.log2(a / b)) for a, b in sizes)

    @property
    def shapes(self) -> str:
        """Local shapes, dtype and axes as text."""
        axes = " and ".join(self.axis_name) or "devices"
        return (
            f"{np.dtype(self.dtype).name} [{self.tokens}, {self.width}] to {self.choices} of"
            f" {self.experts} experts of [{self.width}, {self.hidden}] over {axes}={self.axis_size}"
            f"{described_transport(self.transport)}{self.format.text}"
        )

    def line_dtypes(self, multiplied: tuple[str, str] | None) -> str:
        """The dtypes that travel; "" for operands without a format."""
        del multiplied
        return "" if self.format == PLAIN else f"travels {' and '.join(self.communicated_dtypes)}"
