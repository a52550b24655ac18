"""Kernels that address peers, in processes of one GPU each.

Each process is ``python -m tests.gpu.peer_processes ADDRESS NUMBER PROCESSES [alone]``. With
`alone`, the last one ends where the others launch a kernel, which waits in vain.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys

import jax
import numpy as np
from jax.sharding import AxisType

from collective_matmul import overlap_jit
from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.mosaic_gpu import requirements
from tests.gpu.test_one_shot import differences
from tests.processes import ending_at_once, relative_error
from tests.reference import AXIS, OPS, PEER_KERNELS, Case

TURNS = 100
#: A vector for some lanes, boxes that grow with the array, two boxes for a block.
ELEMENTS = (8, 65_536, 1_500_000)


def main(address: str, number: int, processes: int, alone: bool) -> None:
    jax.distributed.initialize(address, processes, number, initialization_timeout=60)
    mesh = jax.make_mesh((1, processes), ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    assert requirements.peer_arrays_reason() is None
    if alone:
        launch_alone(mesh, number == processes - 1)
        return
    for elements in ELEMENTS:
        for delays in (False, True):
            count = differences(mesh, elements, (AXIS,), "bfloat16", delays, TURNS)
            assert not np.asarray(count(elements)).any(), (elements, delays)
    requested = functools.partial(overlap_jit, peer_kernels=True)
    cases = itertools.product(OPS, [("one_shot", 64), ("fused", 64), ("fused", 2048), (None, 64)])
    for op, (name, rows) in cases:
        case = Case(op, name, processes, (rows,), 4096, ((4096,),), dtype="bfloat16")
        with record_decisions() as decisions:
            error = relative_error(case, mesh, requested if name else overlap_jit)
        assert error <= 1, (case, error)
        # By itself it takes a kernel too, as rows are few.
        chosen = {decision.implementation for decision in decisions}
        assert chosen == {name} if name else chosen & {*PEER_KERNELS}, (case, chosen)
        print(op, name, rows, chosen, error, flush=True)


def launch_alone(mesh: jax.sharding.Mesh, ends: bool) -> None:
    count = differences(mesh, 8, (AXIS,), "bfloat16", False, 1)
    assert not np.asarray(count(0)).any()
    if ends:
        os._exit(0)
    try:
        np.asarray(count(1))
    except jax.errors.JaxRuntimeError as error:
        assert "ILLEGAL_ADDRESS" in str(error)
        os._exit(0)
    raise AssertionError("a kernel ended without its peer")


if __name__ == "__main__":
    with ending_at_once():
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "alone" in sys.argv[4:])
