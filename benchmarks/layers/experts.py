"""``python -m benchmarks experts``: expert layers beside plain JAX, on two or more GPUs.

Plain JAX has the fastest grouped matmuls of Tokamax for each product, if it is installed; see
`benchmarks.layers.public_grouped_matmuls`. All programs take turns. Without gradients a program is
one layer; with them its gradients follow its result, as in a model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from benchmarks.comparison.communication import AXIS
from benchmarks.layers.expert_programs import (
    FSDP,
    ExpertLayer,
    ours,
    plain,
    program,
    quantized_before,
    token_spec,
    weight_spec,
)
from benchmarks.layers.public_grouped_matmuls import fastest
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import Settings, check, check_names, make_mesh
from benchmarks.measuring.tables import table
from benchmarks.measuring.turns import LayerProgram, measure_cases, time_layers, with_quartiles
from collective_matmul import OVERLAP_OPTIONS

#: Features, hidden features, experts, experts of a token.
MODELS = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "tiny": (64, 32, 8, 2),
}

_PLAIN, _BEFORE = "plain JAX", ", weights quantized before"
_CANDIDATES = ("ring_direct", "exchange", "xla", "auto", _PLAIN)


@dataclass(frozen=True, kw_only=True)
class Experts(Settings):
    """Times of expert layers: forward alone, and with gradients."""

    models: tuple[str, ...] = ("qwen3-30b-a3b", "mixtral-8x7b")
    """Whose expert layers."""
    tokens: tuple[int, ...] = (16384, 8192)
    """Tokens of each device."""
    fsdp: int = 1
    """Devices that share the tokens and each expert's matrices beside the axis of experts."""
    candidates: tuple[str, ...] = _CANDIDATES
    """What to time in the layers' dtype; plain JAX is also what others are compared with."""
    recompute: bool = True
    """Also time gradients that compute the products of gate and up again."""
    fp8: tuple[str, ...] = ("rowwise",)
    """Also time experts that multiply by these recipes."""


@dataclass(frozen=True)
class ExpertCase:
    """A layer and a direction."""

    layer: ExpertLayer
    differentiated: bool

    @property
    def name(self) -> str:
        both = "forward and backward" if self.differentiated else "forward"
        return f"{self.layer.name}, {self.layer.tokens} tokens, {both}"


def candidates(
    case: ExpertCase, mesh: Mesh, settings: Experts
) -> tuple[dict[str, LayerProgram], dict[str, str]]:
    """The programs of a case by name, and which kernels plain JAX has."""
    kernels: dict[str, str] = {}
    products: Any = None
    if _PLAIN in settings.candidates:
        try:
            products, kernels = fastest(case.layer, mesh.shape[AXIS])
        except ImportError as error:
            products, kernels = lambda _: jax.lax.ragged_dot, {"all": f"lax.ragged_dot: {error}"}
    found = {
        name: plain(products, mesh)
        if name == _PLAIN
        else ours(None if name == "auto" else name, mesh)
        for name in settings.candidates
    }
    for fp8 in settings.fp8:
        found[f"auto, {fp8}"] = ours(None, mesh, fp8=fp8)
        found[f"auto, {fp8}{_BEFORE}"] = ours(None, mesh, before=True, fp8=fp8)
    if case.differentiated and settings.recompute:
        found["ring_direct, recomputed"] = ours("ring_direct", mesh, recompute_hidden=True)
        if products is not None:
            found[f"{_PLAIN}, recomputed"] = plain(products, mesh, recompute=True)
    programs = {
        name: LayerProgram(
            program(each, mesh, differentiated=case.differentiated),
            {} if name.startswith(_PLAIN) else dict(OVERLAP_OPTIONS),
        )
        for name, each in found.items()
    }
    return programs, kernels


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
    check_names("candidates", settings.candidates, _CANDIDATES)
    measured = functools.partial(_measured, settings, make_mesh(settings, {FSDP: settings.fsdp}))
    return measure_cases("experts", settings, cases(settings), measured, rows)


def _measured(settings: Experts, mesh: Mesh, case: ExpertCase) -> dict[str, Any]:
    layer, placed = case.layer, functools.partial(NamedSharding, mesh)
    programs, kernels = candidates(case, mesh, settings)
    *tokens, ws, dy = layer.arguments(mesh.size).values()
    *arguments, dy = jax.device_put([*tokens, dy], placed(token_spec(mesh)))
    ws = jax.device_put(ws, placed(weight_spec(mesh)))
    quantized = {fp8: quantized_before(mesh, fp8, ws) for fp8 in settings.fp8}
    arguments += [ws, quantized, dy]
    names = ("tokens", "width", "hidden", "experts", "choices")
    return {
        "name": case.name,
        "problem": {
            "devices": mesh.size,
            "fsdp": settings.fsdp,
            **{name: getattr(layer, name) for name in names},
        },
        "kernels of plain JAX, TFLOP/s": kernels,
        **time_layers(programs, arguments, settings),
    }


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
    cell = f"{with_quartiles(samples, '.3f', 1e3)}, {case['GiB'][name]:.2f}"
    if _PLAIN in case["times"]:
        ratio = float(np.median(np.array(case["times"][_PLAIN]) / samples))
        cell += f", {ratio:.3f}"
    return cell
