"""Times contenders in turns, so that whatever drifts hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one number for each group."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


def measure(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    groups: int = 7,
    group_seconds: float = 0.05,
) -> dict[str, Timing]:
    """Calls every contender some times in every group, in an order that turns from group to group.

    Args:
      contenders: by name, what to call; it returns arrays, which are waited for.
      groups: samples for each contender.
      group_seconds: roughly how long one contender's calls in one group take.
    """
    calls = {}
    for name, run in contenders.items():
        jax.block_until_ready(run())
        seconds = min(_seconds(run, 1) for _ in range(2))
        calls[name] = max(1, round(group_seconds / seconds))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for group in range(groups):
        turned = names[group % len(names) :] + names[: group % len(names)]
        for name in turned:
            samples[name].append(_seconds(contenders[name], calls[name]))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def _seconds(run: Callable[[], Any], calls: int) -> float:
    started = time.perf_counter()
    result = None
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / calls
