"""The configurations that a number of GPUs may run, those that fit, and why the others do not.

What somebody set is kept, whatever its value. Everything else that changes no number of the model
is free: the mesh, the ZeRO level, what is recomputed, the loop over layers, and microbatches. The
batch is one for all configurations, so that their speeds compare.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

from jax.sharding import AbstractDevice

from models.blocks.rematerialization import Remat
from models.parameters.adapters import Training
from train.config.checks import check
from train.config.config import Config, MeshConfig, MeshSizes, Zero
from train.memory.device_memory import usable
from train.parallel.mesh import mesh_sizes
from train.parallel.weight_gather import where_gathered
from train.parallel.zero import nothing_sharded
from train.plan.memory_estimate import MemoryEstimate, predict_memory
from train.plan.rings import GPUS_OF_A_NODE
from train.plan.step_time import NETWORK_BYTES, Prediction, predict

#: Fewer tokens of a sequence on a device are not worth a context axis: two GPUs with 4096 tokens
#: each took 23 % longer than with a tensor axis (report plan-2-h100).
_LEAST_TOKENS_OF_CONTEXT = 8192


#: Reasons that are about memory.
_TOO_LARGE = STATE, ACTIVATIONS = (
    "state does not fit",
    "activations and gradients do not fit",
)


@dataclass(frozen=True)
class Machine:
    """The GPUs that a plan is for.

    Attributes:
      devices: number of GPUs.
      device_kind: JAX's name of them.
      memory: bytes of each.
      network_bytes: bytes per second that each sends to other nodes.
      attention: the kernel of attention.
      abstract_device: the kind that steps are traced for; None: that of this machine.
    """

    devices: int
    device_kind: str
    memory: int
    network_bytes: float = NETWORK_BYTES
    attention: str = "cudnn"
    abstract_device: AbstractDevice | None = None

    @property
    def limit(self) -> int:
        """Bytes that an estimate may have."""
        return usable(self.memory)


@dataclass(frozen=True)
class Candidate:
    """A configuration with a mesh of which no size is 0."""

    config: Config
    sizes: MeshSizes
    memory: MemoryEstimate
    prediction: Prediction
    traced_bytes: int | None = None
    """What a trace says that the memory is; None: nothing was traced."""

    @property
    def seconds(self) -> float:
        return self.prediction.time.total

    @property
    def bytes(self) -> float:
        """The memory of a device, as exactly as it is known."""
        return self.memory.total if self.traced_bytes is None else self.traced_bytes


def choices(config: Config, sizes: MeshSizes) -> dict[str, str]:
    """The values that a plan chooses, by name: the columns of its table."""
    values = {
        "mesh": sizes,
        "ZeRO": config.zero,
        "remat": config.remat,
        "scan": config.scan_layers or "-",
        "microbatches": config.gradient_accumulation_steps,
    }
    if config.model.num_experts is not None:
        values["experts"] = config.expert_axes
    return {name: str(value) for name, value in values.items()}


def describe(config: Config, sizes: MeshSizes) -> str:
    """A configuration as a row of the table has it, within a sentence."""
    return ", ".join(
        value if name == "mesh" else f"{name} {value}"
        for name, value in choices(config, sizes).items()
    )


@dataclass
class Plan:
    """The configurations of a machine.

    Attributes:
      fitting: those that fit, the fastest first.
      refused: how many do not, by reason.
      examples: for each reason, the bytes of the two configurations that need least, and a
        sentence about each.
      smallest: of the configurations that are too large, the one that needs least; None: of none.
    """

    fitting: list[Candidate] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    smallest: Candidate | None = None

    @property
    def candidates(self) -> list[Candidate]:
        """The fastest of each mesh, placement of experts and recipe, in the order of `fitting`."""
        fastest: dict[Any, Candidate] = {}
        for candidate in self.fitting:
            config = candidate.config
            key = candidate.sizes, config.expert_axes, config.fp8, config.lora.base_format
            fastest.setdefault(key, candidate)
        return list(fastest.values())

    @property
    def is_too_large(self) -> bool:
        """Whether nothing fits, and more memory would help."""
        return not self.fitting and any(reason in self.refused for reason in _TOO_LARGE)

    def refuse(self, reason: str, example: str, needed: float = 0.0) -> None:
        """Counts a configuration that does not fit, or that is not possible and needs no bytes."""
        self.refused[reason] += 1
        found = [*self.examples.get(reason, ()), (needed, example)]
        self.examples[reason] = sorted(found, key=lambda each: each[0])[:2]

    def accept_smallest(self, traced: Candidate) -> None:
        """Takes the smallest of what is too large for a row, as a trace finds that it fits."""
        self.fitting, self.smallest = [traced], None
        for reason, found in list(self.examples.items()):
            if reason in _TOO_LARGE and found[0][0] == traced.memory.total:
                self.refused[reason] -= 1
                del found[0]
        self.refused += Counter()  # Without reasons of nothing.

    def nearest(self, reason: str) -> str:
        """A sentence about the configuration that needs least of those with a reason."""
        return self.examples[reason][0][1]


def make_plan(config: Config, machine: Machine) -> Plan:
    """All configurations of a machine, in an order that depends on the arguments alone.

    Args:
      config: what was asked for, with the model that it says.
      machine: the GPUs.
    """
    plan = Plan()
    config = dataclasses.replace(config, batch_size=planned_batch_size(config, machine.devices))
    for sizes in meshes(config, machine.devices):
        for changes in shardings(config, sizes):
            padded = config.model.padded_for(sizes.tensor)
            sharded = dataclasses.replace(config, model=padded, mesh=MeshConfig(*sizes), **changes)
            try:
                check_sharded(sharded, sizes)
            except ValueError as error:
                plan.refuse(str(error).partition("=")[0], str(error))
                continue
            plan.fitting += _fitting(sharded, sizes, machine, plan)
    plan.fitting.sort(key=lambda candidate: (candidate.seconds, candidate.sizes[::-1]))
    return plan


def check_sharded(config: Config, sizes: MeshSizes) -> None:
    """Checks that a configuration fits a mesh, and that matmuls can gather frozen weights there.

    Raises:
      ValueError: if they do not.
    """
    check(config, sizes)
    if config.zero == 3 and sizes.weight_shards > 1:
        freezes = Training(config.lora, config.freeze).freezes
        where_gathered(config, sizes, GPUS_OF_A_NODE, freezes=freezes)


def unfit_mesh(config: Config, devices: int) -> str:
    """Says why no mesh of all devices has the axes that were asked for, where none has, in the
    trainer's words if it refuses that mesh too."""
    try:
        sizes = mesh_sizes(config, devices, GPUS_OF_A_NODE)
        padded = config.model.padded_for(sizes.tensor)
        # This is about the mesh: a batch that it divides.
        batch = sizes.data * sizes.fsdp * config.gradient_accumulation_steps
        check_sharded(dataclasses.replace(config, model=padded, batch_size=batch), sizes)
    except ValueError as error:
        return str(error)
    if config.zero and sizes.weight_shards == 1:
        return nothing_sharded(config)
    if sizes.devices == devices:
        return (
            f"mesh.tensor={sizes.tensor}: expected a divisor of the {GPUS_OF_A_NODE} GPUs of a"
            " node, within which a plan keeps the tensor axis; give another --mesh.tensor, or leave"
            " it out"
        )
    return (
        f"{sizes.flags} has {sizes.devices} of {devices} devices; expected a mesh of all: leave out"
        f" an axis, or give --devices {sizes.devices}"
    )


