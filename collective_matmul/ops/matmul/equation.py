"""Einsums of two operands, as labels. This module does not use JAX.

A label is *free* if one operand and the result have it, *batch* if all three have it, and
*contracted* if both operands have it and the result does not.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

_ELLIPSIS = "..."


@dataclass(frozen=True)
class Equation:
    """``a,b->y``, and the label of the gathered or scattered dimension.

    Every label of an operand occurs once in it, and also in the other operand or in the result.

    Attributes:
      a: labels of the gathered operand; or, if the result is scattered, of an operand that has
        `label`.
      b: labels of the other operand.
      y: labels of the result.
      label: label of the gathered or scattered dimension.
    """

    a: str
    b: str
    y: str
    label: str

    def __str__(self) -> str:
        return f"{self.a},{self.b}->{self.y}"

    @property
    def batch(self) -> str:
        """Labels of both operands and the result, in the order of a."""
        return "".join(label for label in self.a if label in self.b and label in self.y)

    @property
    def contracted(self) -> str:
        """Labels of both operands but not of the result, in the order of a."""
        return "".join(label for label in self.a if label not in self.y)

    @property
    def rows(self) -> str:
        """Free labels of a, in the order of a."""
        return "".join(label for label in self.a if label not in self.b)

    @property
    def columns(self) -> str:
        """Free labels of b, in the order of the result."""
        return "".join(label for label in self.y if label not in self.a)

    @property
    def accumulates(self) -> bool:
        """Whether the label is contracted, so that products of slices along it are summed."""
        return self.label not in self.y

    @property
    def gradients(self) -> tuple[Equation, Equation]:
        """The equations of the gradients of a and b.

        Each multiplies the gradient of the result by the other operand. The first operand of a's
        gradient is the one that has the label; the first operand of b's gradient is a.
        """
        first, second = (self.b, self.y) if self.accumulates else (self.y, self.b)
        return (
            Equation(first, second, self.a, self.label),
            Equation(self.a, self.y, self.b, self.label),
        )

    @property
    def is_matmul(self) -> bool:
        """Whether reshapes make it ``[..., label, ..., K] @ [K, N] -> [..., label, ..., N]``.

        b may have to be transposed as well.
        """
        return (
            self.label in self.rows
            and bool(self.contracted)
            and bool(self.columns)
            and self.a == self.rows + self.contracted
            and self.y == self.rows + self.columns
        )

    @property
    def matrices(self) -> tuple[str, str]:
        """The two orders of b's labels that a reshape turns into a matrix: [K, N] and [N, K]."""
        return self.contracted + self.columns, self.columns + self.contracted

    @property
    def is_stored_transposed(self) -> bool:
        """Whether it is a matmul with b stored as [N, K]."""
        return self.is_matmul and self.b == self.matrices[1]

    @property
    def is_weight_gradient(self) -> bool:
        """Whether reshapes make it ``[label.., K]ᵀ @ [label.., N] -> [K, N]``, or [N, K]."""
        return (
            self.label in self.contracted
            and bool(self.rows)
            and bool(self.columns)
            and self.a == self.contracted + self.rows
            and self.b == self.contracted + self.columns
            and self.y in (self.rows + self.columns, self.columns + self.rows)
        )

    @property
    def transposed(self) -> tuple[str, ...]:
        """The arrays, by their labels, that have to be transposed before or after the product.

        A batched matmul takes an array as it is stored if its batch labels are adjacent, as are its
        row labels and its column labels; if the arrays agree on the order within each group; and if
        the batch is not innermost.
        """
        if self.is_matmul:
            return () if self.b in self.matrices else (self.b,)
        columns = "".join(label for label in self.b if label in self.columns)
        groups = {
            self.a: (self.batch, self.rows, self.contracted),
            self.b: (self.batch, self.contracted, columns),
            self.y: (self.batch, self.rows, columns),
        }
        return tuple(
            labels
            for labels, parts in groups.items()
            if not all(part in labels for part in parts)
            or (self.batch and any(parts[1:]) and labels.endswith(self.batch))
        )


def parse(subscripts: str, dimensions: Sequence[int]) -> tuple[str, str, str]:
    """Labels of x, w and the result, with unused letters in place of ``...``.

    Args:
      subscripts: for two operands, as in `numpy.einsum`: ``"...d,df->...f"``. Without ``->``, the
        result has the labels that occur once, in alphabetical order.
      dimensions: numbers of dimensions of x and w.

    Raises:
      TypeError: if subscripts are not a string.
      ValueError: if they do not fit two operands with these numbers of dimensions.
    """
    if not isinstance(subscripts, str):
        raise TypeError(f"subscripts={subscripts!r}: expected a string such as 'sd,df->sf'")
    inputs, arrow, result = subscripts.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if len(operands) != 2:
        raise ValueError(
            f"subscripts={subscripts!r}: {len(operands)} operand(s); expected two, separated by a"
            " comma, as in 'sd,df->sf'"
        )
    for term in (*operands, result):
        _check_term(subscripts, term)
    hidden = _labels_of_ellipsis(subscripts, operands, dimensions)
    x, w = (
        _expand(subscripts, name, term, ndim, hidden)
        for name, term, ndim in zip("xw", operands, dimensions, strict=True)
    )
    if hidden and arrow and _ELLIPSIS not in result:
        raise ValueError(
            f"subscripts={subscripts!r}: the result has no '...'; write it where the dimensions"
            " that it stands for belong"
        )
    y = result.replace(_ELLIPSIS, hidden) if arrow else hidden + _once(x + w, hidden)
    _check_result(subscripts, x + w, y)
    return x, w, y


def _labels_of_ellipsis(subscripts: str, operands: Sequence[str], dimensions: Sequence[int]) -> str:
    """Letters that the subscripts do not use, one for each dimension that ``...`` replaces."""
    count = max(
        ndim - _named(term) if _ELLIPSIS in term else 0
        for term, ndim in zip(operands, dimensions, strict=True)
    )
    unused = [letter for letter in string.ascii_uppercase if letter not in subscripts]
    return "".join(unused[: max(count, 0)])


def _expand(subscripts: str, name: str, term: str, ndim: int, hidden: str) -> str:
    """The labels of an operand, with the last of `hidden` for ``...``."""
    rest = ndim - _named(term)
    if rest < 0 or (rest > 0 and _ELLIPSIS not in term):
        raise ValueError(
            f"subscripts={subscripts!r}: {term!r} has {_named(term)} label(s), and {name} has"
            f" {ndim} dimension(s); write one label for each"
        )
    return term.replace(_ELLIPSIS, hidden[len(hidden) - rest :])


def _named(term: str) -> int:
    return len(term.replace(_ELLIPSIS, ""))


def _check_term(subscripts: str, term: str) -> None:
    labels = term.replace(_ELLIPSIS, "", 1)
    wrong = [label for label in labels if label not in string.ascii_letters]
    if wrong:
        raise ValueError(
            f"subscripts={subscripts!r}: {wrong[0]!r} in {term!r} is not a label; expected letters,"
            " and at most one '...' for an operand"
        )


def _check_result(subscripts: str, operands: str, y: str) -> None:
    for label in y:
        if label not in operands:
            raise ValueError(
                f"subscripts={subscripts!r}: the result has label {label!r}, which neither operand"
                " has; take it out, or name a dimension of an operand so"
            )
        if y.count(label) > 1:
            raise ValueError(
                f"subscripts={subscripts!r}: the result has label {label!r} twice; expected every"
                " label once"
            )


def _once(labels: str, others: str) -> str:
    once = (label for label in labels if labels.count(label) == 1 and label not in others)
    return "".join(sorted(once))
