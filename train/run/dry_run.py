"""Memory and communication of a run on each device, computed by tracing alone."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
from jax.sharding import AbstractDevice, AbstractMesh
from rich.console import Console
from rich.table import Table

from collective_matmul import AttentionDecision, explain, explain_attention
from train.checkpoint.initial_weights import model_name
from train.config.checks import check
from train.config.config import Config, MeshSizes
from train.config.context import describe_context
from train.config.defaults import describe_defaults
from train.config.experts import describe_experts
from train.config.loss_chunks import describe_loss_chunks
from train.memory.device_memory import memory_fraction, memory_limit, usable, verdict
from train.memory.step_memory import Memory, abstract_batch, advice, memory_of
from train.optimizer.muon import describe_muon
from train.optimizer.optimizer import make_optimizer
from train.parallel.mesh import make_abstract_mesh
from train.parallel.model import ModelFunctions, describe_trained, state_on_mesh
from train.parallel.zero import describe_zero
from train.plan.communication import GPUS_OF_A_NODE
from train.plan.run import predict_run
from train.step import sharded_step


class Gpu(NamedTuple):
    """A kind of GPU to predict for.

    Attributes:
      device: what JAX knows of it.
      capacity: its bytes, by its data sheet.
      remark: what its predictions come from; None for measurements.
    """

    device: AbstractDevice
    capacity: int
    remark: str | None = None

    @property
    def memory(self) -> int:
        """The bytes that XLA may allocate."""
        return int(self.capacity * memory_fraction())


GPUS = {
    "H200": Gpu(AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu"), 141 * 10**9),
    "H100": Gpu(AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"), 80 * 10**9),
    "A100": Gpu(
        AbstractDevice("NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu"),
        80 * 10**9,
        "times on an A100 are estimated from its data sheet, for xla and rings; none was measured",
    ),
}


def dry_run(config: Config, sizes: MeshSizes, console: Console) -> None:
    """Prints bytes per device and the collective matmuls of one step on a mesh.

    Compiles nothing and needs no devices; the mesh may have any size. Predicts for the GPUs of this
    machine, or for those that the configuration names, or for H200.

    Raises:
      ValueError: for sizes that do not fit together.
    """
    config = dataclasses.replace(config, model=config.model.padded_for(sizes.tensor))
    check(config, sizes)
    here = config.device is None and jax.default_backend() == "gpu"
    gpu = None if here else GPUS[config.device or "H200"]
    model = ModelFunctions(config, sizes, GPUS_OF_A_NODE)
    console.print(
        f"{model_name(config)}: {model.parameter_count:,} parameters on {sizes},"
        f" {config.batch_size} sequences of {config.sequence_length} tokens per step",
        highlight=False,
        soft_wrap=True,
    )
    for line in (
        *describe_trained(model),
        *describe_zero(config, model, sizes),
        *describe_experts(config, sizes, model.active_parameter_count),
        *describe_context(config, sizes),
        *describe_loss_chunks(config, sizes),
        *describe_muon(config.optimizer, model.abstract_params),
        *describe_defaults(config),
    ):
        console.print(line, highlight=False, soft_wrap=True)
    mesh = make_abstract_mesh(sizes, None if gpu is None else gpu.device)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    state = state_on_mesh(model, optimizer, mesh)
    memory = memory_of(config, mesh, model, state, local_devices=GPUS_OF_A_NODE)
    _print_memory(memory, config, console)
    if gpu is None:
        limit, kind = memory_limit(jax.local_devices()[0])
    else:
        limit, kind = gpu.memory, f"that JAX may use of {gpu.device.device_kind}"
        kind += f", {memory_fraction():.0%} of its memory"
    sentence = verdict(memory.total, limit, kind)
    if limit is not None and memory.total > usable(limit):
        sentence += f": {advice(config, mesh, memory, usable(limit), GPUS_OF_A_NODE)}"
    console.print(sentence, highlight=False, soft_wrap=True)

    if sizes.context == 1:  # Else it is one of the ops of the table below.
        alone = " of whole sequences" if config.separate_documents or config.chat else ""
        for number in range(config.model.layer_period):
            kind = f"layer {number} of {config.model.layer_period}"
            which = "each layer" if config.model.layer_period == 1 else kind
            window = config.model.window_of(number)
            line = f"attention of {which}{alone}: {attention_of(config, sizes, mesh, window)}"
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    step = sharded_step(config, model, optimizer, mesh)
    where = "here" if gpu is None else f"on {gpu.device.device_kind}"
    lines = [f"one step {where}, with the number of times that each op runs:"]
    if gpu is not None and gpu.remark is not None:
        lines.insert(0, gpu.remark)
    explained = explain(step, peer_kernels=False, verbose=config.verbose)
    lines.append(str(explained(state, abstract_batch(config, config.batch_size))))
    lines.append(describe_prediction(config, sizes, device_kind_of(config), mesh))
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def device_kind_of(config: Config) -> str:
    """JAX's name of the GPU that a dry run predicts for."""
    if config.device is None and jax.default_backend() == "gpu":
        return jax.local_devices()[0].device_kind
    return GPUS[config.device or "H200"].device.device_kind


def describe_prediction(
    config: Config, sizes: MeshSizes, device_kind: str, mesh: AbstractMesh
) -> str:
    """The predicted time of a step, or why there is none."""
    try:
        kernel = attention_kernel(config, sizes, mesh)
        return str(predict_run(config, sizes, device_kind, kernel))
    except ValueError as error:
        return str(error)


def attention_kernel(config: Config, sizes: MeshSizes, mesh: AbstractMesh) -> str:
    """The kernel of attention in the layers that see the most tokens."""
    windows = [config.model.window_of(number) for number in range(config.model.layer_period)]
    widest = None if None in windows else max(filter(None, windows))
    return attention_of(config, sizes, mesh, widest).implementation


def attention_of(
    config: Config, sizes: MeshSizes, mesh: AbstractMesh, window: int | None
) -> AttentionDecision:
    """The kernel of attention with a sliding window, and why; for a sequence of one document."""
    model, dtype = config.model, config.compute_dtype
    groups = sizes.data * sizes.fsdp * config.gradient_accumulation_steps
    tokens = config.batch_size // groups, config.sequence_length
    copies = model.key_value_copies(sizes.tensor)
    query, key = (
        jax.ShapeDtypeStruct((*tokens, heads // sizes.tensor, model.head_dim), dtype)
        for heads in (model.num_heads, model.num_key_value_heads * copies)
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return explain_attention(
            query,
            key,
            window=window,
            implementation=None if config.attention == "auto" else config.attention,
        )


def _print_memory(memory: Memory, config: Config, console: Console) -> None:
    table = Table("bytes per device", "", box=None)
    dtypes = config.compute_dtype + (" and 8 bits" if config.fp8 else "")
    sizes = {
        "parameters": memory.parameters,
        f"optimizer state ({config.optimizer.kind})": memory.optimizer_state,
        f"weights in {dtypes}, when most is in use": memory.weights,
        "activations and gradients, then": memory.activations,
        "total": memory.total,
    }
    for name, size in sizes.items():
        table.add_row(name, f"{size:,}")
    console.print(table)
