"""Brings a jaxpr into the form in which matches are looked for, where that shows more of them.

Calls of `jax.jit` between a collective, or a reshard, and its matmul are inlined. Collectives move
into calls of `jax.checkpoint` that hold their matmuls: the call computes the same, and saves the
shard instead of the gathered array, or nothing of the sum; a backward that recomputes it gathers
again, overlapped with the matmul that it recomputes.

Casts are folded into matmuls of half-precision arrays that pass through float32 on their way in or
out, as ``jnp.dot(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)`` and its
gradients, which multiply a cotangent widened to float32. The products of half-precision numbers are
exact in float32. So a half-precision matmul that accumulates in float32 and rounds once, as all
matmuls of this library do, computes the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from collective_matmul.jaxprs.bodies import called, opened, with_jaxprs
from collective_matmul.jaxprs.graph import Atom, Graph, copied, renamed, type_of, variables
from collective_matmul.jaxprs.walks import Holds
from collective_matmul.rewrite.find.commuting import commuting_op
from collective_matmul.rewrite.find.placements import reshard_kind
from collective_matmul.rewrite.find.report import is_named, is_ours
from collective_matmul.rewrite.find.supported_collectives import holds_collectives, kind_of
from collective_matmul.rewrite.match.site_order import match_at

#: Names of the primitive of `jax.checkpoint` in different versions of JAX.
CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})
_HALF = (jnp.bfloat16, jnp.float16)
#: Operations on one array that round nothing, so that a cast may come before or after them. So do
#: multiplications by a power of two.
_EXACT = frozenset(
    {"transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim"}
    | {"pvary", "copy", "copy_p", "neg"}
)
_holds_matmul = Holds(lambda equation: equation.primitive.name == "dot_general")


def normal_form(graph: Graph, axis_sizes: Mapping[str, int]) -> Graph:
    """The jaxpr in normal form; the same object if that adds no sites.

    Args:
      graph: dataflow of the jaxpr, inside shard_map.
      axis_sizes: the manual axes around the jaxpr, with their sizes.
    """
    trial = inlined(graph)
    if trial is not graph and _matches_in(trial, axis_sizes) > _matches_in(graph, axis_sizes):
        graph = trial
    sinkable = [i for i in range(len(graph.equations)) if _sunk(graph, i) is not None]
    for index in reversed(sinkable):
        trial = _sunk(graph, index)
        if trial is not None and _matches_in(trial, axis_sizes) > _matches_in(graph, axis_sizes):
            graph = trial
    trial, made = _narrowed(graph)
    found = (match_at(trial, index, axis_sizes) for index in _collectives(trial) if made)
    products = {var for each in found if not isinstance(each, str) for var in each.products}
    return _narrowed(graph, [index for var, index in made.items() if var in products])[0]


def narrowed(graph: Graph) -> Graph:
    """The jaxpr with all matmuls in half precision that can be; the same object if none can."""
    return _narrowed(graph)[0]


def _matches_in(graph: Graph, axis_sizes: Mapping[str, int]) -> int:
    """The number of sites in a jaxpr, and in the calls and checkpoints that it holds."""
    graph = narrowed(graph)
    matches = (match_at(graph, index, axis_sizes) for index in _collectives(graph))
    number = sum(not isinstance(match, str) for match in matches)
    for equation in graph.equations:
        if equation.primitive.name in CHECKPOINTS | {"jit", "pjit"}:
            inner = opened(called(equation))
            number += _matches_in(Graph(inner), axis_sizes) if holds_collectives(inner) else 0
    return number


def _collectives(graph: Graph) -> Iterator[int]:
    for index, equation in enumerate(graph.equations):
        if kind_of(equation) is not None and not is_ours(equation):
            yield index


# Inlining calls.


def inlined(graph: Graph) -> Graph:
    """The jaxpr with calls inlined, nested ones too; the same object if there are none."""
    while wanted := _calls_to_inline(graph):
        jaxpr = graph.jaxpr
        equations: list[JaxprEqn] = []
        names: dict[Var, Atom] = {}
        for index, equation in enumerate(jaxpr.eqns):
            equation = equation.replace(invars=renamed(equation.invars, names))
            equations += _inline(equation, names) if index in wanted else [equation]
        outvars = renamed(jaxpr.outvars, names)
        graph = Graph(jaxpr.replace(eqns=equations, outvars=outvars))
    return graph


def _inline(equation: JaxprEqn, names: dict[Var, Atom]) -> list[JaxprEqn]:
    """The equations of a call, in its name scope; `names` receives what its results become."""
    scope = equation.source_info.name_stack.extend(equation.params["name"])

    def source(inner: JaxprEqn) -> Any:
        return inner.source_info.replace(name_stack=scope + inner.source_info.name_stack)

    equations, results = copied(opened(called(equation)), equation.invars, source)
    names.update(zip(equation.outvars, results, strict=True))
    return equations


def has_matmul_beside(graph: Graph, index: int) -> bool:
    """Whether a call that can be inlined, next to a collective, holds a matmul."""
    calls = (graph.equations[i] for i in _neighbours(graph, index))
    return any(_holds_matmul(opened(called(c))) for c in calls if _can_inline(c))


def _calls_to_inline(graph: Graph) -> set[int]:
    """Indices of calls that use a gathered array, or that make or use the operand of a sum."""
    calls = {index for index, equation in enumerate(graph.equations) if _can_inline(equation)}
    if not calls:
        return calls
    beside = {
        index
        for at, equation in enumerate(graph.equations)
        if _kind(equation) is not None
        for index in _neighbours(graph, at)
    }
    return {i for i in calls if i in beside or _reaches_outside(graph.equations[i])}


def _kind(equation: JaxprEqn) -> str | None:
    """The kind of a collective, or of a reshard over Explicit mesh axes."""
    return kind_of(equation) or reshard_kind(equation)


def _neighbours(graph: Graph, index: int) -> set[int]:
    """Equations next to a collective, skipping those that commute with it."""
    equation = graph.equations[index]
    if _kind(equation) == "all_gather":
        return _users(graph, equation.outvars[0])[0]
    return _makers(graph, equation.invars[0])[0]


def _users(graph: Graph, var: Var) -> tuple[set[int], bool]:
    """Equations that read an array, or what commuting equations make of it.

    And whether one of these arrays is a result of the jaxpr.
    """
    found, pending, seen = set[int](), [var], {var}
    while pending:
        for index in graph.users(pending.pop()):
            equation = graph.equations[index]
            if commuting_op(graph, equation) is None:
                found.add(index)
            elif equation.outvars[0] not in seen:
                seen.add(equation.outvars[0])
                pending.append(equation.outvars[0])
    return found, not seen.isdisjoint(graph.results)


def _makers(graph: Graph, atom: Atom) -> tuple[set[int], bool]:
    """Producers of an array, or of the terms that it is the sum of.

    And whether one of these is an argument of the jaxpr.
    """
    # A stack and a set, since sums may have thousands of terms, and terms be sums of others.
    found, pending, seen = set[int](), [atom], set[int | None]()
    while pending:
        index = graph.producer(pending.pop())
        if index in seen:
            continue
        seen.add(index)
        if index is None:
            continue
        equation = graph.equations[index]
        if (passed := commuting_op(graph, equation)) is not None:
            pending.append(passed.operand)
        elif equation.primitive.name in ("add", "add_any"):
            pending += equation.invars
        else:
            found.add(index)
    return found, None in seen


def _reaches_outside(call: JaxprEqn) -> bool:
    """Whether a collective inside the call may have its matmul outside of it."""
    jaxpr = opened(called(call))
    if not holds_collectives(jaxpr):
        return False
    graph = Graph(jaxpr)
    for equation in graph.equations:
        kind = kind_of(equation)
        if kind == "all_gather":
            reaches = _users(graph, equation.outvars[0])[1]
        elif kind is not None:
            reaches = _makers(graph, equation.invars[0])[1]
        else:
            reaches = _can_inline(equation) and _reaches_outside(equation)
        if reaches:
            return True
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


# Moving collectives into checkpoints.


def _sunk(graph: Graph, index: int) -> Graph | None:
    """The jaxpr with a collective moved into the checkpoint beside it; None if it cannot be.

    The checkpoint alone uses the gathered array, or makes the array that is only summed.
    """
    equation = graph.equations[index]
    kind = kind_of(equation)
    if kind is None or len(equation.invars) != 1:
        return None
    operand: Any = equation.invars[0]
    (result,) = equation.outvars
    if kind == "all_gather":
        at = graph.only_user(result)
    else:
        at = graph.producer(operand) if graph.only_user(operand) == index else None
    if at is None:
        return None
    call = graph.equations[at]
    if call.primitive.name not in CHECKPOINTS or call.invars.count(result) > 1:
        return None
    jaxpr = called(call)
    if kind == "all_gather":
        place, inner = call.invars.index(result), Var(type_of(operand))
        inside = equation.replace(invars=[inner], outvars=[jaxpr.invars[place]])
        body = jaxpr.replace(
            invars=_replaced(jaxpr.invars, place, inner), eqns=[inside, *jaxpr.eqns]
        )
        call = call.replace(invars=_replaced(call.invars, place, operand))
    else:
        place, inner = call.outvars.index(operand), Var(type_of(result))
        inside = equation.replace(invars=[jaxpr.outvars[place]], outvars=[inner])
        body = jaxpr.replace(
            outvars=_replaced(jaxpr.outvars, place, inner), eqns=[*jaxpr.eqns, inside]
        )
        call = call.replace(outvars=_replaced(call.outvars, place, result))
    body = body.replace(effects=jaxpr.effects | equation.effects)
    equations = list(graph.equations)
    equations[at] = with_jaxprs(call, [body]).replace(effects=body.effects)
    del equations[index]
    return Graph(graph.jaxpr.replace(eqns=equations))


def _replaced(atoms: list[Any], place: int, atom: Atom) -> list[Any]:
    return [*atoms[:place], atom, *atoms[place + 1 :]]


# Folding casts into matmuls.


def _narrowed(graph: Graph, wanted: Collection[int] | None = None) -> tuple[Graph, dict[Var, int]]:
    """The jaxpr with matmuls in half precision; the same object if none can be.

    Also the indices of these, by the variables that their new equations make.

    Args:
      graph: dataflow of the jaxpr.
      wanted: indices of matmuls; None for all.
    """
    narrowing = _Narrowing(graph)
    dots = (i for i, e in enumerate(graph.equations) if e.primitive.name == "dot_general")
    for index in dots if wanted is None else wanted:
        narrowing.add(index)
    if not narrowing.made:
        return graph, {}
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
    return Graph(graph.jaxpr.replace(eqns=kept[::-1])), narrowing.made


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
    return None if op is None or op.exact_factor is None else op.operand


class _Narrowing:
    """Equations in half precision that take the place of others.

    Attributes:
      made: the indices of the matmuls, by the variables that their new equations make.
      replaced: by index, the equations in place of one.
      inserted: by index, the equations after one.
      bypassed: indices of equations that are no longer needed for the matmuls.

    Args:
      graph: dataflow of the jaxpr.
    """

    def __init__(self, graph: Graph):
        self.made: dict[Var, int] = {}
        self.replaced: dict[int, list[JaxprEqn]] = {}
        self.inserted: dict[int, list[JaxprEqn]] = defaultdict(list)
        self.bypassed: set[int] = set()
        self._graph = graph
        self._narrow: dict[Atom, Atom] = {}

    def add(self, index: int) -> None:
        """Executes a matmul, and what follows until its result is cast, in half precision.

        If it can be, and is not yet.
        """
        equation = self._graph.equations[index]
        dtype, *others = {_narrow_dtype(self._graph, atom) for atom in equation.invars}
        until_cast = None if others or dtype is None else self._until_cast(index, dtype)
        if until_cast is None:
            return
        *between, last = until_cast
        results = [_like(self._graph.equations[i].outvars[0], dtype) for i in (index, *between)]
        (results[-1],) = self._graph.equations[last].outvars
        params = {**equation.params, "preferred_element_type": jnp.dtype(dtype)}
        operands = [self._operand(atom) for atom in equation.invars]
        self.replaced[last] = []
        self.replaced[index] = [
            equation.replace(params=params, invars=operands, outvars=results[:1])
        ]
        for at, operand, result in zip(between, results, results[1:], strict=False):
            self.replaced[at] = _in_half(self._graph, at, operand, result)
        self.made[results[0]] = index

    def _until_cast(self, index: int, dtype: Any) -> list[int] | None:
        """The equations from a matmul, without it, to the cast of its result, which is the last.

        Only the matmul if its result is in half precision; None if it need not or cannot be so.
        """
        equation, found = self._graph.equations[index], list[int]()
        (var,) = equation.outvars
        if type_of(var).dtype == dtype:
            widened = any(type_of(atom).dtype != dtype for atom in equation.invars)
            return [index] if widened else None
        exact = type_of(var).dtype == jnp.float32
        while exact and (user := self._graph.only_user(var)) is not None:
            found.append(user)
            using = self._graph.equations[user]
            name, (var, *_) = using.primitive.name, using.outvars
            if name == "convert_element_type" and type_of(var).dtype == dtype:
                return found
            exact = _exact_operand(self._graph, using) is not None
        return None

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
