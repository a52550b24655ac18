"""``python -m benchmarks configs``: the fastest configuration of a backend for each op, measured.

For each site the configurations that the backend predicts to be fastest are compiled, checked and
timed in turns. A configuration is right if its results equal XLA's bit for bit, on operands for
which every sum is exact, where memory held NaNs before.

A configuration that hangs, or ends the process that the sites run in, is left out of what the next
process does, at all sites.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any, cast, get_args

from benchmarks.internals import BACKENDS, LAYERS, Backend, MeasuredData, Record, Site, shipped
from benchmarks.measuring import environment
from benchmarks.measuring.isolated import Message, run_isolated
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import (
    Settings,
    check,
    check_least,
    check_names,
    check_positive,
    choose_platform,
    make_mesh,
)
from benchmarks.measuring.tables import table
from benchmarks.ops.config_trial import ConfigTrial, first_line
from benchmarks.ops.ops import Op


@dataclass(frozen=True, kw_only=True)
class Configs(Settings):
    """Tunes a backend: writes the fastest configurations into a copy of the library's table."""

    backend: str = "fused"
    """Whose configurations."""
    models: tuple[str, ...] = ("llama3-8b", "llama3-70b")
    """Whose layers, as for `python -m collective_matmul tune --shapes`."""
    layers: tuple[str, ...] = ("up", "down")
    """Which of a model's layers."""
    ops: tuple[Op, ...] = get_args(Op)
    """Which ops; a layer that scatters has both kinds of sums."""
    rows: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    """M, of all devices together: multiples of their number."""
    configs: int = 8
    """Configurations tried at each site, besides the one that is used today."""
    compile_threads: int = 32
    """Programs compiled at the same time."""
    lead_seconds: float = 0.2
    """Untimed seconds at each site. On a cool GPU, other configurations win than in a program."""
    groups: int = 5
    """Timed groups; within each all configurations take turns."""
    group_seconds: float = 0.03
    """How long each configuration runs in each group."""
    step_seconds: float = 60.0
    """A step that takes longer hangs: a check, compiling or timing the programs of a site."""

    def sites(self, devices: int) -> dict[str, Site]:
        """The forward sites, by name.

        Raises:
          ValueError: for rows that the devices do not divide.
        """
        sites = {}
        for model in self.models:
            for layer in LAYERS[model]:
                for op in self.ops if layer.name in self.layers else ():
                    if (op == "all_gather_matmul") != (layer.kind == "gather"):
                        continue
                    for rows in self.rows:
                        if rows % devices:
                            raise ValueError(f"rows={rows}: not divisible by {devices} devices")
                        k, columns = layer.contracted, layer.columns
                        if op == "all_gather_matmul":
                            pairs = [((rows // devices, k), (k, n // devices)) for n in columns]
                        else:
                            pairs = [((rows, k // devices), (k // devices, columns[0]))]
                        site = Site(op, tuple(pairs), self.array_dtype, "", devices)
                        sites[f"{op} {model} {layer.name} M={rows}"] = site.flat
        return sites


@dataclass
class Outcome:
    """The results of one site. Configurations are named by their JSON.

    Attributes:
      name: the site's name.
      best: the fastest configuration.
      times: quartiles in microseconds per op of all that was timed, by name.
      wrong: why configurations were not timed.
      record: the line of the fastest one in the table of configurations.
      failure: why there are no times.
      gpus: their power and clocks after the last step.
    """

    name: str
    best: str = ""
    times: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    record: Record | None = None
    failure: str = ""
    gpus: list[dict[str, str]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return bool(self.best or self.failure)

    def add(self, message: Message) -> str:
        """Adds the result of a step; returns what to print about it, maybe nothing."""
        result = message.result
        if message.step:
            if result == 0:
                return ""
            self.wrong[message.step] = f"{result} wrong" if isinstance(result, int) else result
            return f"{brief(message.step)}: {self.wrong[message.step]}"
        if isinstance(result, str):
            self.failure = result
            return result
        self.best, self.times, self.record = result
        columns = _columns(self.times, self.best)
        medians = (f"{title} {self.times[name][1]:.1f} µs" for title, name in columns.items())
        return f"{', '.join(medians)}: {brief(self.best)}"


def run(settings: Configs) -> Report:
    """Tunes all sites; the table of configurations and all times are in the report's folder.

    Raises:
      ValueError: for settings that nothing can be measured with.
    """
    check(settings)
    check_least(settings, 1, "configs")
    check_positive(settings, "lead_seconds", "step_seconds")
    check_names("backend", (settings.backend,), list(BACKENDS))
    check_names("models", settings.models, list(LAYERS))
    kinds = environment.device_kinds(settings.platform, settings.devices)
    sites = settings.sites(len(kinds))
    report = Report("configs", settings, [fastest], kinds)
    ends = time.time() + settings.limit_seconds
    outcomes = {name: Outcome(name) for name in sites}
    failed: set[str] = set()

    def arguments() -> tuple[Any, ...] | None:
        left = {name: site for name, site in sites.items() if not outcomes[name].done}
        return (left, frozenset(failed), settings, ends) if left and time.time() < ends else None

    def note(message: Message) -> None:
        outcome = outcomes[message.subject]
        if message.step and isinstance(message.result, str):
            failed.add(message.step)
        if text := outcome.add(message):
            outcome.gpus = environment.gpu_state() if outcome.done else []
            report.log(f"{outcome.name}: {text}")
            _save(report, settings.backend, kinds[0], [*outcomes.values()])

    run_isolated(work, arguments, settings.step_seconds, note)
    return report


@dataclass
class Steps:
    """Sends the steps of a site: configurations by their JSON, and "" for everything else."""

    name: str
    connection: Connection
    current: str = ""

    def begin(self, step: str) -> None:
        self.current = step
        self.connection.send(Message(self.name, step))

    def end(self, result: Any) -> None:
        self.connection.send(Message(self.name, self.current, result))


def work(
    sites: dict[str, Site],
    failed: frozenset[str],
    settings: Configs,
    ends: float,
    connection: Connection,
) -> None:
    """Measures site after site, in the other process; begins none after `ends`."""
    choose_platform(settings)
    devices = list(make_mesh(settings).devices.flat)
    for name, site in sites.items():
        if time.time() > ends:
            return
        steps = Steps(name, connection)
        try:
            steps.begin("")
            steps.end(measure_site(site, devices, failed, settings, steps))
        except Exception as error:
            traceback.print_exc(limit=3)
            steps.end(first_line(error))
            # After an error on a device nothing works in this process, maybe not even its end.
            os._exit(1)


def measure_site(
    site: Site, devices: Sequence[Any], failed: frozenset[str], settings: Configs, steps: Steps
) -> str | tuple[str, dict[str, list[float]], Record]:
    """The best configuration, all times, and the best one's record; or why there are none.

    Each check is a step of its own.
    """
    backend = cast(Backend, BACKENDS[settings.backend])
    if reason := backend.unsupported_reason(site):
        return reason
    configs = {json.dumps(config.to_json()): config for config in backend.configurations(site)}
    configs = {text: config for text, config in configs.items() if text not in failed}
    configs = dict([*configs.items()][: settings.configs])
    trial = ConfigTrial(site, devices, backend, configs, settings.compile_threads)
    right = []
    for text in configs:
        steps.begin(text)
        wrong = trial.wrong(text)
        steps.end(wrong)
        right += [text] if wrong == 0 else []
    if not right:
        return f"none of {len(configs)} configurations works"
    steps.begin("")
    times = trial.times(right, settings.lead_seconds, settings.groups, settings.group_seconds)
    best = min(right, key=lambda text: times[text][1])
    return best, times, backend.configuration_record(site, configs[best], times[best][1])


def _columns(times: dict[str, Any], best: str) -> dict[str, str]:
    """The columns of the table by title: today's configuration, the fastest, and the others."""
    others = {name: name for name in times if not name.startswith("{")}
    return {**others, "tuned": best} if best else others


def brief(config: str) -> str:
    """A configuration's JSON as text, nested fields at one level."""
    fields = json.loads(config)
    flat = [
        pair
        for name, value in fields.items()
        for pair in (value.items() if isinstance(value, dict) else [(name, value)])
    ]
    return ", ".join(f"{name} {value}" for name, value in flat)


def _save(report: Report, backend: str, device_kind: str, outcomes: Sequence[Outcome]) -> None:
    """Writes the report, and the library's table with the records found so far."""
    report.write_cases(
        [{**asdict(outcome), "record": None, "devices": None} for outcome in outcomes]
    )
    measures = f"{backend}_configs"
    data = shipped(device_kind, measures) or MeasuredData(measures, device_kind, [])
    data = data.updated([outcome.record for outcome in outcomes if outcome.record is not None])
    (report.folder / f"{measures}.jsonl").write_text(data.to_text(), encoding="utf-8")


def fastest(content: dict[str, Any]) -> str:
    """A table of medians in microseconds per op."""
    cases = content["cases"]
    titles = list(dict.fromkeys(t for case in cases for t in _columns(case["times"], case["best"])))
    rows = []
    for case in cases:
        columns = _columns(case["times"], case["best"])
        medians = [f"{case['times'][columns[t]][1]:.1f}" if t in columns else "-" for t in titles]
        best = brief(case["best"]) if case["best"] else case["failure"]
        rows.append([case["name"], *medians, str(len(case["wrong"])), best])
    return table(["µs per op", *titles, "left out", "fastest"], rows)
