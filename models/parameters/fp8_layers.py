"""Which linear layers of a model quantize their operands to 8 bits, by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from models.families.parameter_table import EXPERTS, LAYER_GROUPS, LayerGroup

#: The linear layers by the names that patterns match, and the `jax.named_scope` of each.
FP8_LAYERS = {group.name: group.scope for group in LAYER_GROUPS}
#: Those that are in 8 bits on request. Experts are not: no kernel multiplies them in 8 bits yet, so
#: that they would be rounded, and no faster.
DEFAULT_FP8_LAYERS = ("layers.*",)


def recipes(fp8: str, patterns: Sequence[str]) -> dict[str, str]:
    """The recipe of each layer that a pattern matches, by its name."""
    for pattern in patterns:
        if not fnmatch.filter(FP8_LAYERS, pattern):
            raise ValueError(
                f"fp8_layers={pattern!r}: matches none of the layers {', '.join(FP8_LAYERS)}"
            )
    return {name: fp8 for pattern in patterns for name in fnmatch.filter(FP8_LAYERS, pattern)}


def scopes(fp8: str | None, patterns: Sequence[str]) -> Any:
    """Recipes by scope, as `collective_matmul.overlap` takes it; None without a recipe."""
    if fp8 is None:
        return None
    chosen = recipes(fp8, patterns).items()
    # Programs that are rewritten have no experts.
    return {FP8_LAYERS[name]: recipe for name, recipe in chosen if name != EXPERTS.name}


def of_layer(group: LayerGroup, options: dict[str, Any]) -> dict[str, Any]:
    """The options of one group of layers, of those of all: `training` becomes what it says of
    them."""
    own = {key: value for key, value in options.items() if key != "training"}
    if "fp8" in options:
        own["fp8"] = options["fp8"].get(group.name)
    if "training" in options:
        own |= options["training"].options_of(group.name)
    return own
