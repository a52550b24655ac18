"""Why XLA may add collectives to a program: the causes in words, and the time that they cost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from collective_matmul.hardware import Rates
from collective_matmul.jaxprs.collectives import seconds_of_bytes
from collective_matmul.jaxprs.graph import type_of
from collective_matmul.jaxprs.sources import described
from collective_matmul.jit.compiler_sharding import Communication, communications

#: How many causes a sentence names. It counts the others.
NAMED = 4


@dataclass(frozen=True)
class Cause:
    """An operation of a program for which the compiler may add collectives.

    Attributes:
      operation: the operation and its line, in words.
      axes: the mesh axes that it is divided over, in words.
      cure: how the program can do without the collectives.
      seconds: predicted time of them in one run of the program; None if nothing is known of it.
    """

    operation: str
    axes: str
    cure: str
    seconds: float | None = None

    def __str__(self) -> str:
        time = "" if self.seconds is None else f" ({self.seconds * 1e6:,.0f} µs)"
        return f"{self.operation}{time}"


def causes_in(
    program: Jaxpr,
    axis_sizes: Mapping[str, int],
    gpu: Rates,
    between_nodes: Collection[str],
) -> tuple[Cause, ...]:
    """All causes in a program, each once: those of unknown time, then the others by time.

    Args:
      program: the program.
      axis_sizes: the sizes of mesh axes that are not manual around it.
      gpu: rates of the devices.
      between_nodes: the axes that cross nodes; along all others there is NVLink.
    """
    seconds: dict[tuple[str, str, str], list[float | None]] = defaultdict(list)
    for each in communications(program, {a: n for a, n in axis_sizes.items() if n > 1}):
        equation, calls, _ = each.operation
        axes = ", ".join(f"{name!r} of size {axis_sizes[name]}" for name in each.axes)
        cause = described(equation, calls), axes, _cure(equation)
        seconds[cause].append(_seconds(each, axis_sizes, gpu, between_nodes))
    unknown = [Cause(*cause) for cause, times in seconds.items() if None in times]
    known = [Cause(*cause, sum(filter(None, t))) for cause, t in seconds.items() if None not in t]
    return *unknown, *sorted(known, key=lambda cause: -(cause.seconds or 0))


def divided(causes: Sequence[Cause]) -> str:
    """Causes in words, to follow "the compiler divides": the first ones, and how many are left."""
    by_axes: dict[str, list[str]] = defaultdict(list)
    for cause in causes[:NAMED]:
        by_axes[cause.axes].append(str(cause))
    groups = [f"{_listed(names)} over axis {axes}" for axes, names in by_axes.items()]
    if len(causes) > NAMED:
        left = len(causes) - NAMED
        groups.append(f"{left} more (peer_kernels.causes of explain's result has all)")
    return _listed(groups)


def cures(causes: Iterable[Cause]) -> str:
    """How the program can do without the collectives, in words."""
    return "; ".join(dict.fromkeys(cause.cure for cause in causes))


def _seconds(
    each: Communication,
    axis_sizes: Mapping[str, int],
    gpu: Rates,
    between_nodes: Collection[str],
) -> float | None:
    """Seconds of the slower one of two: to gather arrays, or to sum results over devices."""
    if each.gathered is None:
        return None
    devices = math.prod(axis_sizes[axis] for axis in each.axes)
    crosses = not {*each.axes}.isdisjoint(between_nodes)

    def time(arrays: Iterable[int], passes: int) -> float:
        return sum(seconds_of_bytes(size, devices, gpu, crosses, passes) for size in arrays)

    return each.operation.runs * max(time(each.gathered, 1), time(each.summed, 2))


def _cure(equation: JaxprEqn) -> str:
    if equation.primitive.name in ("shard_map", "sharding_constraint"):
        return "shard arrays over the axis as the operations around do"
    operand = type_of(equation.invars[0])
    if equation.primitive.name == "slice" and jnp.issubdtype(operand.dtype, jnp.integer):
        return "cut tokens before the program: take inputs and targets as two arguments"
    return (
        "leave such operations out, or do them in a jax.shard_map over the axis, or after the"
        " matmul that gathers over the axis"
    )


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
