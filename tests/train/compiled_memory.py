"""Memory of compiled steps beside what the dry run predicts, for Llama 3 8B on two GPUs.

``python -m tests.train.compiled_memory`` prints a table. Without two GPUs, XLA compiles for two
H200 by their description: nothing runs, and JAX needs its CUDA build all the same. Without GPUs to
measure on, XLA takes Triton's matmuls and fuses more into them than on GPUs; with
``XLA_FLAGS=--xla_gpu_enable_triton_gemm=false`` it allocates what it does there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from collective_matmul import _compat
from train.config import presets
from train.config.config import Config, LoraConfig, MeshSizes, OptimizerConfig
from train.memory.step_memory import Memory, memory_of
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import state_on_mesh
from train.parallel.batches import BATCH_SPEC, abstract_batch
from train.parallel.mesh import AXES
from train.parallel.model import ModelFunctions
from train.step import make_step

#: What XLA has to know of a device to compile for it, in the names of its `GpuTargetConfigProto`.
H200: dict[str, Any] = {
    "platform_name": "CUDA",
    "device_description_str": "NVIDIA H200",
    "dnn_version_info": {"major": 9, "minor": 10},
    "gpu_device_info": {
        "cuda_compute_capability": {"major": 9},
        "core_count": 132,
        "fpus_per_core": 128,
        "clock_rate_ghz": 1.98,
        "device_memory_size": 151_397_597_184,
        # Without a version of CUDA, XLA multiplies 8 bits in float16.
        "runtime_version": "12.9.0",
        "memory_bandwidth": 4_800_000_000_000,
        "l2_cache_size": 52_428_800,
        "threads_per_warp": 32,
        "threads_per_block_limit": 1024,
        "threads_per_core_limit": 2048,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_block_optin": 232_448,
        "shared_memory_per_core": 233_472,
        "registers_per_block_limit": 65_536,
        "registers_per_core_limit": 65_536,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
    },
}
#: The oldest cuDNN whose attention is traced: nothing is asked of the one that is installed.
_CUDNN = 91_000
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_HAS_CUDA_BUILD = any(map(importlib.util.find_spec, _PLUGINS))
#: For tests that compile for GPUs.
needs_cuda_build = pytest.mark.skipif(
    not _HAS_CUDA_BUILD,
    reason="compiling for GPUs, also without one, needs JAX's CUDA build: jax[cuda13]",
)

TENSOR, FSDP = MeshSizes(tensor=2), MeshSizes(fsdp=2)


class Case(NamedTuple):
    """A configuration: a mesh, a number of layers and what else differs from the preset."""

    sizes: MeshSizes
    layers: int
    changes: Mapping[str, Any]

    def __str__(self) -> str:
        axes = self.sizes._asdict().items()
        mesh = ", ".join(f"{axis} {size}" for axis, size in axes if size > 1)
        changes = (
            f"{name} {value.kind if isinstance(value, OptimizerConfig) else value}"
            for name, value in self.changes.items()
        )
        return ", ".join([mesh, f"{self.layers} layers", *changes])

    @property
    def config(self) -> Config:
        """The configuration; its mesh is given apart."""
        preset = presets.PRESETS["llama3-8b"]()
        model = dataclasses.replace(preset.model, num_layers=self.layers)
        rows = 2 * self.changes.get("gradient_accumulation_steps", 1)
        changes = {"batch_size": rows, "sequence_length": 8192, **self.changes}
        return dataclasses.replace(preset, model=model, **changes)


def case(sizes: MeshSizes, layers: int, **changes: Any) -> Case:
    """A case by the fields that differ."""
    return Case(sizes, layers, changes)


def sharded(layers: int, gathers: str, **changes: Any) -> Case:
    """ZeRO 3, with all recomputed."""
    return case(FSDP, layers, **{"zero": 3, "weight_gather": gathers, "remat": "full"} | changes)


CASES = [
    *(case(TENSOR, 8, remat=remat) for remat in ("none", "dots", "full")),
    case(TENSOR, 8, remat="dots", gradient_accumulation_steps=2),
    case(TENSOR, 32, remat="full", scan_layers=1),
    *(case(FSDP, 8, zero=zero, remat="full") for zero in (1, 2)),
    sharded(8, "blocks"),
    sharded(8, "matmuls"),
    case(FSDP, 8, zero=2, remat="full", optimizer=OptimizerConfig(kind="muon")),
    *(case(TENSOR, 8, remat="full", fp8=fp8) for fp8 in ("tensorwise", "rowwise")),
    case(TENSOR, 8, remat="full", fp8="rowwise", gradient_accumulation_steps=2),
    *(
        case(FSDP, 8, zero=zero, remat="full", fp8="rowwise", gradient_accumulation_steps=2)
        for zero in (1, 2)
    ),
    case(FSDP, 8, zero=2, remat="full", fp8="rowwise"),
    *(sharded(8, gathers, fp8="rowwise") for gathers in ("blocks", "matmuls")),
    sharded(8, "matmuls", fp8="rowwise", gradient_accumulation_steps=2),
    sharded(8, "matmuls", fp8="tensorwise", remat="none"),
    case(TENSOR, 16, remat="full", scan_layers=1, lora=LoraConfig(rank=16, base_format="rowwise")),
    case(TENSOR, 32, remat="dots"),
    sharded(32, "blocks"),
    sharded(32, "matmuls"),
    sharded(32, "matmuls", remat="dots"),
]
#: Pairs of depths, which show what a layer adds.
DEPTHS = [
    (sharded(8, gathers, **changes), sharded(12, gathers, **changes))
    for gathers in ("blocks", "matmuls")
    for changes in ({}, {"scan_layers": 1})
]


class CompiledStep(NamedTuple):
    """The memory of one device, in bytes, and how long it took to compile, in seconds.

    Attributes:
      arguments: parameters, optimizer state and batch. Results are written in their place.
      temporary: all else that XLA allocates.
      live: the most of both that is in use at one time, without the gaps between arrays.
      predicted: what the dry run says.
      trace_seconds: time to trace and lower.
      compile_seconds: time to compile.
      program: the optimised program, as text.
    """

    arguments: int
    temporary: int
    live: int
    predicted: Memory
    trace_seconds: float
    compile_seconds: float
    program: str = ""

    @property
    def total(self) -> int:
        """All that XLA allocates."""
        return self.arguments + self.temporary

    @property
    def ratio(self) -> float:
        """Predicted over allocated."""
        return self.predicted.total / self.total


def compiled_step(config: Config, mesh: Mesh, dump_to: str | None = None) -> CompiledStep:
    """Compiles the step of a configuration.

    Args:
      config: the configuration.
      mesh: the mesh, of devices that are here or only described.
      dump_to: folder for what XLA writes about the program; default: it writes nothing.
    """
    model = ModelFunctions(config, MeshSizes(**mesh.shape))
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    state = state_on_mesh(model, optimizer, mesh)
    sharding = NamedSharding(mesh, BATCH_SPEC)
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for name, leaf in abstract_batch(config).items()
    }
    started = time.monotonic()
    lowered = make_step(config, model, optimizer, mesh).lower(state, batch)
    traced = time.monotonic()
    compiled = lowered.compile({"xla_dump_to": dump_to} if dump_to else {})
    ended = time.monotonic()
    memory: Any = compiled.memory_analysis()
    new_results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return CompiledStep(
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes + new_results,
        memory.peak_memory_in_bytes,
        memory_of(config, mesh.abstract_mesh),
        traced - started,
        ended - traced,
        compiled.as_text() or "",
    )


@contextlib.contextmanager
def gpus(count: int) -> Iterator[list[Any]]:
    """GPUs of one node, or H200 that XLA compiles for, and that tracing takes for present.

    Raises:
      SystemExit: without so many GPUs, if JAX is not built for CUDA.
    """
    if not Path("/proc/driver/nvidia/version").exists():
        jax.config.update("jax_platforms", "cpu")  # The CUDA build would look for a driver.
    if jax.default_backend() == "gpu" and len(jax.devices()) >= count:
        yield jax.devices()[:count]
        return
    if not _HAS_CUDA_BUILD:
        raise SystemExit(
            f"{count} GPUs are not here, and to compile for H200 all the same JAX needs its CUDA"
            " build: pip install 'jax[cuda12]'"
        )
    described = topologies.get_topology_desc(
        "h200", platform="cuda", target_config=as_text(H200), topology=f"1x1x{count}"
    )
    with (
        mock.patch.object(jax, "default_backend", lambda: "gpu"),
        mock.patch.object(_compat.cudnn, "check_cudnn_version", lambda: _CUDNN),
    ):
        yield list(described.devices)


def as_text(fields: Mapping[str, Any]) -> str:
    """Nested fields in the text format of protocol buffers."""
    texts = (
        f"{name} {{ {as_text(value)} }}"
        if isinstance(value, Mapping)
        else f'{name}: "{value}"'
        if isinstance(value, str)
        else f"{name}: {value}"
        for name, value in fields.items()
    )
    return " ".join(texts)


def mesh_of(devices: Sequence[Any], sizes: MeshSizes) -> Mesh:
    """The trainer's mesh over devices."""
    types = (AxisType.Auto,) * len(AXES)
    shape = [getattr(sizes, axis) for axis in AXES]
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=types)


