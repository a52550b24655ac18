"""`Format`: how the operands of an op are stored while they travel and are multiplied.

A format is data, which requests hold, and the rules that depend on it: how rows and weights are
converted, and what a gradient converts and keeps. `PLAIN` stores arrays as they are. Others are
registered by the name that users give; see `collective_matmul.operands.recipes`.

Legend: x and dy are *rows* [..., K], which travel between devices; w is a *weight* [K, N]. Rows in
a format are an array, or a pytree of arrays that all have the leading dimensions of the array: a
schedule cuts and sends them without knowing what they are. A weight in a format is an array or a
`Matrix`. Rows that are no array have the attributes of `operands.scaled.packed_rows.PackedRows`:
shape, array, without_array and dequantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import jax
import numpy as np

from collective_matmul.mosaic_gpu.hopper_matmul.chunk_matmul import Rows

#: Rows: an array, or a pytree of arrays in another format.
RowsOperand = Any
#: A weight: an array, a `Matrix`, or a shard of either.
WeightOperand = Any


class Shapes(Protocol):
    """The shapes of matmuls on one device, as a request has them.

    Attributes:
      operands: the shapes (x, w) of every matmul; w is [K, N].
      dimension: the dimension of every x that chunks divide, or None.
    """

    @property
    def operands(self) -> Sequence[tuple[tuple[int, ...], tuple[int, int] | tuple[int, ...]]]: ...  # noqa: D102

    @property
    def dimension(self) -> int | None: ...  # noqa: D102


class Matrix(Protocol):
    """A weight [K, N] in a format: a pytree, which multiplies rows in that format.

    Attributes:
      product_dtype: the dtype of products with it.
    """

    product_dtype: Any

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N), derived from the arrays."""
        ...

    def multiply(self, rows: Any) -> jax.Array:
        """The product [..., N] with rows [..., K], accumulated in at least float32."""
        ...

    def dequantized(self) -> jax.Array:
        """The weight [K, N] that this stands for, at least float32."""
        ...

    def gathered(self, axis_name: str, dimension: int) -> Any:
        """The whole of a shard along a dimension, 0 or 1, which a mesh axis shards."""
        ...

    @staticmethod
    def multiply_chunks(
        xs: Sequence[Rows], ws: Sequence[Sequence[Any]], outs: Sequence[Rows], *, dimension: int
    ) -> tuple[jax.Array, ...] | None:
        """Multiplies chunks in place: see `collective_matmul.operands.multiply.multiply_chunks`.

        Returns:
          The arrays of outs; None where chunks are to be cut out, multiplied and written.
        """
        del xs, ws, outs, dimension
        return None


