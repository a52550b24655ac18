"""The lifetimes of arrays in a sequence of executions, and the moment at which most are alive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple


class Execution(NamedTuple):
    """One operation that is executed. Arrays are numbers.

    Attributes:
      made: the arrays that it makes.
      inner: the most bytes at one time inside it, as in a loop.
      replacing: bytes of results that may be written to what it reads for the last time.
    """

    made: Set[int]
    inner: int = 0
    replacing: int = 0


def last_reads(reads: Iterable[tuple[int, Iterable[int]]]) -> dict[int, int]:
    """The place of the last execution that reads each array, from places and what is read there."""
    last: dict[int, int] = {}
    for place, read in reads:
        last.update(dict.fromkeys(read, place))
    return last


def peak(
    executions: Sequence[Execution],
    last_read: Mapping[int, int],
    sizes: Sequence[int],
    kept: Set[int] = frozenset(),
) -> tuple[int, set[int]]:
    """The most bytes at one time, and the arrays that are alive then.

    An array lives from the execution that makes it to the last that reads it. What none makes does
    not count; what none reads lives while it is made.

    Args:
      executions: in order.
      last_read: for each array, the place of its last reader; arrays that none makes count too,
        as memory that is freed.
      sizes: bytes of each array.
      kept: arrays to which no result may be written.
    """
    dying: dict[int, set[int]] = {}
    for array, place in last_read.items():
        dying.setdefault(place, set()).add(array)
    live, at_most = set[int](), set[int]()
    now = most = 0
    for place, execution in enumerate(executions):
        made, freed = execution.made, dying.get(place, set())
        now += sum(sizes[array] for array in made)
        live |= made
        bytes_of = [sum(sizes[array] for array in group) for group in (made, freed - kept)]
        replaced = min(execution.replacing, *bytes_of)
        if now + execution.inner - replaced > most:
            most, at_most = now + execution.inner - replaced, set(live)
        gone = freed | {array for array in made if array not in last_read}
        now -= sum(sizes[array] for array in gone)
        live -= gone
    return most, at_most