class Steps:
    """Compiled steps, each printed once as a row of a table."""

    def __init__(self, devices: Sequence[Any], dump_to: str | None):
        self._devices, self._dump_to = devices, dump_to
        self._compiled: dict[str, CompiledStep] = {}

    def __call__(self, case: Case) -> CompiledStep:
        """Compiles a case, if it is new."""
        name = str(case)
        if name not in self._compiled:
            folder = self._dump_to and str(Path(self._dump_to) / name.replace(", ", "_"))
            step = compiled_step(case.config, mesh_of(self._devices, case.sizes), folder)
            self._compiled[name] = step
            gigabytes = (step.arguments, step.temporary, step.total, step.live)
            cells = [name, *(f"{size / 1e9:.2f}" for size in gigabytes)]
            cells += [f"{step.predicted.total / 1e9:.2f}", f"{step.ratio:.3f}"]
            cells += [f"{step.predicted.total / step.live:.3f}"]
            cells += [f"{step.trace_seconds:.0f} + {step.compile_seconds:.0f}"]
            print_row(cells)
        return self._compiled[name]


def print_row(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def print_head(*cells: str) -> None:
    print_row(cells)
    print_row(["---", *["---:"] * (len(cells) - 1)])


def added_by_a_layer(steps: Callable[[Case], CompiledStep], shallow: Case, deep: Case) -> list[str]:
    """The name and MB that a layer adds: all, gradients, saved activations, and the rest."""
    growth = steps(deep).temporary - steps(shallow).temporary
    model = ModelFunctions(shallow.config)
    layer = sum(
        math.prod(leaf.shape) // (shallow.layers if shallow.config.scan_layers else 1)
        for name, leaf in model.abstract_params.items()
        if name.startswith("layers.") and (shallow.config.scan_layers or ".0." in name)
    )
    gradients = 4 * layer // shallow.sizes.fsdp
    config = shallow.config
    saved = 2 * config.sequence_length * config.model.features  # A block's input, bfloat16.
    added = growth // (deep.layers - shallow.layers)
    sizes = (added, gradients, saved, added - gradients - saved, 2 * layer)
    return [f"{shallow}, {deep.layers} layers", *(f"{size / 1e6:.0f}" for size in sizes)]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--match", default="", help="compile the configurations with this text")
    parser.add_argument("--depths", action="store_true", help="compare depths with ZeRO 3 instead")
    parser.add_argument("--dump-to", help="folder for what XLA writes about each program")
    arguments = parser.parse_args(argv)
    with gpus(2) as devices:
        print(f"jax {jax.__version__}, 2 × {devices[0].device_kind}; GB per device\n")
        steps = Steps(devices, arguments.dump_to)
        columns = ("arguments", "temporary", "total", "live", "predicted")
        ratios = ("predicted / total", "predicted / live", "seconds: trace + compile")
        print_head("configuration", *columns, *ratios)
        if not arguments.depths:
            for one in CASES:
                if arguments.match in str(one):
                    steps(one)
            return
        pairs = [pair for pair in DEPTHS if arguments.match in str(pair[0])]
        for one in (one for pair in pairs for one in pair):
            steps(one)
        print()
        rest = ("shard of gradients", "block's input", "rest", "whole weights of a layer, bfloat16")
        print_head("MB of temporary arrays per layer", "added", *rest)
        for shallow, deep in pairs:
            print_row(added_by_a_layer(steps, shallow, deep))


if __name__ == "__main__":
    main()
