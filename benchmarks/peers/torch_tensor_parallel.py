"""Times PyTorch's tensor parallelism; `benchmarks.peers.torch_stack` starts it with a job.

One process per device. All processes go through the same steps in the same order, and agree after
each whether it went well on all of them: what one does alone, the others would wait for.
"""

# PyTorch is no dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.peers import MULTICAST_OFF
from benchmarks.peers.torch_communication import AsyncTensorParallel, Collectives, Communication
from benchmarks.peers.torch_layers import Layers, LayersCase
from benchmarks.peers.torch_ops import Ops, OpsCase
from benchmarks.peers.torch_programs import Place, Program, relative_error

Run = Callable[[], list[Tensor]]

PILOT_GROUPS = 3
#: Two layers show whether one operator disturbs the next; the reference is slow and large.
CHECKED_LAYERS = 2
#: Relative to the reference's norm. Rounding to bfloat16 between operators leaves about 0.005; a
#: chunk that is missing or out of place, at least 0.1.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Job:
    """What `torch_stack` was told."""

    cases: list[dict[str, Any]]
    devices: int
    peers: list[str]
    variants: list[str]
    platform: str
    dtype: str
    groups: int
    group_seconds: float
    limit_seconds: float
    output: str
    port: int = 0
    seed: int = 0


class Failure(Exception):
    """A step failed on some device; the message is the first one's."""


def program_of(case: dict[str, Any], *arguments: Any) -> Program:
    """A device's part of a case as `torch_stack` describes it; `arguments` as `Program` takes."""
    if "op" in case:
        return Ops(OpsCase(**case), *arguments)
    return Layers(LayersCase(**case), *arguments)


