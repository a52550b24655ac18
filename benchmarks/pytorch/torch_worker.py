"""Times PyTorch's tensor parallelism; `benchmarks.pytorch.runner` starts it with a job.

One process per device. All processes go through the same steps in the same order, and agree after
each whether it went well on all of them: what one does alone, the others would wait for.
"""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import datetime
import functools
import gc
import json
import math
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.attention import sdpa_kernel

from benchmarks.pytorch import FIRST_STEPS, MULTICAST_OFF, NAMES, VARIANTS, float8_recipe
from benchmarks.pytorch.llama.torch_generation import TorchGeneration
from benchmarks.pytorch.llama.torch_training import ATTENTION, TorchTraining
from benchmarks.pytorch.programs.torch_context import TorchContext
from benchmarks.pytorch.programs.torch_experts import TorchExperts
from benchmarks.pytorch.programs.torch_float8 import TorchFloat8Layers
from benchmarks.pytorch.programs.torch_layers import TorchLayers
from benchmarks.pytorch.programs.torch_ops import TorchOps
from benchmarks.pytorch.torch_communication import (
    AsyncTensorParallel,
    Collectives,
    TorchCommunication,
)
from benchmarks.pytorch.torch_programs import (
    Failure,
    GraphPool,
    Place,
    Run,
    TorchCase,
    TorchProgram,
    relative_error,
    require_right,
)

PILOT_GROUPS = 3
#: Two layers show whether one operator disturbs the next; the reference is slow and large.
CHECKED_LAYERS = 2
#: Programs of one function; PyTorch's own limits are for programs that grow without an end.
MOST_PROGRAMS = 2**16


@dataclass(frozen=True)
class Job:
    """The arguments of `benchmarks.pytorch.runner.time_pytorch`."""

    cases: list[dict[str, Any]]
    devices: int
    platform: str
    dtype: str
    groups: int
    group_seconds: float
    limit_seconds: float
    output: str
    port: int = 0
    seed: int = 0


def program_of(
    name: str, case: dict[str, Any], *arguments: Any, compiler: str | None = None
) -> TorchProgram:
    """A device's part of a case, as a candidate runs it.

    Args:
      name: the candidate.
      case: the case, as `time_pytorch` takes it.
      *arguments: the others of `TorchProgram`.
      compiler: backend of `torch.compile` for candidates that are compiled; None: run eagerly.
    """
    described = TorchCase(**{key: case[key] for key in case if key != "candidates"})
    recipe = float8_recipe(name)
    if recipe is not None:
        return TorchFloat8Layers(described, *arguments, recipe=recipe, compiler=compiler)
    program = TorchOps if described.op else TorchLayers
    return program(described, *arguments)


