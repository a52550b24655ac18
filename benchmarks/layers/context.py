"""``python -m benchmarks context``: layers of attention over a sharded sequence, on several GPUs.

A layer is a residual, the projections of queries, keys and values, attention, and the projection of
its result. Weights are on every device; tokens are divided. All programs take turns. "compute" is
the library's program whose permutes move nothing: a bound, not a result. A tensor axis divides
heads, and tokens outside of attention; its collectives are XLA's in every program.

Plain JAX gathers keys and values and attends with the same kernels. A branch for each device has
the keys that its chunks attend to, so that it masks nothing away either.

Legend: S tokens of a sequence, D devices, E features, N query heads, K key heads, H head size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
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
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import Settings, check, check_least, check_names, make_mesh
from benchmarks.measuring.tables import table
from benchmarks.measuring.turns import LayerProgram, measure_cases, time_layers, with_quartiles
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
_HEADS = "heads"
_KEYS_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"


@dataclass(frozen=True, kw_only=True)
class Context(Settings):
    """Times of layers of attention over sharded sequences: forward alone, and with gradients."""

    models: tuple[str, ...] = ("llama3-8b",)
    """Whose layers."""
    lengths: tuple[int, ...] = (8192, 32768, 131072)
    """Tokens of the whole sequence."""
    tensor: int = 1
    """Devices that divide the heads, beside those that divide the sequence."""
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
        specs = _weight_specs(mesh)
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
            {name: normal(shape, specs[name], shape[0] ** -0.5) for name, shape in shapes.items()}
            for _ in range(self.layers)
        ]
        divided = _token_spec(mesh)
        return normal(tokens, divided, 1.0), weights, normal(tokens, divided, 1.0)


def _head_axis(mesh: Mesh) -> str | None:
    return _HEADS if _HEADS in mesh.axis_names else None


def _token_spec(mesh: Mesh) -> P:
    """How [1, S, E] is divided: first along the sequence's axis, then along that of heads."""
    return P(None, (AXIS, *([_HEADS] if _head_axis(mesh) else [])))


def _weight_specs(mesh: Mesh) -> dict[str, P]:
    heads = _head_axis(mesh)
    return {"q": P(None, heads), "k": P(None, heads), "v": P(None, heads), "out": P(heads)}


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
    """Returns a candidate's attention and its layout."""
    if name in (_PLAIN, _PLAIN_CONTIGUOUS):
        layout = "zigzag" if name == _PLAIN else "contiguous"
        return plain(layout), layout
    if name == "contiguous auto":
        return ours(None, "contiguous"), "contiguous"
    return ours(None if name in ("auto", _COMPUTE) else name), "zigzag"


def program(case: ContextCase, attend: Attend, mesh: Mesh) -> Callable[..., Any]:
    """A function of `ContextCase.arguments`: the result, or it and all gradients."""
    size, tensor = MODELS[case.model][-1], _head_axis(mesh)

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        own = lax.all_gather(x, tensor, axis=1, tiled=True) if tensor else x
        heads = (*own.shape[:2], -1, size)
        # Keys and values first: they travel while the queries are projected.
        key, value = ((own @ weights[name]).reshape(heads) for name in ("k", "v"))
        query = (own @ weights["q"]).reshape(heads)
        y = attend(query, key, value).reshape(*own.shape[:2], -1) @ weights["out"]
        return x + (lax.psum_scatter(y, tensor, scatter_dimension=1, tiled=True) if tensor else y)

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

    tokens, weights = _token_spec(mesh), [_weight_specs(mesh)] * case.layers
    gradients = [{n: P(AXIS, *spec) for n, spec in each.items()} for each in weights]
    specs = (tokens, tokens, gradients) if case.differentiated else tokens
    return jax.shard_map(
        local, mesh=mesh, in_specs=(tokens, weights, tokens), out_specs=specs, check_vma=False
    )


def without_communication(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function whose permutes move nothing: the bound."""
    stays = lambda x, *_, **__: lax.optimization_barrier(x)  # noqa: E731

    def traced(*arguments: Any) -> Any:
        with mock.patch.object(lax, "ppermute", stays):
            return fun(*arguments)

    return traced


def run(settings: Context) -> Report:
    """Times all cases; writes the report after each.

    Raises:
      ValueError: for settings that do not fit.
    """
    check(settings)
    check_least(settings, 1, "layers", "copies_at_once")
    check_names("models", settings.models, list(MODELS))
    check_names("candidates", settings.candidates, _CANDIDATES)
    mesh = make_mesh(settings, {_HEADS: settings.tensor})
    shapes = itertools.product(settings.models, settings.lengths, (False, True))
    cases = [
        ContextCase(model, length, settings.layers, settings.array_dtype, differentiated)
        for model, length, differentiated in shapes
    ]
    measured = functools.partial(_measured, settings, mesh)
    return measure_cases("context", settings, cases, measured, rows)


def _measured(settings: Context, mesh: Mesh, case: ContextCase) -> dict[str, Any]:
    programs = {name: _program(name, case, settings, mesh) for name in settings.candidates}
    problem = {
        "devices": mesh.size,
        "tensor": settings.tensor,
        "tokens": case.length,
        "layers": case.layers,
    }
    times = time_layers(programs, case.arguments(mesh), settings)
    return {"name": case.name, "problem": problem, **times}


def _program(name: str, case: ContextCase, settings: Context, mesh: Mesh) -> LayerProgram:
    attend, layout = attention_of(name)
    fun = program(case, attend, mesh)
    options = {**OVERLAP_OPTIONS, _KEYS_AT_ONCE: str(settings.copies_at_once)}
    if name == _COMPUTE:
        return LayerProgram(without_communication(fun), options, compared=None)
    # Layouts order the same tokens differently: only equal layouts can be compared.
    compared = (
        (lambda results: results[0] if case.differentiated else results)
        if (layout == "zigzag")
        else None
    )
    is_plain = name in (_PLAIN, _PLAIN_CONTIGUOUS)
    return LayerProgram(fun, {} if is_plain else options, compared)


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
    cell = with_quartiles(samples, ".3f", 1e3)
    if _COMPUTE in case["times"]:
        cell += f", {float(np.median(samples / np.array(case['times'][_COMPUTE]))):.3f}"
    return cell
