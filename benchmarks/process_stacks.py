"""One process per GPU beside one process of all GPUs: ``python -m benchmarks.process_stacks -h``.

Each part starts its own processes on this machine. Times are medians; what the tables show is their
ratio to the same computation without communication, in the same processes.

- stacks: feed-forward layers of 8B widths, see `benchmarks.stack`.
- train-tensor, train-fsdp: steps of the trainer, Llama 3 8B cut to ``--layers``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import json
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import candidates
from benchmarks.candidates import Candidate
from benchmarks.communication import AXIS, CollectiveMatmul, NoCommunication, PlainJax
from benchmarks.compiling import compile_cases
from benchmarks.internals import SHARING, SYMMETRIC_BUFFERS, Sharing, exchange, measure
from benchmarks.operands import Operands
from benchmarks.programs import Direction, Program
from benchmarks.stack import SHAPES, FeedForward, StackCase
from collective_matmul import overlap_jit

ROWS = (8192, 2048, 512, 24)
SMALL = FeedForward("8B", 64, 32, 64)
#: Gradients of fewer rows are not timed, but in a rehearsal.
LEAST_ROWS_OF_GRADIENTS = 1024
PROCESSES = 2
#: Milliseconds by candidate, by case.
Results = dict[str, dict[str, float]]
LIMIT_SECONDS = 230
SYMMETRIC = {SYMMETRIC_BUFFERS: True}
NOT_SYMMETRIC = {SYMMETRIC_BUFFERS: False}
COMPUTE = "compute"

#: How the products of a ring share the GPU with NCCL, by the candidate's name.
PRODUCTS = {
    "ring, Hopper": Sharing(),
    "ring, Hopper - 16": Sharing(left=16),
    "ring, Hopper - 32": Sharing(left=32),
    "ring, XLA": Sharing(left=16, by_xla=True),
}
#: The candidates that are timed unless others are asked for.
USUAL = "compute|plain|ring, Hopper - 16|ring, XLA|auto"
STARTED = time.monotonic()


def log(message: str) -> None:
    """Prints a message with the seconds since the process started."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {message}", flush=True)


class PlainRing(PlainJax):
    """Two devices' ring of permutes in plain JAX, forward only."""

    def all_gather_matmul(self, rows, ws):
        other = lax.ppermute(rows, AXIS, [(0, 1), (1, 0)])
        first = tuple(rows @ w for w in ws)
        first, rows, other = lax.optimization_barrier((first, rows, other))
        second = tuple(other @ w for w in ws)
        swapped = lax.axis_index(AXIS) == 1
        return tuple(
            lax.concatenate([jnp.where(swapped, b, a), jnp.where(swapped, a, b)], 0)
            for a, b in zip(first, second, strict=True)
        )

    def matmul_reduce_scatter(self, x, w):
        m, me = x.shape[0] // 2, lax.axis_index(AXIS)
        away = lax.dynamic_slice_in_dim(x, (1 - me) * m, m) @ w
        away, x = lax.optimization_barrier((away, x))
        arrived = lax.ppermute(away, AXIS, [(0, 1), (1, 0)])
        return lax.dynamic_slice_in_dim(x, me * m, m) @ w + arrived


def _compilers() -> dict[str, Callable[..., Any]]:
    unmerged = {**SYMMETRIC, "xla_gpu_dot_merger_threshold_mb": "0"}
    return {
        "jit, symmetric": functools.partial(jax.jit, compiler_options=SYMMETRIC),
        "jit, unmerged": functools.partial(jax.jit, compiler_options=unmerged),
        "overlap_jit, not symmetric": functools.partial(
            overlap_jit, compiler_options=NOT_SYMMETRIC
        ),
    }


def _candidates(processes: int, direction: Direction) -> list[Candidate]:
    chosen = [Candidate(COMPUTE, NoCommunication(), "jit"), Candidate("plain", PlainJax(), "jit")]
    ring = CollectiveMatmul("ring")
    if processes == 1:
        chosen.append(Candidate("ring", ring, "overlap_jit"))
        return [*chosen, Candidate("auto", CollectiveMatmul(None), "overlap_jit")]
    chosen.append(Candidate("plain, symmetric", PlainJax(), "jit, symmetric"))
    if direction == "forward":
        chosen.append(Candidate("plain ring, symmetric", PlainRing(), "jit, unmerged"))
    chosen += [Candidate(name, ring, "overlap_jit") for name in PRODUCTS]
    not_symmetric = Candidate("ring, XLA, not symmetric", ring, "overlap_jit, not symmetric")
    auto = Candidate("auto", CollectiveMatmul(None), "overlap_jit")
    return [*chosen, not_symmetric, auto]