class Format(Protocol):
    """A way to store operands. Subclasses inherit what suits formats that are not arrays.

    Attributes:
      name: the name for users and tables.
      packs_gradients: whether a weight gradient is computed from rows in the format. Else it is
        computed from arrays, which the backward pass then needs too.
      travels_in_loop: whether shards of weights may be gathered in the loop of an op. Else they are
        gathered before it.
      scaled_parts: the parts of operands that have scales, as our kernels for 8 bits read them;
        None if the kernels cannot multiply the format.
      relative_seconds: time of a matmul relative to one in half precision; None for that of arrays.
      ring_error: the error of predicted rings, where it was measured; None for that of arrays.
      family: what formats of its kind are called together, before their names; None for one that
        is alone.
    """

    name: str
    packs_gradients: bool = False
    travels_in_loop: bool = False
    scaled_parts: Any = None
    relative_seconds: float | None = None
    ring_error: float | None = None
    family: str | None = None

    def rows(self, xs: Sequence[jax.Array], *, of_gradient: bool = False) -> tuple[Any, ...]:
        """Rows in the format. They keep their arrays too, unless it `packs_gradients`.

        Args:
          xs: arrays [..., K_i], operands of one sum of products.
          of_gradient: whether they are gradients of results.
        """
        ...

    def local_rows(
        self, xs: Sequence[jax.Array], *, of_gradient: bool = False
    ) -> tuple[Any, ...] | None:
        """Rows [M, K_i], each converted by itself, for products on this device.

        Kernels call it with blocks of rows in registers, which zeros fill up to a power of two of
        columns: it has only operations that Pallas knows for Triton.

        Args:
          xs: arrays, operands of one sum of products.
          of_gradient: whether they are gradients of results.

        Returns:
          Pytrees of arrays [M, ...], which products take in place of `rows`; None if `rows` is the
          only way.
        """
        del xs, of_gradient
        return None

    def matrices(
        self, ws: Sequence[jax.Array], *, transposed: bool = False, sharding: Any = None
    ) -> tuple[Any, ...]:
        """Weights [K_i, N] in the format, or their transposes, for rows that are gradients.

        Args:
          ws: the weights, operands of one sum of products; or shards of them.
          transposed: whether the results are [N, K_i].
          sharding: the `WeightShards` of shards, as of [K, N]; or None. Devices agree on what
            shards have in common.
        """
        ...

    def stacks(
        self, ws: Sequence[Any], *, transposed: bool = False, sharding: Any = None
    ) -> tuple[Any, ...]:
        """Stacks of matrices, of weights [G, K_i, N]: each matrix is converted by itself.

        The arguments are those of `matrices`, and so is what a stack has, with a first dimension
        more.
        """

        def converted(*each: jax.Array) -> tuple[Any, ...]:
            return tuple(self.matrices(each, transposed=transposed, sharding=sharding))

        return jax.vmap(converted)(*ws)

    def magnitudes(self, w: jax.Array) -> Any:
        """The largest magnitudes of a weight [K, N] that scales of it and its transpose depend on.

        Where they are found as the weight is written, `matrices_with_magnitudes` reads it once
        less.

        Returns:
          A pytree of float32 arrays; None if the format makes no use of them.
        """
        del w

    def matrices_with_magnitudes(
        self,
        ws: Sequence[jax.Array],
        magnitudes: Sequence[Any],
        *,
        transposed: bool = False,
        sharding: Any = None,
    ) -> tuple[Any, ...]:
        """`matrices` of weights whose `magnitudes` are known, for a format that makes use of them.

        Args:
          ws: the weights, as in `matrices`.
          magnitudes: of each weight, or of each shard of one.
          transposed: as in `matrices`.
          sharding: as in `matrices`.
        """
        raise TypeError(f"{self.name}: matrices of weights with known magnitudes")

    def transposed(self, matrix: Any) -> tuple[Any, jax.Array | None]:
        """The transpose of a matrix, of the same values, and what its rows are multiplied by.

        For frozen weights, which have one copy of their values. The default converts it anew.

        Returns:
          The matrix [N, K]; and a factor of each of the N numbers of a row, or None.
        """
        w = matrix.dequantized().astype(matrix.product_dtype)
        return self.matrices([w], transposed=True)[0], None

    def weight_gradients(
        self, xs: Sequence[Any], dys: Sequence[Any], dtype: Any, *, shards: int, dimension: int
    ) -> Sequence[jax.Array]:
        """``xᵀ dy`` [K, N] of each pair of rows, for a format that `packs_gradients`.

        Args:
          xs: rows of x; either as many as dys, or one for all of them.
          dys: rows of gradients; likewise.
          dtype: dtype of the results.
          shards: how many devices' rows follow each other in gathered rows.
          dimension: the dimension along which they do.
        """
        raise TypeError(f"{self.name}: weight gradients of rows in this format")

    def row_bytes(self, columns: int, itemsize: int) -> int:
        """The bytes of a row of `columns` numbers, which as an array have `itemsize` bytes each."""
        ...

    def operand_dtypes(self, dtype: Any, *, backward: bool) -> tuple[str, str]:
        """The dtypes of x, or of dy in a `backward` pass, and of w, in a program of this dtype."""
        ...

    def wire_dtype(self, dtype: Any, *, backward: bool) -> str:
        """The dtype in which rows travel, in words."""
        return f"{self.operand_dtypes(dtype, backward=backward)[0]} + scales"

    def fits_kernel(self, shapes: Shapes, rows: int, *, backward: bool) -> bool:
        """Whether our kernel for 8 bits multiplies this number of rows, on the GPU it is for."""
        del shapes, rows, backward
        return False

    def multiplied_dtypes(
        self, shapes: Shapes, rows: int, dtype: Any, *, backward: bool
    ) -> tuple[str, str]:
        """`operand_dtypes`, as this number of rows is multiplied in the traced program."""
        del shapes, rows
        return self.operand_dtypes(dtype, backward=backward)

    @property
    def second_derivative_reason(self) -> str | None:
        """Why an op has no second derivative; None if it has."""
        return (
            f"second derivative of a collective matmul with fp8={self.name!r}: its gradients are"
            " computed from rounded operands, and rounding has none; leave fp8 out for ops that are"
            " differentiated twice"
        )

    @property
    def text(self) -> str:
        """The end of a request's text."""
        return f", {self.family} {self.name}" if self.family else f", {self.name}"

    @property
    def kind(self) -> str:
        """The name of the format in sentences about operands."""
        return self.family or self.name

    def refusal(self, reason: str) -> str:
        """The text of `explain` for operands that stay arrays for this reason."""
        return f"not in {self.kind}: {reason}"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the format in a record of a table."""
        return {"fp8": self.name}


@dataclass(frozen=True)
class Plain(Format):
    """Arrays as they are."""

    name: str = "plain"
    travels_in_loop = True

    def rows(self, xs: Sequence[jax.Array], *, of_gradient: bool = False) -> tuple[Any, ...]:
        """The arrays."""
        del of_gradient
        return tuple(xs)

    def matrices(
        self, ws: Sequence[jax.Array], *, transposed: bool = False, sharding: Any = None
    ) -> tuple[Any, ...]:
        """The arrays, which are never transposed."""
        del transposed, sharding
        return tuple(ws)

    def row_bytes(self, columns: int, itemsize: int) -> int:
        """The bytes of the numbers."""
        return columns * itemsize

    def operand_dtypes(self, dtype: Any, *, backward: bool) -> tuple[str, str]:
        """The program's dtype, twice."""
        del backward
        return np.dtype(dtype).name, np.dtype(dtype).name

    def wire_dtype(self, dtype: Any, *, backward: bool) -> str:
        """The program's dtype."""
        del backward
        return np.dtype(dtype).name

    @property
    def second_derivative_reason(self) -> None:
        """None: there is a second derivative."""

    @property
    def text(self) -> str:
        """Nothing."""
        return ""

    @property
    def fields(self) -> dict[str, Any]:
        """Nothing."""
        return {}


