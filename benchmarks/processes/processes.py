"""``python -m benchmarks processes``: one process for each device, beside one process for all.

Two jobs stay alive with their compiled programs and take turns in rounds: one process with all
devices, and as many processes as devices. Nothing is timed whose first results, gradients too,
differ from those of plain JAX in one process. Operands are random, and differ between devices, as
processes whose programs do not fit together exchange wrong data without a sign.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from benchmarks.comparison import candidates
from benchmarks.comparison.comparing import check_divisible
from benchmarks.comparison.compiling import Compiled, Executable, compile_cases
from benchmarks.comparison.operands import Operands
from benchmarks.comparison.programs import Direction
from benchmarks.comparison.timing import Results, describe, warm_up
from benchmarks.internals import COMPUTE_ONLY, communication_order, exchange
from benchmarks.measuring import environment, tables
from benchmarks.measuring.report import Report, Result, with_times
from benchmarks.measuring.settings import Settings, check, check_least, check_names, make_mesh
from benchmarks.measuring.turns import take_turns
from benchmarks.processes.jobs import JobError, ResidentJob
from benchmarks.pytorch import runner
from benchmarks.step.stack import SHAPES, Stack, StackCase
from benchmarks.step.train import CANDIDATES, TrainCase
from train.config.presets import PRESETS

Kind = Literal["stack", "tensor", "fsdp"]
#: Some numbers of results, by leaf and device.
Numbers = dict[tuple[str, int], np.ndarray]
Runs = dict[Executable, Callable]

PLAIN = "baseline"
#: So many numbers of a device are compared along each dimension, or up to twice as many.
_COMPARED = 64
#: The largest norm of a difference over the norm of what is expected. Rounding to bfloat16 makes
#: less than 0.01, and one wrong number of 800 makes more. A loss is the sum of many numbers.
_ARRAY_TOLERANCE, _SCALAR_TOLERANCE = 0.05, 0.001


@dataclass(frozen=True, kw_only=True)
class Processes(Settings):
    """Stacks and training steps with one process for each device, beside one for all of them."""

    devices: int = 2
    """Devices on the axis, which is as many as the processes of one job."""
    kinds: tuple[Kind, ...] = ("stack",)
    """Stacks of feed-forward layers; or the trainer's step on an axis tensor or fsdp."""
    candidates: tuple[str, ...] = ()
    """Those of `stack` and `train`, besides baseline, which always takes part; default: auto, and
    for stacks also fused and compute_only."""
    shape: str = "8B"
    """Which layers: those of `stack`."""
    rows: tuple[int, ...] = (8192, 2048, 512, 128, 24)
    """Rows of all devices, for stacks."""
    directions: tuple[Direction, ...] = ("forward", "forward_backward")
    """Whether gradients of stacks are computed too."""
    layers: int = 0
    """Layers; default: 8 of a model, and for stacks as `stack` has."""
    preset: str = "llama3-8b"
    """Which model takes steps."""
    sequence_length: int = 8192
    """Tokens of a sequence; the axis tensor divides one, and fsdp has one for each device."""
    rounds: int = 3
    """Rounds; in each, one job after the other measures everything."""
    groups: int = 3
    """Timed groups of a round; within each all candidates take turns."""
    pytorch_seconds: float = 0.0
    """How long PyTorch is timed on the same stacks after the first round; 0: it takes no part."""
    compile_threads: int = 8
    """Programs compiled at the same time by one process. Several compile one after the other: they
    share what they find out by trying kernels, and so find each program in one state."""
    job_seconds: float = 300.0
    """A job that takes longer to compile, or for a round, is ended."""

    def names(self, kind: Kind) -> tuple[str, ...]:
        """The candidates."""
        default = ("auto", "fused", COMPUTE_ONLY) if kind == "stack" else ("auto",)
        return tuple(dict.fromkeys((PLAIN, *(self.candidates or default))))

    def cases(self, kind: Kind) -> Sequence[StackCase | TrainCase]:
        """The programs of a job."""
        if kind == "stack":
            stack = Stack(shapes=(self.shape,), sweep_m=self.rows, directions=self.directions)
            return dataclasses.replace(stack, layers=self.layers).cases()
        model = self.preset, self.layers or 8, self.sequence_length
        if kind == "tensor":
            return [TrainCase(*model, sequences=1, remat="none", zero=0)]
        return [TrainCase(*model, sequences=self.devices, remat="projections", zero=3)]


@dataclass
class JobCase:
    """A case in a job.

    Attributes:
      described: the case, for the report.
      results: by candidate.
      numbers: of first results, by candidate.
    """

    described: dict[str, Any]
    results: Results
    numbers: dict[str, Numbers] = field(default_factory=dict)


Cases = dict[str, JobCase]