def _program(case: StackCase, operands: Operands, candidate: Candidate) -> Program:
    """The program of a candidate, traced with its own way to share the GPU."""
    program = case.build(operands, candidate)
    sharing = PRODUCTS.get(candidate.name)
    if sharing is None:
        return program

    def fun(*arguments: Any) -> Any:
        jax.clear_caches()
        with mock.patch.dict(SHARING, dict.fromkeys(SHARING, sharing)):
            return program.fun(*arguments)

    return program._replace(fun=fun)


def stacks(settings: argparse.Namespace) -> Results:
    """Milliseconds per layer of every candidate, by direction and rows."""
    mesh = jax.make_mesh((len(jax.devices()),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    operands = Operands(mesh, jnp.dtype(settings.dtype))
    results: Results = {}
    for direction in settings.directions:
        chosen = [
            each
            for each in _candidates(settings.processes, direction)
            if re.fullmatch(settings.only, each.name)
        ]
        for rows in settings.rows:
            is_short = rows < LEAST_ROWS_OF_GRADIENTS and not settings.rehearse
            if direction == "forward_backward" and is_short:
                continue
            shape = SMALL if settings.rehearse else SHAPES["8B"]
            layers = settings.layers or (4 if direction == "forward" else 2)
            case = StackCase(dataclasses.replace(shape, rows=rows), direction, layers)
            times = _times(settings, case, chosen, operands)
            results[f"{direction} M {rows}"] = times
            if settings.number == 0:  # What was measured stays if a later case fails.
                Path(settings.file).write_text(json.dumps(results))
    return results


def _times(
    settings: argparse.Namespace, case: StackCase, chosen: Sequence[Candidate], operands: Operands
) -> dict[str, float]:
    with mock.patch.dict(candidates.COMPILERS, _compilers()):
        build = functools.partial(_program, case, operands)
        (ready,) = compile_cases(chosen, [build], threads=8)
    executables = sorted(ready.executables, key=lambda each: ready.candidates.index(each.candidate))
    compiled = ", ".join(f"{each.candidate} {each.seconds:.1f}" for each in executables)
    log(f"{case.name} M {case.shape.rows}: compiled, seconds: {compiled}")
    for name, failure in ready.failures.items():
        log(f"{name}: {failure}")
    made, runs = ready.make(), {}
    for each in executables:
        run = each.on(made)
        try:
            jax.block_until_ready(run())
        except jax.errors.JaxRuntimeError as error:
            log(f"{each.candidate}: {' '.join(str(error).split())[:300]}")
            continue
        runs[each.candidate] = run
        log(f"{each.candidate}: ran")
    ran = set.intersection(*map(set, exchange(list(runs))))
    runs = {name: run for name, run in runs.items() if name in ran}
    executables = [each for each in executables if each.candidate in ran]
    timings = measure(runs, groups=settings.groups, seconds_per_group=settings.seconds)
    times = {
        program.candidate.name: timings[each.candidate].median / case.layers * 1e3
        for each in executables
        for program in each.programs
    }
    log(", ".join(f"{name} {value:.4f}" for name, value in times.items()) + " ms a layer")
    for each in executables:
        for program in each.programs:
            for line in sorted(
                {
                    f"{d.site.op} {d.implementation}: {d.reason}"
                    for d in program.decisions
                    if program.candidate.name == "auto"
                }
            ):
                log(f"auto: {line}")
    ready.executables.clear()
    return times


def worker(settings: argparse.Namespace) -> None:
    faulthandler.dump_traceback_later(max(1, settings.limit - 20))
    if settings.processes > 1:
        jax.distributed.initialize(settings.address, settings.processes, settings.number)
    log(f"process {settings.number} of {settings.processes}: {jax.local_devices()}")
    stacks(settings)
    log(f"process {settings.number}: done")
    faulthandler.cancel_dump_traceback_later()


def _free_address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def _environment(settings: argparse.Namespace, number: int) -> dict[str, str]:
    """The environment of one process; it sees one GPU, or all in a run of one process."""
    given = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    }
    if settings.rehearse:
        given["JAX_PLATFORMS"] = "cpu"
        given["JAX_NUM_CPU_DEVICES"] = str(PROCESSES // settings.processes)
        given["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
        given["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    elif settings.processes > 1:
        given["JAX_LOCAL_DEVICE_IDS"] = str(number)
        # Each process tries matmuls by itself. Else threads that compile several programs wait for
        # those of the other process, which may wait for them.
        flags = os.environ.get("XLA_FLAGS", "")
        given["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false"
    return {**os.environ, **given}


def start(settings: argparse.Namespace, commands: Sequence[Sequence[str]]) -> int:
    """Runs processes together; the first prints. Returns the largest exit status."""
    with contextlib.ExitStack() as files:
        # A pipe that nobody reads would stop a process.
        logs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in commands[1:]]
        running = [
            subprocess.Popen(command, env=_environment(settings, number), stdout=log, stderr=log)
            for number, (command, log) in enumerate(zip(commands, [None, *logs], strict=True))
        ]
        limit = time.monotonic() + settings.limit
        try:
            # One that fails ends the others, which would wait for it.
            while None in (codes := [each.poll() for each in running]) and not any(codes):
                if time.monotonic() > limit:
                    raise subprocess.TimeoutExpired(commands[0], settings.limit)
                time.sleep(0.2)
            status = max(abs(code) for code in codes if code is not None)
        except subprocess.TimeoutExpired:
            log(f"no end after {settings.limit} seconds")
            status = 1
        finally:
            for each in running:
                each.kill()
        for number, file in enumerate(logs, start=1):
            file.seek(0)
            if status:
                print(f"process {number}: …{file.read()[-6000:]}", flush=True)
        return status


def measured_stacks(settings: argparse.Namespace) -> Results:
    address = _free_address()
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/results.json"
        more = ["--worker", address, "--file", file, "--processes", str(settings.processes)]
        own = [sys.executable, "-m", "benchmarks.process_stacks", *sys.argv[1:], *more, "--number"]
        start(settings, [[*own, str(number)] for number in range(settings.processes)])
        return json.loads(Path(file).read_text()) if Path(file).exists() else {}


def train_seconds(settings: argparse.Namespace, overlap: str) -> list[float]:
    """Seconds of the later steps of a run of the trainer."""
    sharded = {"train-tensor": "--mesh.tensor 2", "train-fsdp": "--mesh.fsdp 2 --zero 3"}
    model = f"--preset llama3-8b --model.num-layers {settings.layers or 8} --sequence-length 8192"
    if settings.rehearse:
        model = "--preset debug --sequence-length 64"
    sequences = 1 if settings.part == "train-tensor" else 2
    flags = f"{model} {sharded[settings.part]} --batch-size {sequences} --steps 14"
    flags += f" --log-interval 1 --overlap {overlap}"
    flags += " --mesh.tensor 1" if "fsdp" in settings.part else ""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        command = [sys.executable, "-m", "train", *shlex.split(flags), "--log-file", str(log)]
        if settings.rehearse:
            command += ["--cpu-devices", str(PROCESSES // settings.processes)]
        commands = [command]
        if settings.processes > 1:
            across = [] if "fsdp" in settings.part else ["--distributed.tensor-across-processes"]
            place = ["--distributed.coordinator-address", _free_address(), *across]
            place += ["--distributed.num-processes", str(settings.processes)]
            numbers = range(settings.processes)
            commands = [[*command, *place, "--distributed.process-id", str(n)] for n in numbers]
        start(settings, commands)
        lines = log.read_text().splitlines() if log.exists() else []
    records = [json.loads(line) for line in lines]
    return [record["step_seconds"] for record in records if record.get("step", 0) > 4]


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Times over the computation alone, one line for each candidate and one column for each M."""
    names = dict.fromkeys(name for times in results.values() for name in times)
    short = [case.replace("forward_backward", "grad") for case in results]
    lines = [f"{'× compute alone':27}" + "".join(f"{case:>15}" for case in short)]
    for name in names:
        cells = [
            f"{times[name] / times[COMPUTE]:15.3f}" if {name, COMPUTE} <= times.keys() else " " * 15
            for times in results.values()
        ]
        lines.append(f"{name:27}" + "".join(cells))
    alone = [f"{times.get(COMPUTE, 0):15.3f}" for times in results.values()]
    return "\n".join([*lines, f"{'compute alone, ms a layer':27}" + "".join(alone)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("part", choices=("stacks", "train-tensor", "train-fsdp"))
    parser.add_argument("--processes", type=int, default=PROCESSES, choices=(1, PROCESSES))
    parser.add_argument("--directions", nargs="+", default=["forward", "forward_backward"])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--only", default=USUAL, help="regular expression of candidates")
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.03)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=LIMIT_SECONDS)
    parser.add_argument("--overlaps", nargs="+", default=["xla", "auto"])
    parser.add_argument("--rehearse", action="store_true", help="small, on simulated devices")
    for name in ("--worker", "--file"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    settings.address = settings.worker
    if settings.worker is not None:
        try:
            worker(settings)
        except Exception:
            # An orderly exit would wait for the others, and they wait for this one.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    elif settings.part.startswith("train"):
        for overlap in settings.overlaps:
            seconds = train_seconds(settings, overlap) or [float("nan")]
            print(
                f"{settings.part}, {settings.processes} processes, {overlap}:"
                f" {statistics.median(seconds) * 1e3:.2f} ms a step (median of {len(seconds)},"
                f" {min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f})",
                flush=True,
            )
    else:
        results = measured_stacks(settings)
        print(f"{settings.part}, {settings.processes} processes\n{table(results)}")


if __name__ == "__main__":
    main()
