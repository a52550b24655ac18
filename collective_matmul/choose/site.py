"""One place in a program where an op is called: all that a decision may depend on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from collective_matmul.choose.source import Source

Direction = Literal["forward", "backward"]
Op = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]


@dataclass(frozen=True)
class Site:
    """An op and its local shapes.

    Attributes:
      op: the name of the op.
      operands: (x shape, w shape) of every matmul, local; w is [K, N].
      dtype: of operands and result.
      axis_name: the mesh axis that is communicated over.
      axis_size: D.
      rider: local shape of an array gathered in the same loop, or None.
      keep_gathered: whether what was gathered is a result too.
      direction: which pass of the op that the user called this is. Like `source`, it tells sites
        apart for a reader, not for a decision: sites that differ in these alone are equal.
      source: where the user called it.
    """

    op: Op
    operands: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    dtype: np.dtype
    axis_name: str
    axis_size: int
    rider: tuple[int, ...] | None = None
    keep_gathered: bool = False
    direction: Direction = field(default="forward", compare=False)
    source: Source | None = field(default=None, compare=False)

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole op on one device."""
        gathered = self.axis_size if self.op == "all_gather_matmul" else 1
        return sum(2 * gathered * math.prod(x) * w[1] for x, w in self.operands)

    @property
    def bytes_communicated(self) -> int:
        """Bytes each device sends: D - 1 shards of what is gathered or scattered."""
        x, w = self.operands[0]
        if self.op == "all_gather_matmul":
            elements = (self.axis_size - 1) * math.prod(x)
        else:
            elements = (self.axis_size - 1) * math.prod(x[:-1]) * w[1] // self.axis_size
        if self.op == "matmul_all_reduce":
            elements *= 2
        if self.rider is not None:
            elements += (self.axis_size - 1) * math.prod(self.rider)
        return elements * np.dtype(self.dtype).itemsize

    @property
    def rows(self) -> int:
        """Rows of the local product: the leading dimensions of x multiplied together."""
        x, _ = self.operands[0]
        return math.prod(x[:-1])

    def __str__(self) -> str:
        shapes = ", ".join(f"{list(x)} @ {list(w)}" for x, w in self.operands)
        return f"{self.op} {shapes} {np.dtype(self.dtype).name} over {self.axis_name!r}"
