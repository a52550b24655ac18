"""Memory by arithmetic, beside what was measured and what a dry run traces."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from collective_matmul.jaxprs import scratch
from collective_matmul.ops.attention import flash_attention
from tests.train.plan.plans import FSDP, LONG, STACKED, TENSOR, config
from train.config.checks import check
from train.config.config import MeshSizes
from train.memory.device_memory import GPUS
from train.memory.step_memory import memory_of
from train.parallel.mesh import make_abstract_mesh
from train.plan.memory_estimate import predict_memory
from train.plan.traced_rows import TOO_HIGH

# Peaks of these reports, of compiled-memory-4-h200 (2026-11-25) and of train-experts-2-h100:
# preset, layers, sequences, length, mesh, other settings, GiB.
_EXPERTS = {"balance_loss_weight": 0.0, "loss_chunk": 0}


PEAKS = {
    "8B": ("llama3-8b", 32, 2, 8192, TENSOR, {}, 89.9),
    "8B tensorwise": ("llama3-8b", 32, 2, 8192, TENSOR, {"fp8": "tensorwise"}, 82.4),
    "8B ZeRO 3": ("llama3-8b", 32, 2, 8192, FSDP, {"zero": 3}, 83.9),
    "8B ZeRO 3 rowwise": ("llama3-8b", 32, 2, 8192, FSDP, {"zero": 3, "fp8": "rowwise"}, 87.2),
    "8B fsdp 4": ("llama3-8b", 32, 4, 8192, MeshSizes(fsdp=4), {"zero": 3}, 61.0),
    "8B 2 × 2": ("llama3-8b", 32, 2, 8192, MeshSizes(fsdp=2, tensor=2), {"zero": 3}, 42.0),
    "8B tensor 4": ("llama3-8b", 32, 1, 8192, MeshSizes(tensor=4), {}, 35.1),
    "8 layers": ("llama3-8b", 8, 1, 8192, TENSOR, {}, 24.0),
    "full": ("llama3-8b", 8, 2, 8192, FSDP, {"zero": 3, "remat": "full"}, 21.5),
    "dots": ("llama3-8b", 8, 1, 32768, TENSOR, {"remat": "dots"}, 37.3),
    "2 layers": ("llama3-8b", 2, 2, 8192, FSDP, {"zero": 3}, 15.5),
    "full, stacked": ("llama3-8b", 32, 2, 4096, TENSOR, STACKED, 60.4),
    # As programs are allocated that are compiled for GPUs by their description (plan-2-h100).
    "128k": ("llama3-8b", 8, 1, 131072, TENSOR, LONG, 39.2),
    "128k over context": (
        "llama3-8b", 8, 1, 131072, MeshSizes(context=2), {"zero": 3, **LONG}, 39.5
    ),
    # FlashAttention-3 allocates more besides; in use on GPUs (context-2-h100).
    "320k over context": (
        "llama3-8b", 8, 1, 327680, MeshSizes(context=2),
        {"zero": 3, "attention": "flash3", **LONG}, 69.4,
    ),
    "experts over fsdp": (
        "qwen3-30b-a3b", 4, 4, 8192, FSDP, {"zero": 3, "expert_axes": "fsdp", **_EXPERTS}, 34.8
    ),
    "experts over tensor": ("qwen3-30b-a3b", 4, 2, 16384, TENSOR, _EXPERTS, 35.2),
}  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_memory_is_near_what_was_measured(name: str) -> None:
    preset, layers, sequences, length, sizes, changes, measured = PEAKS[name]
    run = config(preset, layers, batch_size=sequences, sequence_length=length, **changes)
    ratio = predict_memory(run, sizes).total / 2**30 / measured
    assert 0.965 <= ratio <= 1.07


# What a dry run traces, and the arithmetic: sequences, mesh, settings.
TRACED = {
    "one": (1, MeshSizes(), {}),
    "tensor": (2, TENSOR, {"remat": "dots"}),
    "ZeRO 3": (2, FSDP, {"zero": 3, "remat": "full"}),
    "ZeRO 3 tensor": (4, MeshSizes(fsdp=2, tensor=2), {"zero": 3}),
    "ZeRO 1 data": (4, MeshSizes(data=2, fsdp=2), {"zero": 1}),
    "microbatches": (4, TENSOR, {"gradient_accumulation_steps": 4}),
    "ZeRO 2 microbatches": (8, MeshSizes(fsdp=4), {"zero": 2, "gradient_accumulation_steps": 2}),
    "context": (2, MeshSizes(fsdp=2, tensor=2, context=2), {"zero": 3, "remat": "dots"}),
    "scan": (4, MeshSizes(fsdp=4), {"zero": 3, "scan_layers": 1}),
    "tensorwise": (2, TENSOR, {"fp8": "tensorwise"}),
}


@pytest.mark.parametrize("name", TRACED)
def test_memory_is_near_what_a_dry_run_traces(name: str) -> None:
    """Both count the logits and their gradient."""
    sequences, sizes, changes = TRACED[name]
    run = config(layers=3, batch_size=sequences, sequence_length=4096, **changes)
    check(run, sizes)
    traced = memory_of(run, make_abstract_mesh(sizes, GPUS["H100"].device), local_devices=8)
    estimate = predict_memory(run, sizes)
    assert estimate.state == pytest.approx(traced.state, rel=0.002)
    assert 0.95 <= estimate.total / traced.total <= 1 + TOO_HIGH


@pytest.mark.parametrize("sizes", [TENSOR, MeshSizes(context=2)], ids=["tensor", "context"])
def test_memory_that_flash_attention_allocates(
    sizes: MeshSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dry run, from the kernel's operands, and the plan count the same bytes."""
    monkeypatch.setattr(flash_attention, "missing_reason", lambda: None)
    changes = {"batch_size": 1, "sequence_length": 4096, "remat": "full"}
    run = config(layers=1, attention="flash3", **changes)
    heads, keys = 32 // sizes.tensor, 8 // sizes.tensor
    seen = 4096 * (1.25 if sizes.context == 2 else 1)
    expected = 4 * 128 * (4096 // sizes.context * heads + 2 * seen * keys)
    predicted = [
        predict_memory(dataclasses.replace(run, attention=name), sizes).total
        for name in ("flash3", "cudnn")
    ]
    assert predicted[0] - predicted[1] == expected
    jax.clear_caches()
    mesh = make_abstract_mesh(sizes, GPUS["H100"].device)
    traced = [memory_of(run, mesh, local_devices=8).total]
    monkeypatch.setattr(scratch, "_BYTES_OF", {})
    traced.append(memory_of(run, mesh, local_devices=8).total)
    jax.clear_caches()
    assert traced[0] - traced[1] == expected


def test_memory_of_experts() -> None:
    sizes = MeshSizes(fsdp=2, tensor=2)
    shape = {"batch_size": 4, "sequence_length": 2048, "zero": 3, "expert_axes": "both"}
    run = config("mixtral-8x7b", 2, **shape)
    traced = memory_of(run, make_abstract_mesh(sizes, GPUS["H100"].device), local_devices=8)
    assert 0.95 <= predict_memory(run, sizes).total / traced.total <= 1.10
