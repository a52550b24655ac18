"""The order in which XLA runs operations whose results nothing waits for.

XLA's scheduler works from the end of a program to its begin, and places an operation as late as
its readers allow, to have work left for the time of every collective. So matmuls of weight
gradients run after the whole backward of a block, or of the whole program, up to the barrier that
reads them; and until then what they multiply stays. Operations that other matmuls depend on keep
their place in the trace: they are the chain that all else waits for.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from train.memory.operation import Operation

#: Operations that compute for long, and that others are postponed behind.
_COMPUTE = frozenset({
    "conv_general_dilated", "core_map", "dot_general", "mpmd_map", "pallas_call", "ragged_dot",
    "ragged_dot_general", "scan", "while",
    "dot_product_attention_bwd_wrapper", "dot_product_attention_fwd_wrapper",
})  # fmt: skip
_BARRIER = "optimization_barrier"
#: Operations that run with what makes their operands, or that bind what they read.
_IN_PLACE = frozenset({_BARRIER, "reduce", "reduce_max", "reduce_min", "reduce_sum"})
#: Sums over devices. They begin early enough to end before a barrier that reads them.
_SUMS = frozenset({"psum", "psum_invariant", "reduce_scatter"})


def postponed(operations: Sequence[Operation], carried: Set[int]) -> list[Operation]:
    """Operations in an order in which those that no matmul waits for run as late as they can.

    Args:
      operations: in the order of the trace.
      carried: values that the next iteration of a loop reads.
    """
    count = len(operations)
    # Of values: those that a matmul waits for, those that are read where the trace reads them, and
    # the first place where each is read.
    awaited, read_in_place = set(carried), set(carried)
    first_read: dict[int, int] = {}
    slots = list(range(count))
    is_barrier = [operation.name == _BARRIER for operation in operations]
    for place in reversed(range(count)):
        name, reads, results = operations[place].name, *_values(operations[place])
        is_awaited = not awaited.isdisjoint(results)
        readers = [first_read[value] for value in results if value in first_read]
        stays = is_awaited and not (readers and read_in_place.isdisjoint(results))
        if stays or name in _IN_PLACE:
            read_in_place.update(reads)
        else:
            slots[place] = min(readers, default=count)
            if name in _SUMS and slots[place] < count and is_barrier[slots[place]]:
                slots[place] = (place + slots[place]) // 2
        for value in reads:
            first_read[value] = min(first_read.get(value, count), slots[place])
        if is_awaited or name in _COMPUTE:
            awaited.update(reads)
    return [operations[place] for place in sorted(range(count), key=lambda p: (slots[p], p))]


def _values(operation: Operation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The values that an operation reads, and those that it makes."""
    return operation.operands, operation.results
