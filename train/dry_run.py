"""Memory and communication of a run on each device, computed by tracing alone."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from collective_matmul import explain
from train.config import Config, check
from train.mesh import make_abstract_mesh
from train.metrics import Device
from train.state import ModelFunctions, abstract_state, make_optimizer, state_specs
from train.step import BATCH_SPEC, batch_losses, sharded_step

#: The GPU that decisions are made for on machines without GPUs.
_ASSUMED_DEVICE = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
#: H200 Tensor Core GPU data sheet.
_ASSUMED_MEMORY = 141 * 10**9


def dry_run(config: Config, data: int, tensor: int, console: Console) -> None:
    """Prints bytes per device and the collective matmuls of one step on a data × tensor mesh.

    Compiles nothing and needs no devices; the mesh may have any size.

    Raises:
      ValueError: for sizes that do not fit together.
    """
    check(config, data, tensor)
    device = None if jax.default_backend() == "gpu" else _ASSUMED_DEVICE
    mesh = make_abstract_mesh(data, tensor, device)
    model = ModelFunctions(config)
    optimizer = make_optimizer(config.optimizer, config.steps)
    state, specs = abstract_state(model, optimizer), state_specs(model, optimizer)
    saved = _saved_for_backward(config, model, mesh)
    step = sharded_step(config, model, optimizer, mesh)
    explanation = explain(step)(state, _abstract_batch(config, config.batch_size))

    console.print(
        f"{config.preset}: {model.parameter_count:,} parameters on data={data} × tensor={tensor},"
        f" {config.batch_size} sequences of {config.sequence_length} tokens per step"
    )
    sizes = {
        "parameters": _bytes_per_device(state["params"], specs["params"], mesh),
        "optimizer state": _bytes_per_device(state["opt_state"], specs["opt_state"], mesh),
        "gradients": _bytes_per_device(state["params"], specs["params"], mesh),
        f"activations and {config.compute_dtype} weights, saved for the backward": saved,
    }
    total = sum(sizes.values())
    _print_bytes({**sizes, "total": total}, console)
    if device is None:
        verdict = verdict_here(total, jax.local_devices()[0])
    else:
        verdict = _verdict(total, _ASSUMED_MEMORY, f"of {_ASSUMED_DEVICE.device_kind}")
    console.print(verdict, highlight=False, soft_wrap=True)
    where = "here" if device is None else f"on {device.device_kind}"
    console.print(
        f"collective matmuls, as executed {where}, with the number of times each is traced; those"
        " that layers share or a loop repeats are executed more often:",
        highlight=False,
        soft_wrap=True,
    )
    console.print(str(explanation), highlight=False, soft_wrap=True, markup=False)


def _print_bytes(sizes: dict[str, int], console: Console) -> None:
    table = Table("bytes per device", "", box=None)
    for name, size in sizes.items():
        table.add_row(name, f"{size:,}")
    console.print(table)


def verdict_here(total: int, device: Device) -> str:
    """Says whether `total` bytes fit into the memory that JAX may use of the device."""
    memory = (device.memory_stats() or {}).get("bytes_limit")
    if memory is None:
        return f"how much memory JAX may use of {device.device_kind} is not known"
    return _verdict(total, memory, f"that JAX may use of {device.device_kind}")


def _verdict(total: int, memory: int, whose: str) -> str:
    if total <= memory:
        spare = f"{memory - total:,} are left for temporary arrays"
        return f"fits into the {memory:,} bytes {whose}: {spare}"
    return (
        f"does not fit into the {memory:,} bytes {whose}, by {total - memory:,}: more --mesh.tensor"
        " divides all of it further, more --gradient-accumulation-steps or --remat full saves less"
    )


def _abstract_batch(config: Config, sequences: int) -> dict[str, jax.ShapeDtypeStruct]:
    tokens = jax.ShapeDtypeStruct((sequences, config.sequence_length), jnp.int32)
    return {"inputs": tokens, "targets": tokens}


def _bytes_per_device(tree: Any, specs: Any, mesh: AbstractMesh) -> int:
    """The bytes of one device's shards."""

    def leaf_bytes(leaf: jax.ShapeDtypeStruct, spec: P) -> int:
        shards = math.prod(mesh.shape[axis] for axis in spec if axis is not None)
        return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize // shards

    return sum(jax.tree.leaves(jax.tree.map(leaf_bytes, tree, specs)))


def _saved_for_backward(config: Config, model: ModelFunctions, mesh: AbstractMesh) -> int:
    """Bytes per device that the forward of one microbatch saves for its backward."""
    saved = 0

    def forward(params, batch):
        nonlocal saved

        def loss(params):
            return jnp.sum(batch_losses(model, params, batch))

        value, backward = jax.vjp(loss, params)
        residuals = {id(leaf): leaf for leaf in jax.tree.leaves(backward)}
        for leaf in params.values():
            residuals.pop(id(leaf), None)
        saved = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in residuals.values())
        return jax.lax.psum(value, "data")

    traced = jax.shard_map(
        forward, mesh=mesh, in_specs=(model.specs, BATCH_SPEC), out_specs=P(), check_vma=True
    )
    sequences = config.batch_size // config.gradient_accumulation_steps
    jax.eval_shape(traced, model.abstract_params, _abstract_batch(config, sequences))
    return saved
