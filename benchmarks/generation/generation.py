"""``python -m benchmarks generation``: prefill and decoding of a model with random weights.

Decoding reads all weights but the embedding for each token, and the keys and values so far; the
floor is the time that takes. Candidates are backends of the collective matmuls, in turns, and
after them PyTorch's tensor parallelism, in processes of its own. Each draws the same number of
tokens from the end of the prompts on, over and over.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.generation import generation_tables
from benchmarks.generation.generation_programs import (
    LAUNCH,
    ROOM,
    Failures,
    Programs,
    compile_all,
    make_generator,
    recording_failures,
    reference_of,
)
from benchmarks.internals import measure
from benchmarks.measuring import environment
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import Settings, check, check_least, check_names, make_mesh
from benchmarks.pytorch import GENERATION_NAMES, runner
from benchmarks.step import budget
from models.config import LlamaConfig
from models.families import PRESETS
from models.generation import Generator
from models.layers import rotary

#: Prompts whose first tokens are compared, at least; and the share of them that must agree.
#: Rounding chooses another token where two logits are close, as those of random weights often are.
#: A wrong program has no token in common with a right one.
_CHECKED, _AGREE = 16, 0.25

Run = Callable[[], jax.Array]
Times = dict[str, dict[str, list[float]]]


@dataclass(frozen=True, kw_only=True)
class Generation(Settings):
    """Tokens per second of prefill and of decoding, beside the time to read the weights.

    Most of the time goes to compiling: for each batch and candidate, a program of prefill and one
    of decoding, with all layers. All are compiled at the same time, before anything is timed. With
    --prefill-limit 0 one program of prefill serves all candidates. With the environment's
    JAX_COMPILATION_CACHE_DIR, a folder, XLA looks for the fastest kernel of a matmul once for all
    runs.
    """

    preset: str = "llama3-8b"
    """Which model: a name in models/families."""
    layers: int = 0
    """Layers of the model, which is cut to that many; 0: all."""
    prompt: int = 2048
    """Tokens of each prompt."""
    batches: tuple[int, ...] = (1, 8, 64)
    """Numbers of prompts."""
    prefill_limit: int = 64
    """Prefill is timed for up to this many prompts, and compiled for each candidate. For more, the
    first prepares the caches of all, of which only decoding is timed."""
    candidates: tuple[str, ...] = ("auto", "xla", "baseline")
    """Backends; xla is JAX's own collectives, baseline the same compiled by plain jax.jit, and
    plain has JAX's grouped matmuls too; "auto, whole cache" reads all of caches, as
    references do."""
    pytorch: bool = False
    """Afterwards, time PyTorch in processes of its own; JAX must leave it memory, as with
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.45 on 80 GB."""
    group_seconds: float = 0.3


@dataclass
class Measured:
    """Measurements of one batch."""

    times: Times = field(default_factory=lambda: {"prefill": {}, "decode": {}})
    """Seconds of a prefill and of a decoded token, in each group, by candidate."""
    options: dict[str, str] = field(default_factory=dict)
    """How a candidate of PyTorch runs fastest."""
    tried: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds of what it tried."""
    failures: Failures = field(default_factory=dict)
    """Why a candidate has no times."""


