"""Finds the matmuls whose products a reduce-scatter or a psum sums over devices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from collective_matmul.jaxprs.graph import Atom, Graph, Shape, type_of
from collective_matmul.jaxprs.sources import described, place_of
from collective_matmul.rewrite.find.commuting import (
    CommutingOp,
    ShardOp,
    commuting_op,
    divided,
    reshaping,
    same_blocks,
)
from collective_matmul.rewrite.find.report import is_named, is_ours
from collective_matmul.rewrite.find.supported_collectives import Collective
from collective_matmul.rewrite.match.matmuls import Matmul, matmul_of

_ADDED = "something is added to its matmul before the sum over devices"
_NEEDED = "only casts, reshapes and constant factors may stand between x @ w and its sum"
#: What the program could do instead, by what stands there.
_CURES: dict[str, str] = dict.fromkeys(
    ("slice", "dynamic_slice", "split"), "; cut x or w before the matmul, or the sum after it"
)


@dataclass(frozen=True)
class SumPath:
    """The way from a sum over devices back to an array that contributes to it.

    Attributes:
      shard_ops: applied after the sum instead of before it, the last first.
      dimension: the scattered dimension of the array; None for psum.
      dtype: dtype of the sum over devices.
      factor: what the array is multiplied by on the way, exactly.
      shape: if the array must be reshaped before the shard ops, the shape that they expect.
      consumed: indices of the equations that the site replaces.
    """

    shard_ops: tuple[ShardOp, ...]
    dimension: int | None
    dtype: jnp.dtype
    factor: float = 1.0
    shape: Shape | None = None
    consumed: tuple[int, ...] = ()


@dataclass(frozen=True)
class SumMatch:
    """A sum over devices of the products of `terms`, which all have one shape.

    Attributes:
      index: index of the collective's equation.
      collective: the sum.
      terms: the matmuls, which the program adds up. Their x differ at most in the contracted
        dimension.
      path: the way back to the dots, the same for each, but for its factor.
      factors: the products are multiplied by these before they are added up, which is exact.
      result: the variable that the site makes.
      consumed: indices of the equations that the site replaces.
    """

    index: int
    collective: Collective
    terms: tuple[Matmul, ...]
    path: SumPath
    factors: tuple[float, ...]
    result: Var
    consumed: frozenset[int]

    @property
    def inputs(self) -> tuple[Atom, ...]:
        """The arrays that its replacement reads."""
        return tuple(atom for term in self.terms for atom in (term.x, term.w))

    @property
    def products(self) -> list[Var]:
        """The variables that the matmuls make."""
        return [term.equation.outvars[0] for term in self.terms]

    @property
    def matmuls(self) -> int:
        """The number of matmuls in the site."""
        return len(self.terms)

    @property
    def rows(self) -> Shape:
        """The shape of the op's x without its contracted dimension."""
        rows = _rows(self.terms[0], self.path)
        assert rows is not None, "the path was checked"
        return rows

    @property
    def dimension(self) -> int | None:
        """The scattered dimension of the op's x."""
        if self.path.dimension is None or self.path.shape is not None:
            return self.path.dimension
        columns = len(self.terms[0].columns_shape) if self.terms[0].x_side else 0
        return self.path.dimension - columns


def match_sum(graph: Graph, index: int, collective: Collective) -> SumMatch | str:
    """Matches the sum of equation `index` with its matmuls, or says why it is left alone."""
    operand, start = _start(graph, index, collective)
    found = _terms(graph, operand, start, collective.devices)
    if isinstance(found, str):
        return found
    # A gradient adds the terms of the last use first: reversed, they are in the order of the uses.
    terms, paths = zip(*reversed(found), strict=True)
    first = replace(paths[0], consumed=())
    if any(replace(path, consumed=(), factor=first.factor) != first for path in paths[1:]):
        return "the matmuls added up are cast, scaled or shaped differently"
    if len({(term.x_side, term.free_shape, term.columns_shape) for term in terms}) > 1:
        return "the matmuls added up have different layouts"
    consumed = frozenset().union(*(path.consumed for path in paths))
    factors = tuple(path.factor / first.factor for path in paths)
    (result,) = graph.equations[index].outvars
    return SumMatch(index, collective, terms, first, factors, result, consumed)