class Worker:
    """One device's process."""

    def __init__(self, job: Job, rank: int):
        self.job = job
        self.started = time.monotonic()
        on_gpu = job.platform == "gpu"
        device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        self.place = Place(rank, job.devices, device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"tcp://127.0.0.1:{job.port}",
            world_size=job.devices,
            rank=rank,
            device_id=device if on_gpu else None,
            timeout=datetime.timedelta(seconds=60),
        )
        # What processes tell each other must not depend on the GPUs, which a failure may stop.
        self.control: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=120))
        self.results: list[dict[str, Any]] = []

    def run(self) -> None:
        """All cases, the results written after each."""
        for case in self.job.cases:
            if self.largest(time.monotonic() - self.started) > self.job.limit_seconds:
                self.say(f"stopped: limit_seconds={self.job.limit_seconds:g} is over")
                break
            self.measure_case(case)
        dist.barrier(self.control)
        dist.destroy_process_group()

    def measure_case(self, case: dict[str, Any]) -> None:
        dtype = getattr(torch, self.job.dtype)
        program = program_of(case, self.place, dtype, self.job.seed)
        fastest: dict[str, Run] = {}
        described: dict[str, dict[str, Any]] = {}
        for peer in self.job.peers:
            described[peer] = self.describe(peer, case)
            try:
                described[peer]["relative_error"] = self.check(peer, program)
                fastest[peer] = self.fastest_variant(peer, program, described[peer])
            except Failure as failure:
                described[peer]["failure"] = str(failure)
        for peer, samples in self.measure(fastest, self.job.groups).items():
            described[peer] |= {"samples": samples, "milliseconds": quartiles(samples)}
        for description in described.values():
            self.add(description)
        # Graphs must be gone before the communicator whose kernels they hold.
        fastest.clear()

    def describe(self, peer: str, case: dict[str, Any]) -> dict[str, Any]:
        nccl = torch.cuda.nccl.version() if self.job.platform == "gpu" else ()
        versions = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, nccl)),
        }
        ran = {"devices": self.job.devices, "dtype": self.job.dtype, "versions": versions}
        return {"peer": peer, **case, **ran}

    def communications(self, peer: str, program: Program) -> dict[str, Communication]:
        """The ways to try, by name."""
        if peer == "torch_async_tp":
            return {"": AsyncTensorParallel(self.place.device)}
        if program.overlaps:
            return {"": Collectives(), "overlapped": Collectives(overlap=True)}
        return {"": Collectives()}

    def check(self, peer: str, program: Program) -> float:
        """The relative error of every way; raises Failure if one is not right."""

        def errors() -> float:
            checked = min(program.case.layers, CHECKED_LAYERS)
            expected = program.reference(checked)
            arguments = program.arguments(checked)
            ways = self.communications(peer, program).values()
            return max(
                relative_error(program.run(program.part, way, *arguments), expected) for way in ways
            )

        error = self.largest(self.together(errors))
        if not error < TOLERANCE:
            raise Failure(f"wrong: relative error {error:.3g} to the float32 reference")
        return error

    def fastest_variant(self, peer: str, program: Program, result: dict[str, Any]) -> Run:
        """Tries all variants; raises Failure if none runs."""
        ways = self.together(lambda: self.communications(peer, program))
        arguments = self.together(lambda: program.arguments(program.case.layers))
        runs: dict[str, Run] = {}
        failures = {}
        for way, communication in ways.items():
            for variant in self.job.variants:
                name = ", ".join(filter(None, (variant, way)))
                build = functools.partial(self.build, variant, program, communication, arguments)
                try:
                    runs[name] = self.together(build)
                except Failure as failure:
                    failures[name] = str(failure)
                    self.say(f"{peer}, {name}: {failure}")
        if not runs:
            raise Failure("; ".join(f"{name}: {text}" for name, text in failures.items()))
        timings = self.measure(runs, PILOT_GROUPS)
        result["tried"] = {name: statistics.median(samples) for name, samples in timings.items()}
        result["not_run"] = failures
        result["options"] = min(result["tried"], key=result["tried"].__getitem__)
        return runs[result["options"]]

    def build(
        self, variant: str, program: Program, communication: Communication, arguments: tuple
    ) -> Run:
        """A warm function of nothing."""
        compiled = variant == "compiled"
        part = torch.compile(program.part, dynamic=False) if compiled else program.part
        run = functools.partial(program.run, part, communication, *arguments)
        run()
        self.synchronize()
        return captured(run) if variant == "CUDA graph" else run

    def measure(self, runs: dict[str, Run], groups: int) -> dict[str, list[float]]:
        """Seconds per call, each run once in every group, as `collective_matmul.tuning.timing`.

        In an order drawn anew for each group, the same on all devices; each run comes untimed first
        for half as long, so that it is timed at the clocks that its own power leaves.
        """
        calls = {}
        for name, run in runs.items():
            run()
            seconds = min(self.seconds(run, 1) for _ in range(2))
            calls[name] = max(1, round(self.job.group_seconds / seconds))
        samples: dict[str, list[float]] = {name: [] for name in runs}
        names = list(runs)
        order = random.Random(groups)
        for _ in range(groups):
            for name in order.sample(names, len(names)):
                self.seconds(runs[name], math.ceil(calls[name] / 2))
                samples[name].append(self.seconds(runs[name], calls[name]))
        return samples

    def seconds(self, run: Run, calls: int) -> float:
        """Per call, on the slowest device."""
        self.synchronize()
        dist.barrier(self.control)
        started = time.perf_counter()
        for _ in range(calls):
            run()
        self.synchronize()
        return self.largest((time.perf_counter() - started) / calls)

    def synchronize(self) -> None:
        if self.job.platform == "gpu":
            torch.cuda.synchronize()

    def largest(self, value: float) -> float:
        """Over all devices."""
        values = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX, self.control)
        return float(values)

    def together(self, step: Callable[[], Any]) -> Any:
        """The step's value; raises Failure on all devices if it failed on one."""
        value, error = None, None
        try:
            value = step()
            self.synchronize()
        # Whatever goes wrong with one peer, the other still counts.
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}".splitlines()[0][:300]
        errors: list[str | None] = [None] * self.job.devices
        dist.all_gather_object(errors, error, self.control)
        for rank, text in enumerate(errors):
            if text is not None:
                raise Failure(f"{text} (device {rank})")
        return value

    def add(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        if self.place.rank == 0:
            output = Path(self.job.output)
            part = output.with_suffix(".part")
            part.write_text(json.dumps(self.results))
            part.replace(output)
        said = result.get("failure")
        if said is None:
            times = result["milliseconds"]
            said = (
                f"{times['median']:.3f} ms [{times['q1']:.3f}, {times['q3']:.3f}] "
                f"{result['options']}, relative error {result['relative_error']:.2g}"
            )
        self.say(f"{result['name']:<30} {result['peer']:<15} {said}")

    def say(self, line: str) -> None:
        if self.place.rank == 0:
            now = datetime.datetime.now().strftime("%H:%M:%S")
            print(f"{now} {time.monotonic() - self.started:6.1f} s  {line}", flush=True)


def captured(run: Run) -> Run:
    """The same as one CUDA graph; results are overwritten by every call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events from a thread of its own, which other modes forbid.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run()

    def replay(kept: Run = run) -> list[Tensor]:
        del kept  # With it the arguments, which the graph reads where they lie.
        graph.replay()
        return results

    return replay


def quartiles(samples: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    if len(samples) < 2:
        return dict.fromkeys(("q1", "median", "q3"), 1e3 * samples[0])
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return {"q1": 1e3 * q1, "median": 1e3 * median, "q3": 1e3 * q3}


def work(rank: int, job: Job) -> None:
    """What each process does."""
    if job.platform == "cpu":
        torch.set_num_threads(1)
    Worker(job, rank).run()


def main(path: str) -> None:
    os.environ.update(MULTICAST_OFF)
    # All processes are on this machine, whose name may not resolve to an address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    job = Job(**json.loads(Path(path).read_text()), port=port, seed=random.randrange(2**20))
    if job.platform == "gpu" and torch.cuda.device_count() < job.devices:
        sys.exit(f"devices={job.devices}: PyTorch finds {torch.cuda.device_count()} GPUs")
    spawn(work, args=(job,), nprocs=job.devices)


if __name__ == "__main__":
    main(sys.argv[1])
