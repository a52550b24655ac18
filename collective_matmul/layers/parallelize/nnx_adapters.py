"""Flax's nnx adapters, `nnx.LoRALinear` and `nnx.LoRA`, beside collective layers.

Both compute ``x @ kernel + bias + x @ A @ B``. Their parameters keep their paths::

    nnx.LoRALinear  kernel, bias, lora.lora_a, lora.lora_b
    nnx.LoRA        base_module.kernel, base_module.bias, lora_a, lora_b
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from collective_matmul.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from collective_matmul.layers.linear.lora import Adapter, Lora
from collective_matmul.layers.sharding_context import SpecEntries


def adapter_in(layer: Any) -> nnx.LoRA | None:
    """The adapter of a layer of Flax; None for a layer without one."""
    if isinstance(layer, nnx.LoRALinear):
        return layer.lora
    return layer if isinstance(layer, nnx.LoRA) else None


def base_of(layer: Any) -> Any:
    """The linear layer in a layer of Flax with or without an adapter."""
    return layer.base_module if isinstance(layer, nnx.LoRA) else layer


def check_adapter(where: str, layer: Any) -> None:
    """Checks that what a layer of Flax computes with its adapter is what `Adapter` computes.

    Args:
      where: the entry of the plan and the path of the layer.
      layer: an `nnx.LoRALinear`, or an `nnx.LoRA` whose base module was checked.

    Raises:
      ValueError: if it is not.
    """
    adapter, base = adapter_in(layer), base_of(layer)
    assert adapter is not None
    option = "" if adapter is layer else "lora_"
    if adapter.promote_dtype is not promote_dtype:
        raise ValueError(
            f"{where} has {option}promote_dtype={adapter.promote_dtype!r}, which a collective"
            f" matmul cannot honour; construct it without {option}promote_dtype, or leave it out"
            " of the plan"
        )
    if adapter.dtype != base.dtype or (
        base.dtype is None and adapter.lora_a.dtype != base.kernel.dtype
    ):
        raise ValueError(
            f"{where} computes with {option}dtype={_name(adapter.dtype)} and parameters in"
            f" {_name(adapter.lora_a.dtype)} beside a linear layer with dtype={_name(base.dtype)}"
            f" and parameters in {_name(base.kernel.dtype)}; one matmul has one dtype: construct"
            f" both with one dtype, as in dtype=jnp.bfloat16 and {option}dtype=jnp.bfloat16"
        )
    *_, inputs, rank = adapter.lora_a.shape
    sizes = inputs, adapter.lora_b.shape[-1]
    if sizes != tuple(base.kernel.shape[-2:]) or base.kernel.ndim != adapter.lora_a.ndim:
        raise ValueError(
            f"{where} has an adapter of {sizes[0]} input and {sizes[1]} output features, with rank"
            f" {rank}, beside a kernel {list(base.kernel.shape)}; construct both with the same"
            " features, one size each"
        )


def _name(dtype: Any) -> str:
    return "None" if dtype is None else jax.numpy.dtype(dtype).name


def specs_of_adapter(layer: ColumnParallelLinear | RowParallelLinear) -> dict[str, SpecEntries]:
    """The axes that shard the parameters of an adapter, by name.

    The layer's own axis does as it shards the kernel. A second axis of the kernel does not.
    """
    axis_name = layer.axis_name
    *_, inputs, outputs = (
        axis_name if axis_name in jax.tree.leaves(entry) else None
        for entry in layer.kernel.get_metadata("out_sharding")
    )
    return {"lora_a": (inputs, None), "lora_b": (None, outputs)}


def _adapter_of(layer: Any, adapter: nnx.LoRA) -> Adapter:
    rank = adapter.lora_a.shape[-1]  # The scale of Flax is 1.
    return layer.adapter_of(adapter.lora_a[...], adapter.lora_b[...], Lora(rank, float(rank)))


class ColumnParallelLoRALinear(ColumnParallelLinear):
    """A `ColumnParallelLinear` with the adapter of the `nnx.LoRALinear` that it was."""

    def _adapter(self) -> Adapter | None:
        adapter: Any = self.lora
        return _adapter_of(self, adapter)


class RowParallelLoRALinear(RowParallelLinear):
    """A `RowParallelLinear` with the adapter of the `nnx.LoRALinear` that it was."""

    def _adapter(self) -> Adapter | None:
        adapter: Any = self.lora
        return _adapter_of(self, adapter)


@functools.cache
def parallel_lora(kind: type[nnx.LoRA]) -> type[nnx.LoRA]:
    """A subclass of `nnx.LoRA` whose adapter and base module share a collective.

    Args:
      kind: `nnx.LoRA`, or a subclass that inherits its `__call__`.
    """

    class ParallelLoRA(kind):  # pyright: ignore[reportGeneralTypeIssues]
        def __call__(self, x: jax.Array, **kwargs: Any) -> jax.Array:
            base: Any = self.base_module
            return base.with_adapter(x, self.adapter_of_base(), **kwargs)

        def adapter_of_base(self) -> Adapter:
            """The adapter, as a call of the base module takes it."""
            return _adapter_of(self.base_module, self)

    ParallelLoRA.__name__ = ParallelLoRA.__qualname__ = f"Parallel{kind.__name__}"
    return ParallelLoRA
