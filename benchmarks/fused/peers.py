"""PyTorch on the ops that the fused kernels carry out, once JAX has left the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fused.cases import FEATURES, Case, Op
from benchmarks.peers import PEERS, torch_stack, undivided
from benchmarks.settings import Settings
from benchmarks.stack import FeedForward

Content = dict[str, Any]

#: A benchmark that may take for ever gives PyTorch so many seconds.
_LIMIT_SECONDS = 600.0


@dataclass(frozen=True)
class OpStack:
    """A case as PyTorch is told of it: an op so many times, each with its own weight."""

    name: str
    op: Op
    shape: FeedForward
    layers: int

    @property
    def divided_sizes(self) -> dict[str, int]:
        sizes = {"rows": self.shape.rows, "hidden_features": self.shape.hidden_features}
        if self.op == "matmul_all_reduce":
            del sizes["rows"]
        return sizes


def op_stack(case: Case, layers: int) -> OpStack:
    """As many ops as layers."""
    shape = FeedForward(case.model, case.rows, *FEATURES[case.model])
    return OpStack(case.name, case.op, shape, layers)


def time_peers(
    cases: Sequence[Case], *, devices: int, layers: int, settings: Settings, seconds_left: float
) -> dict[Case, dict[str, Content]]:
    """By case and peer what `benchmarks.peers.PeerRun` holds of it: with samples, or a failure."""
    stacks = {case: op_stack(case, layers) for case in cases}
    refused = {case: undivided(stack, devices) for case, stack in stacks.items()}
    ran = torch_stack(
        [stack for case, stack in stacks.items() if refused[case] is None],
        devices=devices,
        platform=settings.platform,
        dtype=settings.dtype,
        groups=settings.groups,
        group_seconds=settings.group_seconds,
        limit_seconds=min(seconds_left, _LIMIT_SECONDS),
    )
    measured = {(result["name"], result["peer"]): result for result in ran.results}
    missing = ran.reason or "the time was over before its turn"
    return {
        case: {
            peer: measured.get((case.name, peer), {"failure": refused[case] or missing})
            for peer in PEERS
        }
        for case in cases
    }


def options_tried(content: Content) -> str:
    """What PyTorch tried, the fastest first, in microseconds per op, and what did not run."""
    layers = content["settings"]["layers"]
    lines = []
    for case in content["cases"]:
        for peer, result in case["peers"].items():
            tried = sorted(result.get("tried", {}).items(), key=lambda item: item[1])
            said = [f"{name} {1e6 * seconds / layers:.1f}" for name, seconds in tried]
            said += [f"{name}: {reason}" for name, reason in result.get("not_run", {}).items()]
            if said:
                lines.append(f"- {case['name']}, {peer}: {'; '.join(said)}")
    if not lines:
        return ""
    how = (
        "Timed after the others, in processes of its own: µs per op in a short trial, of which"
        " the fastest was timed."
    )
    return "\n".join(["## How PyTorch ran", "", how, "", *lines])
