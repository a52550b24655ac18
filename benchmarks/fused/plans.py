"""``python -m benchmarks plans``: the fastest plan of each fused kernel, found by measuring.

Of each case the plans that a model takes for the likeliest are compiled, checked and timed in
turns. While they run, XLA compiles those of the next cases. Nothing is traced meanwhile: Python
would get in the way of what is timed.

A plan that hangs, or ends the process that the cases run in, is left out of what the next process
does, and so are those like it of other cases.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from jax.sharding import Mesh

from benchmarks import environment
from benchmarks.fused.apart import Said, run_apart
from benchmarks.fused.cases import Case, Model, Op
from benchmarks.fused.operands import Operands
from benchmarks.fused.trials import (
    Bench,
    Plan,
    Trials,
    call_of,
    describe,
    kind_of,
    plans_of,
    plans_to_try,
    start,
    text_of,
)
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
from collective_matmul.backends.fused.config_search import merged, shipped_configs
from collective_matmul.data import Record

# Cases that XLA compiles before they are timed.
_AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class Plans(Settings):
    """Tunes the plans of the fused kernels: adds the fastest to a copy of the package's table."""

    ops: tuple[Op, ...] = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    """What to tune."""
    models: tuple[Model, ...] = ("8B", "70B")
    """Widths."""
    rows: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    """M, of all devices together: a multiple of them."""
    candidates: int = 8
    """Plans that are tried of the likeliest; and the one that is chosen today."""
    contenders: tuple[str, ...] = ()
    """Who else is timed: bulk, ceiling."""
    layers: int = 16
    """Ops in one executable, each with its own weight."""
    compile_threads: int = 32
    """Programs that XLA compiles at the same time."""
    lead_seconds: float = 0.2
    """Untimed, in each case."""
    groups: int = 5
    """Timed groups; within each all plans take turns."""
    group_seconds: float = 0.03
    """How long each plan runs in each group."""
    step_seconds: float = 60.0
    """What takes longer hangs: a check, the timing of a case, the compilation of the next."""


@dataclass
class Outcome:
    """What was found in a case. Plans are told by their choices, as text.

    Attributes:
      case: that it was found in.
      predicted: the likeliest plan.
      best: the fastest.
      record: of the table, for that.
      times: quartiles in microseconds per op, by plan or contender.
      wrong: why a plan was left out.
      failure: why there is no best.
      gpus: their power and clocks at the end.
    """

    case: Case
    predicted: str = ""
    best: str = ""
    record: Record | None = None
    times: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    gpus: list[dict[str, str]] = field(default_factory=list)

    @property
    def as_json(self) -> dict[str, Any]:
        return {"name": self.case.name, **asdict(self)}

    @property
    def done(self) -> bool:
        return bool(self.best or self.failure)


class Step(NamedTuple):
    """Of a case: the check of a plan, or the rest, which belongs to none.

    Attributes:
      plan: its choices, as text.
      kind: what it has in common with those for other numbers of rows.
    """

    plan: str = ""
    kind: str = ""


def work(
    cases: Sequence[Case],
    failed: frozenset[str],
    settings: Plans,
    ends: float,
    connection: Connection,
) -> None:
    """The other process: measures case after case, and begins none after `ends`."""
    choose_platform(settings)
    mesh = make_mesh(settings)
    with ThreadPoolExecutor(settings.compile_threads) as pool:
        started = _start_all(cases, failed, settings, mesh, pool, connection)
        ahead = deque(itertools.islice(started, _AHEAD))
        while ahead and time.time() < ends:
            ahead.extend(itertools.islice(started, 1))
            trials = ahead.popleft()
            step = Step()
            try:
                bench, right = Bench(trials), {}
                for plan in trials.chains:
                    step = Step(text_of(plan), kind_of(trials.call, plan))
                    right |= _checked(trials, bench, plan, step, connection)
                step = Step()
                connection.send(Said(trials.case, step))
                connection.send(Said(trials.case, step, _times(trials, bench, right, settings)))
            except Exception as error:
                traceback.print_exc(limit=3)
                connection.send(Said(trials.case, step, describe(error)))
                # After an error on a device nothing works in this process, maybe not even its end.
                os._exit(1)


def _start_all(
    cases: Sequence[Case],
    failed: frozenset[str],
    settings: Plans,
    mesh: Mesh,
    pool: Executor,
    connection: Connection,
) -> Iterator[Trials]:
    """Has the plans of case after case compiled."""
    # Of a scatter and an all-reduce, x and w are the same.
    for _, group in itertools.groupby(cases, lambda case: (case.model, case.specs[:2])):
        alike = [*group]
        most = max(alike, key=lambda case: case.rows)
        operands = Operands(most, settings.layers, mesh, settings.array_dtype)
        for case in alike:
            began = time.monotonic()
            try:
                call = call_of(case, mesh.size)
                plans = plans_to_try(call, settings.candidates, failed)
                trials = start(case, call, plans, settings.contenders, operands, pool)
            except Exception as error:
                traceback.print_exc(limit=3)
                connection.send(Said(case, Step(), describe(error)))
                continue
            connection.send(Said(case, Step(), {"traced": time.monotonic() - began}))
            yield trials


