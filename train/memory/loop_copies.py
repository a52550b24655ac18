"""Bytes that XLA adds to a loop whose body gathers weights and sums their gradients over devices.

Collectives work along the first dimension in memory. Stacked weights of which the body gathers
slices along another one are copied before the loop, all of them, with that dimension first. And a
sum over devices with which an iteration ends is made by the next one, so the loop passes on what is
to be summed, whole.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from train.memory.operation import Operation

#: What stands between a stacked array and the gather of its slice.
_CASTS = frozenset({"convert_element_type", "transpose"})
_SLICES = frozenset({"dynamic_slice", "squeeze"})


def copied_before(
    operations: Sequence[Operation], gathered: Set[int], constants: Set[int]
) -> set[int]:
    """The constants of a loop that XLA copies before it.

    Args:
      operations: of the body.
      gathered: values that are gathered along another dimension than the first.
      constants: arguments that all iterations share.
    """
    made_of = {
        value: operation.operands[0]
        for operation in operations
        if operation.name in _CASTS | _SLICES
        for value in operation.results[:1]
        if operation.operands
    }
    found = set[int]()
    for value in gathered:
        while value in made_of:
            value = made_of[value]
        found.add(value)
    return found & constants


def passed_on(operations: Sequence[Operation], stacked: Set[int], fused: Set[str]) -> set[int]:
    """The values that are summed and scattered at the end of an iteration.

    Args:
      operations: of the body.
      stacked: results of which the loop collects one for each iteration.
      fused: names of operations that are computed where their results are read.
    """
    ends, found = set(stacked), set[int]()
    for operation in reversed(operations):
        if ends.isdisjoint(operation.results):
            continue
        if operation.name in fused:
            ends.update(operation.operands)
        elif operation.name == "reduce_scatter":
            found.update(operation.operands)
    return found
