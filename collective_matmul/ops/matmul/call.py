"""`Call`: the parameters of one call of an op, from which the request of each pass is made."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from jax import lax

from collective_matmul.dispatch.branches import divergent_axes
from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.dispatch.selection import choose
from collective_matmul.operands.format import PLAIN
from collective_matmul.operands.quantized import arrays_of, format_of
from collective_matmul.operands.sharded import WeightShards, sharding_of
from collective_matmul.ops.matmul.backend import MatmulBackend
from collective_matmul.ops.matmul.backends import BACKENDS
from collective_matmul.ops.matmul.request import Op, Site
from collective_matmul.source_location import SourceLocation, calling_location
from collective_matmul.transport import transport_over


@dataclass(frozen=True)
class Call:
    """Parameters of an op, for its forward and its backward pass; its operands have the others.

    Attributes:
      axis_name: the mesh axis.
      dimension: the gathered or scattered dimension; None for an all-reduce, and for einsums, which
        have a label instead.
      implementation: names of the requested backends, best first, or None.
      transpose_w: whether weights that are arrays are [N, K].
      keep_gathered: whether what was gathered is a result too.
      divergent_axes, source, replaces, remarks: see `Site`.
    """

    axis_name: str
    dimension: int | None
    implementation: tuple[str, ...] | None
    transpose_w: bool = False
    keep_gathered: bool = False
    divergent_axes: tuple[str, ...] = ()
    source: SourceLocation | None = field(default=None, compare=False)
    replaces: str | None = field(default=None, compare=False)
    remarks: tuple[str, ...] = ()

    def remarking(self, remark: str) -> Call:
        """The call with a further remark for `explain`."""
        return replace(self, remarks=(*self.remarks, remark))

    def in_arrays(self, ws: Sequence[Any], reason: str) -> tuple[Call, Sequence[Any]]:
        """The call and its weights as arrays; where they were not, `explain` says the reason."""
        stored = format_of(ws)
        if stored == PLAIN:
            return self, ws
        return self.remarking(stored.refusal(reason)), arrays_of(ws)

    def choose(
        self, op: Op, xs: Sequence[Any], ws: Sequence[Any], **attributes: Any
    ) -> tuple[MatmulBackend, Site]:
        """The backend for one pass, and its request; arguments as for `request`."""
        return self.chosen(self.request(op, xs, ws, **attributes))

    def chosen(self, request: Site) -> tuple[MatmulBackend, Site]:
        """The backend for a request, and the request."""
        return cast(MatmulBackend, choose(request, self.implementation)), request

    def request(self, op: Op, xs: Sequence[Any], ws: Sequence[Any], **attributes: Any) -> Site:
        """The request of one pass.

        Args:
          op: what the pass is.
          xs: the rows of every matmul.
          ws: the weight of each.
          **attributes: further attributes of the request.
        """
        backward = attributes.get("direction") == "backward"
        transpose_w = self.transpose_w != backward
        stored, sharding = format_of(ws), sharding_of(ws[0])
        shapes = [w.shape[::-1] if transpose_w else w.shape for w in ws]
        in_loop = stored.travels_in_loop and self._can_gather_in_loop(op, len(ws), backward)
        return self.site(
            op,
            operands=tuple(zip([x.shape for x in xs], shapes, strict=True)),
            dtype=xs[0].dtype,
            format=stored,
            weight_shards=sharding if in_loop else None,
            gathered_shards=None if in_loop else sharding,
            dimension=self.dimension,
            transpose_w=transpose_w,
            **attributes,
        )

    def site(self, op: Op, **attributes: Any) -> Site:
        """A request with these attributes and with those that the call has."""
        axes = [self.axis_name]
        if (sharding := attributes.get("weight_shards")) is not None:
            axes.append(sharding.axis_name)
        return Site(
            op=op,
            transport=transport_over(*axes),
            axis_name=self.axis_name,
            axis_size=lax.axis_size(self.axis_name),
            divergent_axes=self.divergent_axes,
            source=self.source,
            replaces=self.replaces,
            remarks=self.remarks,
            **attributes,
        )

    def _can_gather_in_loop(self, op: Op, weights: int, backward: bool) -> bool:
        """Whether the loop of a pass can gather shards of weights.

        Nothing of an all-reduce is divided into chunks, under which a gather could hide. In forms
        that only programs have which contain gradients already, the backward's loop gathers none.
        """
        if op == "matmul_all_reduce":
            return False
        several = op == "all_gather_matmul" and weights > 1
        return not backward or not (self.keep_gathered or self.transpose_w or several)

    def copies_between_peers(self, sharding: WeightShards) -> bool:
        """Whether terms of a sum over an axis are copied between peers, as those of a ring are."""
        names = self.implementation
        backends = [cast(MatmulBackend, BACKENDS[name]) for name in names or ()]
        allowed = names is None or any(each.copies_between_peers for each in backends)
        return (
            allowed
            and not self.divergent_axes
            and transport_over(sharding.axis_name) == "peer_copies"
        )

    def suppress_recording(self) -> contextlib.AbstractContextManager:
        """A context that hides decisions which were recorded when the op replaced a collective."""
        return record_decisions(hidden=True) if self.replaces else contextlib.nullcontext()


def call_here(
    axis_name: str, dimension: int | None, implementation: tuple[str, ...] | None, **attributes: Any
) -> Call:
    """The parameters of an op that the user's program calls now."""
    return Call(
        axis_name,
        dimension,
        implementation,
        divergent_axes=divergent_axes(axis_name),
        source=calling_location(),
        **attributes,
    )