def run(settings: Processes) -> Report:
    """Runs the benchmark; writes the report after each round.

    Raises:
      ValueError: for settings that do not fit.
    """
    check(settings)
    check_least(settings, 0, "layers", "pytorch_seconds")
    check_least(settings, 1, "rounds")
    check_least(settings, 2, "devices")
    check_names("shape", (settings.shape,), list(SHAPES))
    check_names("preset", (settings.preset,), list(PRESETS))
    devices = environment.device_kinds(settings.platform, settings.devices)
    if len(devices) < settings.devices:
        raise ValueError(f"devices={settings.devices}: there are {len(devices)}; ask for fewer")
    for kind in settings.kinds:
        known = candidates.layer_names() if kind == "stack" else CANDIDATES
        check_names("candidates", settings.candidates, known)
        check_divisible(settings.cases(kind), settings.devices)
    if settings.platform == "gpu":  # Both jobs share its memory; PyTorch needs 40 GB.
        share = "0.25" if settings.pytorch_seconds else "0.45"
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
    sections = (ratios, tables.times, tables.training_steps, tables.over_pytorch, tables.decisions)
    report = Report("processes", settings, [*sections, tables.failures], devices)
    for kind in settings.kinds:
        if not report.out_of_time():
            _measure(settings, report, kind)
    print(ratios(report.content), tables.failures(report.content), sep="\n\n")
    return report


def _measure(settings: Processes, report: Report, kind: Kind) -> None:
    """Starts the jobs, one after the other as each tries kernels; then lets them take turns."""
    before = list(report.content["cases"])
    jobs: dict[ResidentJob, Cases] = {}
    where = settings.platform, settings.devices
    try:
        for processes in (1, settings.devices):
            job = ResidentJob(work, (settings, kind), *where, processes, settings.job_seconds)
            jobs[job] = {}  # It is ended whatever happens.
            jobs[job] = _compiled(job, settings, kind)
            report.log(f"{kind}: compiled in {job}")
            plain, *_ = jobs.values()
            for name, case in jobs[job].items():
                _check(case, plain[name].numbers.get(PLAIN))
        for turn in range(settings.rounds):
            if report.out_of_time():
                break
            for job, cases in list(jobs.items())[:: -1 if turn % 2 else 1]:
                _take_turns(job, cases)
            if turn == 0 and settings.pytorch_seconds:
                _add_pytorch(settings, kind, jobs.values())
            measured = [
                case.described | {"candidates": {n: with_times(r) for n, r in case.results.items()}}
                for cases in jobs.values()
                for case in cases.values()
            ]
            report.write_cases([*before, *measured])
            report.log(f"{kind}: round {turn + 1}")
    finally:
        for job in jobs:
            job.end()


def _compiled(job: ResidentJob, settings: Processes, kind: Kind) -> Cases:
    """The cases of a job, whose processes have compiled and called all programs."""
    names, cases = settings.names(kind), settings.cases(kind)
    unknown = {case.name: JobCase({}, {name: Result() for name in names}) for case in cases}
    first, *others = _ask(job, None, unknown) or [unknown]
    for name, case in first.items():
        case.described = {"name": f"{name}, {job}", "gpus": []} | case.described
        for answer in others:
            for candidate, numbers in case.numbers.items():
                numbers |= answer[name].numbers.get(candidate, {})
    return first


def _check(case: JobCase, expected: Numbers | None) -> None:
    """Notes a failure of every candidate that has not computed what is expected."""
    for name, numbers in case.numbers.items():
        if name != COMPUTE_ONLY:
            case.results[name].failure = wrong(numbers, expected)


def _take_turns(job: ResidentJob, cases: Cases) -> None:
    """Adds the samples of a round to the results that have not failed."""
    timed = {
        name: [candidate for candidate, result in case.results.items() if result.failure is None]
        for name, case in cases.items()
    }
    for times in _ask(job, timed, cases)[:1]:
        for name, by_candidate in times.items():
            for candidate, samples in by_candidate.items():
                cases[name].results[candidate].samples += tuple(samples)


def _ask(job: ResidentJob, request: Any, cases: Cases) -> list[Any]:
    """The answers of a job's processes; nothing if it fails, which is noted."""
    job.request(request)
    gpus = environment.gpu_state()  # At work.
    for case in cases.values():
        case.described["gpus"] = gpus
    try:
        return job.answers()
    except JobError as error:
        for case in cases.values():
            for result in case.results.values():
                if not result.samples:
                    result.failure = result.failure or str(error)
        return []


def _add_pytorch(settings: Processes, kind: Kind, jobs: Iterable[Cases]) -> None:
    """Adds PyTorch's results, of one process for each device, to those of both jobs."""
    whom = settings, settings.cases(kind), settings.devices
    found = runner.results_of(*whom, settings.pytorch_seconds)
    for cases in jobs:
        for (name, candidate), result in found.items():
            cases[name].results[candidate] = result


