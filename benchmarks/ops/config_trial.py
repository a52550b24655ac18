"""The configurations of a backend at one site: compiled, compared with what is exact, timed."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.internals import (
    COMPUTE_ONLY,
    REFERENCE,
    Backend,
    Configuration,
    Site,
    SiteOperands,
    SiteProgram,
    filler,
    measure,
)
from collective_matmul import overlap_jit

#: The standard deviation of sums of whole numbers. bfloat16 has all whole numbers up to 256.
_DEVIATION = 30
#: Weights that the repetitions of a program use in turn when they are checked.
_CHECKED = 2


class ConfigTrial:
    """Programs of one site: with each configuration, with the reference, and without communication.

    Args:
      site: a flat site.
      devices: at least as many as the site's axis has.
      backend: what is configured. It is timed as it is too, under its name.
      configs: by name.
      threads: programs compiled at the same time.
    """

    def __init__(
        self,
        site: Site,
        devices: Sequence[Any],
        backend: Backend,
        configs: Mapping[str, Configuration],
        threads: int,
    ):
        self.site, self.program = site, SiteProgram(site, devices)
        others = {REFERENCE.name: REFERENCE, backend.name: backend, COMPUTE_ONLY: COMPUTE_ONLY}
        self._others = tuple(others)
        with ThreadPoolExecutor(threads) as pool:
            jobs = {
                name: self._compile(chosen, pool)
                for name, chosen in (
                    *((text, backend.configured(config)) for text, config in configs.items()),
                    *others.items(),
                )
            }
        self._compiled = {name: _outcome(job) for name, job in jobs.items()}

    def wrong(self, name: str) -> int | str:
        """The number of wrong elements that a configuration's program returns, or its error."""
        compiled = self._compiled[name]
        if isinstance(compiled, str):
            return compiled
        operands, nothing = self._exact
        jax.block_until_ready(compiled(nothing))
        return int(_count_differences(compiled(operands), self._expected))

    def times(
        self, names: Iterable[str], lead_seconds: float, groups: int, group_seconds: float
    ) -> dict[str, list[float]]:
        """Quartiles in microseconds per op, of these configurations and the others, in turns."""
        operands = _fill(self.program.operands(REFERENCE.name))
        gathered = _fill(self.program.operands(COMPUTE_ONLY)._replace(weights=()))
        gathered = gathered._replace(weights=operands.weights)
        runs = {
            name: functools.partial(compiled, gathered if name == COMPUTE_ONLY else operands)
            for name in (*self._others, *names)
            if not isinstance(compiled := self._compiled[name], str)
        }
        ends = time.monotonic() + lead_seconds
        while time.monotonic() < ends:
            jax.block_until_ready([run() for run in runs.values()])
        timings = measure(runs, groups=groups, seconds_per_group=group_seconds)
        return {
            name: [
                1e6 * seconds / self.program.repetitions
                for seconds in (timing.quartiles[0], timing.median, timing.quartiles[1])
            ]
            for name, timing in timings.items()
        }

    @functools.cached_property
    def _exact(self) -> tuple[SiteOperands, SiteOperands]:
        """Operands for which every sum is exact; and the same with an x that has only NaNs."""
        described = self.program.operands(REFERENCE.name)
        sharing = 1 if self.site.op == "all_gather_matmul" else self.site.axis_size
        contracted = self.site.contracted * sharing
        numbers = itertools.count()

        def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            return _whole_numbers(leaf, contracted)(np.uint32(next(numbers)))

        xs = [fill(x) for x in described.xs]
        weights = [[fill(w) for w in ws] for ws in described.weights[:_CHECKED]]
        weights = [weights[i % _CHECKED] for i in range(len(described.weights))]
        exact = SiteOperands(xs, None, weights)
        return exact, exact._replace(xs=[jnp.full_like(x, jnp.nan) for x in xs])

    @functools.cached_property
    def _expected(self) -> Any:
        return self._compiled[REFERENCE.name](self._exact[0])

    def _compile(self, backend: Backend | str, pool: Executor) -> Future[Any] | str:
        """Lowers a program here, where JAX traces one at a time, and has the pool compile it."""
        peer_kernels = not isinstance(backend, str) and backend.uses_peer_kernels
        name = backend if isinstance(backend, str) else REFERENCE.name
        try:
            jitted = overlap_jit(self.program.program(backend), peer_kernels=peer_kernels)
            return pool.submit(jitted.lower(self.program.operands(name)).compile)
        except Exception as error:
            return first_line(error)


def first_line(error: Exception) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def _outcome(job: Future[Any] | str) -> Any:
    """An executable, or why there is none."""
    try:
        return job if isinstance(job, str) else job.result()
    except Exception as error:
        return first_line(error)


def _fill(described: SiteOperands) -> SiteOperands:
    """Random operands."""
    leaves, tree = jax.tree.flatten(described)
    return jax.tree.unflatten(tree, [filler(leaf)(np.uint32(i)) for i, leaf in enumerate(leaves)])


@functools.cache
def _whole_numbers(leaf: jax.ShapeDtypeStruct, contracted: int) -> Any:
    """A function that makes an array of -1, 0 and 1 from a seed.

    So few are not zero that every partial sum of `contracted` products is exact in bfloat16.
    """
    density = min(1.0, _DEVIATION / contracted**0.5)

    def fill(seed: jax.Array) -> jax.Array:
        key = jax.random.key(seed)
        signs = jax.random.rademacher(key, leaf.shape, jnp.int8)
        some = jax.random.bernoulli(jax.random.fold_in(key, 1), density, leaf.shape)
        return (signs * some).astype(leaf.dtype)

    return jax.jit(fill, out_shardings=leaf.sharding)


@jax.jit
def _count_differences(results: Any, expected: Any) -> jax.Array:
    """The number of elements that differ. A NaN differs from everything."""
    counts = jax.tree.map(lambda a, b: jnp.sum(a != b, dtype=jnp.int32), results, expected)
    return jnp.sum(jnp.stack(jax.tree.leaves(counts)))
