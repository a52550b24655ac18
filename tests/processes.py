"""Processes that run the ops together, each `python -m tests.processes ADDRESS NUMBER FILE`.

Each writes to FILE for every case how far its shards are from the reference, in units of what is
allowed, what was decided, and what the library warned of.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from collective_matmul import hardware, overlap_jit
from collective_matmul.dispatch import assessment, selection
from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.ops.matmul.backends import BACKENDS
from tests.dispatch.sites import H200
from tests.reference import AXIS, OPS, PEER_KERNELS, Case, reference

PROCESSES = 2
LOCAL_DEVICES = 2
#: Sizes of the axes ("data", AXIS): a ring over all processes, and one ring within each.
ACROSS, WITHIN = (1, PROCESSES * LOCAL_DEVICES), (PROCESSES, LOCAL_DEVICES)
FEW = (None, "xla", "ring")
IMPLEMENTATIONS_ON = {ACROSS: (None, *BACKENDS), WITHIN: FEW}

#: The environment of a process that simulates its devices.
ON_THE_CPU = {
    "JAX_NUM_CPU_DEVICES": str(LOCAL_DEVICES),
    # Processes would read what another is writing.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
}

# A process that waits for one that has died would wait for ever.
TIMEOUT_SECONDS = 120


class Report(NamedTuple):
    """Findings of one process about one call of an op.

    Attributes:
      mesh: sizes of the axes "data" and AXIS.
      op: the name of the op.
      implementation: as the op took it.
      error: the largest of a result or gradient on this process, over what `Case.bounds` allows.
      decisions: the implementations that were chosen, forward and backward.
      warnings: the library's warnings.
    """

    mesh: tuple[int, int]
    op: str
    implementation: str | None
    error: float
    decisions: list[str]
    warnings: list[str]


def start(environments: Sequence[Mapping[str, str]], folder: Path) -> list[list[Report]]:
    """The reports of processes that run together, each with more environment of its own.

    They are written to `folder`: what a process prints is not its own alone.
    """
    files = [folder / f"{number}.json" for number in range(len(environments))]
    run("tests.processes", environments, [[str(file)] for file in files])
    return [[Report(*fields) for fields in json.loads(file.read_text())] for file in files]


def run(
    module: str, environments: Sequence[Mapping[str, str]], arguments: Sequence[Sequence[str]]
) -> None:
    """Runs a module in several processes, and asserts that each of them ends well.

    Args:
      module: executed as ``python -m MODULE ADDRESS NUMBER ARGUMENTS``, with the address of the
        first process and the number of its own.
      environments: what is added to the environment of each.
      arguments: more arguments of each.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, address, str(number), *more],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, (environment, more) in enumerate(zip(environments, arguments, strict=True))
    ]

    def output(process: subprocess.Popen) -> str:
        try:
            printed, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            kill(processes)
            printed, _ = process.communicate()
        if process.returncode != 0:
            kill(processes)  # They wait for it.
        return f"exit status {process.returncode}\n{printed}"

    try:
        with ThreadPoolExecutor() as pool:
            outputs = list(pool.map(output, processes))
    finally:
        kill(processes)
    assert all(process.returncode == 0 for process in processes), "\n\n".join(outputs)


def kill(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()


def main(address: str, number: int, file: Path) -> None:
    jax.distributed.initialize(address, PROCESSES, number, initialization_timeout=60)
    reports = [
        report(case, jax.make_mesh(sizes, ("data", AXIS), axis_types=(AxisType.Auto,) * 2))
        for sizes, names in IMPLEMENTATIONS_ON.items()
        for case in cases(sizes[1], names if simulated() else FEW)
    ]
    file.write_text(json.dumps(reports))


def simulated() -> bool:
    return jax.default_backend() == "cpu"


def cases(devices: int, implementations: Sequence[str | None]) -> list[Case]:
    # On GPUs a size that kernels are made for; and float32 would be rounded to TensorFloat-32.
    unit, dtype = (1, "float32") if simulated() else (128, "bfloat16")
    case = Case("", None, devices, (8 * unit,), 4 * unit, ((4 * unit,),), dtype=dtype)
    return [
        replace(case, op=op, implementation=implementation)
        for op in OPS
        for implementation in implementations
    ]


def report(case: Case, mesh: Mesh) -> Report:
    # On CPUs nothing runs under a matmul, so that nothing is given up, and nothing reported.
    # Kernels that address peers cannot run across processes: XLA takes their place.
    name = case.implementation
    assert name is None or isinstance(name, str)
    request = (name, "xla") if name in PEER_KERNELS else name
    with (
        contextlib.ExitStack() as devices,
        warnings_of_the_library() as warnings,
        record_decisions() as decisions,
    ):
        if name is None:
            for module in (assessment, selection, hardware):
                patch = mock.patch.object(module, "traced_device", lambda: H200)
                devices.enter_context(patch)
        error = relative_error(replace(case, implementation=request), mesh)
    chosen = sorted({taken.implementation for taken in decisions})
    return Report(mesh.devices.shape, case.op, name, error, chosen, warnings)


def relative_error(case: Case, mesh: Mesh, jit: Callable = overlap_jit) -> float:
    """The largest error of a result or gradient here, over what `Case.bounds` allows."""
    arrays = x, ws, dys = case.arrays()
    placed = jax.tree.map(
        lambda array, spec: place(array, NamedSharding(mesh, spec)),
        (x, tuple(ws), tuple(dys)),
        case.specs,
    )
    outcome = case.run(mesh, placed, jit)
    parts = (jax.tree.leaves(part) for part in (outcome, reference(*arrays), case.bounds(arrays)))
    return max(
        float(np.max(abs(np.asarray(shard.data) - expected[shard.index]) / bound[shard.index]))
        for actual, expected, bound in zip(*parts, strict=True)
        for shard in actual.addressable_shards
    )


def place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Ends the process if the block raises an error: an orderly exit would wait for the others, and
    they wait for this one. One that is late says where it is before it is killed."""
    faulthandler.dump_traceback_later(TIMEOUT_SECONDS - 10)
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def warnings_of_the_library() -> Iterator[list[str]]:
    sentences: list[str] = []
    handler: Any = logging.Handler()
    handler.emit = lambda record: sentences.append(record.getMessage())
    logger = logging.getLogger("collective_matmul")
    logger.addHandler(handler)
    try:
        yield sentences
    finally:
        logger.removeHandler(handler)


if __name__ == "__main__":
    with ending_at_once():
        main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