def run(settings: Generation) -> Report:
    """Times prefill and decoding; writes the tables.

    Raises:
      ValueError: for settings that do not fit.
    """
    check(settings)
    check_least(settings, 1, "prompt")
    check_names("preset", (settings.preset,), list(PRESETS))
    config = PRESETS[settings.preset]()
    config = dataclasses.replace(config, num_layers=settings.layers or config.num_layers)
    mesh = make_mesh(settings)
    if settings.pytorch:
        _check_pytorch(settings.preset, config, mesh.size)
    generators = {
        name: make_generator(name, config, mesh, settings.array_dtype)
        for name in settings.candidates
    }
    report = Report("generation", settings, sections=generation_tables.SECTIONS)
    first = next(iter(generators.values()))
    found = {batch: Measured() for batch in settings.batches}
    with jax.set_mesh(mesh):
        failures = {batch: measured.failures for batch, measured in found.items()}
        programs = compile_all(generators, failures, settings.prompt, settings.prefill_limit)
    report.log("compiled")
    params = _random(first)
    report.log("made the weights")
    cases: list[dict[str, Any]] = []
    for batch in settings.batches:
        if report.out_of_time():
            del found[batch]
            continue
        with jax.set_mesh(mesh):
            _measure(programs[batch], found[batch], params, batch, first.config, settings)
        floor = _bytes(first, batch, settings.prompt) / mesh.size / _bandwidth(mesh)
        cases.append({"batch": batch, "prompt": settings.prompt, "floor": floor})
        cases[-1] |= {**dataclasses.asdict(found[batch]), "gpus": environment.gpu_state()}
        report.write_cases(cases)
        report.log(f"batch {batch}")
    if settings.pytorch and not report.out_of_time():
        _add_pytorch(found, settings, config, mesh.size, report.seconds_left)
        for case in cases:
            case |= dataclasses.asdict(found[case["batch"]])
        report.write_cases(cases)
    print("\n\n".join(section(report.content) for section in generation_tables.SECTIONS))
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


def _check_pytorch(preset: str, config: LlamaConfig, devices: int) -> None:
    """Raises ValueError for a model that PyTorch's candidates cannot run."""
    unlike = (
        "tied_head", "projection_bias", "output_bias", "query_key_norm", "sliding_window",
        "attention_sinks", "expert_bias",
    )  # fmt: skip
    if other := [name for name in unlike if getattr(config, name)]:
        raise ValueError(
            f"preset={preset!r}: PyTorch's model has no {other[0]}; choose llama3-8b, or leave out"
            " --pytorch"
        )
    for name, size in config.sharded_sizes.items():
        if size % devices:
            raise ValueError(f"devices={devices}: PyTorch's model needs a divisor of {name}={size}")


def _add_pytorch(
    found: dict[int, Measured],
    settings: Generation,
    config: LlamaConfig,
    devices: int,
    limit_seconds: float,
) -> None:
    """Adds PyTorch's candidates to what was measured, by batch."""
    case = {
        "candidates": GENERATION_NAMES,
        "model": dataclasses.asdict(config),
        "frequencies": rotary.frequencies(config).tolist(),
        "prompt": settings.prompt,
        "capacity": settings.prompt + ROOM,
        "launch": LAUNCH,
        "seed": 0,
    }
    results, reason = runner.time_pytorch(
        [
            {**case, "name": str(batch), "batch": batch, "prefill": batch <= settings.prefill_limit}
            for batch in found
        ],
        devices=devices,
        platform=settings.platform,
        dtype=settings.dtype,
        groups=settings.groups,
        group_seconds=settings.group_seconds,
        limit_seconds=min(limit_seconds, runner.LIMIT_SECONDS),
    )
    by_name = {(result["name"], result["candidate"]): result for result in results}
    missing = {"failure": reason or "the time was over before its turn"}
    for batch, measured in found.items():
        for name in GENERATION_NAMES:
            result = by_name.get((str(batch), name), missing)
            if "failure" in result:
                measured.failures[name] = result["failure"]
                continue
            measured.times["decode"][name] = result["samples"]
            measured.options[name], measured.tried[name] = result["options"], result["tried"]
            if "prefill" in result:
                measured.times["prefill"][name] = result["prefill"]


