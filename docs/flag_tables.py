"""Tables of the flags of the command lines, from the fields and docstrings of dataclasses."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from tyro.conf import Fixed, Positional

from models import command_line
from train.config.config import Config

#: What is documented: the heading, and the class whose fields are the flags.
PROGRAMS: dict[str, type] = {
    "python -m train": Config,
    "python -m models import": command_line.Import,
    "python -m models export": command_line.Export,
    "python -m models generate": command_line.Generate,
}


class Flag(NamedTuple):
    """One row."""

    name: str
    values: str
    default: str
    meaning: str

    def __str__(self) -> str:
        cells = (f"`{self.name}`", self.values, self.default, self.meaning)
        return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(cell: str) -> str:
    return re.sub(r"([|*])", r"\\\1", cell)


def pages() -> str:
    """The tables of all programs, as Markdown."""
    return "".join(_program(name, config) for name, config in PROGRAMS.items())


def _program(name: str, config: type) -> str:
    head = "| flag | values | default | meaning |\n|---|---|---|---|\n"
    rows = "".join(f"{flag}\n" for flag in flags_of(config))
    return f"\n## {name}\n\n{inspect.getdoc(config)}\n\n{head}{rows}"


def flags_of(config: type, prefix: str = "") -> Iterator[Flag]:
    """The flags of a dataclass, those of the dataclasses in it after its own."""
    types = typing.get_type_hints(config, include_extras=True)
    meanings, nested = dict(_docstrings(config)), []
    for field in dataclasses.fields(config):
        kind, name = types[field.name], f"{prefix}{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(kind):
            nested.append((kind, f"{name}."))
        elif Fixed not in typing.get_args(kind):
            is_positional = Positional in typing.get_args(kind)
            shown = field.name.upper() if is_positional else f"--{name}"
            yield Flag(shown, _values(kind), _default(field), meanings.get(field.name, ""))
    for kind, name in nested:
        yield from flags_of(kind, name)


def _docstrings(config: type) -> Iterator[tuple[str, str]]:
    """The string after each field, on one line; of inherited fields too."""
    for base in reversed(config.__mro__):
        if dataclasses.is_dataclass(base):
            (definition,) = ast.parse(inspect.getsource(base)).body
            assert isinstance(definition, ast.ClassDef)
            for field, after in zip(definition.body, definition.body[1:], strict=False):
                match field, after:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        yield name, " ".join(text.split())


def _values(kind: Any) -> str:
    """The values that a flag takes, in words."""
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Annotated:
        return _values(typing.get_args(kind)[0])
    options = [_values(option) for option in typing.get_args(kind) if option is not type(None)]
    if options and typing.get_origin(kind) is not tuple:
        return " or ".join(options)
    names = {int: "integer", float: "number", str: "text", bool: "switch"}
    return names.get(kind, "texts")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return ""
    return "" if field.default in (None, "", ()) else f"`{field.default}`"
