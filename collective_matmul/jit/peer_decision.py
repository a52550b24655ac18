"""The decision whether a program may have kernels that address peers' memory.

Such kernels are much faster at sites with few rows. But XLA must then run its own collectives one
at a time (`collective_matmul.peer_access.peer_kernels_disallowed_reason` says why), and overlaps
them with nothing. So two assignments of backends to all sites of the program are compared: the best
one with such kernels, and the best one without. With them, the time of the collectives that nothing
hides any more is added.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from collective_matmul.dispatch.recording import Decision
from collective_matmul.dispatch.registry import REFERENCE
from collective_matmul.dispatch.run_counts import PROCESS_COUNTER, RunCounter, totals
from collective_matmul.hardware import assumed_rates
from collective_matmul.jaxprs.collectives import collective_seconds, is_collective_kernel
from collective_matmul.jaxprs.dead_code import without_dead_code
from collective_matmul.jaxprs.walks import distinct_equations
from collective_matmul.jit.compiler_causes import Cause, causes_in, cures, divided
from collective_matmul.log import warn_once
from collective_matmul.transport import transport_along

#: The share of the time without these kernels that must be saved. Of the stacks in
#: tests/jit/test_measured_decisions.py, 0.3 to 20 % were saved where 4.6 % was predicted, and at
#: least a third of the prediction where more was. Where it was 0.3 %, rings were as fast or faster.
#: The cost needs no margin: other collectives count as if all of them was hidden before.
MARGIN = 0.03


@dataclass(frozen=True)
class PeerKernelDecision:
    """Whether a program may have kernels that address peers' memory.

    Attributes:
      allowed: whether it may.
      reason: why, or why not.
      gain_seconds: what the sites are predicted to gain, in one run of the program.
      cost_seconds: predicted time of the collectives that nothing can hide then.
      seconds_without: predicted time of all sites without these kernels.
      withheld: decisions for sites of the program that would have such kernels.
      unsupported_reasons: why they could not execute others, where they should be faster.
      causes: all operations for which XLA may add collectives that the program does not show.
    """

    allowed: bool
    reason: str
    gain_seconds: float = 0.0
    cost_seconds: float = 0.0
    seconds_without: float = 0.0
    withheld: tuple[Decision, ...] = field(default=(), repr=False)
    unsupported_reasons: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = field(default=(), repr=False)

    @property
    def matters(self) -> bool:
        """Whether such kernels should be faster for some op, by prediction."""
        return bool(self.withheld or self.unsupported_reasons)

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

    Ops and collectives count that XLA executes: not what computes nothing that the program returns.
    A collective counts if NCCL executes it, at any depth and as often as loops repeat it. Over axes
    of one device it takes no time. Permutes within one process stay asynchronous. What XLA may add
    by itself counts with an estimate; where nothing is known of it, the kernels are not allowed.

    Args:
      program: the program, without kernels that address peers' memory.
      counter: what numbered its decisions.
    """
    if not any(e.peer_alternative or e.peer_unsupported_reason for e in counter.decisions.values()):
        return NO_SITE
    # One name may belong to meshes of several sizes: the larger one costs more.
    meshes, gpu = _meshes(program), assumed_rates()
    axis_sizes = dict(sorted(pair for mesh in meshes for pair in mesh.shape.items()))
    between_nodes = {
        name for mesh in meshes for name in mesh.shape if transport_along(mesh, name) == "network"
    }
    withheld: list[Decision] = []
    unsupported_reasons: dict[str, None] = {}

    def of_op(number: int) -> dict[str, float]:
        decision = counter.decisions[number]
        alternative = decision.peer_alternative
        if decision.peer_unsupported_reason is not None:
            unsupported_reasons[decision.peer_unsupported_reason] = None
        if alternative is None:
            return {"without": decision.seconds or 0.0, "cost": _overlapped_seconds(decision)}
        if decision not in withheld:
            withheld.append(decision)
        return {"without": alternative.seconds_without, "gain": alternative.seconds_gained}

    def of_equation(equation: JaxprEqn) -> dict[str, float]:
        if not is_collective_kernel(equation):
            return {}
        return {"cost": collective_seconds(equation, axis_sizes, gpu, between_nodes)}

    program = without_dead_code(program)
    seconds: Mapping[str, float] = totals(program, of_op, of_equation, _most)
    if not withheld:
        reason = "; ".join((NO_SITE.reason, *unsupported_reasons))
        return replace(NO_SITE, reason=reason, unsupported_reasons=tuple(unsupported_reasons))
    causes = causes_in(program, axis_sizes, gpu, between_nodes)
    gain, without = seconds["gain"], seconds["without"]
    cost = seconds["cost"] + sum(cause.seconds or 0.0 for cause in causes)
    unknown = [cause for cause in causes if cause.seconds is None]
    allowed = not unknown and gain > 0 and gain - cost >= MARGIN * without
    reason = _comparison(gain, cost, without, causes[len(unknown) :])
    if unknown:
        reason = f"{_work_of_unknown_time(unknown)}; {reason}"
    elif gain > 0 and not allowed:
        cure = f"; {cures(causes)}" if causes else ""
        reason += f"{cure}; in all, they must save {MARGIN:.0%}"
    found = tuple(withheld), tuple(unsupported_reasons), causes
    return PeerKernelDecision(allowed, reason, gain, cost, without, *found)


def warn_withheld(withheld: Iterable[Decision], reason: str) -> None:
    """Warns of sites where a better backend was not possible without such kernels, once."""
    for decision in withheld:
        alternative = decision.peer_alternative
        if alternative is not None and alternative.missed:
            fallback = f"{decision.site.op} falls back to {decision.implementation}"
            warn_once(f"{fallback}: {alternative.missed}: {reason}")


def _comparison(gain: float, cost: float, without: float, causes: Sequence[Cause]) -> str:
    if gain <= 0:
        return "by prediction the ops gain nothing from them"
    gained = f"they are predicted to save {gain * 1e6:,.0f} of {without * 1e6:,.0f} µs of all ops"
    if cost == 0:
        return f"{gained}, and no other collective loses by them"
    compared = (
        f"{gained}, and other collectives, which nothing hides then, take {cost * 1e6:,.0f} µs"
    )
    if not causes:
        return compared
    added = sum(cause.seconds or 0.0 for cause in causes)
    return (
        f"{compared}; about {added * 1e6:,.0f} µs of that are for collectives that the compiler"
        f" may add, as it divides {divided(causes)}"
    )


def _most(branches: Iterable[Counter]) -> Counter:
    """The largest gain, cost and time of all branches, which may be different ones."""
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
        for equation in distinct_equations(jaxpr)
        if equation.primitive.name == "shard_map"
    )
    return list(dict.fromkeys(found))


def _work_of_unknown_time(causes: Sequence[Cause]) -> str:
    """Why nobody can tell what the compiler adds, and what to do."""
    return (
        f"the compiler divides {divided(causes)}, and may add collectives that the program does not"
        f" show; {cures(causes)}; where the compiler adds few, peer_kernels=True may be faster:"
        " measure both"
    )
