"""Configuration files: JSON as ``--print-config`` writes it, or a part of that, or the config.json
of a Hugging Face folder, which has the model alone."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType, NoneType
from typing import Any, Literal

import tyro
from flax import traverse_util

from models import families
from models.checkpoint.earlier_releases import current_configuration
from models.choices import CHOICES
from train.config.config import Config
from train.config.defaults import FOLLOWING, OF_MODEL, with_values
from train.config.model_folder import NAMED, describes_model, read_object
from train.config.presets import PRESETS

#: Fields that say what to do with the configuration, and are no part of it.
_NOT_WRITTEN = ("config", "print_config")
#: So many names of a file are shown.
_SHOWN = 3
#: The types of fields, in words.
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    NoneType: "null",
}


def config_text(config: Config, unset: Collection[str] = ()) -> str:
    """The text of a file that describes the configuration.

    Args:
      config: the configuration.
      unset: fields of `FOLLOWING` that nobody set, by dotted name. They are null in the file, so
        that they still follow from other settings where it is read.
    """
    values = traverse_util.flatten_dict(config.to_json(), keep_empty_nodes=True, sep=".")
    written = {
        name: None if name in unset else value
        for name, value in values.items()
        if name not in _NOT_WRITTEN
    }
    return json.dumps(traverse_util.unflatten_dict(written, sep="."), indent=2)


def fields_of_file(path: str) -> set[str]:
    """The fields that a configuration file sets, by dotted name; of a Hugging Face config.json
    those whose defaults follow from its model.

    Raises:
      ValueError: see `read_config`.
    """
    values = read_object(path)
    if describes_model(values):
        return {*OF_MODEL}
    flat = traverse_util.flatten_dict(current_configuration(values), sep=".")
    return {name for name, value in flat.items() if not _is_unset(name, value)}


def read_config(
    path: str, preset: str | None, program: str, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Config:
    """Reads a configuration. Fields that the file leaves out have the values of its preset, and so
    have those of `FOLLOWING` that are null in it.

    Names of earlier releases are accepted.

    Args:
      path: the file, or a folder with a config.json; of a Hugging Face config.json, the
        configuration has the model.
      preset: the preset that was asked for beside the file, or None.
      program: the command, for error messages.
      defaults: values by dotted name that replace those of the preset.

    Raises:
      ValueError: the file cannot be read or is not JSON; a key is unknown; a value is not of the
        type of its field; `preset` is another one than the file's.
    """
    values = read_object(path)
    if describes_model(values):
        values = {"model": _described_model(values, path)}
    values = current_configuration(values)
    for name in _NOT_WRITTEN:
        values.pop(name, None)
    name = values.get("preset", preset or "debug")
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"config={path!r}: preset={name!r}: expected one of {', '.join(PRESETS)}")
    if preset not in (None, name):
        raise ValueError(
            f"preset={preset!r}: config={path!r} was made from preset {name!r}, whose values it"
            " holds; leave out --preset, or the file"
        )
    default = with_values(PRESETS[name](), defaults)
    arguments = _as_arguments(values, default, path)
    named = f"{program} --config {path}"
    return tyro.cli(Config, default=default, args=arguments, prog=named, registry=CHOICES)


def _described_model(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The fields of the model that a Hugging Face config.json describes."""
    try:
        return dataclasses.asdict(families.read_config(values))
    except ValueError as error:
        raise ValueError(f"config={path!r}: {error}") from error


def _as_arguments(values: Mapping[str, Any], default: Config, path: str) -> list[str]:
    """The flags that set these values, so that a file and a command line are read alike."""
    fields = traverse_util.flatten_dict(default.to_json(), sep=".")
    arguments = []
    flat = traverse_util.flatten_dict(dict(values), keep_empty_nodes=True, sep=".")
    if flat:
        _check_kind(list(flat), list(fields), path)
    for name, value in flat.items():
        if value is traverse_util.empty_node:
            value = {}
            if any(field.startswith(f"{name}.") for field in fields):
                continue
        if name not in fields:
            raise ValueError(f"config={path!r}: {_unknown(name, value, list(fields))}")
        if _is_unset(name, value):
            continue
        kinds = _kinds_of(name)
        if not any(_is_of(kind, value) for kind in kinds):
            *most, last = [_in_words(kind) for kind in kinds]
            expected = f"{', '.join(most)} or {last}" if most else last
            raise ValueError(f"config={path!r}: {name}={json.dumps(value)}: expected {expected}")
        arguments.append(as_argument(name, value))
    return arguments


def _kinds_of(name: str) -> tuple[Any, ...]:
    """The types that a field may have, by its dotted name: types of `_WORDS`, or a Literal."""
    kind = functools.reduce(
        lambda kind, part: typing.get_type_hints(kind)[part], name.split("."), Config
    )
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = typing.get_args(kind) if is_union else (kind,)
    return (*kinds, NoneType) if name in FOLLOWING and NoneType not in kinds else kinds


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a value of a file is one of this type; numbers and None may be text, as in flags."""
    if isinstance(value, list | dict | bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    if value is None or kind is NoneType:
        return kind is NoneType and value in (None, "None")
    if typing.get_origin(kind) is Literal:
        return str(value) in map(str, typing.get_args(kind))
    try:
        kind(str(value))
    except ValueError:
        return False
    return True


def _in_words(kind: Any) -> str:
    if kind in _WORDS:
        return _WORDS[kind]
    return f"one of {', '.join(map(json.dumps, typing.get_args(kind)))}"


def _is_unset(name: str, value: Any) -> bool:
    """Whether a field of a file has the default that follows from other settings."""
    return value is None and name in FOLLOWING


def as_argument(name: str, value: Any) -> str:
    """The argument that sets a field: ``--model.no-tied-head``, ``--batch-size=8``."""
    group, dot, field = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return f"--{group}{dot}{'' if value else 'no-'}{field}"
    # The value may begin with a hyphen.
    return f"--{group}{dot}{field}={value}"


def _check_kind(names: Sequence[str], fields: list[str], path: str) -> None:
    """Raises ValueError if no name in a file is that of a flag or of a group of them, nor the first
    like one."""
    groups = {field.rpartition(".")[0] for field in fields}
    if {*fields, *groups} & set(names) or difflib.get_close_matches(names[0], fields, n=1):
        return
    listed = ", ".join(map(repr, names[:_SHOWN])) + ", ..." * (len(names) > _SHOWN)
    raise ValueError(
        f"config={path!r}: no name in it is that of a flag, found {listed}; give {NAMED}"
    )


def _unknown(name: str, value: Any, fields: list[str]) -> str:
    inside = [field.removeprefix(f"{name}.") for field in fields if field.startswith(f"{name}.")]
    if inside:
        found = json.dumps(value)
        return f"{name}={found}: expected an object with names such as {inside[0]!r}"
    near = difflib.get_close_matches(name, fields, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "see --print-config for what there is"
    return f"unknown key {name!r}; {hint}"