def work(settings: Processes, kind: Kind) -> Iterator[Any]:
    """Works in a process of a job.

    Yields:
      `JobCase` by case, after the first call of each program. Then, whenever it is sent the
      candidates to time by case, their samples by case and candidate.
    """
    mesh = make_mesh(settings)
    operands, cases = Operands(mesh, settings.array_dtype), settings.cases(kind)
    chosen = [candidates.make(name, mesh, try_options=False) for name in settings.names(kind)]
    builds = [functools.partial(case.build, operands) for case in cases]
    threads = settings.compile_threads if jax.process_count() == 1 else 1
    compiled = compile_cases(chosen, builds, threads)
    runs: dict[str, Runs] = {}
    answer: Cases = {}
    for case, ready in zip(cases, compiled, strict=True):
        _leave_out_different(ready)
        made = ready.make() if ready.executables else None
        first: dict[Executable, Numbers] = {}
        runs[case.name] = warm_up(ready, made, lambda e, y, to=first: to.update({e: sample(y)}))
        described = {"devices": mesh.size, **case.describe(operands)}
        results = describe(ready, runs[case.name], made)
        numbers = {p.candidate.name: first[e] for e in first for p in e.programs}
        answer[case.name] = JobCase(described, results, numbers)
    wanted = yield answer
    while True:
        wanted = yield {name: _times(runs[name], wanted[name], settings) for name in runs}


def _leave_out_different(case: Compiled) -> None:
    """Drops programs that the processes could not compile alike."""
    own = {e.candidate: communication_order(e.compiled.as_text() or "") for e in case.executables}
    told = exchange(own)
    for executable in list(case.executables):
        name = executable.candidate
        if any(orders.get(name) != own[name] for orders in told):
            case.executables.remove(executable)
            for program in executable.programs:
                reason = "XLA has not compiled one program for all processes"
                case.failures[program.candidate.name] = reason


def _times(runs: Runs, wanted: Sequence[str], settings: Processes) -> dict[str, list[float]]:
    """The samples of the candidates that are wanted."""
    timed = {e: run for e, run in runs.items() if e.candidate in wanted}
    samples = take_turns({e.candidate: run for e, run in timed.items()}, settings)
    return {p.candidate.name: samples[e.candidate] for e in timed for p in e.programs}


def sample(results: Any) -> Numbers:
    """Some of the numbers that the devices of this process have."""

    def some(array: jax.Array) -> np.ndarray:
        # Odd strides meet every row and column of a tile.
        strides = (slice(None, None, size // _COMPARED | 1) for size in array.shape)
        return np.asarray(array[tuple(strides)], np.float32)

    return {
        (jax.tree_util.keystr(path), jax.devices().index(shard.device)): some(shard.data)
        for path, leaf in jax.tree.leaves_with_path(results)
        for shard in leaf.addressable_shards
    }


def wrong(numbers: Numbers, expected: Numbers | None) -> str | None:
    """Says which numbers differ from those of plain JAX in one process, if any do."""
    if expected is None:
        return "not compared: plain JAX has no results in one process"
    for place, right in expected.items():
        difference = np.linalg.norm(numbers.get(place, math.nan) - right)
        difference /= np.linalg.norm(right) or 1.0
        if not difference <= (_ARRAY_TOLERANCE if right.ndim else _SCALAR_TOLERANCE):
            where = f"result{place[0]} on device {place[1]}"
            return f"wrong numbers: {where} is {difference:.1%} off plain JAX in one process"
    return None


def ratios(content: dict[str, Any]) -> str:
    """Time over that of the computation alone, or of plain JAX, in the same job and round."""
    groups = content["settings"]["groups"]

    def medians(result: dict[str, Any]) -> list[float]:
        samples = result["samples"]
        starts = range(0, len(samples), groups)
        return [statistics.median(samples[start : start + groups]) for start in starts]

    def cell(case: dict[str, Any], name: str) -> str:
        rounds = {n: medians(r) for n, r in case["candidates"].items() if r["samples"]}
        alone = rounds.get(COMPUTE_ONLY, rounds.get(PLAIN, ()))
        each = [a / b for a, b in zip(rounds.get(name, ()), alone, strict=False)]
        return f"{statistics.median(each):.3f} [{min(each):.3f}, {max(each):.3f}]" if each else ""

    about = f"The median of rounds, [least, most]; over {PLAIN} where {COMPUTE_ONLY} takes no part."
    return f"## Over {COMPUTE_ONLY} of the same job\n\n{about}\n\n{tables.grid(content, cell)}"