def is_free(config: Config, name: str) -> bool:
    """Whether a plan chooses the value of a field, by dotted name: nobody set it."""
    return name not in config.given


def planned_batch_size(config: Config, devices: int) -> int:
    """Sequences per step: as many as were asked for, or the preset's rounded up to a multiple of
    `devices`."""
    if not is_free(config, "batch_size"):
        return config.batch_size
    return -(-config.batch_size // devices) * devices


def meshes(config: Config, devices: int) -> Iterator[MeshSizes]:
    """The meshes of all devices whose tensor axis fits the model and a node."""
    asked = config.mesh
    most = devices if config.distributed.tensor_across_processes else GPUS_OF_A_NODE
    parts = config.sequence_length // _LEAST_TOKENS_OF_CONTEXT
    # A context axis of 1 is the default, so it is kept only where somebody set it.
    is_any = asked.context <= 1 and is_free(config, "mesh.context")
    for tensor in _divisors(devices, asked.tensor):
        if tensor > most or (tensor < GPUS_OF_A_NODE < devices and GPUS_OF_A_NODE % tensor):
            continue
        for context in _divisors(devices // tensor, 0 if is_any else asked.context):
            if context > max(parts, asked.context, 1):
                continue
            for fsdp in _divisors(devices // (tensor * context), asked.fsdp):
                data = devices // (tensor * context * fsdp)
                if asked.data in (0, data):
                    yield MeshSizes(data, fsdp, tensor, context)


def _divisors(number: int, only: int) -> list[int]:
    """The divisors of a number, or `only` if that is one and not 0."""
    return [n for n in range(1, number + 1) if number % n == 0 and only in (0, n)]


def shardings(config: Config, sizes: MeshSizes) -> Iterator[dict[str, Any]]:
    """ZeRO levels that shard something, or that were asked for with this fsdp axis, and placements
    of experts."""
    levels: Iterable[int] = get_args(Zero) if is_free(config, "zero") else (config.zero,)
    placements: Iterable[str] = (config.expert_axes,)
    if config.model.num_experts is not None and is_free(config, "expert_axes"):
        placements = ("tensor", "fsdp", "both")
    for axes in placements:
        if axes == "both" and 1 in (sizes.tensor, sizes.fsdp):
            continue  # The same as one of the others.
        for zero in levels:
            if zero and sizes.weight_shards == 1:
                continue
            is_asked = config.mesh.fsdp == sizes.fsdp and not is_free(config, "zero")
            if not zero and sizes.fsdp > 1 and axes == "tensor" and not is_asked:
                continue  # The same as more replicas.
            yield {"zero": zero, "expert_axes": axes}


def _fitting(config: Config, sizes: MeshSizes, machine: Machine, plan: Plan) -> Iterator[Candidate]:
    """Yields what fits of all kinds of remat, loops and numbers of microbatches."""
    options = {"network_bytes": machine.network_bytes, "attention": machine.attention}
    for changes in _microbatches_and_remat(config, sizes):
        changed = dataclasses.replace(config, **changes)
        memory = predict_memory(changed, sizes)
        if is_too_large := memory.total > machine.limit:
            plan.refuse(*_too_large(changed, sizes, memory, machine), needed=memory.total)
            if plan.smallest is not None and plan.smallest.memory.total <= memory.total:
                continue
        prediction = predict(changed, sizes, machine.device_kind, **options)
        candidate = Candidate(changed, sizes, memory, prediction)
        if is_too_large:
            plan.smallest = candidate
        else:
            yield candidate


def _microbatches_and_remat(config: Config, sizes: MeshSizes) -> Iterator[dict[str, Any]]:
    steps = config.gradient_accumulation_steps
    only = 0 if is_free(config, "gradient_accumulation_steps") else steps
    loops = (0, 1) if is_free(config, "scan_layers") else (config.scan_layers,)
    levels = get_args(Remat) if is_free(config, "remat") else (config.remat,)
    for remat, scan in itertools.product(levels, loops):
        for count in _divisors(config.batch_size // (sizes.data * sizes.fsdp), only):
            yield {"remat": remat, "scan_layers": scan, "gradient_accumulation_steps": count}


def _too_large(
    config: Config, sizes: MeshSizes, memory: MemoryEstimate, machine: Machine
) -> tuple[str, str]:
    """Why a configuration does not fit into memory, in short and with numbers."""
    limit = f"{machine.limit / 1e9:.1f} GB may be used"
    state, total = (f"{size / 1e9:,.1f} GB" for size in (memory.state, memory.total))
    which = describe(config, sizes)
    if memory.state > machine.limit:
        return STATE, f"{which}: parameters and optimizer state alone take {state}, and {limit}"
    return ACTIVATIONS, f"{which}: takes {total}, {state} of it state, and {limit}"
