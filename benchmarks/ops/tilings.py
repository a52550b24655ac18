"""``python -m benchmarks tilings --output FILE``: the best tilings of the chunk kernel, on one GPU.

The ring multiplies its chunks with this kernel. For every problem one tiling of each tile's sizes
is timed, and others that are predicted to be fastest. Then the best of them has its tiles in other
orders, beside XLA's matmul. The output is the library's table of tilings with what was measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.internals import (
    LAYERS,
    MatmulProblem,
    MeasuredData,
    MeasuredTiling,
    Tiling,
    candidate_tilings,
    filler,
    kernel_target,
    measure,
    predicted_microseconds,
    shared_launch,
    shipped,
)
from benchmarks.measuring.settings import check_least, check_names, check_positive

#: The kernel sums in float32 and rounds once to bfloat16; a wrong chunk is far off.
_TOLERANCE = 1e-2


def problems(model: str, rows: int, devices: int) -> list[MatmulProblem]:
    """The chunk matmuls of a model's layers in a ring: forward, dx, and the weight gradient."""
    found = []
    m = rows // devices
    for layer in LAYERS[model]:
        gathers = layer.kind == "gather"
        k = layer.contracted if gathers else layer.contracted // devices
        n = tuple(columns // devices if gathers else columns for columns in layer.columns)
        found += [
            MatmulProblem(1, m, (k,), n),
            MatmulProblem(1, m, n, (k,), w_contracted_axis=2),
            MatmulProblem(1, k, (m,) * devices, n, x_contracted_axis=1),
        ]
    return found


def likeliest(problem: MatmulProblem) -> list[Tiling]:
    """All tilings, those predicted to be fastest first, but before them the best of each tile.

    The model may take tiles of one size for faster than they are, for all problems.
    """
    found = sorted(candidate_tilings(problem), key=lambda t: predicted_microseconds(problem, t))
    best: dict[tuple[int, int], Tiling] = {}
    for tiling in found:
        best.setdefault((tiling.tile_m, tiling.tile_n), tiling)
    return list(dict.fromkeys([*best.values(), *found]))


def with_other_orders(best: Iterable[Tiling]) -> list[Tiling]:
    """The best tilings with the tiles in other orders."""
    return [
        dataclasses.replace(tiling, grid_minor_dim=minor, grid_tile_width=width)
        for tiling in best
        for minor in ("m", "n")
        for width in (1, 4, 8, 16)
        if (minor, width) != (tiling.grid_minor_dim, tiling.grid_tile_width)
    ]


def make_operands(problem: MatmulProblem) -> tuple[Any, ...]:
    """xs, ws, outs and indices for the kernel."""
    seeds = itertools.count()

    def normal(*shape: int) -> jax.Array:
        return filler(jax.ShapeDtypeStruct(shape, jnp.bfloat16))(np.uint32(next(seeds)))

    planes, terms, m = problem.contracted_planes, problem.k, problem.m
    straight = problem.x_contracted_axis == 2
    xs = [normal(problem.batch, m, k) if straight else normal(planes, k, m) for k in terms]
    w_shapes = [
        [(n, k) if problem.w_contracted_axis == 2 else (k, n) for n in problem.n] for k in terms
    ]
    ws = [[normal(planes, *shape) for shape in term] for term in w_shapes]
    outs = [normal(problem.batch, m, n) for n in problem.n]
    zeros = [jnp.int32(0)] * (len(terms) * (1 + len(outs)) + 1)
    return xs, ws, outs, (zeros, zeros)


def kernel(problem: MatmulProblem, tiling: Tiling) -> Any:
    """The chunk kernel; it writes into its third argument."""
    terms, results = len(problem.k), len(problem.n)
    layout = ((1, 1, 1),) * (terms + terms * results)
    if problem.x_contracted_axis == 2:
        layout = ((1, 0, 1),) * terms + ((0, 0, 1),) * (terms * results)
    launch = shared_launch(problem, tiling, (*layout, 1), kernel_target())
    return jax.jit(lambda *args: launch(*args), donate_argnums=2)


def xla_matmuls(problem: MatmulProblem, dtype: Any) -> Any:
    """XLA's matmuls of the same operands; those of a transposed x are not divided into chunks."""
    x_axis, w_axis = problem.x_contracted_axis - 1, problem.w_contracted_axis - 1

    @jax.jit
    def run(xs, ws):
        xs, ws = jax.tree.map(lambda a: a.astype(dtype), (xs, ws))
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


class TilingTrial:
    """One problem's operands, and what was measured on them.

    Attributes:
      times: median seconds of every tiling that works.
      xla_seconds: median seconds of XLA's matmul.
    """

    def __init__(self, problem: MatmulProblem):
        self.problem = problem
        self.xs, self.ws, self.outs, self.indices = make_operands(problem)
        self.times: dict[Tiling, float] = {}
        self.xla_seconds = 0.0
        self._exact = xla_matmuls(problem, jnp.float32)(self.xs, self.ws)
        # A gather does not leave undivided operands: joining the chunks is not timed.
        xs, ws = self.xs, self.ws
        if problem.x_contracted_axis == 1:
            problem = dataclasses.replace(problem, k=(sum(problem.k),))
            xs, ws, _, _ = make_operands(problem)
        compiled = xla_matmuls(problem, jnp.bfloat16).lower(xs, ws).compile()
        self._xla = lambda: compiled(xs, ws)

    def measure(
        self, tilings: Sequence[Tiling], pool: Executor, groups: int, group_seconds: float
    ) -> None:
        """Checks tilings, and times those that are right, and XLA, in turns."""
        runs: dict[str, Any] = {"": self._xla}
        for number, (tiling, compiled) in enumerate(
            zip(tilings, pool.map(self._compile, tilings), strict=True)
        ):
            wrong = (
                str(compiled)[:200] if isinstance(compiled, Exception) else self._wrong(compiled)
            )
            if wrong:
                print(f"  {tiling}: {wrong}", flush=True)
            else:
                runs[str(number)] = lambda compiled=compiled: self._call(compiled)
        timings = measure(runs, groups=groups, seconds_per_group=group_seconds)
        self.xla_seconds = timings.pop("").median
        self.times |= {tilings[int(number)]: t.median for number, t in timings.items()}

    def best(self, count: int) -> list[Tiling]:
        """The fastest tilings."""
        return sorted(self.times, key=self.times.__getitem__)[:count]

    def measured(self) -> MeasuredTiling:
        """The fastest tiling, as the table has it."""
        (tiling,) = self.best(1)
        seconds = self.times[tiling], self.xla_seconds
        return MeasuredTiling(tiling, *(round(1e6 * value, 1) for value in seconds))

    def _compile(self, tiling: Tiling) -> Any:
        arguments = self.xs, self.ws, self.outs, self.indices
        try:
            return kernel(self.problem, tiling).lower(*arguments).compile()
        except Exception as error:
            return error

    def _call(self, compiled: Any) -> Any:
        self.outs = list(compiled(self.xs, self.ws, self.outs, self.indices))
        return self.outs

    def _wrong(self, compiled: Any) -> str | None:
        """The error of a tiling's results, in words, or None."""
        self.outs = [jnp.full_like(out, jnp.nan) for out in self.outs]
        for out, exact in zip(self._call(compiled), self._exact, strict=True):
            error = jnp.max(jnp.abs(out[0] - exact)) / jnp.max(jnp.abs(exact))
            if not error < _TOLERANCE:
                return f"relative error {error}"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tilings:
    """Tunes the tilings of the chunk kernel, problem by problem, on the first GPU."""

    output: Path
    """File for the table; its content is replaced."""
    models: tuple[str, ...] = ("llama3-8b", "llama3-70b")
    """Whose layers, as for `python -m collective_matmul tune --shapes`."""
    rows: int = 8192
    """M, of all devices together."""
    rings: tuple[int, ...] = (4, 2)
    """Sizes of the rings whose chunks are multiplied."""
    limit_seconds: float = 500.0
    """No further problem begins after this many seconds."""
    candidates: int = 9
    """Tilings that are timed: the best of each tile, and others predicted to be fastest."""
    finalists: int = 1
    """Tilings of which other orders of the tiles are timed."""
    groups: int = 5
    """Timed groups; within each all tilings take turns."""
    group_seconds: float = 0.1
    """How long each tiling runs in each group."""


def _check(settings: Tilings) -> None:
    check_names("models", settings.models, list(LAYERS))
    check_least(settings, 1, "candidates", "groups", "rows")
    check_least(settings, 0, "finalists")
    check_positive(settings, "group_seconds", "limit_seconds")
    if not settings.output.parent.is_dir():
        raise ValueError(f"output={settings.output}: there is no folder {settings.output.parent}")
    if kernel_target() is None:
        kind = jax.devices()[0].device_kind
        raise ValueError(f"device {kind!r}: the kernel runs on Hopper GPUs; run this on one")


def run(settings: Tilings) -> None:
    """Measures all problems; writes the table after each.

    Raises:
      ValueError: for settings that nothing can be measured with, or a device without the kernel.
    """
    _check(settings)
    start, measured = time.monotonic(), {}
    chosen = [
        problem
        for devices in settings.rings
        for model in settings.models
        for problem in problems(model, settings.rows, devices)
    ]
    timed = settings.groups, settings.group_seconds
    with ThreadPoolExecutor(8) as pool:
        for problem in dict.fromkeys(chosen):
            if time.monotonic() - start > settings.limit_seconds:
                print(f"out of time before {problem}")
                break
            trial = TilingTrial(problem)
            trial.measure(likeliest(problem)[: settings.candidates], pool, *timed)
            trial.measure(with_other_orders(trial.best(settings.finalists)), pool, *timed)
            if not trial.times:
                print(f"{problem}: no tiling worked")
                continue
            measured[problem] = trial.measured()
            _save(settings.output, measured)
            print(f"{time.monotonic() - start:4.0f} s {problem} xla {1e6 * trial.xla_seconds:.1f}")
            for tiling in trial.best(4):
                print(f"      {1e6 * trial.times[tiling]:.1f} {tiling}", flush=True)


def _save(output: Path, measured: dict[MatmulProblem, MeasuredTiling]) -> None:
    """Writes the shipped table with what was measured in place of its records."""
    kind = jax.devices()[0].device_kind
    table = shipped(kind, "matmul_tilings") or MeasuredData("matmul_tilings", kind, [])
    records = [found.record(problem) for problem, found in measured.items()]
    output.write_text(table.updated(records).to_text(), encoding="utf-8")