def back_to_dot(graph: Graph, index: int, collective: Collective) -> tuple[JaxprEqn, SumPath] | str:
    """The only dot whose product equation `index` sums, or why there is none."""
    found = _back_to_product(graph, *_start(graph, index, collective), collective.devices)
    if isinstance(found, str):
        return found
    equation, path = found
    if equation.primitive.name != "dot_general":
        return _ADDED
    return _rounds(equation, path) or (equation, path)


def _start(graph: Graph, index: int, collective: Collective) -> tuple[Atom, SumPath]:
    (operand,) = graph.equations[index].invars
    shard_ops = () if collective.tiled else (_dropped(collective),)
    return operand, SumPath(
        shard_ops, collective.dimension, type_of(operand).dtype, consumed=(index,)
    )


def _terms(
    graph: Graph, atom: Atom, path: SumPath, devices: int
) -> list[tuple[Matmul, SumPath]] | str:
    """The dots whose sum `atom` is, each with the way back to it."""
    terms = []
    # A stack, since sums of many terms are deep. With each atom, whether it is one of several.
    pending = [(atom, path, False)]
    while pending:
        atom, path, is_summand = pending.pop()
        found = _back_to_product(graph, atom, path, devices)
        if isinstance(found, str):
            reason = found
        else:
            equation, path = found
            if equation.primitive.name == "dot_general":
                term = _term(equation, path)
                if not isinstance(term, str):
                    terms.append((term, path))
                    continue
                reason = term
            elif summands := _summands(equation, path):
                pending += [(*summand, True) for summand in reversed(summands)]
                continue
            else:
                reason = _ADDED
        is_complete = not is_summand or reason.startswith(_ADDED)
        return reason if is_complete else f"{_ADDED} ({reason})"
    return terms


def _back_to_product(
    graph: Graph, atom: Atom, path: SumPath, devices: int
) -> tuple[JaxprEqn, SumPath] | str:
    """The dot, addition or subtraction that makes `atom`, before equations that commute."""
    while True:
        index = graph.producer(atom)
        if index is None:
            return "the summed array is an argument of the function around it, not from a matmul"
        if graph.only_user(atom) is None:
            return _other_use(graph, atom, path)
        equation = graph.equations[index]
        name = equation.primitive.name
        path = replace(path, consumed=(*path.consumed, index))
        if name in ("dot_general", "add", "add_any", "sub"):
            return equation, path
        previous = _back(graph, index, path, devices)
        if isinstance(previous, str):
            return previous
        atom, path = previous


def _summands(equation: JaxprEqn, path: SumPath) -> list[tuple[Atom, SumPath]]:
    """Both operands of a sum or difference, with the way back to each; none if they differ."""
    first, second = equation.invars
    if first is second or type_of(first).shape != type_of(second).shape:
        return []
    sign = -1 if equation.primitive.name == "sub" else 1
    factors = path.factor, sign * path.factor
    return [
        (operand, replace(path, factor=factor))
        for operand, factor in zip((first, second), factors, strict=True)
    ]


def _other_use(graph: Graph, atom: Atom, path: SumPath) -> str:
    """Names other uses of the operand of the sum, which an op would not compute."""
    others = [graph.equations[user] for user in graph.users(atom) if user not in path.consumed]
    others_named = " and ".join(map(described, others)) or "the result of the function around it"
    return f"the summed array is also used elsewhere, by {others_named}"


