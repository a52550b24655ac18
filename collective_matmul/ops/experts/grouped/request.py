"""`GroupedRequest`: a product of groups of rows with matrices of their own, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from collective_matmul.dispatch.contract import (
    Backend,
    Direction,
    Request,
    UnregisteredError,
    size_above_zero,
)
from collective_matmul.dispatch.registry import Registry
from collective_matmul.operands.format import PLAIN, Format, HasFormat, format_of_fields
from collective_matmul.source_location import SourceLocation
from collective_matmul.transport import Transport

GroupedOp = Literal["grouped_matmul", "grouped_weight_gradient"]

#: The backends of grouped matmuls; `collective_matmul.ops.experts.grouped.backends` fills it.
GROUPED_BACKENDS = Registry(
    argument="grouped_implementation",
    reference_differs="multiplies all rows by the matrices of all groups",
)


@dataclass(frozen=True)
class GroupedRequest(HasFormat, Request):
    """Rows in groups, each with a matrix of its own; everything is on one device.

    Attributes:
      op: "grouped_matmul", rows [M, K] times a matrix of each group [G, K, N], or the sum of
        several such products; or "grouped_weight_gradient", [M, K] and [M, N] contracted over the
        rows of each group.
      all_rows: M, those of no group included.
      used_rows: how many of them belong to groups if all experts have equally many.
      contracted: K.
      columns: N.
      groups: G.
      dtype: of the operands, before they are quantized, and of the result.
      pairs: the number of products that are added.
      transposed: whether matrices are stored as [G, N, K].
      format: how operands are stored: the rows and the matrices of a grouped matmul; or, of a
        weight gradient, those of its rows that another device may have sent.
      of_gradient: whether the rows of a grouped matmul are gradients of results, to the format.
      axis_name: none.
      axis_size: 1.
      transport: nothing is communicated.
      divergent_axes: none.
      direction: whether this is part of a forward or of a backward pass.
      source: where the user called the op that this is a part of.
      replaces: None.
    """

    op: GroupedOp
    all_rows: int
    used_rows: int
    contracted: int
    columns: int
    groups: int
    dtype: np.dtype
    pairs: int = 1
    transposed: bool = False
    format: Format = PLAIN
    of_gradient: bool = False
    axis_name: str = ""
    axis_size: int = 1
    transport: Transport = field(default="peer_copies", compare=False)
    divergent_axes: tuple[str, ...] = field(default=(), compare=False)
    direction: Direction = field(default="forward", compare=False)
    source: SourceLocation | None = field(default=None, compare=False)
    replaces: str | None = field(default=None, compare=False)

    @property
    def backends(self) -> Registry:
        """The backends of grouped matmuls."""
        return GROUPED_BACKENDS

    @property
    def communicates(self) -> bool:
        """True: there is something to decide, although it is not about communication."""
        return True

    @property
    def flops(self) -> int:
        """Floating-point operations of the used rows."""
        return 2 * self.used_rows * self.contracted * self.columns * self.pairs

    @property
    def bytes_communicated(self) -> int:
        """0."""
        return 0

    @property
    def collectives(self) -> int:
        """0."""
        return 0

    @property
    def flat(self) -> GroupedRequest:
        """The request itself."""
        return replace(self, dtype=np.dtype(self.dtype))

    def fields(self) -> dict[str, Any]:
        """The key of a table's entry."""
        fields: dict[str, Any] = {
            "op": self.op,
            "dtype": np.dtype(self.dtype).name,
            "rows": self.all_rows,
            "used_rows": self.used_rows,
            "groups": self.groups,
            "contracted": self.contracted,
            "columns": self.columns,
        }
        if self.pairs > 1:
            fields["pairs"] = self.pairs
        if self.transposed:
            fields["transposed"] = True
        if self.of_gradient:
            fields["of_gradient"] = True
        return fields | self.format.fields

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> GroupedRequest:
        """The flat request that `fields` describes.

        Raises:
          UnregisteredError: if it has a format that this program has not registered.
          ValueError, LookupError, TypeError: for other values.
        """
        if fields["op"] not in get_args(GroupedOp):
            raise ValueError(f"the op {fields['op']!r}")
        names = ("used_rows", "contracted", "columns", "groups")
        sizes: dict[str, Any] = {name: size_above_zero(fields[name]) for name in names}
        try:
            stored = format_of_fields(fields)
        except LookupError as error:
            raise UnregisteredError(str(error)) from error
        return cls(
            op=fields["op"],
            all_rows=size_above_zero(fields["rows"]),
            dtype=np.dtype(fields["dtype"]),
            pairs=size_above_zero(fields.get("pairs", 1)),
            transposed=bool(fields.get("transposed", False)),
            format=stored,
            of_gradient=bool(fields.get("of_gradient", False)),
            **sizes,
        )

    @property
    def kind(self) -> tuple:
        """All but the sizes."""
        dtype = np.dtype(self.dtype).name
        return self.op, dtype, self.pairs, self.transposed, self.of_gradient, self.format

    @property
    def rows(self) -> int:
        """All rows."""
        return self.all_rows

    @property
    def layer(self) -> tuple:
        """All sizes but the rows."""
        return self.contracted, self.columns, self.groups

    @property
    def order(self) -> tuple:
        """The sort key of entries in a file."""
        kind = *map(str, self.kind[:-1]), self.format.text
        return (*kind, *self.layer, self.all_rows, self.used_rows)

    def doublings(self, other: GroupedRequest) -> float:
        """The distance of two requests: the sum of those of their sizes."""
        sizes = zip(self._sizes, other._sizes, strict=True)
        return sum(abs(math.log2(a / b)) for a, b in sizes)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.used_rows, self.contracted, self.columns, self.groups

    @property
    def shapes(self) -> str:
        """Local shapes as text."""
        name = np.dtype(self.dtype).name
        rows = f"{name} [{self.all_rows}, "
        if self.op == "grouped_weight_gradient":
            sizes = f"{rows}{self.contracted}]ᵀ {rows}{self.columns}]"
        else:
            sizes = f"{rows}{self.contracted}] @ [{self.groups}, {self.contracted}, {self.columns}]"
            sizes = f"{self.pairs} × {sizes}" if self.pairs > 1 else sizes
        return f"{sizes} in {self.groups} groups{self.format.text}"

    def multiplied_by(self, backend: Backend) -> tuple[str, str] | None:
        """The dtypes in which a backend multiplies operands in a format."""
        return None if self.format == PLAIN else backend.multiplied_dtypes(self)

    def line_dtypes(self, multiplied: tuple[str, str] | None) -> str:
        """The dtypes that are multiplied, in words; "" for operands without a format."""
        if self.format == PLAIN:
            return ""
        name = np.dtype(self.dtype).name
        return f"multiplies {' × '.join(dict.fromkeys(multiplied or (name, name)))}"

    def __str__(self) -> str:
        return f"{self.op} {self.shapes}"
