"""``python -m benchmarks fp8_matmuls``: the kernel for operands in 8 bits, on one GPU.

The matmuls are those of a chunk of a ring, of the layers of a model. Candidates take turns in a new
order in each group: which of them runs before another one decides about the power that it finds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.internals import (
    FORMATS,
    LAYERS,
    kernel_target,
    multiply_in_place,
)
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import Settings, check, check_least, check_names
from benchmarks.measuring.tables import table
from benchmarks.measuring.turns import measure_cases, take_turns, with_quartiles

#: Not our kernels: XLA's matmul in bfloat16, cuBLASLt's of 8-bit operands without scales, and XLA's
#: of packed rows with scales of rows, which copies its values first and scales in a kernel after.
_BASELINES = ("bfloat16", "cublaslt", "xla_rowwise")


@dataclass(frozen=True, kw_only=True)
class Fp8Matmuls(Settings):
    """TFLOP/s of matmuls in 8 bits, beside XLA's and cuBLASLt's."""

    models: tuple[str, ...] = ("llama3-8b", "llama3-70b")
    """Whose layers, as for `python -m collective_matmul tune --shapes`."""
    layers: tuple[str, ...] = ("up", "down", "query, key and value", "attention output")
    """Names of layers. The results of several weights are those of one."""
    rows: int = 8192
    """M, of all devices together."""
    ring: int = 2
    """The number of devices whose chunks are multiplied. One device multiplies here."""
    groups: int = 15


def problems(settings: Fp8Matmuls) -> dict[tuple[int, int, int], str]:
    """(rows, contracted size, columns) of each matmul, and the layers that it is of."""
    found: dict[tuple[int, int, int], str] = {}
    for model in settings.models:
        for layer in LAYERS[model]:
            if layer.name not in settings.layers:
                continue
            k, n, devices = layer.contracted, sum(layer.columns), settings.ring
            k, n = (k, n // devices) if layer.kind == "gather" else (k // devices, n)
            key = settings.rows // devices, k, n
            found[key] = ", ".join(filter(None, (found.get(key), f"{model} {layer.name}")))
    return found


def run(settings: Fp8Matmuls) -> Report:
    """Times all matmuls; writes the table after each.

    Raises:
      ValueError: for settings that do not fit, or a device without the kernel.
    """
    check(settings)
    check_least(settings, 1, "ring", "rows")
    check_names("models", settings.models, list(LAYERS))
    names = dict.fromkeys(layer.name for model in settings.models for layer in LAYERS[model])
    check_names("layers", settings.layers, list(names))
    if kernel_target() is None:
        kind = jax.devices()[0].device_kind
        raise ValueError(f"device {kind!r}: the kernel runs on Hopper GPUs; run this on one")
    measured = functools.partial(_measured, settings)
    return measure_cases("fp8_matmuls", settings, problems(settings).items(), measured, rows)


def _measured(settings: Fp8Matmuls, problem: tuple[tuple[int, int, int], str]) -> dict[str, Any]:
    (m, k, n), layers = problem
    times = take_turns(_candidates(m, k, n), settings)
    return {"name": f"{m} × {k} × {n}", "m": m, "k": k, "n": n, "layers": layers, "times": times}


def _candidates(m: int, k: int, n: int) -> dict[str, Callable[[], Any]]:
    """Functions that multiply once, with operands that are quantized already."""
    keys = jax.random.split(jax.random.key(0))
    x, w = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, ((m, k), (k, n)), strict=True)
    )

    def compiled(function: Callable, *operands: Any) -> Callable[[], Any]:
        return functools.partial(jax.jit(function).lower(*operands).compile(), *operands)

    values, columns = (a.astype(jnp.float8_e4m3fn) for a in (x, w.T))
    found = {
        "bfloat16": compiled(jnp.matmul, x, w),
        "cublaslt": compiled(_transposed_matmul, values, columns),
    }
    for recipe in FORMATS.values():
        (rows,), (weight,) = recipe.rows([x]), recipe.matrices([w])
        rows = rows.without_array
        found[recipe.name] = compiled(multiply_in_place, rows, weight)
        if recipe.name == "rowwise":
            found["xla_rowwise"] = compiled(type(weight).multiply_in_xla, weight, rows)
    return found


def _transposed_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    dimensions = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, w, dimensions, preferred_element_type=jnp.bfloat16)


def rows(content: dict[str, Any]) -> str:
    """The table of all cases."""
    ours = [name for name in FORMATS]
    header = ["m × k × n", *_BASELINES, *ours, *(f"{name} / cublaslt" for name in ours), "layers"]
    lines = []
    for case in content["cases"]:
        teraflops = 2e-12 * case["m"] * case["k"] * case["n"]
        rates = {name: teraflops / np.array(times) for name, times in case["times"].items()}
        ratios = {name: np.array(rates[name]) / rates["cublaslt"] for name in ours}
        lines.append(
            [
                case["name"],
                *(with_quartiles(rates[name], ".0f") for name in (*_BASELINES, *ours)),
                *(with_quartiles(ratios[name], ".2f") for name in ours),
                case["layers"],
            ]
        )
    return (
        "TFLOP/s and ratios of TFLOP/s of the same group: medians, and quartiles in parentheses."
        f"\n\n{table(header, lines)}"
    )
