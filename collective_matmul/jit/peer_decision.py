"""The decision whether a program may have kernels that address peers' memory.

Such kernels are much faster at sites with few rows. But XLA must then run its own collectives one
at a time (`collective_matmul.peer_access.peer_kernels_disallowed_reason` says why), and overlaps
them with nothing. So the program as a whole is compared: what its sites gain with what its other
collectives could lose.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from collective_matmul.dispatch.recording import Decision
from collective_matmul.dispatch.registry import REFERENCE
from collective_matmul.dispatch.run_counts import PROCESS_COUNTER, RunCounter, totals
from collective_matmul.hardware import assumed_rates
from collective_matmul.jaxprs.collectives import collective_seconds, is_collective_kernel
from collective_matmul.jaxprs.sources import described
from collective_matmul.jaxprs.walks import all_equations
from collective_matmul.jit.compiler_sharding import communicating_equation
from collective_matmul.log import warn_once
from collective_matmul.transport import transport_along

#: The gain must be this many times the cost. Predicted times err by 15 %, and sites where these
#: kernels win gain about half of their time: the true gain may be two thirds of the predicted one.
#: The cost needs no margin: every collective counts as if all of it was hidden before.
MARGIN = 1.5


@dataclass(frozen=True)
class PeerKernelDecision:
    """Whether a program may have kernels that address peers' memory.

    Attributes:
      allowed: whether it may.
      reason: why, or why not.
      gain_seconds: what the sites are predicted to gain, in one run of the program.
      cost_seconds: predicted time of the collectives that nothing can hide then.
      withheld: decisions for sites of the program that would have such kernels.
    """

    allowed: bool
    reason: str
    gain_seconds: float = 0.0
    cost_seconds: float = 0.0
    withheld: tuple[Decision, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        allowed = "are allowed" if self.allowed else "are not allowed"
        return f"kernels that address peers' memory {allowed}: {self.reason}"


NO_SITE = PeerKernelDecision(False, "no op of the program would use them")

_decisions: weakref.WeakKeyDictionary[Jaxpr, PeerKernelDecision] = weakref.WeakKeyDictionary()


def decide_once(program: Jaxpr) -> PeerKernelDecision:
    """The decision for a program of `overlap_jit`, remembered as long as the program."""
    if program not in _decisions:
        _decisions[program] = decide(program, PROCESS_COUNTER)
    return _decisions[program]


def decide(program: Jaxpr, counter: RunCounter) -> PeerKernelDecision:
    """The decision for a program that was traced while it was undecided.

    A collective counts if NCCL executes it, at any depth and as often as loops repeat it. Over axes
    of one device it takes no time. Permutes within one process stay asynchronous.

    Args:
      program: the program, without kernels that address peers' memory.
      counter: what numbered its decisions.
    """
    if not any(each.peer_alternative for each in counter.decisions.values()):
        return NO_SITE
    # One name may belong to meshes of several sizes: the larger one costs more.
    meshes, gpu = _meshes(program), assumed_rates()
    axis_sizes = dict(sorted(pair for mesh in meshes for pair in mesh.shape.items()))
    between_nodes = {
        name for mesh in meshes for name in mesh.shape if transport_along(mesh, name) == "network"
    }
    withheld: list[Decision] = []

    def of_op(number: int) -> dict[str, float]:
        decision = counter.decisions[number]
        if decision.peer_alternative is None:
            return {"cost": _overlapped_seconds(decision)}
        if decision not in withheld:
            withheld.append(decision)
        return {"gain": decision.peer_alternative.seconds_gained}

    def of_equation(equation: JaxprEqn) -> dict[str, float]:
        if not is_collective_kernel(equation):
            return {}
        return {"cost": collective_seconds(equation, axis_sizes, gpu, between_nodes)}

    seconds: Mapping[str, float] = totals(program, of_op, of_equation, _most)
    if not withheld:
        return NO_SITE
    gain, cost = seconds["gain"], seconds["cost"]
    unknown = _work_of_the_compiler(program, axis_sizes)
    allowed = unknown is None and gain > MARGIN * cost
    saved = f"they are predicted to save {gain * 1e6:.0f} µs"
    reason = f"{unknown}; {saved}" if unknown else _comparison(gain, cost, allowed)
    return PeerKernelDecision(allowed, reason, gain, cost, tuple(withheld))


def warn_withheld(withheld: Iterable[Decision], reason: str) -> None:
    """Warns of sites where a better backend was not possible without such kernels, once."""
    for decision in withheld:
        alternative = decision.peer_alternative
        if alternative is not None and alternative.missed:
            fallback = f"{decision.site.op} falls back to {decision.implementation}"
            warn_once(f"{fallback}: {alternative.missed}: {reason}")


def _comparison(gain: float, cost: float, allowed: bool) -> str:
    if gain <= 0:
        return "by prediction the ops gain nothing from them"
    gained = f"they are predicted to save {gain * 1e6:.0f} µs"
    if cost == 0:
        return f"{gained}, and no other collective loses by them"
    lost = f"other collectives, which nothing hides then, take {cost * 1e6:.0f} µs"
    margin = "" if allowed else f"; they must save {MARGIN:g} times that"
    return f"{gained}, and {lost}{margin}"


def _most(branches: Iterable[Counter]) -> Counter:
    """The largest gain and the largest cost of all branches, which may be different ones."""
    largest: Counter[Any] = Counter()
    for branch in branches:
        largest |= branch
    return largest


def _overlapped_seconds(decision: Decision) -> float:
    """Seconds of a request's collectives that XLA may have overlapped with something.

    Other backends communicate by permutes, which across processes are NCCL's kernels too. What they
    hide is all that they were chosen for.
    """
    request = decision.site
    if not request.communicates:
        return 0.0
    if decision.implementation == REFERENCE:
        return request.overlapped_seconds
    return request.communication_seconds if jax.process_count() > 1 else 0.0


def _meshes(jaxpr: Jaxpr) -> list[Any]:
    """All meshes in a program, each once."""
    found = (
        equation.params["mesh"]
        for equation in all_equations(jaxpr)
        if equation.primitive.name == "shard_map"
    )
    return list(dict.fromkeys(found))


def _work_of_the_compiler(program: Jaxpr, axis_sizes: Mapping[str, int]) -> str | None:
    """Why the compiler may add collectives to the program, which no jaxpr shows; or None."""
    found = communicating_equation(program, {a: n for a, n in axis_sizes.items() if n > 1})
    if found is None:
        return None
    equation, axes = found
    names = ", ".join(f"{name!r} of size {axis_sizes[name]}" for name in axes)
    return (
        f"the compiler divides {described(equation)} over axis {names}, and may add collectives"
        " that the program does not show"
    )
