"""How the time of a training step is spent, part by part, and the least that each could take.

At each instant a device computes, or else waits for communication, or else is idle. An instant in
which several kernels run counts for the one that began first. So the times of the parts add up to
the time of the step. A part is a scope of the model or the trainer: the compiled program's metadata
has the scopes of each instruction, and each kernel of a profile names its instruction.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from benchmarks.timeline.analysis import COMPUTE, DeviceTimeline, Kind, kind_of
from benchmarks.timeline.intervals import gaps, intersection, length, union
from benchmarks.timeline.trace import Event
from models.blocks.rematerialization import recomputes_feed_forward, recomputes_projections
from train.config.config import Config, MeshSizes
from train.plan.shapes import Shapes

#: Scopes of the model and the trainer: those whose matmuls are a part of their own, and others.
MATMUL_SCOPES = ("qkv", "attention_output", "feed_forward", "head")
SCOPES = (
    *MATMUL_SCOPES, "embedding", "norm", "rotary", "attention", "loss",
    "weights", "gradient_accumulation", "gradient_norm", "optimizer",
)  # fmt: skip

# As in "jit(step)/transpose(jvp(norm))/mul". Functions, as in "jit(norm)", are no scopes.
_SCOPE = re.compile(rf"(?<![\w.'])(?<!jit\()({'|'.join(SCOPES)})(?=[/);]|$)")
_OP_NAME = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*?op_name="([^"]*)"', re.M)
_COLLECTIVE = re.compile(
    r"collective-(permute|broadcast)|all-(gather|reduce|to-all)|reduce-scatter"
)

#: Microseconds by part and direction: forward, backward, or neither.
PartTimes = defaultdict[tuple[str, str], float]


class Part(NamedTuple):
    """A part on an average device in one step. Times are ms; `floor` is None if unknown."""

    part: str
    time: float
    forward: float
    backward: float
    floor: float | None


def instruction_names(hlo: str) -> dict[str, str]:
    """The metadata op_name of each instruction of a compiled program's text."""
    return dict(_OP_NAME.findall(hlo))


def make_rows(
    timelines: Iterable[DeviceTimeline],
    names: Mapping[str, str],
    floors: Mapping[str, float | None] | None,
) -> list[Part]:
    """All parts, those longest beyond their floors first. `floors` are ms; None: none is known."""
    spent: PartTimes = defaultdict(float)
    executions = 0
    for timeline in timelines:
        for key, time in spend(timeline, names).items():
            spent[key] += time
        executions += timeline.executions
    rows = []
    for part in dict.fromkeys([*(part for part, _ in spent), *(floors or ())]):
        times = [spent[part, direction] / executions / 1e3 for direction in _DIRECTIONS]
        floor = None if floors is None else floors.get(part, 0.0)
        forward, backward, neither = times
        rows.append(Part(part, forward + backward + neither, forward, backward, floor))
    return sorted(rows, key=lambda row: (row.floor or 0.0) - row.time)


_DIRECTIONS = ("forward", "backward", "")


def spend(timeline: DeviceTimeline, names: Mapping[str, str]) -> PartTimes:
    """The microseconds of each part and direction; they add up to the timeline's duration."""
    computing = [event for event in timeline.events if kind_of(event) in COMPUTE]
    others = [event for event in timeline.events if kind_of(event) not in COMPUTE]
    spent: PartTimes = defaultdict(float, {("idle", ""): timeline.idle})
    free = [timeline.window]
    for events in (computing, others):
        starts, ends = zip(*free, strict=True) if free else ((), ())
        claimed = timeline.window[0]
        for event in events:
            new = max(event.start, claimed), event.end
            if new[0] < new[1]:
                near = free[bisect_right(ends, new[0]) : bisect_left(starts, new[1])]
                spent[part_of(event, names)] += length(intersection([new], near))
                claimed = event.end
        free = gaps(union((event.start, event.end) for event in events), timeline.window)
    return spent


def part_of(event: Event, names: Mapping[str, str]) -> tuple[str, str]:
    """The part and direction of what a device did, by the innermost scope of its instruction."""
    name, kind = names.get(event.hlo_op, ""), kind_of(event)
    direction = "" if "jvp(" not in name else "backward" if "transpose(" in name else "forward"
    if kind not in COMPUTE:
        found = _COLLECTIVE.search(event.hlo_op.replace("_", "-"))
        return f"exposed {found.group() if found else kind}", direction
    if scopes := _SCOPE.findall(name):
        part = scopes[-1].replace("_", " ")
        if scopes[-1] in MATMUL_SCOPES:
            part += " matmuls" if kind is Kind.MATMUL else " other kernels"
        return part, direction
    # Loops over stacked layers write arrays and take slices. What XLA fuses of it loses its name.
    in_loop = "while/body" in name or re.search("dynamic|broadcast", f"{name} {event.hlo_op}")
    return "arrays of loops" if in_loop else "other", direction