def _back(graph: Graph, index: int, path: SumPath, devices: int) -> tuple[Atom, SumPath] | str:
    """Goes back one more equation, which will be executed after the sum over devices."""
    equation = graph.equations[index]
    name = equation.primitive.name
    op = commuting_op(graph, equation)
    if op is None and is_ours(equation):
        return f"the summed array comes from {_op(equation)}"
    if op is None:
        return (
            f"the summed array comes from {described(equation)}, not from a matmul;"
            f" {_NEEDED}{_CURES.get(name, '')}"
        )
    if name == "pvary":  # The replacement types its operands and its result.
        return op.operand, path
    if name == "convert_element_type":
        before = type_of(op.operand).dtype
        if before.itemsize > path.dtype.itemsize:
            return f"its result is rounded from {before} to {path.dtype} before the sum"
        return f"multiplied in {before} and summed in {path.dtype}"
    factor = op.exact_factor
    if factor is not None:
        return op.operand, replace(path, factor=path.factor * factor)
    if name in ("mul", "div") and path.dtype == jnp.float16:
        return f"scaled in {type_of(equation.outvars[0]).dtype} before it is summed in {path.dtype}"
    if op.reshapes and path.dimension is not None:
        return op.operand, _before_reshape(path, op, devices)
    if path.shape is not None and name in ("transpose", "sharding_constraint"):
        return f"{described(equation)} and a reshape mix the scattered dimension with others"
    before = path.dimension
    if before is not None and path.shape is None:
        before = op.dimension(before, devices, before=True)
        if before is None:
            return f"{described(equation)} mixes the scattered dimension with others"
    shard_op = op.on_shard(path.dimension, devices)
    return op.operand, replace(path, shard_ops=(*path.shard_ops, shard_op), dimension=before)


def _op(equation: JaxprEqn) -> str:
    """An equation that an op traced, in words, with what to do to have its result summed."""
    if is_named(equation):
        return (
            f"the op that overlap has already put in place of the matmul{place_of(equation)}; to"
            " have it look at this sum too, put it around the gradient: overlap(jax.grad(f)), not"
            " jax.grad(overlap(f))"
        )
    return f"an op{place_of(equation)}, whose results overlap leaves as they are"


def _before_reshape(path: SumPath, op: CommutingOp, devices: int) -> SumPath:
    """Goes back a reshape.

    Consecutive reshapes act as one, which can be executed on a shard where blocks stay blocks.
    """
    assert path.dimension is not None
    shape = path.shape or op.shape_after
    before = same_blocks(shape, path.dimension, op.shape_before, devices)
    if before is None:
        return replace(path, shape=shape)
    shard_op = reshaping(divided(shape, path.dimension, devices))
    return replace(path, shard_ops=(*path.shard_ops, shard_op), dimension=before, shape=None)


def _term(equation: JaxprEqn, path: SumPath) -> Matmul | str:
    lhs = type_of(equation.invars[0]).ndim - len(equation.params["dimension_numbers"][0][0])
    in_lhs = path.shape is not None or path.dimension is None or path.dimension < lhs
    if rounds := _rounds(equation, path):
        return rounds
    matmul = matmul_of(equation, 0 if in_lhs else 1, rows_needed=True)
    if not isinstance(matmul, str) and _rows(matmul, path) is None:
        return "a reshape mixes the scattered dimension with others"
    return matmul


def _rounds(equation: JaxprEqn, path: SumPath) -> str | None:
    """Why the sum over devices would round differently from the product; None if it would not."""
    operand, result = (type_of(atoms[0]).dtype for atoms in (equation.invars, equation.outvars))
    if operand == result == path.dtype:
        return None
    return f"multiplied in {operand} and summed in {path.dtype}"


def _rows(matmul: Matmul, path: SumPath) -> Shape | None:
    """The leading dimensions of the reshaped product that x's rows are, if they are dimensions.

    And if the scattered dimension is among them.
    """
    if path.shape is None:
        return matmul.free_shape
    heads = (path.shape[:i] for i in range((path.dimension or 0) + 1, len(path.shape) + 1))
    return next((head for head in heads if math.prod(head) == math.prod(matmul.free_shape)), None)


def _dropped(collective: Collective) -> ShardOp:
    """Drops the scattered dimension, of size 1 on each device, where the scatter is not tiled."""
    dimension = collective.dimension
    assert dimension is not None

    def drop(array):
        return lax.squeeze(array, (dimension,))

    return ShardOp("squeeze", dimension, drop)
