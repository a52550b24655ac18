"""Names of earlier releases: flags that users type, and what logs hold."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from models.checkpoint.earlier_releases import FIELDS, VALUES

#: Fields of `train.log.metrics.Record` by the names that they had. Both were per device.
RECORD_FIELDS = {"tokens_per_second": "tokens_per_second_per_device", "tflops": "tflops_per_device"}


def current_arguments(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with today's names of flags and values.

    Prints a sentence on stderr for each that was renamed.
    """
    current: list[str] = []
    flag = ""
    for argument in arguments:
        if argument.startswith("--"):
            old, equals, value = argument.partition("=")
            flag = _current_flag(old)
            argument = flag + equals + (_current_value(flag, value) if equals else "")
        elif flag:
            argument, flag = _current_value(flag, argument), ""
        current.append(argument)
    return current


def current_record(logged: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a log with today's names. In earlier releases each line was a step."""
    current = {RECORD_FIELDS.get(name, name): value for name, value in logged.items()}
    return {"event": "step", **current}


def _current_flag(flag: str) -> str:
    name = flag.removeprefix("--").replace("-", "_")
    if name not in FIELDS:
        return flag
    current = "--" + FIELDS[name].replace("_", "-")
    _warn(flag, current)
    return current


def _current_value(flag: str, value: str) -> str:
    values = VALUES.get(flag.removeprefix("--"), {})
    if value not in values:
        return value
    _warn(f"{flag} {value}", f"{flag} {values[value]}")
    return values[value]


def _warn(old: str, current: str) -> None:
    sentence = f"warning: {old} is now called {current}; the old name will be removed"
    print(sentence, file=sys.stderr)
