"""``python -m benchmarks tiles --output FILE``: the best tiles of the chunk kernel, on one GPU.

Every problem is measured with every candidate of a coarse grid, and the best few with other orders
of the tiles, beside XLA's own matmul. The output has the format of
collective_matmul/data/h200/matmul_tilings.jsonl.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.settings import check_least, check_positive
from collective_matmul.data import MeasuredData, Record
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.chunk_matmul import shared_launch
from collective_matmul.mosaic_gpu.tiling import (
    MatmulProblem,
    MeasuredTiling,
    Tiling,
    candidate_tilings,
    predicted_microseconds,
)

Model = Literal["8B", "70B", "small"]
# Width, key and value width, feed-forward width.
MODELS: dict[Model, tuple[int, int, int]] = {
    "8B": (4096, 1024, 14336),
    "70B": (8192, 1024, 28672),
    "small": (8192, 0, 8192),
}
ROWS: dict[Model, int] = {"8B": 8192, "70B": 8192, "small": 4096}


def problems(model: Model, devices: int) -> list[MatmulProblem]:
    """The chunk matmuls of a layer, forward and backward."""
    width, key_width, hidden = MODELS[model]
    rows, hidden = ROWS[model] // devices, hidden // devices
    heads = (width // devices, key_width // devices, key_width // devices)
    ups: list[tuple[int, ...]] = [(hidden,), (hidden, hidden)]
    downs = [hidden]
    if key_width:
        ups, downs = [*ups, heads], [hidden, width // devices]
    found = []
    for columns in ups:
        found += [
            MatmulProblem(1, rows, (width,), columns),
            MatmulProblem(1, rows, columns, (width,), w_contracted_axis=2),
            MatmulProblem(1, width, (rows,) * devices, columns, x_contracted_axis=1),
        ]
    for contracted in downs:
        found += [
            MatmulProblem(1, rows, (contracted,), (width,)),
            MatmulProblem(1, rows, (width,), (contracted,), w_contracted_axis=2),
            MatmulProblem(1, contracted, (rows,) * devices, (width,), x_contracted_axis=1),
        ]
    return found


def varied(best: Iterable[Tiling]) -> list[Tiling]:
    """The best, with the tiles in other orders."""
    return [
        dataclasses.replace(tiling, grid_minor_dim=minor, grid_tile_width=width)
        for tiling in best
        for minor in ("m", "n")
        for width in (1, 4, 8, 16)
        if (minor, width) != (tiling.grid_minor_dim, tiling.grid_tile_width)
    ]


def operands(problem: MatmulProblem) -> tuple[Any, ...]:
    """xs, ws, outs and indices for the kernel."""
    keys = itertools.count(time.time_ns() % 2**31)

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(next(keys)), shape, jnp.bfloat16)

    planes, terms = problem.contracted_planes, problem.k
    straight = problem.x_contracted_axis == 2
    xs = [
        normal(problem.batch, problem.m, k) if straight else normal(planes, k, problem.m)
        for k in terms
    ]
    ws = [
        [normal(planes, *((n, k) if problem.w_contracted_axis == 2 else (k, n))) for n in problem.n]
        for k in terms
    ]
    outs = [normal(problem.batch, problem.m, n) for n in problem.n]
    zero = jnp.int32(0)
    indices = [[zero] * len(terms), [[zero] * len(outs)] * len(terms), zero]
    return xs, ws, outs, indices


def kernel(problem: MatmulProblem, tiling: Tiling) -> Any:
    terms, results = len(problem.k), len(problem.n)
    layout = ((1, 1),) * (terms + terms * results)
    if problem.x_contracted_axis == 2:
        layout = ((1, 0),) * terms + ((0, 0),) * (terms * results)
    launch = shared_launch(problem, tiling, layout, device.target())
    return jax.jit(lambda *args: launch(*args), donate_argnums=2)


def library(problem: MatmulProblem, precise: bool) -> Any:
    """XLA's matmuls of the same operands, those of a transposed x undivided."""
    x_axis, w_axis = problem.x_contracted_axis - 1, problem.w_contracted_axis - 1

    @jax.jit
    def run(xs, ws):
        if precise:
            xs, ws = jax.tree.map(lambda a: a.astype(jnp.float32), (xs, ws))
        if problem.x_contracted_axis == 1:
            xs = [jnp.concatenate([x[0] for x in xs])[None]]
            ws = [
                [jnp.concatenate([w[0] for w in column])[None] for column in zip(*ws, strict=True)]
            ]
        results = []
        for q in range(len(problem.n)):
            products = [
                jax.lax.dot_general(x[0], term[q][0], (((x_axis,), (w_axis,)), ((), ())))
                for x, term in zip(xs, ws, strict=True)
            ]
            results.append(sum(products[1:], products[0]))
        return results

    return run


def seconds_per_call(call: Callable[[], Any], duration: Duration) -> float:
    """Seconds of a call in the long run: clocks have fallen by then to what the power allows.

    In a burst on a cool GPU other tiles win, which then lose in a program.
    """
    jax.block_until_ready(call())
    seconds = 0.0
    for limit in (0.01, duration.lead_seconds, duration.timed_seconds):
        calls = max(3, int(limit / seconds)) if seconds else 3
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        seconds = (time.perf_counter() - start) / calls
    return seconds


class Duration(NamedTuple):
    """How long one candidate runs, untimed and then timed."""

    lead_seconds: float
    timed_seconds: float


