"""Feed-forward layers in float8, as PyTorch users write them.

torchao quantizes the operands of linear layers, `parallelize_module` shards them, and
`torch.compile` fuses the rest. Its passes for async tensor parallelism replace collectives beside
matmuls. Recipes are torchao's: "tensorwise" gathers in float8, "rowwise" in the compute dtype.
"""

# PyTorch and torchao are not dependencies: where they are not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import parallel as tp

from benchmarks.pytorch.programs.torch_layers import TorchLayers, gelu
from benchmarks.pytorch.torch_communication import AsyncTensorParallel, TorchCommunication
from benchmarks.pytorch.torch_programs import Run, computed

#: The operators of async tensor parallelism that a pass may put into a program.
_FUSED = (
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
)


class Styles(NamedTuple):
    """How `parallelize_module` shards layers of a recipe; `column` and `row` are linear layers."""

    column: Callable[..., Any]
    row: Callable[..., Any]
    module_input: Callable[..., Any]


def styles(recipe: str | None) -> Styles:
    """PyTorch's styles; for "tensorwise" torchao's, which gather and keep float8."""
    if recipe != "tensorwise":
        return Styles(tp.ColwiseParallel, tp.RowwiseParallel, tp.PrepareModuleInput)
    module = _torchao("float8.float8_tensor_parallel")
    return Styles(
        module.Float8ColwiseParallel,
        module.Float8RowwiseParallel,
        module.PrepareFloat8ModuleInput,
    )


def convert(module: nn.Module, recipe: str, *, emulate: bool) -> None:
    """Replaces every linear layer inside a module; `emulate` runs where no device has float8."""
    float8 = _torchao("float8")
    if emulate:
        _gather_bytes()
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    float8.convert_to_float8_training(module, config=dataclasses.replace(config, emulate=emulate))


@functools.cache
def _gather_bytes() -> torch.library.Library:
    """Makes gathers of CPU tensors gathers of their bytes: Gloo knows no float8."""

    def gather(x: Tensor, devices: int, group: str) -> Tensor:
        gathered = x.new_empty(devices * x.shape[0], *x.shape[1:])
        c10d: Any = dist.distributed_c10d
        parts = gathered.view(torch.uint8), x.contiguous().view(torch.uint8)
        dist.all_gather_into_tensor(*parts, c10d._resolve_process_group(group))
        return gathered

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", gather, "CPU")
    return library


def _torchao(name: str) -> Any:
    try:
        return importlib.import_module(f"torchao.{name}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "float8 in PyTorch needs torchao: pip install torchao; without a network, install its"
            " wheel from a file: pip install --no-deps torchao-*.whl"
        ) from error


class FusedOperators:
    """Counts the operators of async tensor parallelism in what PyTorch compiles.

    Attributes:
      found: the number of each operator, over the programs that were compiled.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def options(self, is_async: bool) -> dict[str, Any]:
        """The options of `torch.compile`."""
        # They are a part of the key of compiled programs, while inductor's configuration is not.
        return {"_micro_pipeline_tp": is_async, "post_grad_custom_post_pass": self.count}

    def count(self, graph: torch.fx.Graph) -> None:
        """A pass after all others, which changes nothing."""
        for node in graph.nodes:
            name = str(node.target).removeprefix("symm_mem.").partition(".")[0]
            if name in _FUSED:
                self.found[name] += 1


class Float8FeedForward(nn.Module):
    """matmul → gelu → matmul, added to the rows: [M/D, K] -> [M/D, K]."""

    def __init__(self, features: int, hidden_features: int, dtype: torch.dtype):
        super().__init__()
        self.up = nn.Linear(features, hidden_features, bias=False, dtype=dtype)
        self.down = nn.Linear(hidden_features, features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(x)))


class TorchFloat8Layers(TorchLayers):
    """The layers of `TorchLayers` with the operands of their matmuls in float8."""

    # Numbers of 3 bits after the leading one are off by 0.026, gradients' of 2 by 0.05, and a
    # gradient has several of them. A chunk that is missing or out of place is off by 0.3 or more.
    tolerance = 0.15

    def __init__(self, *arguments: Any, recipe: str, compiler: str | None = None):
        super().__init__(*arguments)
        self.overlaps = False  # The compiler chooses what runs beside what.
        self.recipe, self.compiler = recipe, compiler
        self.fused = FusedOperators()

    def bind(self, communication: TorchCommunication, layers: int) -> Run:
        """Builds and compiles the modules; raises RuntimeError if async TP fused nothing."""
        state, weights, cotangent = self.arguments(layers)
        is_async = isinstance(communication, AsyncTensorParallel)
        mesh = init_device_mesh(self.place.device.type, (self.place.devices,))
        modules = [self.module(up, down, mesh) for up, down in weights]
        if self.compiler:
            options = self.fused.options(is_async)
            for module in modules:
                # Sizes that differ from those of another case must not become variables.
                module.compile(
                    backend=self.compiler, fullgraph=True, dynamic=False, options=options
                )
        run = functools.partial(_run, nn.Sequential(*modules), state, cotangent)
        run()
        if self.compiler and is_async and self.place.devices > 1 and not self.operators:
            raise RuntimeError("PyTorch's passes fused no collective with a matmul")
        return run

    @property
    def operators(self) -> Counter[str]:
        return self.fused.found

    def module(self, up: Tensor, down: Tensor, mesh: DeviceMesh) -> nn.Module:
        """A layer with these shards of its weights."""
        with torch.device("meta"):
            layer = Float8FeedForward(self.case.features, self.case.hidden_features, self.dtype)
        convert(layer, self.recipe, emulate=self.place.device.type != "cuda")
        style = styles(self.recipe)
        plan = {
            "up": style.column(input_layouts=Shard(0)),
            "down": style.row(output_layouts=Shard(0)),
        }
        tp.parallelize_module(layer, mesh, plan)
        for linear, shard in ((layer.up, up), (layer.down, down)):
            # The shard itself: all programs of a case share their weights.
            placements = linear.weight.placements
            weight = DTensor.from_local(shard, mesh, placements, run_check=False)
            linear.weight = nn.Parameter(weight)
        return layer


def _run(layers: nn.Module, state: Tensor, cotangent: Tensor | None) -> list[Tensor]:
    """Runs the layers, see `TorchLayers.run`."""
    if cotangent is None:
        return computed(layers, [state], None)
    leaves = [state.detach().requires_grad_(), *layers.parameters()]
    return [*map(_local, computed(lambda x, *_: layers(x), leaves, cotangent))]


def _local(array: Tensor) -> Tensor:
    return array.to_local() if isinstance(array, DTensor) else array
