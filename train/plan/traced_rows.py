"""The first row of a plan, and what it advises, with the memory that a trace of a step finds.

Estimates take no time, and are some percent off. So what is near the limit is traced, as a dry run
does it, before a plan says that it fits.
"""

from __future__ import annotations

import dataclasses

from models.parameters.adapters import Training
from train.config.config import Config
from train.config.counts import counted
from train.memory.step_memory import memory_of
from train.memory.tracing import tracing
from train.parallel.mesh import make_abstract_mesh
from train.plan.candidates import ACTIVATIONS, Candidate, Machine, Plan, describe, make_plan
from train.plan.rings import GPUS_OF_A_NODE

#: Estimates of this share of the limit, and of less, are far enough below it; and those of models
#: with experts.
_FAR_BELOW, _FAR_BELOW_WITH_EXPERTS = 0.9, 0.6
#: How far estimates of memory may be above what a trace finds, and where they are less sure, which
#: is beside frozen weights and with experts; tests hold them to that. They may be too low by
#: `MARGIN`, and of models with experts by the last number. docs/how_to/plan.md has these numbers,
#: and what they are from.
TOO_HIGH, TOO_HIGH_IF_UNSURE, TOO_LOW_WITH_EXPERTS = 0.1, 0.3, 0.36
#: Rows that are traced at most until one fits: each takes up to 20 seconds.
_MOST_TRACES = 3


def trace_first(plan: Plan, machine: Machine) -> None:
    """Traces the first row of a plan if its estimate is near the limit, or, where nothing fits, the
    configuration that nearly does. What does not fit leaves the plan, and the next is the first.

    Args:
      plan: the plan, which changes.
      machine: what it is for.
    """
    for _ in range(_MOST_TRACES):
        first = next(iter(plan.fitting), plan.smallest)
        if first is None or (traced := _traced_if_near(first, machine)) is first:
            return
        if not plan.fitting and traced.bytes > machine.limit:
            plan.smallest = traced
        elif not plan.fitting:
            plan.accept_smallest(traced)
        elif traced.bytes <= machine.limit:
            plan.fitting = [traced, *plan.fitting[1:]]
        else:
            _leave_out(traced, plan, machine)


def fits(config: Config, machine: Machine, way: str) -> bool:
    """Whether something of a plan fits, so that it has rows: by the estimate, or by a trace if that
    is near the limit.

    Args:
      config: as of `make_plan`.
      machine: likewise.
      way: what is tried, in flags, for a line to who waits.
    """
    plan = make_plan(config, machine)
    least = min(plan.fitting, key=lambda each: each.bytes, default=plan.smallest)
    return least is not None and _traced_if_near(least, machine, way).bytes <= machine.limit


def _leave_out(traced: Candidate, plan: Plan, machine: Machine) -> None:
    """Takes the first row out of a plan, and those of its mesh that do not fit either if their
    estimates are as far off."""
    _, *rest = plan.fitting
    plan.refuse(ACTIVATIONS, _too_large(traced, machine), traced.bytes)
    plan.fitting, off = [], traced.bytes / traced.memory.total
    for each in rest:
        if each.sizes != traced.sizes or off * each.bytes <= machine.limit:
            plan.fitting.append(each)
        else:
            plan.refused[ACTIVATIONS] += 1


def is_near(candidate: Candidate, machine: Machine) -> bool:
    """Whether a trace has to say whether a configuration fits: its estimate is near the limit, and
    nothing was traced."""
    config = candidate.config
    has_experts = config.model.num_experts is not None
    is_unsure = has_experts or Training(config.lora, config.freeze).freezes
    most = 1 + (TOO_HIGH_IF_UNSURE if is_unsure else TOO_HIGH)
    least = _FAR_BELOW_WITH_EXPERTS if has_experts else _FAR_BELOW
    is_close = least * machine.limit < candidate.bytes <= most * machine.limit
    return candidate.traced_bytes is None and is_close


def _too_large(traced: Candidate, machine: Machine) -> str:
    which, limit = describe(traced.config, traced.sizes), f"{machine.limit / 1e9:.1f} GB"
    return f"{which}: takes {traced.bytes / 1e9:,.1f} GB by a trace, and {limit} may be used"


def _traced_if_near(candidate: Candidate, machine: Machine, way: str | None = None) -> Candidate:
    """A configuration with its traced bytes, if it has none and its estimate is near the limit.

    `way` says which flags are tried, if these are not what was asked for.
    """
    if not is_near(candidate, machine):
        return candidate
    config, sizes = candidate.config, candidate.sizes
    mesh = make_abstract_mesh(sizes, machine.abstract_device)
    layers = counted(config.model.num_layers, "layer")
    which = describe(config, sizes) if way is None else f"{sizes} with {way}"
    with tracing(f"{layers} of {which}, whose estimate is near the limit"):
        memory = memory_of(config, mesh, local_devices=GPUS_OF_A_NODE)
    return dataclasses.replace(candidate, traced_bytes=memory.total)
