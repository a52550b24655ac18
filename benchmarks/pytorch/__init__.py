"""PyTorch on the same layers and ops, as a baseline.

`runner` starts PyTorch's processes and does not import PyTorch. The modules named ``torch_*`` run
in those processes and do not import JAX; nor does this one, which all share.
"""

from __future__ import annotations

#: "torch" communicates with NCCL; "torch_async_tp" with the fused operators of PyTorch's async
#: tensor parallelism.
NAMES = ("torch", "torch_async_tp")
#: The recipes of float8 that torchao has, in words of our own `fp8`.
FLOAT8_RECIPES = ("tensorwise", "rowwise")
#: Whole training steps, by ZeRO level. Masters are float32 or, with "_bf16", nothing is. With
#: "_fp8_RECIPE", the blocks' matmuls have operands in float8. With "torch_context", devices that
#: shard weights divide sequences too.
TRAINING_NAMES: dict[int, tuple[str, ...]] = {
    0: (
        *("torch_tp", "torch_async_tp", "torch_tp_bf16", "torch_async_tp_bf16"),
        *(f"torch_{tp}_fp8_{recipe}" for recipe in FLOAT8_RECIPES for tp in ("tp", "async_tp")),
    ),
    3: ("torch_fsdp", "torch_context"),
}
#: Decoders: NCCL's sums, eager and compiled; and compiled with PyTorch's sums in symmetric memory.
GENERATION_NAMES = ("torch", "torch_compiled", "torch_symm_mem")
#: Expert layers: rows travel to their experts, or all tokens to all devices.
EXPERT_NAMES = ("torch_all_to_all", "torch_all_gather")
#: Attention over a divided sequence, by how keys and values travel.
CONTEXT_NAMES = ("torch_context_all_gather", "torch_context_all_to_all")
#: The losses of so many first steps are kept.
FIRST_STEPS = 8
#: The ways to run each of `NAMES`; the fastest counts.
VARIANTS = ("eager", "CUDA graph")

#: NVLink multicast can take the GPUs of a shared host out of service.
MULTICAST_OFF = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def float8_recipe(name: str) -> str | None:
    """The recipe at the end of a candidate's name, or None."""
    return name.partition("_fp8_")[2] or None
