"""Low-rank adapters (LoRA) of a model's linear layers, beside weights that do not change.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021::

    y = x W + scale (x A) B

An adapted layer has, beside its ``kernel`` [*in_features, *out_features], the parameters ``lora_a``
[product of in_features, rank] and ``lora_b`` [rank, product of out_features], at paths that end in
these names. Layers stacked for a scan have a leading dimension more. The scale is an attribute of
the layer, and part of neither parameter.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx

from collective_matmul.layers import Lora
from models.blocks.barriers import tied_in_backward
from models.families.parameter_table import DENSE, LAYER_GROUPS
from models.parameters.use import Tree

#: The ends of the paths of an adapter's parameters, and of the weight that it adapts.
LORA_A, LORA_B, KERNEL = "lora_a", "lora_b", "kernel"

#: The linear layers that can have adapters: their paths inside a block, by what Hugging Face and
#: PEFT call them.
MODULES = {
    parameter.tensor.split(".")[-2]: parameter.path_in_block.removesuffix(f".{KERNEL}")
    for parameter in DENSE
    if parameter.role == "linear"
}
TARGETS = tuple(MODULES.values())
#: The name of all of them.
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside frozen weights: `models.parameters.adapters`."""

    rank: int | None = None
    """Rank of the adapters; default: there are none."""
    alpha: float = 16.0
    """Numerator of the scale, which is alpha / rank."""
    dropout: float = 0.0
    """Probability of dropout on the input of adapters."""
    targets: str = ALL_LINEAR
    """Layers with adapters, separated by commas: all-linear, names such as q_proj or down_proj, or
    patterns of paths in a block, such as attention.*"""
    rslora: bool = False
    """Scale by alpha / sqrt(rank): Kalajdzievski, "A Rank Stabilization Scaling Factor for
    Fine-Tuning with LoRA", 2023."""

    train: str = ""
    """Parameters that are trained whole beside the adapters, as patterns separated by commas of
    their paths without the number of the layer, such as layers.*norm.scale or head.kernel."""

    base_format: Literal["rowwise", "blockwise"] | None = None
    """Format in 8 bits of frozen kernels between embedding and head; default: --compute-dtype."""

    @property
    def adapter(self) -> Lora | None:
        """The adapter of each target; None without a rank.

        Raises:
          ValueError: for a value that `Lora` refuses.
        """
        if self.rank is None:
            return None
        return Lora(self.rank, self.alpha, self.dropout, self.rslora)

    @property
    def layers(self) -> tuple[str, ...]:
        """The targets, as paths of `TARGETS`.

        Raises:
          ValueError: for a name that is no linear layer of a block.
        """
        found: set[str] = set()
        for name in filter(None, map(str.strip, self.targets.split(","))):
            path = "*" if name == ALL_LINEAR else MODULES.get(name, name)
            matched = fnmatch.filter(TARGETS, path)
            if not matched:
                names = ", ".join((ALL_LINEAR, *MODULES, *TARGETS))
                raise ValueError(f"lora.targets={name!r}: matches none of the layers {names}")
            found.update(matched)
        if not found:
            raise ValueError(f"lora.targets={self.targets!r}: expected the name of a layer")
        return tuple(path for path in TARGETS if path in found)

    def of(self, path: str) -> Lora | None:
        """The adapter of the layer at a path of `TARGETS`; None if it has none."""
        return self.adapter if self.rank is not None and path in self.layers else None


@dataclass(frozen=True)
class Training:
    """Which parameters of a model are trained, and which layers have adapters.

    Attributes:
      lora: the adapters.
      freeze: parameters that are not trained, as patterns like those of `LoraConfig.train`. With
        adapters, all others are frozen anyway.
    """

    lora: LoraConfig = LoraConfig()
    freeze: str = ""

    @property
    def freezes(self) -> bool:
        """Whether some parameter may be frozen."""
        return self.lora.rank is not None or bool(self.freeze)

    def trains(self, name: str) -> bool:
        """Whether a parameter is trained, by its dotted path."""
        if self.lora.rank is None:
            return not _matches(name, self.freeze)
        return is_adapter(name) or _matches(name, self.lora.train)

    def options_of(self, layer: str) -> dict[str, Any]:
        """The options of a linear layer or a block of them, such as "layers.attention.projection":
        the adapters, and whether kernels are frozen."""
        if not self.freezes:
            return {}
        inside = layer.removeprefix("layers.")
        names = {path.removeprefix(f"{inside}.") for path in TARGETS if path.startswith(inside)}
        if names == {inside} or not names:
            frozen = not self.trains(f"{layer}.{KERNEL}")
            return {"lora": self.lora.of(inside), "frozen": frozen}
        frozen = not any(self.trains(f"{layer}.{name}.{KERNEL}") for name in names)
        lora = {name: self.lora.of(f"{inside}.{name}") for name in names}
        if not frozen and any(lora.values()):
            raise ValueError(
                f"lora.train={self.lora.train!r}: {layer} has adapters too, and one gather for all"
                " its layers; train all of its kernels, or none"
            )
        return {"lora": lora, "frozen": frozen}

    def check(self, names: Iterable[str]) -> None:
        """Raises ValueError for a pattern that no parameter matches, if none is trained, or for
        kernels with adapters of which some that share a gather are trained."""
        names = list(names)
        known = {_unnumbered(name) for name in names}
        for field, patterns in (("lora.train", self.lora.train), ("freeze", self.freeze)):
            for pattern in _patterns(patterns):
                if not fnmatch.filter(known, pattern):
                    raise ValueError(
                        f"{field}={pattern!r}: matches no parameter; expected patterns of names"
                        f" such as {', '.join(sorted(known)[:4])}"
                    )
        if self.lora.rank is None and not any(map(self.trains, names)):
            raise ValueError(f"freeze={self.freeze!r}: matches all parameters; train some")
        for group in LAYER_GROUPS:
            self.options_of(group.name)


def _patterns(text: str) -> list[str]:
    return [pattern for pattern in map(str.strip, text.split(",")) if pattern]


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(_unnumbered(name), each) for each in _patterns(patterns))


def _unnumbered(name: str) -> str:
    """The path without the number of the layer, as it is where layers are stacked."""
    return re.sub(r"^layers\.\d+\.", "layers.", name)


def is_adapter(name: str) -> bool:
    """Whether a parameter, by its dotted path, belongs to an adapter."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}"))


def tie_adapters(x: Tree, block: nnx.State) -> tuple[Tree, nnx.State]:
    """Ties the gradients of a block's adapters to that of x: use both results.

    They are small, and computed of large arrays, which stay for as long as they are postponed.
    Weights that are trained whole are left alone: their gradients are larger once computed.
    """
    adapters, others = nnx.split_state(block, lambda path, _: path[-1] in (LORA_A, LORA_B), ...)
    if not adapters:
        return x, block
    x, adapters = tied_in_backward(x, adapters)
    return x, nnx.merge_state(adapters, others)


def set_dropout(block: nnx.Module, key: jax.Array | None) -> None:
    """Gives each adapter of a block that has dropout a key of its own, for the calls that follow;
    with None they have no dropout."""
    found = [module for _, module in nnx.iter_modules(block) if isinstance(module, nnx.Dropout)]
    for number, dropout in enumerate(found):
        dropout.deterministic = key is None
        own: Any = None if key is None else functools.partial(jax.random.fold_in, key, number)
        dropout.rngs = own
