"""The first row of a plan, with the memory that a trace of its step finds.

Estimates take no time, and are some percent off. So what is near the limit is traced, as a dry run
does it, before a plan says that it fits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from models.parameters.adapters import Training
from train.config.counts import counted
from train.memory.step_memory import memory_of
from train.memory.tracing import tracing
from train.parallel.mesh import make_abstract_mesh
from train.plan.candidates import ACTIVATIONS, Candidate, Machine, Plan
from train.plan.rings import GPUS_OF_A_NODE

#: Estimates of this share of the limit, and of less, are far enough below it.
_FAR_BELOW = 0.9
#: How far estimates of memory may be above what a trace finds, without frozen weights and beside
#: them; tests hold them to that. They may be too low by `MARGIN`. docs/how_to/plan.md has these
#: numbers, and what they are from.
TOO_HIGH, TOO_HIGH_BESIDE_FROZEN = 0.1, 0.3
#: Rows that are traced at most until one fits: each takes up to 20 seconds.
_MOST_TRACES = 3


def trace_first(plan: Plan, machine: Machine, device: Any) -> None:
    """Traces the first row of a plan if its estimate is near the limit, or, where nothing fits, the
    configuration that nearly does. What does not fit leaves the plan, and the next is the first.

    Args:
      plan: the plan, which changes.
      machine: what it is for.
      device: the kind of device that is traced for; None: that of this machine.
    """
    for _ in range(_MOST_TRACES):
        first = next(iter(plan.fitting), plan.smallest)
        if first is None or first.traced_bytes is not None:
            return
        freezes = Training(first.config.lora, first.config.freeze).freezes
        too_high = TOO_HIGH_BESIDE_FROZEN if freezes else TOO_HIGH
        if not _FAR_BELOW * machine.limit < first.bytes <= (1 + too_high) * machine.limit:
            return
        traced = _traced(first, device)
        rest = [each for each in plan.fitting if each is not first]
        if traced.bytes <= machine.limit:
            plan.fitting = [traced, *rest]
        elif rest:
            plan.fitting = rest
            plan.refused[ACTIVATIONS] += 1
        else:
            plan.fitting, plan.smallest = [], traced


def _traced(candidate: Candidate, device: Any) -> Candidate:
    mesh = make_abstract_mesh(candidate.sizes, device)
    layers = counted(candidate.config.model.num_layers, "layer")
    with tracing(f"{layers} of {candidate.sizes}, whose estimate is near the limit"):
        memory = memory_of(candidate.config, mesh, local_devices=GPUS_OF_A_NODE)
    return dataclasses.replace(candidate, traced_bytes=memory.total)
