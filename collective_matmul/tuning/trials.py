"""Compiles the programs of sites, many at once, and times each site's against each other."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from collective_matmul.agreement import exchange
from collective_matmul.dispatch.assessment import unsupported_reason
from collective_matmul.dispatch.contract import COMPUTE_ONLY, Request
from collective_matmul.dispatch.registry import OPS, REFERENCE
from collective_matmul.dispatch.repetitions import filler
from collective_matmul.jit.compiler import overlap_jit
from collective_matmul.tuning.timing import Timing, measure_finalists

#: Programs compiled at the same time, at most.
_THREADS = 32


#: `measure` with a fixed time for a group: takes candidates and `groups`.
Measure = Callable[..., Mapping[str, Timing]]


def trials(
    sites: Sequence[Request], devices: Sequence[Any], implementations: Sequence[str]
) -> Iterator[Trial]:
    """A trial for each site, in order.

    Compiling takes most of the time, so several sites are compiled at once: few at first, so that a
    short run measures something. Nothing compiles while the caller uses a trial, because XLA's
    autotuning runs kernels on the devices.
    """
    # Processes try matmuls for each other while they compile, and wait for each other's results:
    # threads that compile in another order could wait for ever.
    threads = 1 if jax.process_count() > 1 else min(_THREADS, os.cpu_count() or 1)
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
    """The programs of one flat request: one for each backend that can run, and the bound.

    Attributes:
      site: the request to measure.
      failures: reasons why a backend was not timed, by its name.
    """

    def __init__(
        self,
        site: Request,
        devices: Sequence[Any],
        implementations: Sequence[str],
        pool: Executor,
    ):
        self.site = site
        self.failures: dict[str, str] = {}
        self._stack = OPS[site.op].measurement(site, devices)
        # Simulated devices share few threads: a queued call could take the thread that the
        # collectives of the call before it wait for.
        self._queues = devices[0].platform != "cpu"
        self._compiling: dict[str, Future] = {}
        self._bounds: tuple[str, ...] = (COMPUTE_ONLY,) if OPS[site.op].has_bound else ()
        known = [name for name in implementations if name in site.backends]
        for name in (*known, *self._bounds):
            if name != COMPUTE_ONLY and (reason := unsupported_reason(site, name)):
                self.failures[name] = reason
            else:
                self._attempt(name, self._compile, pool)
        reference, *bounds = map(self._stack.plain_operands, (REFERENCE, *self._bounds))
        self._described = reference, *(bound._replace(weights=()) for bound in bounds)
        self._fillers = {
            leaf: pool.submit(filler(leaf).lower(np.uint32(0)).compile)
            for leaf in dict.fromkeys(jax.tree.leaves(self._described))
        }
        self._preparing = [
            pool.submit(jax.jit(self._stack.prepare).lower(operands).compile)
            for operands in self._described
            if self._stack.prepares
        ]

    def seconds(self, measure: Measure, groups: int) -> dict[str, float]:
        """Median seconds of the site by implementation, for all that run."""
        operands, *gathered = self._fill()
        of_bounds = [each._replace(weights=operands.weights) for each in gathered]
        others = dict(zip(self._bounds, of_bounds, strict=True))
        runs: dict[str, Callable[[], Any]] = {}
        for name in self._compiling:
            self._attempt(name, lambda name: self._compiling[name].result())
        self._leave_out_failures(self._compiling)
        for name in self._compiling:
            self._attempt(name, self._start, others.get(name, operands), runs)
        self._leave_out_failures(runs)
        # Gains are relative to the reference, so it is always timed.
        timings = measure_finalists(
            measure, runs, groups=groups, bounds=self._bounds, always=[REFERENCE]
        )
        return {name: t.median / self._stack.repetitions for name, t in timings.items()}

    def _fill(self) -> Sequence[Any]:
        """Arrays for the backends, and those for the compute-only bound except its weights."""
        leaves, tree = jax.tree.flatten(self._described)
        arrays = [self._fillers[leaf].result()(np.uint32(i)) for i, leaf in enumerate(leaves)]
        filled = jax.tree.unflatten(tree, arrays)
        if not self._preparing:
            return filled
        pairs = zip(self._preparing, filled, strict=True)
        return [compiling.result()(operands) for compiling, operands in pairs]

    def _leave_out_failures(self, programs: dict[str, Any]) -> None:
        """Removes programs, by backend, that have failed in some process: all run the same."""
        for number, failures in enumerate(exchange(self.failures)):
            for name, reason in failures.items():
                self.failures.setdefault(name, f"process {number}: {reason}")
                programs.pop(name, None)

    def _attempt(self, name: str, step: Callable, *arguments: Any) -> None:
        """Executes a step for one backend; if it fails, the others are still measured."""
        try:
            step(name, *arguments)
        except Exception as error:  # Any error of JAX, XLA or the devices.
            first_line = (str(error).strip() or "no reason given").splitlines()[0]
            self.failures[name] = f"{type(error).__name__}: {first_line}"

    def _compile(self, name: str, pool: Executor) -> None:
        """Lowers the program here, as JAX traces one at a time, and compiles it in the pool."""
        peer_kernels = name != COMPUTE_ONLY and self.site.backends[name].uses_peer_kernels
        jitted = overlap_jit(self._stack.program(name), peer_kernels=peer_kernels)
        lowered = jitted.lower(self._stack.operands(name))
        self._compiling[name] = pool.submit(lowered.compile)

    def _start(self, name: str, operands: Any, runs: dict[str, Callable[[], Any]]) -> None:
        """Runs the program once, and adds it to the programs that run."""
        run = functools.partial(self._compiling[name].result(), operands)
        jax.block_until_ready(run())
        runs[name] = run if self._queues else lambda: jax.block_until_ready(run())
