"""``python -m benchmarks context``: layers of attention over a sharded sequence, on several GPUs.

A layer is a residual, the projections of queries, keys and values, attention, and the projection of
its result. Weights are on every device; tokens are divided. All programs take turns. "compute" is
the library's program whose permutes move nothing: a bound, not a result.

Plain JAX gathers keys and values and attends with the same kernels. A branch for each device has
the keys that its chunks attend to, so that it masks nothing away either.

Legend: S tokens of a sequence, D devices, E features, N query heads, K key heads, H head size.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.comparison.communication import AXIS
from benchmarks.internals import measure
from benchmarks.measuring import environment
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import Settings, check, check_least, check_names, make_mesh
from benchmarks.measuring.tables import table
from collective_matmul import (
    OVERLAP_OPTIONS,
    context_attention,
    dot_product_attention,
)

#: Features, query heads, key and value heads, head size.
MODELS = {"llama3-8b": (4096, 32, 8, 128), "tiny": (64, 4, 2, 16)}

_PLAIN, _PLAIN_CONTIGUOUS, _COMPUTE = "plain JAX", "plain JAX, contiguous", "compute"
_CANDIDATES = (
    "auto",
    "gather",
    "ring",
    "ulysses",
    "contiguous auto",
    _COMPUTE,
    _PLAIN,
    _PLAIN_CONTIGUOUS,
)
_KEYS_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"


@dataclass(frozen=True, kw_only=True)
class Context(Settings):
    """Times of layers of attention over sharded sequences: forward alone, and with gradients."""

    models: tuple[str, ...] = ("llama3-8b",)
    """Whose layers."""
    lengths: tuple[int, ...] = (8192, 32768, 131072)
    """Tokens of the whole sequence."""
    layers: int = 2
    """Layers of a program."""
    candidates: tuple[str, ...] = _CANDIDATES
    """What to time."""
    copies_at_once: int = 2
    """How many copies between peers XLA may run at the same time."""


@dataclass(frozen=True)
class ContextCase:
    """A stack of layers and a direction."""

    model: str
    length: int
    layers: int
    dtype: Any
    differentiated: bool

    @property
    def name(self) -> str:
        both = "forward and backward" if self.differentiated else "forward"
        return f"{self.model}, {self.length} tokens, {both}"

    def arguments(self, mesh: Mesh) -> tuple[jax.Array, list[dict[str, jax.Array]], jax.Array]:
        """Tokens [1, S, E], the weights of each layer, and the gradient of the result."""
        features, heads, key_heads, size = MODELS[self.model]
        keys = iter(jax.random.split(jax.random.key(0), 4 * self.layers + 2))
        shapes = {
            "q": (features, heads * size),
            "k": (features, key_heads * size),
            "v": (features, key_heads * size),
            "out": (heads * size, features),
        }

        def normal(shape: tuple[int, ...], spec: P, scale: float) -> jax.Array:
            make = lambda key: jax.random.normal(key, shape, self.dtype) * scale  # noqa: E731
            return jax.jit(make, out_shardings=NamedSharding(mesh, spec))(next(keys))

        tokens = (1, self.length, features)
        weights = [
            {name: normal(shape, P(), shape[0] ** -0.5) for name, shape in shapes.items()}
            for _ in range(self.layers)
        ]
        return normal(tokens, P(None, AXIS), 1.0), weights, normal(tokens, P(None, AXIS), 1.0)


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def ours(implementation: str | None, layout: Any = "zigzag") -> Attend:
    """The library's op."""
    return functools.partial(
        context_attention, axis_name=AXIS, layout=layout, implementation=implementation
    )