def _checked(
    trials: Trials, bench: Bench, plan: Plan, step: Step, connection: Connection
) -> dict[Plan, Any]:
    """The executable of a plan, if it works; says if it does not."""
    chain = trials.chains[plan]
    try:
        compiled = chain if isinstance(chain, str) else chain.result()
    except Exception as error:
        compiled = describe(error)
    if isinstance(compiled, str):
        connection.send(Said(trials.case, step, compiled))
        return {}
    connection.send(Said(trials.case, step))
    wrong = bench.wrong(compiled)
    connection.send(Said(trials.case, step, wrong))
    return {} if wrong else {plan: compiled}


def _times(
    trials: Trials, bench: Bench, right: dict[Plan, Any], settings: Plans
) -> dict[str, Any] | str:
    """What is new in a case's `Outcome`, or why nothing is."""
    if not right:
        return "no plan worked"
    times = bench.times(right, settings.lead_seconds, settings.groups, settings.group_seconds)
    best = min(right, key=lambda plan: times[plan][1])
    return {
        "predicted": text_of(plans_of(trials.call)[0]),
        "best": text_of(best),
        "record": trials.call.record(best, times[best][1]),
        "times": {n if isinstance(n, str) else text_of(n): t for n, t in times.items()},
    }


def run(settings: Plans) -> Report:
    """Tunes all cases; prints what happens as it does. The table and all times are in its report.

    Raises:
      ValueError: for settings that nothing can be measured with.
    """
    check(settings)
    check_least(settings, 1, "candidates", "layers")
    check_positive(settings, "lead_seconds", "step_seconds")
    check_names("contenders", settings.contenders, ["xla", "ceiling"])
    kinds = environment.device_kinds(settings.platform, settings.devices)
    report = Report("plans", settings, kinds, [fastest])
    ends = time.time() + settings.limit_seconds
    cases = [Case(o, m, r) for m in settings.models for o in settings.ops for r in settings.rows]
    found = {case: Outcome(case) for case in cases}
    failed: set[str] = set()

    def arguments() -> tuple[Any, ...] | None:
        left = [case for case, outcome in found.items() if not outcome.done]
        return (left, frozenset(failed), settings, ends) if left and time.time() < ends else None

    def note(said: Said) -> None:
        outcome = found[said.case]
        if text := add(said, outcome, failed):
            outcome.gpus = environment.gpu_state() if outcome.done else []
            report.say(f"{said.case.name}: {text}")
            _save(report, [*found.values()])

    run_apart(work, arguments, settings.step_seconds, note)
    return report


def add(said: Said, outcome: Outcome, failed: set[str]) -> str:
    """Adds what came out of a step; returns what there is to say of it, maybe nothing."""
    plan, result = said.step.plan, said.result
    if plan:
        if result == 0:
            return ""
        if isinstance(result, str):
            failed.add(said.step.kind)
        outcome.wrong[plan] = result if isinstance(result, str) else f"{result} wrong"
        return f"{brief(plan)}: {outcome.wrong[plan]}"
    if isinstance(result, str):
        outcome.failure = result
        return result
    if "traced" in result:
        return f"traced in {result['traced']:.1f} s"
    for name, value in result.items():
        setattr(outcome, name, value)
    columns = _columns(outcome.as_json)
    medians = (f"{what} {outcome.times[n][1]:.1f} µs" for what, n in columns.items())
    return f"{', '.join(medians)}: {brief(outcome.best)}"


def _columns(case: dict[str, Any]) -> dict[str, str]:
    """What is worth a column, by what to call it."""
    plans = {"predicted": case["predicted"], "tuned": case["best"]}
    contenders = {name: name for name in case["times"] if not name.startswith("{")}
    return {what: name for what, name in (plans | contenders).items() if name in case["times"]}


def brief(plan: str) -> str:
    """The choices in which plans differ most."""
    choices = json.loads(plan)
    tiling = choices.pop("tiling")
    names = ("tile_m", "tile_n", "cluster_dimension", "max_concurrent_steps", "grid_tile_width")
    told = {name: tiling[name] for name in names} | choices
    return ", ".join(f"{name} {value}" for name, value in told.items())


def _save(report: Report, found: Sequence[Outcome]) -> None:
    """Writes all that is known by now."""
    report.write_cases([outcome.as_json for outcome in found])
    records = [outcome.record for outcome in found if outcome.record is not None]
    table = merged(shipped_configs(), records)
    (report.folder / "fused_configs.jsonl").write_text(table.to_text(), encoding="utf-8")


def fastest(content: dict[str, Any]) -> str:
    """A table of medians in microseconds per op."""
    cases = content["cases"]
    names = list(dict.fromkeys(what for case in cases for what in _columns(case)))
    rows = []
    for case in cases:
        columns, times = _columns(case), case["times"]
        medians = [f"{times[columns[n]][1]:.1f}" if n in columns else "-" for n in names]
        best = brief(case["best"]) if case["best"] else case["failure"]
        rows.append([case["name"], *medians, str(len(case["wrong"])), best])
    return table(["µs per op", *names, "left out", "fastest"], rows)
