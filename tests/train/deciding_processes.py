"""Processes that compile a program of a run together; each is started by `tests.processes.run`.

They pretend to have a Hopper GPU each, and that the memory of arrays is shared in those whose
number is among SHARING. Each writes to FILE what it would print of each program, or why not.
Nothing is lowered: there are no such kernels for CPUs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, hardware, overlap_jit
from collective_matmul.dispatch import assessment, selection
from collective_matmul.jit.compiler import OverlapJit
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.peers import shared_memory
from tests.dispatch.sites import H200
from tests.hopper import MULTIPROCESSORS
from tests.processes import PROCESSES, ending_at_once
from tests.reference import AXIS
from train.processes.agreement import AgreedError
from train.run.programs import compile_together

#: The processes that share memory, one case after the other.
SHARING = ((0, 1), (), (0,))


@contextmanager
def pretended_gpus(shares: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (assessment, selection, hardware):
            stack.enter_context(mock.patch.object(module, "traced_device", lambda: H200))
        target = device.Target(MULTIPROCESSORS)
        stack.enter_context(mock.patch.object(device, "target", lambda: target))
        reasons = {"unshared_reason": None, "unshared_pools_reason": None if shares else "no pool"}
        for name, reason in reasons.items():
            patch = mock.patch.object(shared_memory, name, lambda reason=reason: reason)
            stack.enter_context(patch)
        lowered = SimpleNamespace(compile=lambda: None)
        stack.enter_context(mock.patch.object(OverlapJit, "_lower", lambda *_: lowered))
        yield


def lines_of_a_program() -> list[str]:
    mesh = jax.make_mesh((PROCESSES,), (AXIS,), axis_types=(AxisType.Auto,))
    specs = P(AXIS), P(None, AXIS)

    def gather(x: jax.Array, w: jax.Array) -> jax.Array:
        return all_gather_matmul(x, w, AXIS)

    fun = jax.shard_map(gather, mesh=mesh, in_specs=specs, out_specs=specs[1])
    shapes = (8192, 4096), (4096, 14_336)
    arguments = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )
    return compile_together(overlap_jit(fun), *arguments).lines


def main(address: str, number: int, file: Path) -> None:
    jax.distributed.initialize(address, PROCESSES, number, initialization_timeout=60)
    found = []
    for sharing in SHARING:
        with pretended_gpus(number in sharing):
            try:
                found.append(lines_of_a_program())
            except AgreedError as error:
                found.append([str(error)])
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    with ending_at_once():
        main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