PLAIN = Plain()


class HasFormat(Protocol):
    """Attributes of requests with a format, for users.

    Attributes:
      format: how operands are stored while they travel and are multiplied.
    """

    format: Format

    @property
    def fp8(self) -> str | None:
        """The argument `fp8` of the call; None for arrays."""
        return self.format.fields.get("fp8")


_formats: dict[str, Format] = {}
#: The formats that users can name, in the order of their registration.
FORMATS: Mapping[str, Format] = MappingProxyType(_formats)


def register_format(added: Format) -> None:
    """Adds a format, to be requested by its name.

    Raises:
      ValueError: if the name is taken.
    """
    if added.name in _formats:
        raise ValueError(f"format.name={added.name!r}: it is taken; choose another name")
    _formats[added.name] = added


def unregister_format(name: str) -> None:
    """Removes a format that was added by `register_format`."""
    del _formats[name]


def format_named(name: str | None) -> Format:
    """The format of a name; `PLAIN` for None."""
    return PLAIN if name is None else FORMATS[name]


def format_of_fields(fields: Mapping[str, Any]) -> Format:
    """The format of a table's record.

    Raises:
      LookupError: if this program has not registered a format of the name.
      ValueError: for what is no name.
    """
    name = fields.get("fp8")
    if name is not None and not isinstance(name, str):
        raise ValueError(f"no name of a format: {dict(fields)}")
    return format_named(name)
