"""``python -m benchmarks fused``: whether the fused kernels are right, then how long they take.

A kernel that waits for other devices can wait forever. Cases therefore run in a process of their
own; where a step takes too long, that process is killed, its case counts as hung, and another
process goes on with the next case. PyTorch, if it is asked for, has the GPUs to itself afterwards.
"""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from benchmarks import environment
from benchmarks.communication import AXIS
from benchmarks.fused.apart import HUNG, Said, run_apart
from benchmarks.fused.cases import (
    Case,
    Checks,
    Model,
    Op,
    chain,
    quartiles,
    random_arrays,
    way_of,
)
from benchmarks.fused.peers import options_tried, time_peers
from benchmarks.fused.trials import describe
from benchmarks.report import Report
from benchmarks.settings import (
    Settings,
    check,
    check_least,
    check_names,
    check_positive,
    choose_platform,
    make_mesh,
)
from benchmarks.tables import table
from collective_matmul.backends import BACKENDS
from collective_matmul.tuning.timing import Timing, measure

_CASES_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class Fused(Settings):
    """Checks the fused kernels, then times them beside what they compete with."""

    ops: tuple[Op, ...] = ("all_gather_matmul",)
    """What to run."""
    models: tuple[Model, ...] = ("8B",)
    """Widths."""
    rows: tuple[int, ...] = (64, 512, 4096)
    """M, of all devices together."""
    contenders: tuple[str, ...] = ("xla", "ring", "fused", "mosaic_example", "ceiling")
    """Who is timed. The ceiling communicates nothing."""
    repeats: int = 20
    """Turns of every check; 0 checks nothing."""
    layers: int = 8
    """Ops in one executable, each with its own weight; 0 times nothing."""
    step_seconds: float = 60.0
    """A step of a case that takes longer hangs."""
    peers: bool = False
    """Afterwards time PyTorch on the same ops, in processes of its own."""


class Programs:
    """All contenders' chains, those of several cases compiled at once.

    Nothing compiles while one is timed: XLA tries kernels on the devices.
    """

    def __init__(self, cases: Sequence[Case], mesh: Mesh, settings: Fused):
        self._cases, self._mesh, self._settings = cases, mesh, settings
        self._compiled: dict[Case, dict[str, Any]] = {}

    def take(self, case: Case) -> dict[str, Any]:
        """A case's executables, or why there are none, by contender; forgotten here."""
        if case not in self._compiled:
            first = self._cases.index(case)
            self._compile(self._cases[first : first + _CASES_AT_ONCE])
        return self._compiled.pop(case)

    def _compile(self, cases: Sequence[Case]) -> None:
        arguments = self._mesh, self._settings.array_dtype, self._settings.layers
        with ThreadPoolExecutor(_CASES_AT_ONCE * len(self._settings.contenders)) as pool:
            jobs = {
                case: {
                    n: pool.submit(chain, case, n, *arguments) for n in self._settings.contenders
                }
                for case in cases
            }
        self._compiled = {
            case: {n: _outcome(job) for n, job in of.items()} for case, of in jobs.items()
        }


def _outcome(job: Future[Any]) -> Any:
    """What came of it, or its error in words."""
    try:
        return job.result()
    except Exception as error:
        return describe(error)


def times(case: Case, programs: Programs, mesh: Mesh, settings: Fused) -> dict[str, Any]:
    """Microseconds per op of all contenders, in turns, or why there are none."""
    compiled = programs.take(case)
    found: dict[str, Any] = {n: p for n, p in compiled.items() if isinstance(p, str)}
    executables = {n: p for n, p in compiled.items() if n not in found}
    dtype = settings.array_dtype
    x_shape, w_shape = case.shapes
    w_sharding = NamedSharding(mesh, case.specs[1])
    ws = random_arrays(w_shape, dtype, w_sharding, range(settings.layers))
    (x,) = random_arrays(x_shape, dtype, NamedSharding(mesh, case.specs[0]), [settings.layers])
    runs = {
        name: functools.partial(p, jax.device_put(x, p.input_shardings[0][0]), ws)
        for name, p in executables.items()
    }
    for name, timing in measure(
        runs, groups=settings.groups, seconds_per_group=settings.group_seconds
    ).items():
        found[name] = quartiles(timing, settings.layers)
    return {name: found[name] for name in compiled}


@dataclass
class Outcome:
    """What was found in a case."""

    case: Case
    mesh: dict[str, int] = field(default_factory=dict)
    """How many devices an axis has."""
    checks: dict[str, Any] = field(default_factory=dict)
    """Wrong elements, or why there is no count, by check."""
    times: dict[str, Any] = field(default_factory=dict)
    """Quartiles in microseconds per op, or why there are none, by contender."""
    peers: dict[str, Any] = field(default_factory=dict)
    """All that was found of PyTorch, by peer: see `benchmarks.peers.PeerRun`."""
    hung: str = ""
    """The step that took too long."""
    gpus: list[dict[str, str]] = field(default_factory=list)
    """Their power and clocks after the last step."""

    @property
    def as_json(self) -> dict[str, Any]:
        return {"name": self.case.name, **asdict(self)}


