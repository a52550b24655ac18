"""Adapters of a model that generates: several of one shape, of which each call takes one.

Ranks and adapted layers may differ. A generator has room for the largest rank and for all layers
that any of them adapts. What an adapter lacks is zero, and its scale is part of B, so one program
serves all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import jax
import numpy as np

from models.parameters.adapters import KERNEL, LORA_A, LORA_B, TARGETS, LoraConfig, is_adapter


class AdapterParams(Protocol):
    """Adapters as `models.hugging_face.AdapterFolder` has them."""

    @property
    def params(self) -> Mapping[str, np.ndarray]:
        """``lora_a`` [in, rank] and ``lora_b`` [rank, out], by name."""
        ...

    @property
    def scales(self) -> Mapping[str, float]:
        """The factor of each adapter's product, by the name of its kernel."""
        ...


def adapters_in_common(adapters: Iterable[AdapterParams]) -> LoraConfig | None:
    """The adapters that a model needs to hold any one of several; None if there are none."""
    names, rank = set[str](), 0
    for adapter in adapters:
        names |= adapter.scales.keys()
        ranks = (a.shape[1] for name, a in adapter.params.items() if name.endswith(LORA_A))
        rank = max(rank, *ranks)
    if not names:
        return None
    targets = [path for path in TARGETS if any(n.endswith(f"{path}.{KERNEL}") for n in names)]
    return LoraConfig(rank, float(rank), targets=",".join(targets))


def adapter_params(
    adapter: AdapterParams, abstract: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """The parameters of one of the adapters that a model has room for.

    Args:
      adapter: the adapter.
      abstract: all parameters of the model.
    """

    def made(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        whole = np.zeros(leaf.shape, np.float32)
        values = adapter.params.get(name)
        if values is not None:
            is_b = name.endswith(LORA_B)
            scale = adapter.scales[name.removesuffix(LORA_B) + KERNEL] if is_b else 1.0
            rows, columns = values.shape
            whole[:rows, :columns] = scale * values.astype(np.float32)
        return jax.device_put(whole.astype(leaf.dtype), leaf.sharding)

    return {name: made(name, leaf) for name, leaf in abstract.items() if is_adapter(name)}
