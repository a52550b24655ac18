"""Memory and communication of a run on each device, computed by tracing alone."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import AbstractMesh
from rich.console import Console
from rich.table import Table

from collective_matmul import explain
from train.config.checks import check, warnings_of
from train.config.config import Config, MeshSizes
from train.config.context import describe_context
from train.config.counts import counted
from train.config.defaults import describe_defaults
from train.config.experts import describe_experts
from train.config.loss_chunks import describe_loss_chunks
from train.config.model_folder import model_name
from train.memory.device_memory import GPUS, fit, memory_fraction, memory_limit, usable, verdict
from train.memory.step_memory import Memory, advice, memory_of
from train.memory.tracing import tracing
from train.optimizer.muon import describe_muon
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import state_on_mesh
from train.parallel.batches import abstract_batch
from train.parallel.mesh import make_abstract_mesh
from train.parallel.model import ModelFunctions, describe_trained
from train.parallel.zero import describe_zero
from train.plan.memory_estimate import predict_memory
from train.plan.mesh_choice import describe_faster_mesh, describe_mesh_here
from train.plan.rings import GPUS_OF_A_NODE
from train.plan.run import attention_kernel, attention_of, predict_run
from train.plan.step_time import BY_PART
from train.run.setup import check_inputs, with_padding
from train.step import sharded_step

_ONE_PROCESS = (
    "backends and times are those of one process; with several, rings over tensor cannot overlap,"
    " and the run prints after compilation whether kernels that address peers' memory replace them"
)
#: Why the table's times and a step's parts have other sums.
_TWO_ESTIMATES = (
    "times of ops and collectives above are estimated for each alone, to choose backends; a step's"
    " parts are fitted to measured steps, where matmuls and what is hidden under them run at other"
    " rates, so their sums differ"
)


def dry_run(config: Config, sizes: MeshSizes, console: Console) -> bool:
    """Prints bytes per device and the collective matmuls of one step on a mesh.

    Compiles nothing and needs no devices; the mesh may have any size. Predicts for the GPUs of this
    machine, or for those that the configuration names, or for H200.

    Returns:
      Whether the run fits into their memory, if that is known.

    Raises:
      ValueError: for sizes that do not fit together, and files that a run would refuse.
    """
    of_run_here = describe_mesh_here(config, sizes, device_kind_of(config))
    config = with_padding(config, sizes)
    check(config, sizes)
    here = config.device is None and jax.default_backend() == "gpu"
    gpu = None if here else GPUS[config.device or "H200"]
    model = ModelFunctions(config, sizes, GPUS_OF_A_NODE)
    check_inputs(config, model)
    console.print(
        f"{model_name(config)}: {model.parameter_count:,} parameters on {sizes},"
        f" {counted(config.batch_size, 'sequence')} of"
        f" {counted(config.sequence_length, 'token')} per step",
        highlight=False,
        soft_wrap=True,
    )
    for line in (
        *of_run_here,
        *describe_trained(model),
        *describe_zero(config, model, sizes),
        *describe_experts(config, sizes, model.active_parameter_count),
        *describe_context(config, sizes),
        *describe_loss_chunks(config, sizes),
        *describe_muon(config.optimizer, model.abstract_params),
        *describe_defaults(config),
        *warnings_of(config),
    ):
        console.print(line, highlight=False, soft_wrap=True)
    mesh = make_abstract_mesh(sizes, None if gpu is None else gpu.device)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    state = state_on_mesh(model, optimizer, mesh)
    layers = counted(config.model.num_layers, "layer")
    with tracing(f"{layers}, to know what memory a step takes"):
        memory = memory_of(config, mesh, local_devices=GPUS_OF_A_NODE)
    _print_memory(memory, config, console)
    if gpu is None:
        limit, kind = memory_limit(jax.local_devices()[0])
    else:
        limit, kind = gpu.memory, f"that JAX may use of {gpu.device.device_kind}"
        kind += f", {memory_fraction():.0%} of its memory"
    sentence = verdict(memory.total, limit, kind)
    fits = limit is None or memory.total <= usable(limit)
    if limit is not None and not fits:

        def estimate(config: Config, sizes: MeshSizes) -> float:
            return predict_memory(config, sizes).total

        with tracing("other configurations, to find one that fits"):
            flags = advice(config, mesh, memory, usable(limit), GPUS_OF_A_NODE, estimate)
        sentence += f": {flags}"
    console.print(sentence, highlight=False, soft_wrap=True)

    if sizes.context == 1:  # Else it is one of the ops of the table below.
        alone = " of whole sequences" if config.separate_documents or config.chat else ""
        for number in range(config.model.layer_period):
            kind = f"layer {number} of {config.model.layer_period}"
            which = "each layer" if config.model.layer_period == 1 else kind
            window = config.model.window_of(number)
            decision = attention_of(config, sizes, mesh, window)
            shown = dataclasses.replace(decision, missed=None)
            found = [f"attention of {which}{alone}: {shown}"]
            # Of GPUs here, a warning has told it.
            found += [decision.missed] if decision.missed and gpu is not None else []
            for line in dict.fromkeys(found):
                console.print(line, highlight=False, soft_wrap=True, markup=False)
    step = sharded_step(config, model, optimizer, mesh)
    where = "here" if gpu is None else f"on {gpu.device.device_kind}"
    lines = [f"one step {where}, with the number of times that each op runs:"]
    if gpu is not None and gpu.remark is not None:
        lines.insert(0, gpu.remark)
    if config.distributed.tensor_across_processes:
        lines.insert(0, _ONE_PROCESS)
    with tracing(f"{layers}, to know what its collective matmuls take"):
        explained = explain(step, verbose=config.verbose)(state, abstract_batch(config))
        lines.append(explained.table(verbose="--verbose"))
    prediction = _describe_prediction(config, sizes, mesh)
    if len(prediction) > 1 and any(each.seconds for each in explained.decisions):
        lines.append(_TWO_ESTIMATES)
    lines += prediction
    if limit is not None:
        lines[-1] += f"; the run {fit(memory.total, limit)}"
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return fits


def device_kind_of(config: Config) -> str:
    """JAX's name of the GPU that a dry run predicts for."""
    if config.device is None and jax.default_backend() == "gpu":
        return jax.local_devices()[0].device_kind
    return GPUS[config.device or "H200"].device.device_kind


def _describe_prediction(config: Config, sizes: MeshSizes, mesh: AbstractMesh) -> list[str]:
    """The predicted time of a step, its parts, and a mesh that would be faster; or why nothing is
    predicted."""
    kind = device_kind_of(config)
    try:
        kernel = attention_kernel(config, sizes, mesh)
        prediction = predict_run(config, sizes, kind, kernel)
    except ValueError as error:
        return [str(error)]
    parts = f"the whole step, {BY_PART}: {prediction.time}"
    return [parts, *describe_faster_mesh(config, sizes, kind, kernel), str(prediction)]


def _print_memory(memory: Memory, config: Config, console: Console) -> None:
    table = Table("bytes per device, when a step uses most", "", box=None)
    dtypes = config.compute_dtype + (" and 8 bits" if config.fp8 else "")
    sizes = {
        "parameters": memory.parameters,
        f"optimizer state ({config.optimizer.kind})": memory.optimizer_state,
        f"weights in {dtypes}": memory.weights,
        "activations and gradients": memory.activations,
        "total": memory.total,
    }
    for name, size in sizes.items():
        if size:
            table.add_row(name, f"{size:,}")
    console.print(table)
