"""Moves collectives into calls of `jax.checkpoint` that hold their matmuls.

The call computes the same. It saves the shard instead of the gathered array, or nothing of the sum.
A backward that recomputes it gathers again, overlapped with the matmul that it recomputes.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from collective_matmul.jaxprs.bodies import called, with_jaxprs
from collective_matmul.jaxprs.graph import Atom, Graph, type_of
from collective_matmul.rewrite.find.collective_equations import kind_of

#: Names of the primitive in different versions of JAX.
CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})


def sinkable(graph: Graph) -> list[int]:
    """Indices of the collectives that can be moved into a checkpoint beside them."""
    return [i for i in range(len(graph.equations)) if _adjacent_checkpoint(graph, i) is not None]


def sunk(graph: Graph, index: int) -> Graph:
    """The jaxpr with the collective of equation `index` moved into its checkpoint."""
    collective, call = graph.equations[index], _adjacent_checkpoint(graph, index)
    assert call is not None
    with_collective = _with_gather if kind_of(collective) == "all_gather" else _with_sum
    equations = list(graph.equations)
    equations[call] = with_collective(equations[call], collective)
    del equations[index]
    return Graph(graph.jaxpr.replace(eqns=equations))


def _adjacent_checkpoint(graph: Graph, index: int) -> int | None:
    """The checkpoint that alone uses a gathered array, or makes an array that is only summed."""
    equation = graph.equations[index]
    kind = kind_of(equation)
    if kind is None or len(equation.invars) != 1:
        return None
    operand: Any = equation.invars[0]
    (result,) = equation.outvars
    if kind == "all_gather":
        call = graph.only_user(result)
    else:
        call = graph.producer(operand) if graph.only_user(operand) == index else None
    if call is None or graph.equations[call].primitive.name not in CHECKPOINTS:
        return None
    read = [atom for atom in graph.equations[call].invars if atom is result]
    return call if len(read) <= 1 else None


def _with_gather(call: JaxprEqn, gather: JaxprEqn) -> JaxprEqn:
    jaxpr = called(call)
    (operand,), (result,) = gather.invars, gather.outvars
    (place,) = (i for i, atom in enumerate(call.invars) if atom is result)
    shard = Var(type_of(operand))
    inside = gather.replace(invars=[shard], outvars=[jaxpr.invars[place]])
    body = jaxpr.replace(
        invars=_replaced(jaxpr.invars, place, shard),
        eqns=[inside, *jaxpr.eqns],
        effects=jaxpr.effects | gather.effects,
    )
    return _with_body(call, body).replace(invars=_replaced(call.invars, place, operand))


def _with_sum(call: JaxprEqn, summing: JaxprEqn) -> JaxprEqn:
    jaxpr = called(call)
    (operand,), (result,) = summing.invars, summing.outvars
    (place,) = (i for i, var in enumerate(call.outvars) if var is operand)
    summed = Var(type_of(result))
    inside = summing.replace(invars=[jaxpr.outvars[place]], outvars=[summed])
    body = jaxpr.replace(
        outvars=_replaced(jaxpr.outvars, place, summed),
        eqns=[*jaxpr.eqns, inside],
        effects=jaxpr.effects | summing.effects,
    )
    return _with_body(call, body).replace(outvars=_replaced(call.outvars, place, result))


def _with_body(call: JaxprEqn, body: Jaxpr) -> JaxprEqn:
    return with_jaxprs(call, [body]).replace(effects=body.effects)


def _replaced(atoms: list[Any], place: int, atom: Atom) -> list[Any]:
    return [*atoms[:place], atom, *atoms[place + 1 :]]
