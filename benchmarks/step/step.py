"""``python -m benchmarks step``: a profile of the trainer's step as a table of its parts.

The program is compiled without CUDA graphs, in whose profiles kernels do not name instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.comparison import candidates
from benchmarks.comparison.compiling import Executable, trace
from benchmarks.comparison.operands import Operands
from benchmarks.comparison.timing import gpus_at_work
from benchmarks.internals import measure
from benchmarks.measuring.profiling import EXECUTIONS, record_timelines
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import Settings, check, check_names, make_mesh
from benchmarks.measuring.tables import table
from benchmarks.step import budget
from benchmarks.step.train import CANDIDATES, TrainCase
from models.blocks.rematerialization import Remat
from train.config.config import Zero
from train.config.presets import PRESETS

_WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


@dataclass(frozen=True, kw_only=True)
class Step(Settings):
    """Where the time of a training step goes, part by part, beside the least it could be."""

    preset: str = "llama3-8b"
    """Which model: debug, llama3-8b, llama3-70b, llama3-405b."""
    layers: int = 8
    """Layers of the model, which is cut to that many."""
    sequence_length: int = 8192
    """Tokens per sequence."""
    sequences: int = 1
    """Sequences per step."""
    remat: Remat = "none"
    """What the backward recomputes: none, dots, full."""
    zero: Zero = 0
    """ZeRO level; 0 is tensor parallelism, others shard weights over all devices."""
    trainer: str = ""
    """Other flags of the trainer, such as --trainer="--mesh.fsdp 2 --mesh.tensor 4"."""
    candidate: str = "auto"
    """Whose step: auto, or another of `train --candidates`."""
    group_seconds: float = 0.5


def run(settings: Step) -> Report:
    """Profiles the step; writes the table.

    Raises:
      ValueError: for settings that do not fit, and for devices whose work is not in profiles.
    """
    check(settings)
    check_names("preset", (settings.preset,), list(PRESETS))
    check_names("candidate", (settings.candidate,), CANDIDATES)
    mesh = make_mesh(settings)
    shape = settings.preset, settings.layers, settings.sequence_length, settings.sequences
    case = TrainCase(*shape, settings.remat, settings.zero, settings.trainer)
    candidate = candidates.make(settings.candidate, mesh, try_options=False)
    program = case.build(Operands(mesh, settings.array_dtype), candidate)
    report = Report("step", settings, sections=[parts])
    traced = trace(candidate, program)
    (name, options), *_ = candidate.option_sets.items()
    compiled = traced.lowered.compile(compiler_options={**options, **_WITHOUT_GRAPHS})
    report.log("compiled")
    assert program.make is not None
    step = Executable((traced,), name, compiled, 0.0).on(program.make())
    times = measure({"": step}, groups=settings.groups, seconds_per_group=settings.group_seconds)
    timelines = record_timelines(step, report.folder / "profile")
    sizes, rates = case.mesh_sizes(mesh.size), budget.RATES.get(mesh.devices.flat[0].device_kind)
    floors = rates and budget.make_floors(case.config(dtype=settings.dtype), sizes, rates)
    rows = budget.make_rows(timelines, budget.instruction_names(compiled.as_text()), floors)
    described = {
        "name": f"{case.name}, {settings.candidate}, {sizes}",
        "gpus": gpus_at_work(step),
        "median": 1e3 * times[""].median,
        "profiled": sum(row.time for row in rows),
        "rates": rates,
    }
    report.write_cases([{**described, "rows": [row._asdict() for row in rows]}])
    print(parts(report.content))
    return report


def parts(content: dict[str, Any]) -> str:
    """The table of parts."""
    (case,) = content["cases"]
    rows = [budget.Part(**row) for row in case["rows"]]
    about = (
        f"## {case['name']}\n\nms of a step on an average device: {case['profiled']:.1f} in"
        f" a profile of {EXECUTIONS} steps and {case['median']:.1f} without one, both without CUDA"
        " graphs. What runs beside a kernel that began before does not count, and communication"
        " counts while nothing computes. Weights: casts to the compute dtype, and of gradients. "
    )
    rates = [rate / 1e12 for rate in case["rates"] or ()]
    about += budget.ASSUMPTIONS.format(*rates) if rates else "This device has no known floors."
    scale = 30 / max(row.time for row in rows)
    time, forward, backward = (
        sum(getattr(row, name) for row in rows) for name in ("time", "forward", "backward")
    )
    floor = sum(row.floor or 0 for row in rows) if rates else None
    total = budget.Part("all", time, forward, backward, floor)
    header = ["part", "ms", "forward", "backward", "floor", "beyond", "█ floor ░ beyond"]
    lines = [*(_line(row, scale) for row in rows), _line(total, 0)]
    return f"{about}\n\n{table(header, lines)}"


def _line(row: budget.Part, scale: float) -> list[str]:
    beyond = None if row.floor is None else row.time - row.floor
    times = row.time, row.forward or None, row.backward or None, row.floor, beyond
    whole = round(row.time * scale)
    floor = min(whole, round((row.floor or 0) * scale))
    texts = ("" if time is None else f"{time:.2f}" for time in times)
    return [row.part, *texts, "█" * floor + "░" * (whole - floor)]
