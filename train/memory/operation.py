"""An operation of a program without calls, as predictions of memory know it."""

from __future__ import annotations

from typing import NamedTuple


class Operation(NamedTuple):
    """One operation of a program without calls. Values are numbers.

    Attributes:
      name: name of the primitive.
      operands: the values that it reads.
      results: the values that it makes.
      inner: the most bytes at one time inside it, as in a loop.
      replacing: bytes of results that may be written to what it reads for the last time.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    inner: int = 0
    replacing: int = 0