class Bench:
    """One problem's operands, and what was measured on them."""

    def __init__(self, problem: MatmulProblem, duration: Duration):
        self.problem, self.duration = problem, duration
        self.xs, self.ws, self.outs, self.indices = operands(problem)
        self.times: dict[Tiling, float] = {}
        self.exact = library(problem, precise=True)(self.xs, self.ws)
        # The undivided operands are not what a gather leaves: joining them is not timed.
        joined = problem.x_contracted_axis == 1
        xs, ws = self.xs, self.ws
        if joined:
            problem = dataclasses.replace(problem, k=(sum(problem.k),))
            xs, ws, _, _ = operands(problem)
        compiled = library(problem, precise=False).lower(xs, ws).compile()
        self.library = seconds_per_call(lambda: compiled(xs, ws), duration)

    def compile(self, tiling: Tiling) -> Any:
        arguments = self.xs, self.ws, self.outs, self.indices
        try:
            return kernel(self.problem, tiling).lower(*arguments).compile()
        except Exception as error:
            return error

    def measure(self, tiling: Tiling, compiled: Any) -> str | None:
        """Times one candidate and compares its result; returns what is wrong with it."""
        if isinstance(compiled, Exception):
            return str(compiled)[:200]

        def call() -> Any:
            self.outs = list(compiled(self.xs, self.ws, self.outs, self.indices))
            return self.outs

        self.outs = [jnp.full_like(out, jnp.nan) for out in self.outs]
        seconds = seconds_per_call(call, self.duration)
        for out, exact in zip(self.outs, self.exact, strict=True):
            error = jnp.max(jnp.abs(out[0] - exact)) / jnp.max(jnp.abs(exact))
            if not error < 1e-2:
                return f"relative error {error}"
        self.times[tiling] = seconds
        return None

    def best(self, count: int) -> list[Tiling]:
        return sorted(self.times, key=self.times.__getitem__)[:count]

    def record(self) -> Record:
        (tiling,) = self.best(1)
        measured = MeasuredTiling(tiling, 1e6 * self.times[tiling], 1e6 * self.library)
        return measured.record(self.problem)


def search(bench: Bench, pool: ThreadPoolExecutor, count: int, finalists: int) -> None:
    """Measures the candidates predicted best, then the best of them in other orders of tiles."""
    problem = bench.problem
    likely = sorted(candidate_tilings(problem), key=partial(predicted_microseconds, problem))
    for first in (likely[:count], None):
        tiles_tried = first or varied(bench.best(finalists))
        for tiling, compiled in zip(tiles_tried, pool.map(bench.compile, tiles_tried), strict=True):
            if wrong := bench.measure(tiling, compiled):
                print(f"  {tiling}: {wrong}", flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkTiles:
    """Tunes the tiles of the chunk kernel, problem by problem, on the first GPU."""

    output: Path
    """File for the table's lines; what it holds is replaced."""
    models: tuple[Model, ...] = ("8B", "70B", "small")
    """Widths."""
    rings: tuple[int, ...] = (4, 2)
    """Sizes of the rings that cut the chunks."""
    limit_seconds: float = 500.0
    """No further problem begins after this many seconds."""
    candidates: int = 9
    """Tried of those predicted best."""
    finalists: int = 1
    """Varied in the order of tiles."""
    lead_seconds: float = 0.3
    """Untimed, per candidate."""
    timed_seconds: float = 0.1
    """Per candidate."""
    part: tuple[int, int] = (0, 1)
    """i n: every n-th problem from i on."""

    @property
    def problems(self) -> list[MatmulProblem]:
        """Those of this part."""
        everything = [
            problem
            for devices in self.rings
            for model in self.models
            for problem in problems(model, devices)
        ]
        part, parts = self.part
        return list(dict.fromkeys(everything))[part::parts]


def _check(settings: ChunkTiles) -> None:
    check_least(settings, 1, "candidates")
    check_least(settings, 0, "finalists")
    check_positive(settings, "lead_seconds", "timed_seconds", "limit_seconds")
    part, parts = settings.part
    if not 0 <= part < parts:
        raise ValueError(f"part={part} {parts}: expected a number, and a larger one that divides")
    if not settings.output.parent.is_dir():
        raise ValueError(f"output={settings.output}: there is no folder {settings.output.parent}")
    if device.target() is None:
        kind = jax.devices()[0].device_kind
        raise ValueError(f"device {kind!r}: the kernel runs on Hopper GPUs; run this on one")


def run(settings: ChunkTiles) -> None:
    """Measures all problems; writes a line for each as it is done.

    Raises:
      ValueError: for settings that nothing can be measured with, or a device without the kernel.
    """
    _check(settings)
    start, records = time.monotonic(), []
    duration = Duration(settings.lead_seconds, settings.timed_seconds)
    with ThreadPoolExecutor(8) as pool:
        for problem in settings.problems:
            if time.monotonic() - start > settings.limit_seconds:
                print(f"out of time before {problem}")
                break
            bench = Bench(problem, duration)
            search(bench, pool, settings.candidates, settings.finalists)
            if not bench.times:
                print(f"{problem}: no candidate worked")
                continue
            records.append(bench.record())
            measured = MeasuredData("matmul_tilings", jax.devices()[0].device_kind, records)
            settings.output.write_text(measured.to_text(), encoding="utf-8")
            print(f"{time.monotonic() - start:4.0f} s {problem} library {bench.library * 1e6:.1f}")
            for tiling in bench.best(4):
                print(f"      {bench.times[tiling] * 1e6:.1f} {tiling}", flush=True)