def steps(
    case: Case, programs: Programs, mesh: Mesh, settings: Fused
) -> Iterator[tuple[str, str, Callable]]:
    """What to do in a case: where it belongs in the outcome, its name, and a function."""
    yield "mesh", AXIS, lambda: mesh.devices.size
    checks = Checks(case, mesh, settings.array_dtype, settings.repeats)
    if settings.repeats:
        yield "checks", "exact", lambda: checks.exact(way_of("fused", case.op))()
        yield "checks", "repeated", lambda: checks.repeated(way_of("fused", case.op))()
        if case.op == "all_gather_matmul":
            delayed = way_of("fused_delayed", case.op)
            yield "checks", "delayed", lambda: checks.exact(delayed)()
    if settings.layers:
        yield "times", "all", lambda: times(case, programs, mesh, settings)


def work(cases: Sequence[Case], settings: Fused, ends: float, connection: Connection) -> None:
    """The other process: announces each step, then says what came out; begins none after `ends`."""
    choose_platform(settings)
    mesh = make_mesh(settings)
    programs = Programs(cases, mesh, settings)
    for case in cases:
        if time.time() > ends:
            return
        for kind, name, step in steps(case, programs, mesh, settings):
            connection.send(Said(case, (kind, name)))
            try:
                connection.send(Said(case, (kind, name), step()))
            except Exception as error:
                traceback.print_exc(limit=3)
                result = f"{type(error).__name__}: {str(error)[:300]}"
                connection.send(Said(case, (kind, name), result))
                if not isinstance(error, ValueError):
                    # After an error on a device nothing works in this process.
                    return


def run(settings: Fused) -> Report:
    """Runs all cases; prints what happens as it does, and the table last; returns the report.

    Raises:
      ValueError: for settings that nothing can be measured with.
    """
    check(settings)
    check_least(settings, 0, "repeats", "layers")
    check_positive(settings, "step_seconds")
    if settings.peers and not settings.layers:
        raise ValueError("peers=True: layers=0 times nothing; give at least 1, or leave peers out")
    check_names("contenders", settings.contenders, [*BACKENDS, "mosaic_example", "ceiling"])
    kinds = environment.device_kinds(settings.platform, settings.devices)
    report = Report("fused", settings, kinds, [checks_and_times, reasons, options_tried])
    ends = time.time() + settings.limit_seconds
    cases = [Case(o, m, r) for o in settings.ops for m in settings.models for r in settings.rows]
    outcomes: dict[Case, Outcome] = {}

    def arguments() -> tuple[Any, ...] | None:
        left = [case for case in cases if case not in outcomes]
        return (left, settings, ends) if left and time.time() < ends else None

    def note(said: Said) -> None:
        outcome = outcomes.setdefault(said.case, Outcome(said.case))
        add(said, outcome)
        outcome.gpus = environment.gpu_state()
        report.say(f"{said.case.name}: {said.step[1]}: {said.result}")
        report.write_cases([outcome.as_json for outcome in outcomes.values()])

    run_apart(work, arguments, settings.step_seconds, note)
    if settings.peers and outcomes and not report.out_of_time():
        add_peers(outcomes, settings, report)
    print(checks_and_times(report.content), flush=True)
    return report


def add_peers(outcomes: Mapping[Case, Outcome], settings: Fused, report: Report) -> None:
    """Adds what PyTorch takes for the cases that there are outcomes of."""
    found = time_peers(
        list(outcomes),
        devices=max(outcome.mesh[AXIS] for outcome in outcomes.values()),
        layers=settings.layers,
        settings=settings,
        seconds_left=report.seconds_left,
    )
    for case, outcome in outcomes.items():
        outcome.peers = found[case]
        for name, result in found[case].items():
            samples = tuple(result.get("samples", ()))
            outcome.times[name] = (
                quartiles(Timing(samples), settings.layers) if samples else result["failure"]
            )
    report.write_cases([outcome.as_json for outcome in outcomes.values()])


def add(said: Said, outcome: Outcome) -> None:
    """Adds a step's result to what was found in its case."""
    kind, name = said.step
    if said.result == HUNG:
        outcome.hung = name
    else:
        result = said.result if isinstance(said.result, dict) else {name: said.result}
        getattr(outcome, kind).update(result)


def checks_and_times(content: dict[str, Any]) -> str:
    """A table of what was wrong, and of medians in microseconds per op."""
    cases = content["cases"]
    names = list(dict.fromkeys(name for case in cases for name in case["times"]))
    rows = []
    for case in cases:
        wrong = ", ".join(f"{name} {str(v)[:40]}" for name, v in case["checks"].items())
        medians = [
            f"{value[1]:.1f}" if isinstance(value, list) else "-"
            for value in (case["times"].get(name) for name in names)
        ]
        hung = f"{case['hung']} hung or died" if case["hung"] else ""
        rows.append([case["name"], ", ".join(filter(None, (wrong, hung))), *medians])
    return table(["µs per op", "wrong", *names], rows)


def reasons(content: dict[str, Any]) -> str:
    """Why contenders have no times."""
    lines = [
        f"- {case['name']}, {name}: {value}"
        for case in content["cases"]
        for name, value in case["times"].items()
        if isinstance(value, str)
    ]
    return "\n".join(["## Without times", "", *lines]) if lines else ""
