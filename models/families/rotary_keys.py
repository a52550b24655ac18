"""The rotary embedding of a config.json: keys of old and of new files."""

from __future__ import annotations

import math
from typing import Any

from models.config import RotaryScaling
from models.families.config_keys import (
    FLAG,
    OBJECT,
    POSITIVE,
    SIZE,
    TEXT,
    ConfigValues,
    Key,
    numbers,
    or_null,
    shown,
)

_BASE = numbers(1)
#: Hugging Face's library has written `rope_parameters` since version 5, and before that
#: `rope_theta` and `rope_scaling`.
ROTARY_KEYS = (
    Key("rope_parameters", or_null(OBJECT), None),
    Key("rope_scaling", or_null(OBJECT), None),
    Key("rope_theta", _BASE, 10_000.0),
    Key("partial_rotary_factor", POSITIVE, 1.0, supported=(1.0,)),
)


def read_rotary(values: ConfigValues, longest_context: int) -> tuple[float, RotaryScaling]:
    """The base of the rotary embedding, and its scaling.

    Args:
      values: the keys of config.json.
      longest_context: `max_position_embeddings`, or what a file without it means.

    Raises:
      ValueError: for a scaling that is not supported.
    """
    # An old object that says something takes the place of a new one, in Hugging Face's library too.
    place = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    given = values[place] or {}
    place = f"config.json: {place}"
    # "rope_type" was called "type" once.
    kind = given.get("rope_type", given.get("type", "default"))
    common = (
        Key("rope_type", TEXT, "default"),
        Key("type", TEXT, "default"),
        Key("rope_theta", _BASE, values["rope_theta"]),
        Key("partial_rotary_factor", POSITIVE, 1.0, supported=(1.0,)),
    )
    scaling = RotaryScaling()
    if kind == "default":
        parameters = ConfigValues(given, common, place=place)
    elif kind == "llama3":
        parameters = ConfigValues(given, (*common, *_llama3(longest_context)), place=place)
        scaling = _scaling(parameters, place)
    elif kind == "yarn":
        parameters = ConfigValues(given, (*common, *_yarn(longest_context)), place=place)
        scaling = _yarn_scaling(parameters, longest_context, place)
    else:
        raise ValueError(
            f"{place} of type {shown(kind)} is not supported; expected 'llama3' or 'yarn', or null"
            " for none"
        )
    return parameters["rope_theta"], scaling


def write_rotary(base: float, scaling: RotaryScaling) -> dict[str, Any]:
    """The keys of which `read_rotary` reads a base and a scaling, in the form that all versions of
    Hugging Face's library read."""
    if scaling.kind == "yarn":
        return {"rope_theta": float(base), "rope_scaling": _written_yarn(scaling)}
    if scaling.factor == 1:
        return {"rope_theta": float(base), "rope_scaling": None}
    parameters = {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_context,
    }
    return {"rope_theta": float(base), "rope_scaling": parameters}


def _written_yarn(scaling: RotaryScaling) -> dict[str, Any]:
    parameters = {
        "rope_type": "yarn",
        "factor": float(scaling.factor),
        "original_max_position_embeddings": scaling.original_context,
        "beta_fast": float(scaling.beta_fast),
        "beta_slow": float(scaling.beta_slow),
    }
    if scaling.attention_factor is not None:
        parameters["attention_factor"] = float(scaling.attention_factor)
    # Versions before 4.56 do not know the key, and truncate.
    return parameters if scaling.truncate else parameters | {"truncate": False}


_MISSING = object()


def _llama3(longest_context: int) -> tuple[Key, ...]:
    return (
        Key("factor", numbers(1), _MISSING),
        Key("low_freq_factor", POSITIVE, _MISSING),
        Key("high_freq_factor", POSITIVE, _MISSING),
        Key("original_max_position_embeddings", SIZE, longest_context),
    )


def _yarn(longest_context: int) -> tuple[Key, ...]:
    return (
        # Null: the ratio of the two contexts.
        Key("factor", or_null(numbers(1)), _MISSING),
        Key("original_max_position_embeddings", SIZE, longest_context),
        Key("beta_fast", or_null(POSITIVE), None),
        Key("beta_slow", or_null(POSITIVE), None),
        Key("attention_factor", or_null(POSITIVE), None),
        Key("mscale", or_null(numbers(0)), None),
        Key("mscale_all_dim", or_null(numbers(0)), None),
        Key("truncate", FLAG, True),
    )


def _check_complete(parameters: ConfigValues, place: str) -> None:
    for name, value in parameters.items():
        if value is _MISSING:
            raise ValueError(f"{place} has no {name!r}; give the file that the model came with")


def _yarn_scaling(parameters: ConfigValues, longest_context: int, place: str) -> RotaryScaling:
    _check_complete(parameters, place)
    original = parameters["original_max_position_embeddings"]
    factor = parameters["factor"]
    if factor is None:
        factor = longest_context / original
        if factor < 1:
            raise ValueError(
                f"{place}: factor=None stands for max_position_embeddings={longest_context} divided"
                f" by original_max_position_embeddings={original}, which is less than 1; give"
                " the file that the model came with"
            )
    fast, slow = parameters["beta_fast"] or 32, parameters["beta_slow"] or 1
    if not slow < fast:
        raise ValueError(
            f"{place}: beta_slow={slow} and beta_fast={fast}: expected the second to be larger;"
            " give the file that the model came with"
        )
    if parameters["rope_theta"] == 1:
        raise ValueError(
            f"{place}: rope_theta=1: expected more with a scaling of type 'yarn', which needs waves"
            " of different lengths; give the file that the model came with"
        )
    return RotaryScaling(
        kind="yarn",
        factor=float(factor),
        original_context=original,
        beta_fast=float(fast),
        beta_slow=float(slow),
        attention_factor=_attention_factor(parameters, factor),
        truncate=parameters["truncate"],
    )


def _attention_factor(parameters: ConfigValues, factor: float) -> float | None:
    """The factor that a file gives; None for what follows from the factor."""
    if parameters["attention_factor"] is not None:
        return float(parameters["attention_factor"])
    scale, whole = parameters["mscale"], parameters["mscale_all_dim"]
    if not (scale and whole):
        return None
    above, below = (0.1 * each * math.log(factor) + 1 for each in (scale, whole))
    return above / below


def _scaling(parameters: ConfigValues, place: str) -> RotaryScaling:
    _check_complete(parameters, place)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    if not low < high:
        raise ValueError(
            f"{place}: low_freq_factor={low} and high_freq_factor={high}: expected the second to be"
            " larger; give the file that the model came with"
        )
    if parameters["factor"] == 1:
        return RotaryScaling()
    return RotaryScaling(
        factor=float(parameters["factor"]),
        low_frequency_factor=float(low),
        high_frequency_factor=float(high),
        original_context=parameters["original_max_position_embeddings"],
    )
