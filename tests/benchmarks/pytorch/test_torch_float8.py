"""Layers in float8 as PyTorch's compiler makes them, up to the kernels, which CPUs do not have."""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.step.train import TrainCase

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from benchmarks.pytorch.llama.torch_training import TorchTraining  # noqa: E402
from benchmarks.pytorch.programs import torch_float8  # noqa: E402
from benchmarks.pytorch.programs.torch_float8 import FusedOperators, TorchFloat8Layers  # noqa: E402
from benchmarks.pytorch.programs.torch_layers import TorchLayers  # noqa: E402
from benchmarks.pytorch.torch_communication import AsyncTensorParallel, Collectives  # noqa: E402
from benchmarks.pytorch.torch_programs import Place, TorchCase  # noqa: E402
from benchmarks.pytorch.torch_worker import allow_recompilation  # noqa: E402

DEVICES = 2
GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
SCALED_GATHER = "fused_all_gather_scaled_matmul"
SCALED_SCATTER = "fused_scaled_matmul_reduce_scatter"
#: What replaces the collectives of a feed-forward's two matmuls. Rows are gathered in bfloat16 and
#: quantized after that, so that no matmul follows the gather.
FUSED = {"tensorwise": [SCALED_GATHER, SCALED_SCATTER], "rowwise": [SCALED_SCATTER]}

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


class Counted(Exception):
    """Ends a compilation after its passes."""


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """The first of two processes whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=DEVICES)
    yield Place(0, DEVICES, torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs multiply in float8, and compile until all passes have run."""
    convert, count = torch_float8.convert, FusedOperators.count

    def count_and_stop(self: FusedOperators, graph: Any) -> None:
        count(self, graph)
        raise Counted

    def convert_for_gpus(module: Any, recipe: str, *, emulate: bool) -> None:
        assert emulate, "CPUs cannot multiply these"
        convert(module, recipe, emulate=False)

    monkeypatch.setattr(torch_float8, "convert", convert_for_gpus)
    monkeypatch.setattr(FusedOperators, "count", count_and_stop)
    # PyTorch for CPUs alone has no NCCL, without which the passes do nothing.
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    yield
    torch.compiler.reset()


def layers(recipe: str, place: Place, direction: str) -> TorchFloat8Layers:
    case = TorchCase("", 2, 64, 128, 256, direction=direction)
    return TorchFloat8Layers(case, place, torch.bfloat16, 5, recipe=recipe, compiler="inductor")


@needs_torchao
@pytest.mark.filterwarnings("ignore")  # Those of the compiler.
@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
@pytest.mark.parametrize("recipe", FUSED)
def test_matmuls_in_float8_are_fused_with_their_collectives(
    recipe: str, direction: str, place: Place
) -> None:
    program = layers(recipe, place, direction)
    with pytest.raises(Exception, match="Counted"):
        program.bind(AsyncTensorParallel(place.device), 2)
    assert program.operators == dict.fromkeys(FUSED[recipe], 1)


@needs_torchao
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_fused_without_async_tensor_parallelism(place: Place) -> None:
    for communication, fused in ((AsyncTensorParallel(place.device), 2), (Collectives(), 0)):
        program = layers("tensorwise", place, "forward")
        with pytest.raises(Exception, match="Counted"):
            program.bind(communication, 2)
        assert program.operators.total() == fused


@needs_torchao
def test_async_tensor_parallelism_that_fuses_nothing_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
    monkeypatch.setattr(torch_float8, "_run", lambda *arguments: [])
    with pytest.raises(RuntimeError, match="fused no collective with a matmul"):
        layers("rowwise", place, "forward").bind(AsyncTensorParallel(place.device), 2)
    assert layers("rowwise", place, "forward").bind(Collectives(), 2)() == []


@needs_torchao
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("torch_tp", []),
        ("torch_async_tp", [GATHER, SCATTER]),
        ("torch_tp_fp8_tensorwise", []),
        ("torch_async_tp_fp8_tensorwise", FUSED["tensorwise"]),
        ("torch_async_tp_fp8_rowwise", FUSED["rowwise"]),
    ],
)
def test_blocks_of_a_training_step_are_fused_as_layers_are(
    name: str, fused: list[str], place: Place
) -> None:
    """Attention and feed-forward each have one gather, also for several matmuls, and one sum."""
    case = TrainCase("debug", 2, 32, 4, "none", 0, "", (name,)).for_pytorch()
    assert case is not None
    training = TorchTraining(case, name, place, torch.bfloat16, "inductor")
    with pytest.raises(Exception, match="Counted"):
        training.step()
    assert training.fused.found == dict.fromkeys(fused, 2)


@needs_torchao
def test_programs_of_a_case_share_their_weights(place: Place) -> None:
    case, arrays = TorchCase("", 2, 64, 128, 256, direction="forward_backward"), {}
    settings = place, torch.bfloat16, 5, arrays
    drawn = {w.data_ptr() for pair in TorchLayers(case, *settings).arguments(2)[1] for w in pair}
    program = TorchFloat8Layers(case, *settings, recipe="rowwise")
    mesh = init_device_mesh("cpu", (DEVICES,))
    modules = [program.module(up, down, mesh) for up, down in program.arguments(2)[1]]
    used = {w.to_local().data_ptr() for module in modules for w in module.parameters()}
    assert used == drawn and len(drawn) == 4
    program.weights(0, rank=1)  # Another device's weights are drawn for the reference and freed.
    assert len(arrays) == 4 + 2  # With the rows and the cotangent.


@torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1)
def test_a_function_has_as_many_programs_as_there_are_candidates() -> None:
    allow_recompilation()

    def double(x: Any) -> Any:
        return 2 * x

    for size in (3, 4, 5):
        # Otherwise PyTorch runs what it cannot compile.
        options = {"backend": "eager", "fullgraph": True, "dynamic": False}
        torch.compile(double, **options)(torch.ones(size))


def test_without_torchao_a_sentence_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("torchao", "torchao.float8.float8_tensor_parallel"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match="pip install torchao; without a network"):
        torch_float8.styles("tensorwise")
