"""`Site`: one call of an op as data, with everything that the choice of a backend depends on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from collective_matmul.dispatch.contract import (
    HIDDEN_SHARE,
    Backend,
    Direction,
    Request,
    UnregisteredError,
    size_above_zero,
)
from collective_matmul.dispatch.registry import Registry
from collective_matmul.operands.format import PLAIN, Format, HasFormat, format_of_fields
from collective_matmul.operands.sharded import WeightShards
from collective_matmul.ops.matmul.equation import Equation
from collective_matmul.source_location import SourceLocation
from collective_matmul.transport import (
    Transport,
    described_transport,
    transport_fields,
    transport_of_fields,
)

Op = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]

#: All backends by name, in the order in which they are listed;
#: `collective_matmul.ops.matmul.backends` fills it. Permutes replace the reference where that is
#: unprofitable: XLA can split them over the mesh axes that it shards by itself, and they are as
#: much traffic.
BACKENDS = Registry(substitute="ring_direct", renamed={"bulk": "xla"})

#: The TMA engine of a GPU loads an array only if every row starts at a multiple of this.
ALIGNMENT_BYTES = 16

#: A doubling of K or N counts as this many of the rows. They also decide how tiles fill waves, and
#: how much there is to communicate for each operation, which rows change alike.
WEIGHT_OF_K_AND_N = 2.0


@dataclass(frozen=True)
class Einsum:
    """The multiplication at a site that is not a matmul of whole dimensions.

    Attributes:
      equation: subscripts, such as "sd,sf->df".
      operands: the local shapes of both operands.
      accumulates: whether the products of all chunks are added to one float32 sum.
    """

    equation: str
    operands: tuple[tuple[int, ...], ...]
    accumulates: bool

    def __str__(self) -> str:
        return f"{self.equation} {','.join(map(_size, self.operands))}"


@dataclass(frozen=True)
class Site(HasFormat, Request):
    """An op and its local shapes: the `Request` of matmuls.

    Sites that differ only in `dimension` or a later attribute compare equal: they take equally
    long.

    Attributes:
      op: name of the op.
      operands: local shapes (x, w) of every matmul; w is [K, N]. For an einsum, the shapes of a
        matmul with as many operations and as much communication.
      dtype: dtype of operands, before they are quantized, and of the result.
      co_gathered: local shape of an array gathered in the same loop, or None.
      keep_gathered: whether the gathered array is a result too.
      einsum: the multiplication, if it is not a matmul; or None.
      format: how operands are stored while they travel and are multiplied.
      weight_shards: how the weights are sharded, if the op gathers them too; or None. In a
        backward pass their gradients are also summed over that axis, and scattered.
      dimension: gathered or scattered dimension of every x and of the result; None for an
        all-reduce or an einsum.
      transpose_w: whether the weights are stored as [N, K].
      transposed: arrays that have to be transposed before or after the multiplication, named by
        their einsum labels.
      axis_name, axis_size, divergent_axes, direction, source, replaces: see `Request`.
      remarks: what `explain` says of the call before the reason of a decision.
      gathered_shards: how weights are sharded that are gathered before the op's own loop; or None.
      equation: the einsum that the op executes; None for matmuls.
      transport: who moves its bytes.
      columns_beside: number of further columns that travel in the same collective.
    """

    op: Op
    operands: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    dtype: np.dtype
    axis_name: str
    axis_size: int
    co_gathered: tuple[int, ...] | None = None
    keep_gathered: bool = False
    einsum: Einsum | None = None
    format: Format = PLAIN
    weight_shards: WeightShards | None = None
    dimension: int | None = field(default=0, compare=False)
    transpose_w: bool = field(default=False, compare=False)
    transposed: tuple[str, ...] = field(default=(), compare=False)
    divergent_axes: tuple[str, ...] = field(default=(), compare=False)
    direction: Direction = field(default="forward", compare=False)
    source: SourceLocation | None = field(default=None, compare=False)
    replaces: str | None = field(default=None, compare=False)
    remarks: tuple[str, ...] = field(default=(), compare=False)
    gathered_shards: WeightShards | None = field(default=None, compare=False)
    equation: Equation | None = field(default=None, compare=False)
    transport: Transport = "peer_copies"
    columns_beside: int = field(default=0, compare=False, repr=False)

    @property
    def backends(self) -> Registry:
        """The backends of matmuls."""
        return BACKENDS

    @property
    def flat(self) -> Site:
        """This work with leading dimensions joined and the axis unnamed: [m, K] @ [K, N].

        Sites with equal work have equal flat sites: tables are keyed by them. Operands are sorted,
        the largest first. Weights are stored as in a model: [K, N], or [N, K] in a backward pass.
        """
        return replace(
            self,
            operands=tuple(sorted(((_flat(x), w) for x, w in self.operands), reverse=True)),
            dtype=np.dtype(self.dtype),
            axis_name="",
            weight_shards=self.weight_shards and replace(self.weight_shards, axis_name=""),
            co_gathered=None if self.co_gathered is None else _flat(self.co_gathered),
            dimension=0,
            transpose_w=self.has_weight_gradient,
        )

    @property
    def rows(self) -> int:
        """Rows of the local x: the product of its leading dimensions."""
        x, _ = self.operands[0]
        return math.prod(x[:-1])

    @property
    def shard_dimension(self) -> int:
        """The dimension that is gathered or scattered, of matmuls that have one."""
        assert self.dimension is not None
        return self.dimension

    @property
    def labels(self) -> Equation:
        """The equation of an einsum."""
        assert self.equation is not None
        return self.equation

    @property
    def contracted(self) -> int:
        """Size of the contracted dimension, summed over the (x, w) pairs of a reduce-scatter."""
        if self.op == "all_gather_matmul":
            return self.operands[0][1][0]
        return sum(w[0] for _, w in self.operands)

    @property
    def columns(self) -> int:
        """Columns of the result, summed over the weights of a gather."""
        if self.op == "all_gather_matmul":
            return sum(w[1] for _, w in self.operands)
        return self.operands[0][1][1]

    @property
    def product_rows(self) -> int:
        """Rows of the local product, before the scatter."""
        return self.rows * (self.axis_size if self.op == "all_gather_matmul" else 1)

    @property
    def chunk_rows(self) -> int:
        """Rows of the local product that one device's chunk has: what a ring multiplies at once."""
        return self.product_rows // self.axis_size

    @property
    def flops(self) -> int:
        """Floating-point operations of the op's matmuls on one device."""
        return 2 * self.product_rows * self.contracted * self.columns

    @property
    def communicates(self) -> bool:
        """Whether more than one device takes part in an axis of the op."""
        return max(self.axis_size, self.weight_shards.axis_size if self.weight_shards else 1) > 1

    @property
    def has_weight_gradient(self) -> bool:
        """Whether a weight gradient is computed from the gathered array, as in a backward pass.

        Its matmul has as many operations as the op.
        """
        return self.keep_gathered or self.co_gathered is not None

    @property
    def is_aligned(self) -> bool:
        """Whether the TMA engine can load every operand."""
        itemsize = np.dtype(self.dtype).itemsize
        return all(size * itemsize % ALIGNMENT_BYTES == 0 for _, w in self.operands for size in w)

    @property
    def operand_dtypes(self) -> tuple[str, str]:
        """The dtypes of x and w as they are multiplied, where the hardware can."""
        return self.format.operand_dtypes(self.dtype, backward=self.direction == "backward")

    def multiplied_dtypes(self, rows: int) -> tuple[str, str]:
        """The dtypes of x and w as this number of rows is multiplied in the traced program."""
        backward = self.direction == "backward"
        return self.format.multiplied_dtypes(self, rows, self.dtype, backward=backward)

    @property
    def communicated_dtypes(self) -> tuple[str, ...]:
        """The dtypes of arrays between devices; sums have the site's."""
        backward = self.direction == "backward"
        if self.op == "all_gather_matmul":
            rows = self.format.wire_dtype(self.dtype, backward=backward)
            return tuple(dict.fromkeys((rows, *[self.dtype_name] * self._sends_x_itself)))
        kept = self.dtype_name
        if self.format.packs_gradients:
            kept = self.format.wire_dtype(self.dtype, backward=False)
        co_gathered = () if self.co_gathered is None else (kept,)
        return tuple(dict.fromkeys((self.dtype_name, *co_gathered)))

    @property
    def weight_gradient_dtypes(self) -> tuple[str, str] | None:
        """The dtypes of a weight gradient's operands; None if the site has none."""
        if not self.has_weight_gradient:
            return None
        if not self.format.packs_gradients:
            return self.dtype_name, self.dtype_name
        dy, w = self.format.operand_dtypes(self.dtype, backward=True)
        return w, dy

    @property
    def dtype_name(self) -> str:
        """The name of `dtype`."""
        return np.dtype(self.dtype).name

    @property
    def bytes_communicated(self) -> int:
        """Bytes that each device sends: D - 1 shards of each gathered or scattered array."""
        if self.op == "all_gather_matmul":
            row = self.format.row_bytes(self.contracted, np.dtype(self.dtype).itemsize)
            own = (self.axis_size - 1) * self.rows * row
        else:
            elements = (self.axis_size - 1) * self.rows * self.columns // self.axis_size
            own = elements * np.dtype(self.dtype).itemsize
        if self.op == "matmul_all_reduce":
            own *= 2
        return own + self.co_gathered_bytes + self.weight_bytes

    @property
    def _sends_x_itself(self) -> bool:
        """Whether a gather of rows in another format also sends x, for a weight gradient."""
        return self.keep_gathered and self.format != PLAIN and not self.format.packs_gradients

    @property
    def weight_bytes(self) -> int:
        """The part of `bytes_communicated` that belongs to weights, and to their gradients."""
        if self.weight_shards is None:
            return 0
        devices = self.weight_shards.axis_size
        elements = sum(math.prod(w) for _, w in self.operands) * (devices - 1) // devices
        return self.weight_transfers * elements * np.dtype(self.dtype).itemsize

    @property
    def weight_transfers(self) -> int:
        """Collectives of each weight: a gather and, in a backward pass, its gradient's scatter."""
        if self.weight_shards is None:
            return 0
        return 2 if self.direction == "backward" else 1

    @property
    def co_gathered_bytes(self) -> int:
        """The part of `bytes_communicated` that belongs to an array gathered beside the operands.

        That is the co-gathered array; or, beside rows in another format, x itself for a weight
        gradient.
        """
        if self.co_gathered is not None:
            *rows, columns = self.co_gathered
        elif self._sends_x_itself:
            rows, columns = [self.rows], self.contracted
        else:
            return 0
        stored = self.format if self.format.packs_gradients else PLAIN
        row = stored.row_bytes(columns, np.dtype(self.dtype).itemsize)
        return (self.axis_size - 1) * math.prod(rows) * row

    @property
    def collectives(self) -> int:
        """One for each array that travels."""
        collectives = (1 if self.co_gathered is None else 2) if self.axis_size > 1 else 0
        return collectives + self.weight_transfers * len(self.operands)

    @property
    def overlapped_seconds(self) -> float:
        """The part of `communication_seconds` that XLA hides, or may hide.

        In a backward pass it hides some of either collective under the matmul of the weight
        gradient. Weights may be gathered, and their gradients scattered, at any time: they count as
        hidden.
        """
        own = replace(self, weight_shards=None).communication_seconds
        weights = self.communication_seconds - own
        return weights + (HIDDEN_SHARE * own if self.direction == "backward" else 0.0)

    @property
    def is_tabled(self) -> bool:
        """Whether it is a matmul of whole dimensions and whole weights."""
        return self.einsum is None and self.weight_shards is None

    def fields(self) -> dict[str, Any]:
        """The key of a table's entry: "op", "devices", "dtype", "operands" and what else differs.

        "operands" are local [M, K, N], an x [M, K] and a w [K, N]; leading dimensions are joined
        in M. Some sites have more: "co_gathered", [M, K]; "keep_gathered", true; "transport",
        unless bytes are copied between peers; and the fields of their format.
        """
        if not self.is_tabled:
            # Its fields would be those of another site.
            raise ValueError(
                f"{self}: an entry in a table; expected a matmul of whole dimensions and whole"
                " weights"
            )
        fields: dict[str, Any] = {
            "op": self.op,
            "devices": self.axis_size,
            "dtype": self.dtype.name,
            "operands": [[*x, w[1]] for x, w in self.operands],
        }
        if self.co_gathered is not None:
            fields["co_gathered"] = list(self.co_gathered)
        fields |= self.format.fields
        if self.keep_gathered:
            fields["keep_gathered"] = True
        return fields | transport_fields(self.transport)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Site:
        """The flat site of a table's entry; see `fields`.

        Raises:
          UnregisteredError: if the site has a format that this program has not registered.
          ValueError, LookupError, TypeError: if the values are not those of a site.
        """
        op, dtype = fields["op"], jnp.dtype(fields["dtype"])
        co_gathered = fields.get("co_gathered")
        is_floating = jnp.issubdtype(dtype, jnp.floating)
        if op not in get_args(Op) or not is_floating or not fields["operands"]:
            raise ValueError(f"no site of an op: {dict(fields)}")
        if co_gathered is not None:
            co_gathered = size_above_zero(co_gathered[0]), size_above_zero(co_gathered[1])
        size = size_above_zero
        operands = [((size(m), size(k)), (k, size(n))) for m, k, n in fields["operands"]]
        devices = size_above_zero(fields["devices"])
        try:
            stored = format_of_fields(fields)
        except LookupError as error:
            raise UnregisteredError(str(error)) from error
        return cls(
            op=op,
            operands=tuple(operands),
            dtype=dtype,
            axis_name="",
            axis_size=devices,
            co_gathered=co_gathered,
            keep_gathered=bool(fields.get("keep_gathered", False)),
            format=stored,
            transport=transport_of_fields(fields),
        ).flat

    @property
    def kind(self) -> tuple:
        """All but the sizes of the matmuls."""
        has_co_gathered = self.co_gathered is not None
        is_matmul = self.einsum is None
        work = self.op, self.axis_size, has_co_gathered, self.keep_gathered, is_matmul
        # Unaligned matmuls take longer, and gains of aligned ones do not predict theirs. So it is
        # with those in 8 bits of which our kernel leaves chunks to XLA.
        is_aligned = self.is_aligned
        if self.format != PLAIN:
            is_aligned = self.fits_kernel(self.chunk_rows)
        stored = self.weight_shards, self.format, self.dtype.itemsize
        return *work, *stored, is_aligned, self.transport

    @property
    def layer(self) -> tuple[int, int]:
        """K and N: sites of one layer differ in their rows."""
        return self.contracted, self.columns

    @property
    def order(self) -> tuple:
        """Sort key: layer by layer, the rows of each ascending."""
        return (
            self.axis_size,
            self.dtype.name,
            tuple(w for _, w in self.operands),
            self.op,
            self.co_gathered is not None,
            self.keep_gathered,
            self.format.text,
            self.transport,
            self.rows,
        )

    def doublings(self, other: Site) -> float:
        """The distance between two flat sites of one kind, in doublings of the rows."""
        rows = math.log2(self.rows / other.rows)
        contracted = math.log2(self.contracted / other.contracted)
        columns = math.log2(self.columns / other.columns)
        return max(abs(rows), WEIGHT_OF_K_AND_N * max(abs(contracted), abs(columns)))

    def fits_kernel(self, rows: int) -> bool:
        """Whether our kernel for the format multiplies this number of rows of every x."""
        return self.format.fits_kernel(self, rows, backward=self.direction == "backward")

    def multiplied_by(self, backend: Backend) -> tuple[str, str] | None:
        """The dtypes of x and w in which a backend multiplies them; None if they are `dtype`."""
        return None if self.format == PLAIN else backend.multiplied_dtypes(self)

    def line_dtypes(self, multiplied: tuple[str, str] | None) -> str:
        """The dtypes that travel and are multiplied: "travels bfloat16, multiplies float32".

        Empty unless another format than arrays was asked for.
        """
        if self.format == PLAIN and not self.remarks:
            return ""
        travels = " and ".join(self.communicated_dtypes)
        text = f"travels {travels}, multiplies {_product(multiplied or self.operand_dtypes)}"
        if self.weight_gradient_dtypes is not None:
            text += f"; weight gradient {_product(self.weight_gradient_dtypes)}"
        if self.gathered_shards is not None:
            text += f"; gathers {self.gathered_shards} before, in {self.operand_dtypes[1]}"
        return text

    @property
    def shapes(self) -> str:
        """Local shapes, dtype and axis as text, for messages and tables."""
        if self.einsum is not None:
            matmuls = str(self.einsum)
        elif self.op == "all_gather_matmul":
            matmuls = f"{_size(self.operands[0][0])}@{','.join(_size(w) for _, w in self.operands)}"
        else:
            matmuls = " + ".join(f"{_size(x)}@{_size(w)}" for x, w in self.operands)
        co_gathered = f", with {_size(self.co_gathered)}" if self.co_gathered is not None else ""
        kept = ", gathered kept" if self.keep_gathered else ""
        moved = f", {' and '.join(self.transposed)} transposed" if self.transposed else ""
        axis = f"{self.axis_name or 'devices'}={self.axis_size}"
        axis += described_transport(self.transport)
        shards = f", {self.weight_shards}" if self.weight_shards is not None else ""
        stored = self.format.text
        return f"{self.dtype_name} {matmuls}{co_gathered}{kept}{moved} over {axis}{shards}{stored}"

    def __str__(self) -> str:
        return f"{self.op} {self.shapes}"


def _product(dtypes: tuple[str, str]) -> str:
    return " × ".join(dict.fromkeys(dtypes))


def _size(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _flat(shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]
