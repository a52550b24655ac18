"""What was found in a program, and what was done about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jax.extend.core import JaxprEqn

from collective_matmul.dispatch.decision_table import Line, format_table, line_of
from collective_matmul.dispatch.selection import Decision, record
from collective_matmul.rewrite.collective_equations import Kind, axes_of, kind_of
from collective_matmul.rewrite.graph import type_of
from collective_matmul.source_location import SourceLocation, is_library

#: The name scope of what takes a site's place; profiles show it.
NAME = "collective_matmul.overlap"
_LIBRARY = Path(__file__).parents[1]
_OWN_CODE = (
    str(_LIBRARY / "implementations"),
    str(_LIBRARY / "kernels"),
    str(_LIBRARY / "gradients.py"),
    str(_LIBRARY / "ops.py"),
    str(_LIBRARY / "_compat.py"),
)


@dataclass(frozen=True)
class FoundSite:
    """A gather or a sum over devices in a program.

    Attributes:
      kind: "all_gather", "reduce_scatter" or "psum".
      source: where in the user's program; None if that was not recorded.
      shapes: the local array and the axis, to be read.
      matmuls: how many matmuls take part; 0 where it is left alone.
      decision: what carries it out; None where it is left alone.
      reason: why that, or why it is left alone.
    """

    kind: Kind
    source: SourceLocation | None
    shapes: str
    matmuls: int
    decision: Decision | None
    reason: str

    @property
    def replaced(self) -> bool:
        """Whether an op of this library takes its place."""
        return self.decision is not None

    @property
    def line(self) -> Line:
        """It in a table."""
        if self.decision is not None:
            return line_of(self.decision)
        return Line(self.source, "", self.kind, self.shapes, "left alone", self.reason)


def table(sites: Sequence[FoundSite]) -> str:
    """What was done about each site, as `collective_matmul.explain` says it."""
    return format_table(site.line for site in sites)


def left_alone(equation: JaxprEqn, reason: str) -> FoundSite:
    """The report of a collective that stays as it is."""
    return _site(equation, 0, None, reason)


def replaced_by(equation: JaxprEqn, matmuls: int, decision: Decision) -> FoundSite:
    """The report of a collective that an op takes the place of; its decision is recorded."""
    record(decision)
    return _site(equation, matmuls, decision, decision.reason)


def source_of(equation: JaxprEqn) -> SourceLocation | None:
    """The user's line that an equation comes from."""
    for frame in _frames(equation):
        if not is_library(frame.file_name):
            return SourceLocation(frame.file_name, frame.line_num, frame.function_name)
    return None


def is_ours(equation: JaxprEqn) -> bool:
    """Whether an op of this library traced the equation: it is part of a site already."""
    return is_named(equation) or any(
        frame.file_name.startswith(_OWN_CODE) for frame in _frames(equation)
    )


def is_named(equation: JaxprEqn) -> bool:
    """Whether the equation is what took a site's place, or was made from that."""
    return NAME in str(equation.source_info.name_stack)


def _frames(equation: JaxprEqn) -> Sequence:
    traceback = equation.source_info.traceback
    return () if traceback is None else traceback.frames


def _site(equation: JaxprEqn, matmuls: int, decision: Decision | None, reason: str) -> FoundSite:
    kind = kind_of(equation)
    assert kind is not None
    array = type_of(equation.invars[0])
    axes = ", ".join(map(str, axes_of(equation)))
    shapes = f"{array.dtype} [{','.join(map(str, array.shape))}] over {axes}"
    return FoundSite(kind, source_of(equation), shapes, matmuls, decision, reason)
