"""Times candidates in turns, so that drifting clocks affect all of them equally."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from collective_matmul.agreement import of_first_process

#: A candidate is timed no further if its first group took this many times as long as the fastest.
HOPELESS = 1.25


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one sample for each group of calls."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and third quartile of the samples."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third


def measure(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    groups: int = 7,
    seconds_per_group: float = 0.05,
) -> dict[str, Timing]:
    """Times every candidate once in every group, in a new random order for each group.

    Within a group a candidate is called for about `seconds_per_group`. Only the last call is waited
    for, so the host runs ahead as it does in a program. Before that, it runs untimed for half as
    long. Clocks follow power: without the untimed calls, a candidate after one that draws little
    power would be timed at higher clocks than one after a candidate that draws much.

    Several processes take the same turns with the same numbers of calls: those of process 0, whose
    times all return.

    Args:
      candidates: functions by name; their results are waited for. Each is called a few times before
        the first group, so that work of the first call is not timed.
      groups: number of samples for each candidate, at least 1.
      seconds_per_group: how long to time one candidate in one group.

    Raises:
      ValueError: for fewer than 1 group, or a time that is not positive and finite.
    """
    if groups < 1:
        raise ValueError(f"groups={groups}: expected at least 1")
    if not 0 < seconds_per_group < math.inf:
        raise ValueError(f"seconds_per_group={seconds_per_group}: expected more than 0, and finite")
    calls = {}
    for name, run in candidates.items():
        jax.block_until_ready(run())
        calls[name] = max(1, round(seconds_per_group / _seconds_per_call(run, 2)))
    calls = of_first_process(calls)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    order = random.Random(groups)
    for _ in range(groups):
        for name in order.sample(names, len(names)):
            run = candidates[name]
            _seconds_per_call(run, math.ceil(calls[name] / 2))
            samples[name].append(_seconds_per_call(run, calls[name]))
    samples = of_first_process(samples)
    return {name: Timing(tuple(samples[name])) for name in candidates}


def measure_finalists(
    measure: Callable[..., Mapping[str, Timing]],
    candidates: Mapping[str, Callable[[], Any]],
    *,
    groups: int,
    bounds: Collection[str] = (),
    always: Collection[str] = (),
) -> dict[str, Timing]:
    """Times all candidates in one group, and then those that are not hopeless in `groups` more.

    Args:
      measure: `measure`, or a function that is called like it.
      candidates: functions by name.
      groups: number of groups for the finalists.
      bounds: names of candidates that the others are not compared with.
      always: names of candidates that are always timed in all groups.

    Returns:
      The timing of every candidate: of one group for the hopeless ones.
    """
    timings = dict(measure(candidates, groups=1))
    compared = [timing.median for name, timing in timings.items() if name not in bounds]
    limit = HOPELESS * min(compared, default=0.0)
    finalists = {
        name: run
        for name, run in candidates.items()
        if name in always or timings[name].median < limit
    }
    return timings | dict(measure(finalists, groups=groups))


def _seconds_per_call(run: Callable[[], Any], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls - 1):
        run()
    jax.block_until_ready(run())
    return (time.perf_counter() - started) / calls
