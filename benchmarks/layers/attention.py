"""``python -m benchmarks attention``: the kernels of attention beside each other, on one GPU.

Kernels take turns. ``--table FILE`` writes the times as the library ships them: the choice of a
kernel takes the entry that is most like a call.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.internals import (
    AttentionRequest,
    MeasuredData,
    Record,
    attention_choice,
)
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import Settings, check, check_least, check_names
from benchmarks.measuring.tables import table
from benchmarks.measuring.turns import measure_cases, take_turns, with_quartiles
from collective_matmul import dot_product_attention, segments_of_lengths


@dataclass(frozen=True, kw_only=True)
class AttentionKernels(Settings):
    """Times of attention's kernels: forward alone, and with gradients."""

    heads: tuple[str, ...] = ("16/4x128", "32/8x64", "8/8x256")
    """Query heads / key and value heads x head size."""
    lengths: tuple[int, ...] = (512, 2048, 8192, 32768)
    """Tokens of a sequence."""
    tokens: int = 8192
    """Tokens of a batch, if its sequences are not longer."""
    windows: tuple[int, ...] = (0, 1024)
    """Tokens that a token attends to; 0: all before it."""
    segments: tuple[int, ...] = (1, 8, 64, 256)
    """Segments of a sequence, of random lengths; windows are then not tried."""
    kernels: tuple[str, ...] = ("flash3", "cudnn")
    """Which kernels; xla stores all scores."""
    table: Path | None = None
    """File for the times, as the library ships them."""
    groups: int = 7


@dataclass(frozen=True)
class AttentionCase:
    """A request, on arrays of random numbers."""

    request: AttentionRequest

    @property
    def name(self) -> str:
        return f"{self.request}, {'both passes' if self.request.differentiated else 'forward'}"

    def program(self, kernel: str) -> Callable[[], Any]:
        """A compiled program of one call."""
        request, arrays = self.request, self._arrays()

        def attend(query: Any, key: Any, value: Any, lengths: Any) -> jax.Array:
            segments = None
            if lengths is not None:
                segments = segments_of_lengths(lengths, request.queries)
            return dot_product_attention(
                query,
                key,
                value,
                window=request.window,
                segment_ids=segments,
                implementation=kernel,
            )

        def both(cotangent: Any, *arrays: Any) -> Any:
            out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, arrays[3]), *arrays[:3])
            return out, pullback(cotangent)

        arguments = arrays if request.differentiated else arrays[1:]
        fun = both if request.differentiated else attend
        return functools.partial(jax.jit(fun).lower(*arguments).compile(), *arguments)

    def _arrays(self) -> tuple[Any, ...]:
        request = self.request
        query = request.batch, request.queries, request.heads, request.head_size
        key = request.batch, request.keys, request.key_value_heads, request.head_size
        keys = jax.random.split(jax.random.key(0), 4)
        heads = [
            jax.random.normal(k, shape, request.dtype)
            for k, shape in zip(keys, (query, query, key, key), strict=True)
        ]
        lengths = None if request.segments is None else jnp.asarray(_lengths(request))
        return *heads, lengths


def _lengths(request: AttentionRequest) -> np.ndarray:
    """Random lengths of as many segments as there may be, int32 [B, M]."""
    assert request.segments is not None
    rng, rows = np.random.default_rng(0), []
    for _ in range(request.batch):
        cuts = rng.choice(request.queries - 1, request.segments - 1, replace=False) + 1
        rows.append(np.diff([0, *sorted(cuts.tolist()), request.queries]))
    return np.array(rows, np.int32)


def cases(settings: AttentionKernels) -> Iterator[AttentionCase]:
    """All cases, those without segments first."""
    for heads, length in itertools.product(settings.heads, settings.lengths):
        count, size = heads.split("x")
        queries, keys = count.split("/")
        request = AttentionRequest(
            max(settings.tokens // length, 1),
            length,
            length,
            int(queries),
            int(keys),
            int(size),
            settings.array_dtype,
            causal=True,
            window=None,
            scale=int(size) ** -0.5,
        )
        masks: list[dict[str, Any]] = [{"window": w or None} for w in settings.windows]
        masks += [{"segments": s} for s in settings.segments if 1 < s < length]
        for mask, both in itertools.product(masks, (False, True)):
            if (mask.get("window") or 0) < length:
                yield AttentionCase(dataclasses.replace(request, differentiated=both, **mask))


def run(settings: AttentionKernels) -> Report:
    """Times all cases; writes the report after each.

    Raises:
      ValueError: for settings that do not fit.
    """
    check(settings)
    check_least(settings, 1, "tokens")
    check_names("kernels", settings.kernels, list(attention_choice.KERNELS))
    measured = functools.partial(_measured, settings)
    report = measure_cases("attention", settings, cases(settings), measured, rows)
    if settings.table is not None:
        settings.table.write_text(as_data(report.content).to_text(), encoding="utf-8")
    return report


def _measured(settings: AttentionKernels, case: AttentionCase) -> dict[str, Any]:
    programs, refused = {}, {}
    for name in settings.kernels:
        reason = attention_choice.unsupported_reason(name, case.request)
        if reason is None:
            programs[name] = case.program(name)
        else:
            refused[name] = reason
    problem = dataclasses.asdict(case.request) | {"dtype": case.request.dtype.name}
    about = {"name": case.name, "problem": problem, "refused": refused}
    return {**about, "times": take_turns(programs, settings)}


def as_data(content: dict[str, Any]) -> MeasuredData:
    """The table that the library ships."""
    records = [
        Record(case["problem"], {name: _middle(times) for name, times in case["times"].items()})
        for case in content["cases"]
        if len(case["times"]) > 1
    ]
    return MeasuredData("attention", jax.devices()[0].device_kind, records)


def _middle(samples: list[float]) -> float:
    """The median in microseconds."""
    return 1e6 * float(np.median(samples))


def rows(content: dict[str, Any]) -> str:
    """The table of all cases."""
    names = content["settings"]["kernels"]
    header = ["attention", *(f"{name} µs" for name in names), f"{names[-1]} / {names[0]}"]
    lines = []
    for case in content["cases"]:
        times = [case["times"].get(name) for name in names]
        cells = ["–" if t is None else with_quartiles(t, ".0f", 1e6) for t in times]
        ratio = math.nan
        if {names[0], names[-1]} <= case["times"].keys():
            first, last = (np.array(case["times"][name]) for name in (names[0], names[-1]))
            ratio = float(np.median(last / first))
        lines.append([case["name"], *cells, "–" if math.isnan(ratio) else f"{ratio:.2f}"])
    return f"Medians, and quartiles in parentheses.\n\n{table(header, lines)}"