class Worker:
    """One device's process."""

    def __init__(self, job: Job, rank: int):
        self.job = job
        self.started = time.monotonic()
        allow_recompilation()
        on_gpu = job.platform == "gpu"
        device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        self.place = Place(rank, job.devices, device)
        self.compiler = "inductor" if on_gpu else None
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"tcp://127.0.0.1:{job.port}",
            world_size=job.devices,
            rank=rank,
            device_id=device if on_gpu else None,
            # One may compile for long while another waits for its part of a sum.
            timeout=datetime.timedelta(seconds=120),
        )
        # What processes tell each other must not depend on the GPUs, which a failure may stop.
        self.control: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=120))
        self.results: list[dict[str, Any]] = []
        self.graphs: GraphPool | None = None

    def run(self) -> None:
        """Measures all cases; writes the results after each."""
        for case in self.job.cases:
            if self.out_of_time():
                self.log(f"stopped: limit_seconds={self.job.limit_seconds:g} is over")
                break
            self.measurement_of(case)(case)
            self.free()
        dist.barrier(self.control)
        dist.destroy_process_group()

    def measurement_of(self, case: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
        """Returns the measurement of a case, by what it describes."""
        if "prompt" in case:
            return functools.partial(self.measure_program, TorchGeneration)
        if "experts" in case:
            return functools.partial(self.measure_program, TorchExperts)
        if "head_size" in case:
            return functools.partial(self.measure_program, TorchContext)
        return self.measure_training if "model" in case else self.measure_case

    def measure_case(self, case: dict[str, Any]) -> None:
        arguments = self.place, getattr(torch, self.job.dtype), self.job.seed, {}
        fastest: dict[str, Run] = {}
        described: dict[str, dict[str, Any]] = {}
        for name in case.get("candidates", NAMES):
            program = program_of(name, case, *arguments, compiler=self.compiler)
            described[name] = {"candidate": name, **case, "devices": self.job.devices}
            try:
                described[name]["relative_error"] = self.check(name, program)
                fastest[name] = self.fastest_variant(name, program, described[name])
                described[name]["decisions"] = dict(program.operators)
            except Failure as failure:
                described[name]["failure"] = str(failure)
        for name, samples in self.measure(fastest, self.job.groups).items():
            described[name]["samples"] = samples
        for description in described.values():
            self.add(description)
        # Graphs must be gone before the communicator whose kernels they hold.
        fastest.clear()

    def measure_training(self, case: dict[str, Any]) -> None:
        """Measures training steps: one candidate, and then another in the memory of it."""
        for name in case["candidates"]:
            result = {"candidate": name, "name": case["name"], "devices": self.job.devices}
            try:
                result |= self.measure_steps(name, case)
            except Failure as failure:
                result["failure"] = str(failure)
            self.free()
            self.add(result)

    def measure_program(self, program: Callable[..., Any], case: dict[str, Any]) -> None:
        """Measures a layer, forward and with gradients; or prefill and decoding of a batch."""
        case = {**case, "groups": self.job.groups}
        for result in program(self, case, getattr(torch, self.job.dtype)).results():
            self.add(result)

    def measure_steps(self, name: str, case: dict[str, Any]) -> dict[str, Any]:
        """The result of a candidate; raises Failure if it cannot run."""
        dtype = getattr(torch, self.job.dtype)
        build = functools.partial(TorchTraining, case, name, self.place, dtype, self.compiler)
        with sdpa_kernel(ATTENTION, set_priority=True):
            training = self.together(build)
            self.together(training.step)  # Compiles, and makes the optimizer's state.
            if self.compiler:
                torch.cuda.reset_peak_memory_stats()
            self.together(training.step)
            samples = self.measure({name: training.step}, self.job.groups)[name]
        losses = torch.stack(training.losses[:FIRST_STEPS]).double().cpu()
        dist.all_reduce(losses, group=self.control)
        means, peak = (losses / self.job.devices).tolist(), torch.cuda.max_memory_allocated()
        return {
            "samples": samples,
            "losses": means,
            "peak_bytes": int(self.largest(peak)),
            "decisions": dict(training.fused.found),
        }

    def communications(self, name: str, program: TorchProgram) -> dict[str, TorchCommunication]:
        """The ways to communicate that are tried, by what distinguishes them."""
        if "async" in name:
            return {"": AsyncTensorParallel(self.place.device)}
        if program.overlaps:
            return {"": Collectives(), "overlapped": Collectives(overlap=True)}
        return {"": Collectives()}

    def check(self, name: str, program: TorchProgram) -> float:
        """The largest relative error of any way; raises Failure if one is not right."""

        def errors() -> float:
            checked = min(program.case.layers, CHECKED_LAYERS)
            expected = program.reference(checked)
            return max(
                relative_error(program.bind(communication, checked)(), expected)
                for communication in self.communications(name, program).values()
            )

        error = self.largest(self.together(errors))
        require_right(error, program.tolerance, "the float32 reference")
        return error

    def fastest_variant(self, name: str, program: TorchProgram, result: dict[str, Any]) -> Run:
        """Tries all variants; raises Failure if none runs."""
        communications = self.together(lambda: self.communications(name, program))
        runs: dict[str, Run] = {}
        failures = {}
        for way, communication in communications.items():
            for variant in VARIANTS:
                tried = ", ".join(filter(None, (variant, way)))
                build = functools.partial(self.build, variant, program, communication)
                try:
                    runs[tried] = self.together(build)
                except Failure as failure:
                    failures[tried] = str(failure)
                    self.log(f"{name}, {tried}: {failure}")
        if not runs:
            raise Failure("; ".join(f"{tried}: {text}" for tried, text in failures.items()))
        timings = self.measure(runs, PILOT_GROUPS)
        result["tried"] = {tried: statistics.median(times) for tried, times in timings.items()}
        result["options"] = min(result["tried"], key=result["tried"].__getitem__)
        return runs[result["options"]]

    def build(self, variant: str, program: TorchProgram, communication: TorchCommunication) -> Run:
        """A warm function without arguments."""
        run = program.bind(communication, program.case.layers)
        run()
        self.synchronize()
        return self.captured(run) if variant == "CUDA graph" else run

    def measure(self, runs: dict[str, Run], groups: int) -> dict[str, list[float]]:
        """Seconds per call, each run once in every group, as `benchmarks.internals.measure`.

        The order is drawn anew for each group, and is the same on all devices. Each run is called
        untimed first for half as long, so that it is timed at the clocks that its own power leaves.
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
        """Seconds per call, on the slowest device."""
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
        """The largest value of all devices."""
        values = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX, self.control)
        return float(values)

    def together(self, step: Callable[[], Any]) -> Any:
        """The step's value; raises Failure on all devices if it failed on one."""
        value, error = None, None
        try:
            value = step()
            self.synchronize()
        # Whatever goes wrong with one candidate, the other still counts.
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}".splitlines()[0][:300]
            # Where the others wait for this device, they end without its message.
            print(f"device {self.place.rank}: {error}", file=sys.stderr, flush=True)
        errors: list[str | None] = [None] * self.job.devices
        dist.all_gather_object(errors, error, self.control)
        for rank, text in enumerate(errors):
            if text is not None:
                raise Failure(f"{text} (device {rank})")
        return value

    def captured(self, run: Run) -> Run:
        """Captures one CUDA graph, which shares memory with the others of the case."""
        self.graphs = self.graphs or GraphPool()
        return self.graphs.captured(run)

    def free(self) -> None:
        """Gives back the memory of programs that are gone, and forgets what was compiled."""
        self.graphs = None
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()

    def add(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        if self.place.rank == 0:
            output = Path(self.job.output)
            part = output.with_suffix(".part")
            part.write_text(json.dumps(self.results))
            part.replace(output)
        outcome = result.get("failure")
        if outcome is None:
            shown = ("options", "relative_error", "peak_bytes", "losses")
            outcome = f"{1e3 * statistics.median(result['samples']):.3f} ms"
            outcome += "".join(f", {key} {result[key]}" for key in shown if key in result)
        self.log(f"{result['name']:<30} {result['candidate']:<15} {outcome}")

    def out_of_time(self) -> bool:
        """Whether nothing further may begin; all devices ask together."""
        return self.largest(time.monotonic() - self.started) > self.job.limit_seconds

    def log(self, line: str) -> None:
        if self.place.rank == 0:
            now = datetime.datetime.now().strftime("%H:%M:%S")
            print(f"{now} {time.monotonic() - self.started:6.1f} s  {line}", flush=True)


def allow_recompilation() -> None:
    """Lets programs of one function be many: PyTorch compiles the layers of each candidate."""
    torch._dynamo.config.recompile_limit = MOST_PROGRAMS
    torch._dynamo.config.accumulated_recompile_limit = MOST_PROGRAMS


def work(rank: int, job: Job) -> None:
    """The work of each process."""
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
