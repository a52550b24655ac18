"""Inlines calls of `jax.jit` between a collective, or a reshard, and its matmul."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, Var

from collective_matmul.jaxprs.bodies import called, opened
from collective_matmul.jaxprs.graph import Atom, Graph, type_of
from collective_matmul.jaxprs.walks import Holds
from collective_matmul.rewrite.find.collective_equations import holds_collectives, kind_of
from collective_matmul.rewrite.find.commuting import commuting_op
from collective_matmul.rewrite.find.placements import reshard_kind
from collective_matmul.rewrite.find.report import is_named

_holds_matmul = Holds(lambda equation: equation.primitive.name == "dot_general")


def inlined(graph: Graph) -> Graph:
    """The jaxpr with those calls inlined, nested ones too; the same object if there are none."""
    while wanted := _calls_to_inline(graph):
        jaxpr = graph.jaxpr
        equations: list[JaxprEqn] = []
        names: dict[Var, Atom] = {}
        for index, equation in enumerate(jaxpr.eqns):
            equation = equation.replace(invars=_renamed(equation.invars, names))
            equations += _inline(equation, names) if index in wanted else [equation]
        outvars = _renamed(jaxpr.outvars, names)
        graph = Graph(jaxpr.replace(eqns=equations, outvars=outvars))
    return graph


def has_matmul_beside(graph: Graph, index: int) -> bool:
    """Whether a call that can be inlined, next to a collective, holds a matmul."""
    calls = (graph.equations[i] for i in _neighbours(graph, index))
    return any(_holds_matmul(opened(called(c))) for c in calls if _can_inline(c))


def _calls_to_inline(graph: Graph) -> set[int]:
    """Indices of calls that use a gathered array, or that make or use the operand of a sum."""
    found = {
        index
        for at, equation in enumerate(graph.equations)
        if _kind(equation) is not None
        for index in _neighbours(graph, at)
        if _can_inline(graph.equations[index])
    }
    calls = (index for index, equation in enumerate(graph.equations) if _can_inline(equation))
    found.update(i for i in calls if _reaches_outside(opened(called(graph.equations[i]))))
    return found


def _kind(equation: JaxprEqn) -> str | None:
    """The kind of a collective, or of a reshard over Explicit mesh axes."""
    return kind_of(equation) or reshard_kind(equation)


def _neighbours(graph: Graph, index: int) -> set[int]:
    """Equations next to a collective, skipping those that commute with it."""
    equation = graph.equations[index]
    if _kind(equation) == "all_gather":
        return set(_users(graph, equation.outvars[0]))
    return {made for made in _makers(graph, equation.invars[0]) if made is not None}


def _users(graph: Graph, var: Var) -> Iterator[int]:
    """Equations that read an array, or what commuting equations make of it."""
    pending, seen = [var], {var}
    while pending:
        for index in graph.users(pending.pop()):
            equation = graph.equations[index]
            if commuting_op(graph, equation) is None:
                yield index
            elif equation.outvars[0] not in seen:
                seen.add(equation.outvars[0])
                pending.append(equation.outvars[0])


def _makers(graph: Graph, atom: Atom) -> Iterator[int | None]:
    """Producers of an array, or of the terms that it is the sum of; None for an argument."""
    # A stack and a set, since sums may have thousands of terms, and terms be sums of others.
    pending, seen = [atom], set()
    while pending:
        index = graph.producer(pending.pop())
        if index in seen:
            continue
        seen.add(index)
        equation = None if index is None else graph.equations[index]
        if equation is None:
            yield None
        elif (passed := commuting_op(graph, equation)) is not None:
            pending.append(passed.operand)
        elif equation.primitive.name in ("add", "add_any"):
            pending += equation.invars
        else:
            yield index


def _reaches_outside(jaxpr: Jaxpr) -> bool:
    """Whether a collective inside the call may have its matmul outside of it."""
    if not holds_collectives(jaxpr):
        return False
    graph = Graph(jaxpr)
    for equation in graph.equations:
        if kind_of(equation) == "all_gather" and _is_returned(graph, equation.outvars[0]):
            return True
        summed = kind_of(equation) in ("reduce_scatter", "psum")
        if summed and None in _makers(graph, equation.invars[0]):
            return True
        if _can_inline(equation) and _reaches_outside(opened(called(equation))):
            return True
    return False


def _is_returned(graph: Graph, var: Var) -> bool:
    """Whether an array, or what commuting equations make of it, is a result of the jaxpr."""
    pending = [var]
    while pending:
        var = pending.pop()
        if var in graph.results:
            return True
        users = map(graph.equations.__getitem__, graph.users(var))
        pending += [user.outvars[0] for user in users if commuting_op(graph, user) is not None]
    return False


def _can_inline(equation: JaxprEqn) -> bool:
    return is_plain_call(equation) and not called(equation).consts


def is_plain_call(equation: JaxprEqn) -> bool:
    """Whether it is a call of `jax.jit` without shardings, compiler options or a special name."""
    if equation.primitive.name not in ("jit", "pjit") or is_named(equation):
        return False
    parameters = equation.params
    shardings = (*parameters["in_shardings"], *parameters["out_shardings"])
    specified = any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)
    return not (specified or parameters["compiler_options_kvs"])


def _inline(equation: JaxprEqn, names: dict[Var, Atom]) -> list[JaxprEqn]:
    """The equations of a call, in its name scope; `names` receives what its results become."""
    jaxpr = opened(called(equation))
    inside: dict[Var, Atom] = dict(zip(jaxpr.invars, equation.invars, strict=True))
    scope = equation.source_info.name_stack.extend(equation.params["name"])
    equations = []
    for inner in jaxpr.eqns:
        invars = _renamed(inner.invars, inside)
        outvars = [v if isinstance(v, DropVar) else Var(type_of(v)) for v in inner.outvars]
        inside.update(zip(inner.outvars, outvars, strict=True))
        source = inner.source_info.replace(name_stack=scope + inner.source_info.name_stack)
        equations.append(inner.replace(invars=invars, outvars=outvars, source_info=source))
    names.update(zip(equation.outvars, _renamed(jaxpr.outvars, inside), strict=True))
    return equations


def _renamed(atoms: list[Atom], names: dict[Var, Atom]) -> list[Atom]:
    return [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in atoms]
