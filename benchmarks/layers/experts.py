"""``python -m benchmarks experts``: expert layers beside plain JAX, on two or more GPUs.

Plain JAX has the fastest grouped matmuls of Tokamax for each product, if it is installed; see
`benchmarks.layers.public_grouped_matmuls`. All programs take turns. Without gradients a program is
one layer; with them its gradients follow its result, as in a model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.comparison.communication import AXIS
from benchmarks.internals import measure
from benchmarks.layers.expert_programs import ExpertLayer, Layer, ours, plain, program
from benchmarks.layers.public_grouped_matmuls import fastest
from benchmarks.measuring import environment
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import Settings, check, check_names, make_mesh
from benchmarks.measuring.tables import table
from collective_matmul import OVERLAP_OPTIONS

#: Features, hidden features, experts, experts of a token.
MODELS = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "tiny": (64, 32, 8, 2),
}

_PLAIN = "plain JAX"


@dataclass(frozen=True, kw_only=True)
class Experts(Settings):
    """Times of expert layers: forward alone, and with gradients."""

    models: tuple[str, ...] = ("qwen3-30b-a3b", "mixtral-8x7b")
    """Whose expert layers."""
    tokens: tuple[int, ...] = (16384, 8192)
    """Tokens of each device."""
    recompute: bool = True
    """Also time gradients that compute the products of gate and up again."""


@dataclass(frozen=True)
class ExpertProgram:
    """A program of a case."""

    layer: Layer
    options: dict[str, Any]


def candidates(
    layer: ExpertLayer, devices: int, *, differentiated: bool, recompute: bool
) -> tuple[dict[str, ExpertProgram], dict[str, str]]:
    """The programs of a case by name, and which kernels plain JAX has."""
    rings = dict(OVERLAP_OPTIONS)
    found = {
        "ring_direct": ExpertProgram(ours("ring_direct"), rings),
        "xla": ExpertProgram(ours("xla"), rings),
        "auto": ExpertProgram(ours(None), rings),
    }
    try:
        products, kernels = fastest(layer, devices)
    except ImportError as error:
        products, kernels = lambda _: jax.lax.ragged_dot, {"all": f"lax.ragged_dot: {error}"}
    found[_PLAIN] = ExpertProgram(plain(products), {})
    if differentiated and recompute:
        again = ours("ring_direct", recompute_hidden=True)
        found["ring_direct, recomputed"] = ExpertProgram(again, rings)
        found[f"{_PLAIN}, recomputed"] = ExpertProgram(plain(products, recompute=True), {})
    return found, kernels


@dataclass(frozen=True)
class ExpertCase:
    """A layer and a direction."""

    layer: ExpertLayer
    differentiated: bool

    @property
    def name(self) -> str:
        both = "forward and backward" if self.differentiated else "forward"
        return f"{self.layer.name}, {self.layer.tokens} tokens, {both}"


def cases(settings: Experts) -> Iterator[ExpertCase]:
    """All cases."""
    for model in settings.models:
        for tokens in settings.tokens:
            layer = ExpertLayer(model, tokens, *MODELS[model], settings.array_dtype)
            yield ExpertCase(layer, False)
            yield ExpertCase(layer, True)


def run(settings: Experts) -> Report:
    """Times all cases; writes the report after each.

    Raises:
      ValueError: for settings that do not fit.
    """
    check(settings)
    check_names("models", settings.models, list(MODELS))
    mesh = make_mesh(settings)
    report = Report("experts", settings, sections=[rows])
    found: list[dict[str, Any]] = []
    for case in cases(settings):
        if report.out_of_time():
            break
        found.append(_measured(case, settings, mesh))
        report.write_cases(found)
        report.log(f"{case.name}: {found[-1]['summary']}")
    print(rows(report.content))
    return report


def _measured(case: ExpertCase, settings: Experts, mesh: Mesh) -> dict[str, Any]:
    made, kernels = candidates(
        case.layer,
        mesh.size,
        differentiated=case.differentiated,
        recompute=settings.recompute,
    )
    placed = NamedSharding(mesh, P(AXIS))
    arguments = [jax.device_put(each, placed) for each in case.layer.arguments(mesh.size).values()]
    programs: dict[str, Callable] = {}
    memory: dict[str, float] = {}
    failed: dict[str, str] = {}
    errors: dict[str, float] = {}
    expected = None
    for name, candidate in made.items():
        try:
            compiled = (
                jax.jit(program(candidate.layer, mesh, differentiated=case.differentiated))
                .lower(*arguments)
                .compile(compiler_options=candidate.options if settings.platform == "gpu" else {})
            )
            results = jax.block_until_ready(compiled(*arguments))
        except Exception as error:  # The others are still worth their time.
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        expected = results if expected is None else expected
        errors[name] = max(jax.tree.leaves(jax.tree.map(_difference, results, expected)))
        statistics: Any = compiled.memory_analysis()
        memory[name] = statistics.temp_size_in_bytes / 2**30
        call = functools.partial(compiled, *arguments)
        # Simulated devices wait for each other for ever if many calls are in flight.
        waiting = functools.partial(_and_wait, call)
        programs[name] = call if settings.platform == "gpu" else waiting
    del expected
    timings = measure(programs, groups=settings.groups, seconds_per_group=settings.group_seconds)
    times = {name: list(timing.samples) for name, timing in timings.items()}
    return {
        "name": case.name,
        "problem": {"devices": mesh.size, **_sizes(case.layer)},
        "kernels of plain JAX, TFLOP/s": kernels,
        "times": times,
        "GiB": memory,
        "largest difference to the first": errors,
        "failed": failed,
        "gpus": environment.gpu_state(),
        "summary": ", ".join(f"{name} {np.median(t) * 1e3:.3f} ms" for name, t in times.items()),
    }


def _and_wait(call: Callable) -> Any:
    return jax.block_until_ready(call())


def _sizes(layer: ExpertLayer) -> dict[str, Any]:
    names = ("tokens", "width", "hidden", "experts", "choices")
    return {name: getattr(layer, name) for name in names}


def _difference(result: jax.Array, expected: jax.Array) -> float:
    """The largest difference, relative to the largest number; infinite for NaN."""
    wide = result.astype(jnp.float32), expected.astype(jnp.float32)
    difference = float(jnp.abs(wide[0] - wide[1]).max() / jnp.abs(wide[1]).max())
    return difference if math.isfinite(difference) else math.inf


def rows(content: dict[str, Any]) -> str:
    """The table of all cases."""
    names = list(dict.fromkeys(name for case in content["cases"] for name in case["times"]))
    header = ["layer", *(f"{name}: ms (quartiles), GiB, × {_PLAIN}" for name in names)]
    lines = []
    for case in content["cases"]:
        cells = [_cell(case, name) for name in names]
        lines.append([case["name"], *cells])
    return f"Medians, and quartiles in parentheses.\n\n{table(header, lines)}"


def _cell(case: dict[str, Any], name: str) -> str:
    if name not in case["times"]:
        return case["failed"].get(name, "–")[:40]
    samples = np.array(case["times"][name])
    low, middle, high = 1e3 * np.percentile(samples, (25, 50, 75))
    cell = f"{middle:.3f} ({low:.3f}–{high:.3f}), {case['GiB'][name]:.2f}"
    if _PLAIN in case["times"]:
        ratio = float(np.median(np.array(case["times"][_PLAIN]) / samples))
        cell += f", {ratio:.3f}"
    return cell
