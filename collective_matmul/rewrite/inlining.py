"""Opens calls of `jax.jit` that stand between a collective and its matmul."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, Var

from collective_matmul.rewrite.collective_equations import collectives_in, kind_of
from collective_matmul.rewrite.commuting import passage
from collective_matmul.rewrite.graph import Atom, Graph, type_of
from collective_matmul.rewrite.report import is_named


def inlined(graph: Graph) -> Graph:
    """The jaxpr with such calls opened, and those within them; itself if there are none."""
    while wanted := _between(graph):
        jaxpr = graph.jaxpr
        equations: list[JaxprEqn] = []
        names: dict[Var, Atom] = {}
        for index, equation in enumerate(jaxpr.eqns):
            equation = equation.replace(invars=_renamed(equation.invars, names))
            equations += _opened(equation, names) if index in wanted else [equation]
        outvars = _renamed(jaxpr.outvars, names)
        graph = Graph(jaxpr.replace(eqns=equations, outvars=outvars))
    return graph


def _between(graph: Graph) -> set[int]:
    """The calls that use what is gathered, make what is summed, or do either to their results."""
    found = {
        index
        for at, equation in enumerate(graph.equations)
        if kind_of(equation) is not None
        for index in _neighbours(graph, at)
        if _can_open(graph.equations[index])
    }
    calls = (index for index, equation in enumerate(graph.equations) if _can_open(equation))
    found.update(i for i in calls if _reaches_outside(graph.equations[i].params["jaxpr"].jaxpr))
    return found


def _neighbours(graph: Graph, index: int) -> set[int]:
    """The equations next to a collective, but for what commutes with it."""
    equation = graph.equations[index]
    if kind_of(equation) == "all_gather":
        return set(_users(graph, equation.outvars[0]))
    return {made for made in _makers(graph, equation.invars[0]) if made is not None}


def _users(graph: Graph, var: Var) -> Iterator[int]:
    for index in graph.users(var):
        equation = graph.equations[index]
        if passage(graph, equation) is None:
            yield index
        else:
            yield from _users(graph, equation.outvars[0])


def _makers(graph: Graph, atom: Atom) -> Iterator[int | None]:
    """Those of an array or of the terms that it is the sum of; None for an argument."""
    index = graph.producer(atom)
    equation = None if index is None else graph.equations[index]
    if equation is None:
        yield None
    elif (passed := passage(graph, equation)) is not None:
        yield from _makers(graph, passed.operand)
    elif equation.primitive.name in ("add", "add_any"):
        for operand in equation.invars:
            yield from _makers(graph, operand)
    else:
        yield index


def _reaches_outside(jaxpr: Jaxpr) -> bool:
    """Whether the matmul of a collective in a call may be outside of the call."""
    if not any(collectives_in([jaxpr])):
        return False
    graph = Graph(jaxpr)
    for equation in graph.equations:
        if kind_of(equation) == "all_gather" and _is_returned(graph, equation.outvars[0]):
            return True
        summed = kind_of(equation) in ("reduce_scatter", "psum")
        if summed and None in _makers(graph, equation.invars[0]):
            return True
        if _can_open(equation) and _reaches_outside(equation.params["jaxpr"].jaxpr):
            return True
    return False


def _is_returned(graph: Graph, var: Var) -> bool:
    return var in graph.results or any(
        _is_returned(graph, graph.equations[index].outvars[0])
        for index in graph.users(var)
        if passage(graph, graph.equations[index]) is not None
    )


def _can_open(equation: JaxprEqn) -> bool:
    return is_plain_call(equation) and not equation.params["jaxpr"].consts


def is_plain_call(equation: JaxprEqn) -> bool:
    """Whether it is a call of `jax.jit` that asks for nothing but to be carried out."""
    if equation.primitive.name not in ("jit", "pjit") or is_named(equation):
        return False
    parameters = equation.params
    shardings = (*parameters["in_shardings"], *parameters["out_shardings"])
    specified = any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)
    return not (specified or parameters["compiler_options_kvs"])


def _opened(equation: JaxprEqn, names: dict[Var, Atom]) -> list[JaxprEqn]:
    """The equations of a call, under its name; `names` tells what its results are now."""
    jaxpr = equation.params["jaxpr"].jaxpr
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
