"""One place in a program where an op is called: all that a decision may depend on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from collective_matmul.source_location import SourceLocation

Direction = Literal["forward", "backward"]
Op = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]

#: Where rows of an array start at other than multiples of so many bytes, no copy engine of a GPU
#: brings them to the tensor cores.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Einsum:
    """What is multiplied at a site, if it is no matmul of whole dimensions.

    Attributes:
      equation: its labels, as "sd,sf->df".
      operands: their local shapes.
      accumulates: whether every chunk's product is added to the same sum, in float32.
    """

    equation: str
    operands: tuple[tuple[int, ...], ...]
    accumulates: bool

    def __str__(self) -> str:
        return f"{self.equation} {','.join(map(_size, self.operands))}"


@dataclass(frozen=True)
class Site:
    """An op and its local shapes.

    Attributes:
      op: the name of the op.
      operands: (x shape, w shape) of every matmul, local; w is [K, N]. Of an einsum, those of a
        matmul that computes and communicates as much.
      dtype: of operands and result.
      axis_name: the mesh axis that is communicated over.
      axis_size: D.
      co_gathered: local shape of an array gathered in the same loop, or None.
      keep_gathered: whether what was gathered is a result too.
      einsum: what is multiplied instead, or None.
      dimension: of every x and result, gathered or scattered; None of an all-reduce, or an einsum.
        Sites that differ in this alone, or in what follows, are equal: they take as long.
      transpose_w: whether the weights lie as [N, K].
      transposed: the arrays, by the labels of an einsum, whose elements have to be moved first or
        after.
      direction: which pass of the op that the user called this is.
      source: where the user called it.
      replaces: the collective that the user called there instead, whose place
        `collective_matmul.overlap` gave the op; or None.
    """

    op: Op
    operands: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    dtype: np.dtype
    axis_name: str
    axis_size: int
    co_gathered: tuple[int, ...] | None = None
    keep_gathered: bool = False
    einsum: Einsum | None = None
    dimension: int | None = field(default=0, compare=False)
    transpose_w: bool = field(default=False, compare=False)
    transposed: tuple[str, ...] = field(default=(), compare=False)
    direction: Direction = field(default="forward", compare=False)
    source: SourceLocation | None = field(default=None, compare=False)
    replaces: str | None = field(default=None, compare=False)

    @property
    def flat(self) -> Site:
        """The same work with leading dimensions joined and the axis unnamed: [m, K] @ [K, N].

        Weights lie as a model's would: the other way round in a backward. The largest comes first.
        """
        return replace(
            self,
            operands=tuple(sorted(((_flat(x), w) for x, w in self.operands), reverse=True)),
            dtype=np.dtype(self.dtype),
            axis_name="",
            co_gathered=None if self.co_gathered is None else _flat(self.co_gathered),
            dimension=0,
            transpose_w=self.has_weight_gradient,
        )

    @property
    def rows(self) -> int:
        """Rows of the local x: its leading dimensions multiplied together."""
        x, _ = self.operands[0]
        return math.prod(x[:-1])

    @property
    def contracted(self) -> int:
        """Columns of all x that are not the same array."""
        if self.op == "all_gather_matmul":
            return self.operands[0][1][0]
        return sum(w[0] for _, w in self.operands)

    @property
    def columns(self) -> int:
        """Columns of all results."""
        if self.op == "all_gather_matmul":
            return sum(w[1] for _, w in self.operands)
        return self.operands[0][1][1]

    @property
    def product_rows(self) -> int:
        """Rows of the local product, before anything is scattered."""
        return self.rows * (self.axis_size if self.op == "all_gather_matmul" else 1)

    @property
    def flops(self) -> int:
        """Floating-point operations of the op's matmuls on one device."""
        return 2 * self.product_rows * self.contracted * self.columns

    @property
    def has_weight_gradient(self) -> bool:
        """Whether what is gathered beside the product is for a weight gradient, as in a backward.

        The matmul of that gradient is as large as those of the op.
        """
        return self.keep_gathered or self.co_gathered is not None

    @property
    def is_aligned(self) -> bool:
        """Whether copy engines can bring what its matmuls multiply to the tensor cores."""
        itemsize = np.dtype(self.dtype).itemsize
        return all(size * itemsize % ALIGNMENT_BYTES == 0 for _, w in self.operands for size in w)

    @property
    def bytes_communicated(self) -> int:
        """Bytes each device sends: D - 1 shards of what is gathered or scattered."""
        if self.op == "all_gather_matmul":
            elements = (self.axis_size - 1) * self.rows * self.contracted
        else:
            elements = (self.axis_size - 1) * self.rows * self.columns // self.axis_size
        if self.op == "matmul_all_reduce":
            elements *= 2
        return elements * np.dtype(self.dtype).itemsize + self.co_gathered_bytes

    @property
    def co_gathered_bytes(self) -> int:
        """Those of them that are of the co_gathered."""
        elements = (
            0 if self.co_gathered is None else (self.axis_size - 1) * math.prod(self.co_gathered)
        )
        return elements * np.dtype(self.dtype).itemsize

    @property
    def shapes(self) -> str:
        """The local arrays and the axis, to be read."""
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
        return f"{np.dtype(self.dtype).name} {matmuls}{co_gathered}{kept}{moved} over {axis}"

    def __str__(self) -> str:
        return f"{self.op} {self.shapes}"


def _size(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _flat(shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]
