"""The rotary embedding of a config.json: keys of old and of new files."""

from __future__ import annotations

from typing import Any

from models.config import RotaryScaling
from models.families.config_keys import (
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
    if kind == "default":
        parameters, scaling = ConfigValues(given, common, place=place), RotaryScaling()
    elif kind == "llama3":
        parameters = ConfigValues(given, (*common, *_llama3(longest_context)), place=place)
        scaling = _scaling(parameters, place)
    else:
        raise ValueError(
            f"{place} of type {shown(kind)} is not supported; expected 'llama3', or null for none"
        )
    return parameters["rope_theta"], scaling


def write_rotary(base: float, scaling: RotaryScaling) -> dict[str, Any]:
    """The keys of which `read_rotary` reads a base and a scaling, in the form that all versions of
    Hugging Face's library read."""
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


_MISSING = object()


def _llama3(longest_context: int) -> tuple[Key, ...]:
    return (
        Key("factor", numbers(1), _MISSING),
        Key("low_freq_factor", POSITIVE, _MISSING),
        Key("high_freq_factor", POSITIVE, _MISSING),
        Key("original_max_position_embeddings", SIZE, longest_context),
    )


def _scaling(parameters: ConfigValues, place: str) -> RotaryScaling:
    for name, value in parameters.items():
        if value is _MISSING:
            raise ValueError(f"{place} has no {name!r}; give the file that the model came with")
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
