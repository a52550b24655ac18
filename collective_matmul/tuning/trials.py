"""Compiles the programs of sites, many at once, and times each site's against each other."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from collective_matmul.backends import BACKENDS, REFERENCE
from collective_matmul.compiler import overlap_jit
from collective_matmul.dispatch.assessment import unsupported_reason
from collective_matmul.dispatch.table import COMPUTE_ONLY
from collective_matmul.site import Site
from collective_matmul.tuning.repeated_site import Operands, Stack, filler
from collective_matmul.tuning.timing import Timing

#: Programs compiled at the same time, at most.
_THREADS = 32

#: What takes so many times as long as the fastest in one group needs no further group.
_HOPELESS = 1.25


#: `measure` with its time for a group: takes contenders and `groups`.
Measure = Callable[..., Mapping[str, Timing]]


def trials(
    sites: Sequence[Site], devices: Sequence[Any], implementations: Sequence[str]
) -> Iterator[Trial]:
    """A trial for each site, in order.

    Compiling takes most of the time, so several sites are compiled at once: few at first, since who
    has little time should have measured something. XLA tries kernels on the devices meanwhile:
    nothing compiles while the caller has a trial in hand.
    """
    threads = min(_THREADS, os.cpu_count() or 1)
    most = max(1, 4 * threads // (len(implementations) + 2))
    start, count = 0, min(2, most)
    while start < len(sites):
        with ThreadPoolExecutor(threads) as pool:
            compiling = [
                Trial(site, devices, implementations, pool) for site in sites[start : start + count]
            ]
        yield from compiling
        start, count = start + count, min(2 * count, most)


class Trial:
    """The programs of one flat site: one for each implementation that can run, and the ceiling.

    Attributes:
      site: what is tried.
      failures: by the name of an implementation, why it was not timed.
    """

    def __init__(
        self,
        site: Site,
        devices: Sequence[Any],
        implementations: Sequence[str],
        pool: Executor,
    ):
        self.site = site
        self.failures: dict[str, str] = {}
        self._stack = Stack(site, devices)
        # Simulated devices share few threads: a call queued behind another could take the thread
        # that the other's collectives wait for.
        self._queues = devices[0].platform != "cpu"
        self._compiling: dict[str, Future] = {}
        for name in (*implementations, COMPUTE_ONLY):
            if name != COMPUTE_ONLY and (reason := unsupported_reason(site, name)):
                self.failures[name] = reason
            else:
                self._attempt(name, self._compile, pool)
        bulk, ceiling = map(self._stack.operands, (REFERENCE.name, COMPUTE_ONLY))
        self._described = bulk, ceiling._replace(weights=())
        self._fillers = {
            leaf: pool.submit(filler(leaf).lower(np.uint32(0)).compile)
            for leaf in dict.fromkeys(jax.tree.leaves(self._described))
        }

    def seconds(self, measure: Measure, groups: int) -> dict[str, float]:
        """Median seconds of the site by implementation, for all that run."""
        operands, gathered = self._fill()
        gathered = gathered._replace(weights=operands.weights)
        runs: dict[str, Callable[[], Any]] = {}
        for name in self._compiling:
            self._attempt(name, self._start, gathered if name == COMPUTE_ONLY else operands, runs)
        timings = dict(measure(runs, groups=1))
        fastest = min(
            (t.median for name, t in timings.items() if name != COMPUTE_ONLY), default=0.0
        )
        close = {n: run for n, run in runs.items() if timings[n].median < _HOPELESS * fastest}
        # Bulk is what every gain is counted from.
        timings |= measure(
            close | {n: runs[n] for n in (REFERENCE.name,) if n in runs}, groups=groups
        )
        return {name: t.median / self._stack.repetitions for name, t in timings.items()}

    def _fill(self) -> tuple[Operands, Operands]:
        """Arrays for the implementations, and for the ceiling all but its weights."""
        leaves, tree = jax.tree.flatten(self._described)
        arrays = [self._fillers[leaf].result()(np.uint32(i)) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, arrays)

    def _attempt(self, name: str, step: Callable, *arguments: Any) -> None:
        """Carries out a step for one implementation; if that fails, the others still count."""
        try:
            step(name, *arguments)
        except Exception as error:  # Whatever it is, in JAX, in XLA or on the devices.
            first_line = (str(error).strip() or "no reason given").splitlines()[0]
            self.failures[name] = f"{type(error).__name__}: {first_line}"

    def _compile(self, name: str, pool: Executor) -> None:
        """Lowers the program here, where JAX traces one at a time, and has the pool compile it."""
        peer_kernels = name != COMPUTE_ONLY and BACKENDS[name].uses_peer_kernels
        jitted = overlap_jit(self._stack.program(name), peer_kernels=peer_kernels)
        lowered = jitted.lower(self._stack.operands(name))
        self._compiling[name] = pool.submit(lowered.compile)

    def _start(self, name: str, operands: Operands, runs: dict[str, Callable[[], Any]]) -> None:
        """Runs the program once, and adds it to those that do run."""
        run = functools.partial(self._compiling[name].result(), operands)
        jax.block_until_ready(run())
        runs[name] = run if self._queues else lambda: jax.block_until_ready(run())