class Rates(NamedTuple):
    """Rates that programs reach on a device: FLOP/s of bfloat16 matmuls, bytes/s of memory."""

    flops: float
    memory: float


#: Measured on H200: large matmuls at the power limit; a copy within a device, read and written.
#: H100 has the same multiprocessors, and its memory's share of H200's in their data sheets.
RATES = {
    "NVIDIA H200": Rates(790e12, 4.3e12),
    "NVIDIA H100 80GB HBM3": Rates(790e12, 3.0e12),
}

ASSUMPTIONS = (
    "A floor is the least that a part takes at {:.0f} TFLOP/s of matmuls and {:.1f} TB/s"
    " of memory. A matmul's backward has twice the FLOPs of its forward, causal attention's 2.5"
    " times; full remat adds attention's forward, and, as remat of all but attention does, that of"
    " the matmuls that gradients need."
    " Activations move once, in the compute dtype: 5 arrays for a norm, 3 for a residual sum, 8"
    " for the feed-forward's activation, 4 for rotary, 3 of the logits for the loss, and with remat"
    " those of the forward again. AdamW reads gradients, in the compute dtype unless they are"
    " summed in another, and its state, and writes that and weights. All else could hide: 0."
)


def make_floors(config: Config, sizes: MeshSizes, rates: Rates) -> dict[str, float | None]:
    """The least milliseconds that parts could take on one device; `ASSUMPTIONS` are in words.

    Parts without an entry have none; None is for those that nothing is known of.
    """
    # Each device has its share of the tokens, or of what is computed of each.
    tokens = config.batch_size * config.sequence_length / sizes.devices
    floors: dict[str, float | None] = {
        part: 1e3 * count / rates.memory for part, count in _least_bytes(config, sizes, tokens)
    }
    known = config.compute_dtype == "bfloat16"  # The rate is that of bfloat16.
    for part, flops in _flops_per_token(config).items():
        floors[part] = 1e3 * tokens * flops / rates.flops if known else None
    return floors if config.optimizer.kind == "adamw" else floors | {"optimizer": None}


def _flops_per_token(config: Config) -> dict[str, float]:
    model, full = config.model, config.remat == "full"
    again = recomputes_projections(config.remat)
    fed_again = recomputes_feed_forward(config.remat)
    heads = model.num_heads * model.head_dim
    key_value_heads = model.num_key_value_heads * model.head_dim
    block = 2 * model.num_layers * model.features
    return {
        "qkv matmuls": block * (heads + 2 * key_value_heads) * (3 + again),
        "attention": 2 * model.num_layers * heads * config.sequence_length * (3.5 + full),
        "attention output matmuls": block * heads * (3 + again),
        # Gradients need two of the forward's three products.
        "feed forward matmuls": block * model.hidden_features * (9 + 2 * fed_again),
        "head matmuls": 2 * model.features * model.vocabulary_size * 3,
    }


def _least_bytes(config: Config, sizes: MeshSizes, tokens: float) -> Iterable[tuple[str, float]]:
    model, again = config.model, config.remat != "none"
    size = jnp.dtype(config.compute_dtype).itemsize
    heads = (model.num_heads + model.num_key_value_heads) * model.head_dim
    sums = 2 * model.num_layers
    table = model.features * model.vocabulary_size / sizes.tensor
    shards = sizes.fsdp if config.zero else 1
    matmuls = model.matmul_parameters / sizes.tensor / shards
    parameters = matmuls + (0 if model.tied_head else table / shards)
    # XLA leaves a gradient in the compute dtype unless it is summed, or added up, in another one.
    is_summed = sizes.data * sizes.fsdp > 1
    summed = jnp.dtype(config.gradient_dtype if is_summed else config.compute_dtype).itemsize
    microbatches = config.gradient_accumulation_steps
    gradient = summed if microbatches == 1 else 4
    moved = tokens * size
    yield "embedding", moved * 3 * model.features + table * size
    yield "norm", moved * model.features * (5 * (sums + 1) + 3 * sums + again * 4 * sums)
    yield "rotary", moved * model.num_layers * heads * (4 + 2 * again)
    feed_forward = model.num_layers * model.hidden_features * (8 + 3 * again)
    yield "feed forward other kernels", moved * feed_forward
    yield "loss", moved * 3 * model.vocabulary_size
    written = Shapes(config, sizes).kept_weights
    yield "weights", (matmuls - written) * (4 + size) * (size < 4)
    yield "gradient norm", parameters * gradient
    yield "optimizer", parameters * (24 + gradient) + written * size
    if microbatches > 1:
        added = parameters * (1 if config.zero > 1 else shards)
        yield "gradient accumulation", added * microbatches * (8 + size)
