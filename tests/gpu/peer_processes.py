"""Kernels that address peers, in processes of one GPU each.

Each process is ``python -m tests.gpu.peer_processes ADDRESS NUMBER PROCESSES PART``; the parts are
the functions named in `PARTS`. On the CPU it is a rehearsal: XLA executes the ops.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from collective_matmul import overlap_jit
from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.mosaic_gpu import requirements
from tests.gpu.test_fused import OPS as KERNELS
from tests.gpu.test_fused import Case as Kernel
from tests.gpu.test_fused import kernel_of, op_of, product
from tests.gpu.test_one_shot import differences
from tests.processes import ending_at_once, place, relative_error, simulated
from tests.reference import AXIS, OPS, PEER_KERNELS, Case, poisoned_results

TURNS = 100
#: A vector for some lanes, boxes that grow with the array, two boxes for a block; with delays or
#: without.
EXCHANGES = ((8, True), (65_536, False), (1_500_000, True))
#: Few rows, and several tiles for each multiprocessor.
ROWS = (48, 2048)
REPEATS = 50

requested = functools.partial(overlap_jit, peer_kernels=True)


def exchanges(mesh: Mesh) -> None:
    """One-shot exchanges do what XLA's collectives do."""
    for elements, delays in () if simulated() else EXCHANGES:
        count = differences(mesh, elements, (AXIS,), "bfloat16", delays, TURNS)
        assert not np.asarray(count(elements)).any(), (elements, delays)
        show("exchanges of", elements)


def kernels(mesh: Mesh) -> None:
    """Fused kernels get everything from other processes: of arrays that held NaN, each time."""
    for op in KERNELS:
        for rows in ROWS:
            sizes = (16, 32, 32) if simulated() else (rows, 1024, 1024)
            with poisoned_results():
                assert_repeats(Kernel(op, sizes, ((AXIS, mesh.shape[AXIS]),)))


def gradients(mesh: Mesh) -> None:
    """Results and gradients are those of the reference; NCCL's kernels run in between."""
    for op in OPS:
        for name in PEER_KERNELS:
            case = replace(case_of(mesh, op, 64), implementation=(name, "xla"))
            with record_decisions() as decisions:
                error = relative_error(case, mesh, requested)
            assert error <= 1, (case, error)
            chosen = {decision.implementation for decision in decisions}
            assert chosen == {"xla" if simulated() else name}, (case, chosen)
            show(op, name, error)


def choices(mesh: Mesh) -> None:
    """By itself it takes such kernels for few rows."""
    for op in OPS:
        with record_decisions() as decisions:
            error = relative_error(case_of(mesh, op, 64), mesh)
        assert error <= 1, (op, error)
        chosen = {decision.implementation for decision in decisions}
        assert chosen & ({"xla"} if simulated() else {*PEER_KERNELS}), (op, chosen)
        show(op, chosen)


def alone(mesh: Mesh) -> None:
    """The last process ends where the others launch a kernel, which waits in vain."""
    count = differences(mesh, 8, (AXIS,), "bfloat16", False, 1)
    assert not np.asarray(count(0)).any()
    if jax.process_index() == jax.process_count() - 1:
        os._exit(0)
    try:
        np.asarray(count(1))
    except jax.errors.JaxRuntimeError as error:
        assert "ILLEGAL_ADDRESS" in str(error)
        os._exit(0)
    raise AssertionError("a kernel ended without its peer")


PARTS = {part.__name__: part for part in (exchanges, kernels, gradients, choices, alone)}


def case_of(mesh: Mesh, op: str, rows: int) -> Case:
    """A call of an op; small on the CPU."""
    size = 32 if simulated() else 1024
    return Case(op, None, mesh.shape[AXIS], (rows,), size, ((size,),), dtype="bfloat16")


def assert_repeats(case: Kernel) -> None:
    """Asserts that a kernel is right, and the same bit for bit in every run.

    Sums of the operands are exact. Senders wait for random times.
    """
    x, w, _ = case.arrays()
    way = op_of(case) if simulated() else kernel_of(case, race_delays=True)
    sharded, shardings = case.sharded(lambda x, w: (way(x, w),))
    placed, expected = list(map(place, (x, w), shardings)), product(x, w)
    run = requested(sharded)
    for (result,) in [run(*placed) for _ in range(REPEATS)]:
        for shard in result.addressable_shards:
            found = np.asarray(shard.data, np.float64)
            np.testing.assert_array_equal(found, expected[shard.index], str(case))
    show(case)


def show(*what: object) -> None:
    print(f"{time.perf_counter():.1f}", *what, flush=True)


def main(address: str, number: int, processes: int, part: str) -> None:
    jax.distributed.initialize(address, processes, number, initialization_timeout=60)
    mesh = jax.make_mesh((1, processes), ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    assert simulated() or requirements.peer_arrays_reason("nccl") is None
    PARTS[part](mesh)


if __name__ == "__main__":
    with ending_at_once():
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
