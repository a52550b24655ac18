"""Reports of the collectives found in a program and of what was done about each."""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from collective_matmul.dispatch.decision_table import Line, format_table, line_of
from collective_matmul.dispatch.recording import Decision
from collective_matmul.dispatch.run_counts import is_numbered
from collective_matmul.hardware import rates
from collective_matmul.jaxprs.collectives import axes_of, collective_seconds
from collective_matmul.jaxprs.graph import type_of
from collective_matmul.jaxprs.sources import frames_of, source_of
from collective_matmul.rewrite.find.supported_collectives import CollectiveKind, kind_of
from collective_matmul.source_location import SourceLocation

#: The name scope of a site's replacement, which profiles show.
NAME = "collective_matmul.overlap"
_LIBRARY = Path(__file__).parents[2]
#: Code that traces the equations of ops: collectives in them are already part of a site.
_OWN_CODE = tuple(
    str(_LIBRARY / name) for name in ("ops", "mosaic_gpu", "operands", "schedule", "_compat.py")
)


@dataclass(frozen=True)
class FoundSite:
    """A gather or a sum over devices in a program.

    Attributes:
      kind: "all_gather", "reduce_scatter" or "psum".
      source: the user's line; None if JAX did not record it.
      shapes: the operand, local to a device, and the axis, as text.
      matmuls: the number of matmuls in the site; 0 if it is left alone.
      decision: what executes the site; None if it is left alone.
      reason: why that was chosen, or why the site is left alone.
      communication_seconds: predicted time of the collective alone; None if unknown.
      kept: whether the decision is to keep the program's own collective and matmuls.
      axes: the mesh axes that it communicates over.
      is_weight: whether it gathers a weight for the op of another site, which has its decision. The
        op executes the gather too, unless it is `kept`.
      runs: how often a run of the jaxpr that it was looked for in executes it, with the steps of
        loops. Branches count as taken, and a loop whose number of steps is computed as one step.
    """

    kind: CollectiveKind
    source: SourceLocation | None
    shapes: str
    matmuls: int
    decision: Decision | None
    reason: str
    communication_seconds: float | None = None
    kept: bool = False
    axes: tuple = ()
    is_weight: bool = False
    runs: int = 1

    @property
    def replaced(self) -> bool:
        """Whether it is a site, which an op replaces unless it is `kept` on these devices."""
        return self.decision is not None

    @property
    def key(self) -> tuple:
        """The kind, the place and the shapes, which other programs with the site have too."""
        return self.kind, self.source, self.shapes

    @property
    def line(self) -> Line:
        """Its line in a table."""
        if self.decision is not None and not self.kept:
            return line_of(self.decision)
        chosen = "left alone" if self.decision is None else f"{self.decision.implementation}, kept"
        return Line(self.source, "", self.kind, self.shapes, chosen, self.reason)


class FoundSites:
    """The sites of a jaxpr, and those of the jaxprs that it executes, in the order they are found.

    A jaxpr that is executed at several places has one of these, whose runs add up.
    """

    def __init__(self) -> None:
        self._found: list[FoundSite | tuple[FoundSites, int]] = []

    def add(self, sites: Iterable[FoundSite]) -> None:
        """Adds sites of the jaxpr itself, with the runs that they have in it."""
        self._found += sites

    def add_inside(self, sites: FoundSites, runs: int) -> None:
        """Adds those of a jaxpr that a run of this one executes `runs` times."""
        self._found.append((sites, runs))

    def counted(self) -> list[FoundSite]:
        """Each site once, with how often a run of the jaxpr executes it."""
        completed: dict[FoundSites, None] = {}
        each: list[tuple[FoundSites, FoundSite]] = []

        def visit(sites: FoundSites) -> None:
            for found in sites._found:
                if isinstance(found, FoundSite):
                    each.append((sites, found))
                elif found[0] not in completed:
                    visit(found[0])
            completed[sites] = None

        visit(self)
        runs: Counter[FoundSites] = Counter({self: 1})
        for sites in reversed(completed):  # Each after all that execute it.
            for found in sites._found:
                if isinstance(found, tuple):
                    runs[found[0]] += runs[sites] * found[1]
        return [replace(site, runs=runs[sites] * site.runs) for sites, site in each]


def table(sites: Sequence[FoundSite]) -> str:
    """A table of the sites, in the format of `collective_matmul.explain`."""
    runs: Counter[Line] = Counter()
    for site in sites:
        runs[site.line] += site.runs
    return format_table(runs, runs)


def reported(
    equation: JaxprEqn,
    reason: str,
    decision: Decision | None = None,
    matmuls: int = 0,
    **others: Any,
) -> FoundSite:
    """The report of a collective of the program: left alone, unless there is a decision.

    The other arguments are fields of the report.
    """
    kind, axes = kind_of(equation), axes_of(equation)
    assert kind is not None
    source, shapes = source_of(equation), _shapes(equation)
    seconds = _communication_seconds(equation)
    return FoundSite(kind, source, shapes, matmuls, decision, reason, seconds, axes=axes, **others)


def left_alone_by_type(
    equation: JaxprEqn, kind: CollectiveKind, array: Any, axis: str, reason: str
) -> FoundSite:
    """The report of what an equation communicates of an array by types alone, and which stays."""
    shapes = _shapes_of(type_of(array), (axis,))
    return FoundSite(kind, source_of(equation), shapes, 0, None, reason, axes=(axis,))


_considered: contextvars.ContextVar[list[FoundSite] | None] = contextvars.ContextVar(
    "considered", default=None
)


@contextlib.contextmanager
def record_considered() -> Iterator[list[FoundSite]]:
    """Collects what `overlap` finds inside the block and leaves in the program as it is."""
    sites: list[FoundSite] = []
    token = _considered.set(sites)
    try:
        yield sites
    finally:
        _considered.reset(token)


def consider(sites: Iterable[FoundSite]) -> None:
    """Adds those of the sites that stay in the program to the active record, if any."""
    record = _considered.get()
    if record is not None:
        record += (site for site in sites if not site.replaced or site.kept)


def is_ours(equation: JaxprEqn) -> bool:
    """Whether an op traced the equation, which then is part of a site already."""
    if is_named(equation) or is_numbered(equation):
        return True
    return any(frame.file_name.startswith(_OWN_CODE) for frame in frames_of(equation))


def is_named(equation: JaxprEqn) -> bool:
    """Whether the equation replaces part of a site, or was derived from such an equation."""
    return NAME in str(equation.source_info.name_stack)


def _shapes(equation: JaxprEqn) -> str:
    return _shapes_of(type_of(equation.invars[0]), axes_of(equation))


def _shapes_of(array: Any, axes: Iterable) -> str:
    shape = ",".join(map(str, array.shape))
    return f"{array.dtype} [{shape}] over {', '.join(map(str, axes))}"


def _communication_seconds(equation: JaxprEqn) -> float | None:
    """Seconds of a collective over NVLink; None on devices of unknown rates."""
    gpu, mesh = rates(), jax.sharding.get_abstract_mesh()
    if gpu is None or not set(axes_of(equation)) <= set(mesh.axis_names):
        return None
    return collective_seconds(equation, mesh.shape, gpu)