def plain(layout: str) -> Attend:
    """Plain JAX around the library's attention on one device."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        devices, tokens = lax.axis_size(AXIS), query.shape[1]
        both = lax.all_gather(jnp.stack([key, value]), AXIS, axis=2, tiled=True)
        size = tokens // 2 if layout == "zigzag" else tokens
        chunks = jnp.split(both, both.shape[2] // size, axis=2)
        if layout == "zigzag":
            chunks = [*chunks[::2], *chunks[1::2][::-1]]

        def branch(device: int, query: jax.Array, chunks: list[jax.Array]) -> jax.Array:
            late = 2 * devices - 1 - device
            numbers = [device, late] if layout == "zigzag" else [device]
            results = []
            for number, own in zip(numbers, jnp.split(query, len(numbers), axis=1), strict=True):
                keys, values = jnp.concatenate(chunks[: number + 1], axis=2)
                results.append(dot_product_attention(own, keys, values))
            return jnp.concatenate(results, axis=1)

        branches = [functools.partial(branch, device) for device in range(devices)]
        return lax.switch(lax.axis_index(AXIS), branches, query, chunks)

    return attend


def attention_of(name: str) -> tuple[Attend, str]:
    """What a candidate attends with, and its layout."""
    if name in (_PLAIN, _PLAIN_CONTIGUOUS):
        layout = "zigzag" if name == _PLAIN else "contiguous"
        return plain(layout), layout
    if name == "contiguous auto":
        return ours(None, "contiguous"), "contiguous"
    return ours(None if name in ("auto", _COMPUTE) else name), "zigzag"


def program(case: ContextCase, attend: Attend, mesh: Mesh) -> Callable[..., Any]:
    """A function of `ContextCase.arguments`: the result, or it and all gradients."""
    _, heads, key_heads, size = MODELS[case.model]

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        batch, tokens = x.shape[:2]
        # Keys and values first: they travel while the queries are projected.
        key = (x @ weights["k"]).reshape(batch, tokens, key_heads, size)
        value = (x @ weights["v"]).reshape(batch, tokens, key_heads, size)
        query = (x @ weights["q"]).reshape(batch, tokens, heads, size)
        attended = attend(query, key, value).reshape(batch, tokens, heads * size)
        return x + attended @ weights["out"]

    def local(x: jax.Array, weights: Any, dy: jax.Array) -> Any:
        def forward(x: jax.Array, weights: Any) -> jax.Array:
            return functools.reduce(layer, weights, x)

        if not case.differentiated:
            return forward(x, weights)
        y, pullback = jax.vjp(forward, x, weights)
        # In a model, the gradient of the result depends on the result.
        y, dy = lax.optimization_barrier((y, dy))
        dx, gradients = pullback(dy)
        # Each device's own terms: their sum over devices belongs to data parallelism.
        return y, dx, jax.tree.map(lambda g: g[None], gradients)

    tokens = P(None, AXIS)
    specs = (tokens, tokens, P(AXIS)) if case.differentiated else tokens
    return jax.shard_map(
        local, mesh=mesh, in_specs=(tokens, P(), tokens), out_specs=specs, check_vma=False
    )


@contextlib.contextmanager
def without_communication(name: str) -> Iterator[None]:
    """Inside the block, permutes of the bound move nothing."""
    if name != _COMPUTE:
        yield
        return
    stays = lambda x, *_, **__: lax.optimization_barrier(x)  # noqa: E731
    with mock.patch.object(lax, "ppermute", stays):
        yield


def run(settings: Context) -> Report:
    """Times all cases; writes the report after each.

    Raises:
      ValueError: for settings that do not fit.
    """
    check(settings)
    check_least(settings, 1, "layers", "copies_at_once")
    check_names("models", settings.models, list(MODELS))
    check_names("candidates", settings.candidates, _CANDIDATES)
    mesh = make_mesh(settings)
    report = Report("context", settings, sections=[rows])
    found: list[dict[str, Any]] = []
    for model in settings.models:
        for length in settings.lengths:
            for differentiated in (False, True):
                if report.out_of_time():
                    break
                dtype = settings.array_dtype
                case = ContextCase(model, length, settings.layers, dtype, differentiated)
                found.append(_measured(case, settings, mesh))
                report.write_cases(found)
                report.log(f"{case.name}: {found[-1]['summary']}")
    print(rows(report.content))
    return report


def _measured(case: ContextCase, settings: Context, mesh: Mesh) -> dict[str, Any]:
    x, weights, dy = case.arguments(mesh)
    programs: dict[str, Callable] = {}
    memory: dict[str, float] = {}
    failed: dict[str, str] = {}
    errors: dict[str, float] = {}
    expected: Any = None
    for name in settings.candidates:
        attend, layout = attention_of(name)
        arguments = x, weights, dy
        try:
            with without_communication(name):
                lowered = jax.jit(program(case, attend, mesh)).lower(*arguments)
            compiled = lowered.compile(compiler_options=_options(name, settings))
            results = jax.block_until_ready(compiled(*arguments))
        except Exception as error:  # The others are still worth their time.
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        if name != _COMPUTE:
            result = results[0] if case.differentiated else results
            # Layouts order the same tokens differently: only equal layouts can be compared.
            if layout == "zigzag":
                expected = result if expected is None else expected
                errors[name] = _difference(result, expected)
        statistics: Any = compiled.memory_analysis()
        memory[name] = statistics.temp_size_in_bytes / 2**30
        call = functools.partial(compiled, *arguments)
        # Simulated devices wait for each other for ever if many calls are in flight.
        waiting = functools.partial(_and_wait, call)
        programs[name] = call if settings.platform == "gpu" else waiting
        del results
    timings = measure(programs, groups=settings.groups, seconds_per_group=settings.group_seconds)
    times = {name: list(timing.samples) for name, timing in timings.items()}
    return {
        "name": case.name,
        "problem": {"devices": mesh.size, "tokens": case.length, "layers": case.layers},
        "times": times,
        "GiB": memory,
        "largest difference to the first": errors,
        "failed": failed,
        "gpus": environment.gpu_state(),
        "summary": ", ".join(f"{name} {np.median(t) * 1e3:.3f} ms" for name, t in times.items()),
    }


def _options(name: str, settings: Context) -> dict[str, Any]:
    if settings.platform != "gpu" or name in (_PLAIN, _PLAIN_CONTIGUOUS):
        return {}
    return {**OVERLAP_OPTIONS, _KEYS_AT_ONCE: str(settings.copies_at_once)}


def _and_wait(call: Callable) -> Any:
    return jax.block_until_ready(call())


def _difference(result: jax.Array, expected: jax.Array) -> float:
    """The largest difference, relative to the largest number; infinite for NaN."""
    wide = result.astype(jnp.float32), expected.astype(jnp.float32)
    difference = float(jnp.abs(wide[0] - wide[1]).max() / jnp.abs(wide[1]).max())
    return difference if math.isfinite(difference) else math.inf


def rows(content: dict[str, Any]) -> str:
    """The table of all cases."""
    names = list(dict.fromkeys(name for case in content["cases"] for name in case["times"]))
    header = ["layers", *(f"{name}: ms (quartiles), × {_COMPUTE}" for name in names)]
    lines = [[case["name"], *(_cell(case, name) for name in names)] for case in content["cases"]]
    failed = {f"{n}: {why}" for case in content["cases"] for n, why in case["failed"].items()}
    return "\n".join(
        ["Medians, and quartiles in parentheses.", "", table(header, lines), *sorted(failed)]
    )


def _cell(case: dict[str, Any], name: str) -> str:
    if name not in case["times"]:
        return "–"
    samples = np.array(case["times"][name])
    low, middle, high = 1e3 * np.percentile(samples, (25, 50, 75))
    cell = f"{middle:.3f} ({low:.3f}–{high:.3f})"
    if _COMPUTE in case["times"]:
        cell += f", {float(np.median(samples / np.array(case['times'][_COMPUTE]))):.3f}"
    return cell