def _measure(
    programs: dict[str, Programs],
    measured: Measured,
    params: Any,
    batch: int,
    config: LlamaConfig,
    settings: Generation,
) -> None:
    """Adds the times of JAX's candidates whose first tokens agree."""
    size = -(-_CHECKED // batch), batch, settings.prompt
    vocabulary = config.vocabulary_size
    prompts = np.random.default_rng(0).integers(vocabulary, size=size, dtype=np.int32)
    lengths = np.full(batch, settings.prompt, np.int32)
    is_timed = {"prefill": batch <= settings.prefill_limit, "decode": True}
    tokens = {}
    for name, candidate in programs.items():
        with recording_failures(measured.failures, name):
            tokens[name] = _first_tokens(candidate, params, prompts, lengths)
    measured.failures |= _disagreements(tokens)
    right = {name: programs[name] for name in tokens if name not in measured.failures}
    for part, make in (("prefill", _prefills), ("decode", _launches)):
        if not is_timed[part] or not right:
            continue
        scale = 1 if part == "prefill" else LAUNCH
        with recording_failures(measured.failures, *right):
            runs = make(right, params, prompts[0], lengths)
            seconds = settings.group_seconds
            timings = measure(runs, groups=settings.groups, seconds_per_group=seconds)
            for name, timing in timings.items():
                measured.times[part][name] = [seconds / scale for seconds in timing.samples]


def _first_tokens(
    programs: Programs, params: Any, prompts: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """The first two tokens after each of the prompts [times, B, S]: int32 [2, times * B]."""
    found = []
    prefill, decode = programs
    for tokens in prompts:
        # No cache is kept while the next one is made.
        first, *state = prefill(params, tokens, lengths)
        after = decode(params, *state)[0]
        del state
        found.append(np.stack([first, after[0]]))
    return np.concatenate(found, axis=1)


def _prefills(
    programs: dict[str, Programs], params: Any, tokens: np.ndarray, lengths: np.ndarray
) -> dict[str, Run]:
    """Functions that compute the tokens after prompts."""
    return {
        name: functools.partial(lambda prefill: prefill(params, tokens, lengths)[0], prefill)
        for name, (prefill, _) in programs.items()
    }


def _launches(
    programs: dict[str, Programs], params: Any, tokens: np.ndarray, lengths: np.ndarray
) -> dict[str, Run]:
    """Functions that decode the tokens after prompts, from their end at each call.

    They hand on one cache, as memory has no room for one of each.
    """
    first, *_ = programs.values()
    _, ends, caches = first[0](params, tokens, lengths)

    def launch(decode: Callable) -> jax.Array:
        nonlocal caches
        tokens, _, caches = decode(params, ends, caches)
        return tokens

    return {name: functools.partial(launch, decode) for name, (_, decode) in programs.items()}


def _disagreements(tokens: dict[str, np.ndarray]) -> dict[str, str]:
    """Why candidates are wrong whose tokens [2, prompts] are not those of the reference.

    The second tokens are compared where the first ones agree.
    """
    reference = reference_of(tokens)
    wrong: dict[str, str] = {}
    for name, (first, second) in tokens.items() if reference is not None else ():
        same = first == tokens[str(reference)][0]
        for place, agree in (
            ("first", same),
            ("second", second[same] == tokens[str(reference)][1][same]),
        ):
            if agree.sum() < _AGREE * len(agree):
                wrong[name] = (
                    f"wrong: {agree.sum()} of {len(agree)} {place} tokens are those of {reference}"
                )
                break
    return wrong


def _bytes(generator: Generator, batch: int, prompt: int) -> float:
    """Bytes that a token reads: weights, and keys and values of the prompt."""
    config, size = generator.config, jnp.dtype(next(iter(generator.abstract_params.values())).dtype)
    # Of experts, those that tokens are expected to choose.
    used = 1 - (1 - (config.num_experts_per_token or 1) / (config.num_experts or 1)) ** batch
    weights = sum(
        math.prod(leaf.shape) * (used if config.num_experts and ".w_" in name else 1)
        for name, leaf in generator.abstract_params.items()
        if name != "embedding" or config.tied_head
    )
    cache = 2 * config.num_layers * config.num_key_value_heads * config.head_dim * prompt * batch
    return (weights + cache) * size.itemsize


def _bandwidth(mesh: jax.sharding.Mesh) -> float:
    """Bytes per second of a device's memory; of an H200 where it is not known."""
    kind = mesh.devices.flat[0].device_kind
    return budget.RATES.get(kind, budget.RATES["NVIDIA H200"]).memory
