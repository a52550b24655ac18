"""Flags of the command lines that take one of several names."""

from __future__ import annotations

import difflib
import types
import typing
from typing import Any, Literal

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

#: The `registry` of `tyro.cli` by which a wrong name is answered with the names in their order, and
#: with the nearest one. Without it, the names of a flag that may be None have no order.
CHOICES = ConstructorRegistry()


@CHOICES.primitive_rule
def _one_of_names(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """The constructor of a Literal of names, or of one that may be None; else no constructor."""
    is_union = typing.get_origin(info.type) in (typing.Union, types.UnionType)
    kinds = typing.get_args(info.type) if is_union else (info.type,)
    literals = [kind for kind in kinds if kind is not type(None)]
    if len(literals) != 1 or typing.get_origin(literals[0]) is not Literal:
        return None
    names = typing.get_args(literals[0])
    if not all(isinstance(name, str) for name in names):
        return None
    may_be_none = len(kinds) > 1

    def read(values: list[str]) -> str | None:
        (value,) = values
        if value in names:
            return value
        if may_be_none and value == "None":  # As --print-config and printed commands write it.
            return None
        near = difflib.get_close_matches(value, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{value!r} is not one of {', '.join(names)}{hint}")

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(names) + "}",
        instance_from_str=read,
        is_instance=lambda value: value in names or (may_be_none and value is None),
        str_from_instance=lambda value: [str(value)],
    )
