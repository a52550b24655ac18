"""``python -m benchmarks generation``: prefill and decoding of a model with random weights.

Decoding reads all weights but the embedding for each token, and the keys and values so far; the
floor is the time that takes. Candidates are backends of the collective matmuls, in turns.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import budget, environment
from benchmarks.internals import measure
from benchmarks.report import Report
from benchmarks.settings import Settings, check, check_least, check_names, make_mesh
from benchmarks.tables import table
from models.families import PRESETS
from models.generation import Generator, Sampling

#: Tokens of a launch.
_LAUNCH = 16


@dataclass(frozen=True, kw_only=True)
class Generation(Settings):
    """Tokens per second of prefill and of decoding, beside the time to read the weights."""

    preset: str = "llama3-8b"
    """Which model: a name in models/families."""
    layers: int = 0
    """Layers of the model, which is cut to that many; 0: all."""
    prompt: int = 2048
    """Tokens of each prompt."""
    batches: tuple[int, ...] = (1, 8, 64)
    """Numbers of prompts."""
    candidates: tuple[str, ...] = ("auto", "xla")
    """Backends; xla is JAX's own collectives."""
    group_seconds: float = 0.3


def run(settings: Generation) -> Report:
    """Times prefill and decoding; writes the table.

    Raises:
      ValueError: for settings that do not fit.
    """
    check(settings)
    check_least(settings, 1, "prompt")
    check_names("preset", (settings.preset,), list(PRESETS))
    mesh = make_mesh(settings)
    config = PRESETS[settings.preset]()
    config = dataclasses.replace(config, num_layers=settings.layers or config.num_layers)
    generators = {
        name: Generator(
            config,
            mesh=mesh,
            implementation=None if name == "auto" else name,
            dtype=settings.array_dtype,
        )
        for name in settings.candidates
    }
    report = Report("generation", settings, sections=[rows])
    first = next(iter(generators.values()))
    params = _random(first)
    report.log("made the weights")
    cases: list[dict[str, Any]] = []
    for batch in settings.batches:
        if report.out_of_time():
            break
        with jax.set_mesh(mesh):
            times = _times(generators, params, batch, settings)
        floor = _bytes(first, batch, settings.prompt) / mesh.size / _bandwidth(mesh)
        case = {"batch": batch, "prompt": settings.prompt, "floor": floor, "times": times}
        cases.append({**case, "gpus": environment.gpu_state()})
        report.write_cases(cases)
        report.log(f"batch {batch}")
    print(rows(report.content))
    return report


def _random(generator: Generator) -> dict[str, jax.Array]:
    """Weights one after the other, as one program of all compiles for minutes."""

    @functools.partial(jax.jit, static_argnums=1)
    def make(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = (0.02 * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)
        return jax.lax.with_sharding_constraint(values, leaf.sharding)

    return {
        name: make(jax.random.key(number), leaf)
        for number, (name, leaf) in enumerate(generator.abstract_params.items())
    }


def _times(
    generators: dict[str, Generator], params: Any, batch: int, settings: Generation
) -> dict[str, dict[str, list[float]]]:
    """Seconds of a prefill and of a decoded token, in each group, by candidate."""
    tokens = np.zeros((batch, settings.prompt), np.int32)
    lengths = np.full(batch, settings.prompt, np.int32)
    capacity = settings.prompt + 512
    times: dict[str, dict[str, list[float]]] = {}
    for part, runs in (("prefill", {}), ("decode", {})):
        for name, generator in generators.items():
            program = generator.prefill(capacity, Sampling(), ())
            if part == "prefill":
                runs[name] = lambda program=program: program(params, tokens, lengths)[0]
            else:
                runs[name] = _launches(generator, params, program(params, tokens, lengths))
        measured = measure(runs, groups=settings.groups, seconds_per_group=settings.group_seconds)
        scale = 1 if part == "prefill" else _LAUNCH
        times[part] = {
            name: [seconds / scale for seconds in timing.samples]
            for name, timing in measured.items()
        }
    return times


def _launches(generator: Generator, params: Any, started: Any) -> Callable[[], jax.Array]:
    """A function that decodes, each time from where it was."""
    program, (_, *state) = generator.decode(_LAUNCH, Sampling(), ()), started

    def launch() -> jax.Array:
        tokens, *state[:] = program(params, *state)
        return tokens

    return launch


def _bytes(generator: Generator, batch: int, prompt: int) -> int:
    """What a token reads: weights, and keys and values of the prompt."""
    config, size = generator.config, jnp.dtype(next(iter(generator.abstract_params.values())).dtype)
    weights = sum(
        math.prod(leaf.shape)
        for name, leaf in generator.abstract_params.items()
        if name != "embedding" or config.tied_head
    )
    cache = 2 * config.num_layers * config.num_key_value_heads * config.head_dim * prompt * batch
    return (weights + cache) * size.itemsize


def _bandwidth(mesh: jax.sharding.Mesh) -> float:
    """Bytes per second of a device's memory; of an H200 where it is not known."""
    kind = mesh.devices.flat[0].device_kind
    return budget.RATES.get(kind, budget.RATES["NVIDIA H200"]).memory


def rows(content: dict[str, Any]) -> str:
    """The table of all cases."""
    header = ["batch", "", "prefill tokens/s", "decode tokens/s", "ms", "spread", "of floor"]
    lines = []
    for case in content["cases"]:
        for name in case["times"]["decode"]:
            prefill, decode = (
                np.array(case["times"][part][name]) for part in ("prefill", "decode")
            )
            one = float(np.median(decode))
            lines.append(
                [
                    str(case["batch"]),
                    name,
                    f"{case['batch'] * case['prompt'] / np.median(prefill):,.0f}",
                    f"{case['batch'] / one:,.0f}",
                    f"{1e3 * one:.3f}",
                    f"{(decode.max() - decode.min()) / one:.1%}",
                    f"{one / case['floor']:.2f}",
                ]
            )
    return f"Greedy tokens. The floor reads weights and cache.\n\n{table(header, lines)}"
