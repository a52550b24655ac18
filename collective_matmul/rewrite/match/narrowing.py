"""Matmuls of half-precision arrays that pass through float32 on their way in or out.

An example is ``jnp.dot(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)`` with its
gradients, which multiply a cotangent widened to float32. The products of half-precision numbers are
exact in float32. So a half-precision matmul that accumulates in float32 and rounds once, as all
matmuls of this library do, computes the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from collective_matmul.jaxprs.graph import Atom, Graph, type_of, variables
from collective_matmul.rewrite.find.commuting import commuting_op

_HALF = (jnp.bfloat16, jnp.float16)
#: Operations on one array that round nothing, so that a cast may come before or after them. So do
#: multiplications by a power of two.
_EXACT = frozenset(
    {"transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim"}
    | {"pvary", "copy", "copy_p", "neg"}
)


@dataclass(frozen=True)
class NarrowMatmul:
    """A matmul that can be executed in half precision.

    Attributes:
      index: index of its equation.
      dtype: the half-precision dtype.
      after: indices of the equations from the matmul to the cast of its result, which is the last;
        empty if its result is in half precision.
      result: the variable with the result in half precision.
    """

    index: int
    dtype: Any
    after: tuple[int, ...]
    result: Var


def narrow_matmuls(graph: Graph) -> list[NarrowMatmul]:
    """The matmuls that are not in half precision but can be."""
    dots = (i for i, eqn in enumerate(graph.equations) if eqn.primitive.name == "dot_general")
    return [found for found in (_narrow_matmul(graph, index) for index in dots) if found]


def narrowed(
    graph: Graph, matmuls: Collection[NarrowMatmul]
) -> tuple[Graph, dict[Var, NarrowMatmul]]:
    """The jaxpr with these matmuls in half precision; the same object if there are none.

    Also the matmuls, by the variables that their new equations make.
    """
    if not matmuls:
        return graph, {}
    narrowing = _Narrowing(graph)
    made = {narrowing.add(matmul): matmul for matmul in matmuls}
    equations: list[JaxprEqn] = []
    for index, equation in enumerate(graph.equations):
        replaced = narrowing.replaced.get(index, [equation])
        equations += [*replaced, *narrowing.inserted[index]]
    unused = {id(graph.equations[index]) for index in narrowing.bypassed}
    needed = set(graph.results)
    kept = []
    for equation in reversed(equations):
        if id(equation) in unused and needed.isdisjoint(equation.outvars):
            continue
        needed.update(variables(equation.invars))
        kept.append(equation)
    return Graph(graph.jaxpr.replace(eqns=kept[::-1])), made


def _narrow_matmul(graph: Graph, index: int) -> NarrowMatmul | None:
    equation = graph.equations[index]
    dtypes = {_narrow_dtype(graph, atom) for atom in equation.invars}
    (var,) = equation.outvars
    result = type_of(var).dtype
    dtype = dtypes.pop()
    if dtypes or dtype is None or result not in (dtype, jnp.float32):
        return None
    if result == dtype:
        widened = any(type_of(atom).dtype != dtype for atom in equation.invars)
        return NarrowMatmul(index, dtype, (), var) if widened else None
    after: list[int] = []
    while (user := graph.only_user(var)) is not None:
        after.append(user)
        using = graph.equations[user]
        name, (var, *_) = using.primitive.name, using.outvars
        if name == "convert_element_type" and type_of(var).dtype == dtype:
            return NarrowMatmul(index, dtype, tuple(after), var)
        if _exact_operand(graph, using) is None:
            return None
    return None


def _narrow_dtype(graph: Graph, atom: Atom) -> Any:
    """The half-precision dtype that represents an array exactly; None if none is known to."""
    while (dtype := type_of(atom).dtype) not in _HALF:
        index = graph.producer(atom)
        if dtype != jnp.float32 or index is None:
            return None
        equation = graph.equations[index]
        if equation.primitive.name == "convert_element_type":
            (atom,) = equation.invars
        else:
            atom = _exact_operand(graph, equation)
        if atom is None:
            return None
    return dtype


def _exact_operand(graph: Graph, equation: JaxprEqn) -> Atom | None:
    """The operand of an operation on one array that rounds nothing; None for any other one."""
    if equation.primitive.name in _EXACT and len(equation.invars) == 1:
        return equation.invars[0]
    op = commuting_op(graph, equation)
    return None if op is None or op.exact_factor(graph) is None else op.operand


class _Narrowing:
    """Equations in half precision that take the place of others.

    Attributes:
      replaced: by index, the equations in place of one.
      inserted: by index, the equations after one.
      bypassed: indices of equations that are no longer needed for the matmuls.

    Args:
      graph: dataflow of the jaxpr.
    """

    def __init__(self, graph: Graph):
        self.replaced: dict[int, list[JaxprEqn]] = {}
        self.inserted: dict[int, list[JaxprEqn]] = defaultdict(list)
        self.bypassed: set[int] = set()
        self._graph = graph
        self._narrow: dict[Atom, Atom] = {}

    def add(self, matmul: NarrowMatmul) -> Var:
        """Executes a matmul, and what follows until its result is cast, in half precision.

        Returns:
          The variable that the matmul itself makes.
        """
        dot, *between = (matmul.index, *matmul.after[:-1])
        results = [
            _like(self._graph.equations[i].outvars[0], matmul.dtype) for i in (dot, *between)
        ]
        results[-1] = matmul.result
        equation = self._graph.equations[dot]
        params = {**equation.params, "preferred_element_type": jnp.dtype(matmul.dtype)}
        operands = [self._operand(atom) for atom in equation.invars]
        new = equation.replace(params=params, invars=operands, outvars=results[:1])
        self.replaced[dot] = [new]
        for index, operand, result in zip(between, results, results[1:], strict=False):
            self.replaced[index] = _in_half(self._graph, index, operand, result)
        self.replaced.update({key: [] for key in matmul.after[-1:]})
        return results[0]

    def _operand(self, atom: Atom) -> Atom:
        """The operand of a matmul in half precision."""
        if type_of(atom).dtype in _HALF:
            return atom
        if atom not in self._narrow:
            index = self._graph.producer(atom)
            assert index is not None
            equation = self._graph.equations[index]
            self.bypassed.add(index)
            if equation.primitive.name == "convert_element_type":
                self._narrow[atom] = self._operand(equation.invars[0])
            else:
                source = self._operand(_exact_operand(self._graph, equation))
                self._narrow[atom] = made = _like(atom, type_of(source).dtype)
                self.inserted[index] += _in_half(self._graph, index, source, made)
        return self._narrow[atom]


def _in_half(graph: Graph, index: int, operand: Atom, result: Var) -> list[JaxprEqn]:
    """An operation that rounds nothing, on another operand; before it, casts of its constants."""
    equation, dtype = graph.equations[index], type_of(operand).dtype
    replaced = _exact_operand(graph, equation)
    casts, invars = [], []
    for atom in equation.invars:
        if atom is not replaced:
            params = {"new_dtype": dtype, "weak_type": False, "sharding": None}
            constant = _like(atom, dtype)
            casts.append(
                equation.replace(
                    primitive=lax.convert_element_type_p,
                    params=params,
                    invars=[atom],
                    outvars=[constant],
                )
            )
        invars.append(operand if atom is replaced else constant)
    return [*casts, equation.replace(invars=invars, outvars=[result])]


def _like(atom: Atom, dtype: Any) -> Var:
    return Var(type_of(atom).update(dtype=jnp.dtype(dtype), weak_type=False))
