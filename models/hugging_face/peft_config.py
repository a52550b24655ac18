"""adapter_config.json, as the library PEFT writes and reads it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.families.config_keys import shown
from models.parameters.adapters import MODULES, LoraConfig

_ALL_LINEAR = "all-linear"
#: Keys that change no result, or only training or how PEFT initializes adapters.
_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "inference_mode", "loftq_config", "lora_ga_config", "megatron_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
})  # fmt: skip
_USED = frozenset({
    "alpha_pattern", "bias", "fan_in_fan_out", "init_lora_weights", "lora_alpha", "lora_dropout",
    "peft_type", "r", "rank_pattern", "target_modules", "task_type", "use_rslora",
})  # fmt: skip


#: Initializations that leave the base's weights as they are. After the others, such as "pissa", an
#: adapter belongs to other weights than those of the base's files.
_INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class PeftConfig:
    """The adapters of a model, in PEFT's terms.

    Attributes:
      rank: rank of each adapter that `rank_pattern` does not name.
      alpha: numerator of the scale of each adapter that `alpha_pattern` does not name.
      target_modules: ends of modules' names; or a regular expression of whole names, or
        "all-linear".
      dropout: probability of dropout on the input of adapters, in training.
      rslora: whether the scale is alpha / sqrt(rank), not alpha / rank.
      rank_pattern: ranks by a regular expression of the end of a module's name. The first that
        matches is used.
      alpha_pattern: alphas by such expressions.
      base_model: name or path of the model that the adapters belong to.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...] | str
    dropout: float = 0.0
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    base_model: str | None = None

    def adapts(self, module: str) -> bool:
        """Whether a linear module other than the head has an adapter, by its name in the model."""
        if self.target_modules == _ALL_LINEAR:
            return True
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, module) is not None
        return any(module == end or module.endswith(f".{end}") for end in self.target_modules)

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of the product of a module's adapter."""
        rank = self.rank_of(module)
        alpha = _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def peft_config_of(lora: LoraConfig, base_model: str | None = None) -> PeftConfig:
    """Adapters of the trainer, in PEFT's terms.

    Raises:
      ValueError: parameters were trained whole beside the adapters.
    """
    if lora.train:
        raise ValueError(
            f"lora.train={lora.train!r}: parameters that were trained whole beside the adapters,"
            " which have no place in a folder of adapters; train without --lora.train"
        )
    assert lora.rank is not None
    return PeftConfig(
        rank=lora.rank,
        alpha=lora.alpha,
        target_modules=tuple(name for name, path in MODULES.items() if path in lora.layers),
        dropout=lora.dropout,
        rslora=lora.rslora,
        base_model=base_model,
    )


def read_peft_config(values: Mapping[str, Any]) -> PeftConfig:
    """The adapters that the object of an adapter_config.json describes.

    Raises:
      ValueError: for a value that is not supported, or of the wrong type; names the key.
    """
    _refuse_other_methods(values)
    rank = _checked(values, "r", 8, _is_rank, "a whole number of at least 1")
    alpha = _checked(values, "lora_alpha", 8, _is_alpha, "a positive number")
    dropout = _checked(values, "lora_dropout", 0.0, _is_dropout, "at least 0 and less than 1")
    rslora = _checked(
        values, "use_rslora", False, lambda value: isinstance(value, bool), "true or false"
    )
    base = values.get("base_model_name_or_path")
    return PeftConfig(
        rank=rank,
        alpha=alpha,
        target_modules=_targets(values.get("target_modules")),
        dropout=dropout,
        rslora=rslora,
        rank_pattern=_patterns(values, "rank_pattern", _is_rank),
        alpha_pattern=_patterns(values, "alpha_pattern", _is_alpha),
        base_model=base if isinstance(base, str) else None,
    )


def write_peft_config(config: PeftConfig) -> dict[str, Any]:
    """The object of an adapter_config.json."""
    targets = config.target_modules
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base_model,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "use_rslora": config.rslora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }


def _refuse_other_methods(values: Mapping[str, Any]) -> None:
    if values.get("peft_type") != "LORA":
        raise ValueError(f"peft_type={shown(values.get('peft_type'))}: expected 'LORA'")
    task = values.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise ValueError(f"task_type={shown(task)}: expected 'CAUSAL_LM'")
    if values.get("bias", "none") != "none":
        raise ValueError(
            f"bias={shown(values['bias'])}: biases are not trained here; expected 'none'"
        )
    if values.get("init_lora_weights", True) not in _INITIALIZATIONS:
        raise ValueError(
            f"init_lora_weights={shown(values['init_lora_weights'])}: changes the base's weights;"
            " save the adapter with PEFT's path_initial_model_for_weight_conversion"
        )
    if values.get("fan_in_fan_out", False) is not False:
        raise ValueError(
            f"fan_in_fan_out={shown(values['fan_in_fan_out'])}: these models store [out, in];"
            " expected false"
        )
    for key, value in values.items():
        # What PEFT writes for a feature that is off.
        off = any(value is each for each in (None, False)) or value in ([], {}, "")
        if key not in _WITHOUT_EFFECT | _USED and not off:
            raise ValueError(
                f"{key}={shown(value)}: is not supported; merge the adapter with PEFT"
                " (merge_and_unload) and give the merged folder"
            )


def _targets(value: Any) -> tuple[str, ...] | str:
    if isinstance(value, str) and value:
        if value != _ALL_LINEAR:
            _compiled("target_modules", value)
        return value
    if isinstance(value, list) and value and all(isinstance(end, str) and end for end in value):
        return tuple(sorted(value))
    raise ValueError(
        f"target_modules={shown(value)}: expected names of modules, a regular expression of them,"
        " or 'all-linear'"
    )


def _patterns(values: Mapping[str, Any], key: str, valid: Any) -> dict[str, Any]:
    given = values.get(key) or {}
    if not isinstance(given, dict) or not all(map(valid, given.values())):
        raise ValueError(f"{key}={shown(given)}: expected positive numbers by patterns of modules")
    for pattern in given:
        _compiled(key, pattern)
    return dict(given)


def _compiled(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{key}={shown(pattern)}: no regular expression ({error})") from error


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _checked(values: Mapping[str, Any], key: str, default: Any, valid: Any, words: str) -> Any:
    value = values.get(key, default)
    if not valid(value):
        raise ValueError(f"{key}={shown(value)}: expected {words}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_alpha(value: Any) -> bool:
    return _is_number(value) and 0 < value < math.inf


def _is_dropout(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1
