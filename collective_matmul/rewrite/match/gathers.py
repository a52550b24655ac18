"""Finds the matmuls that an all-gather feeds, which one ring can gather and multiply."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var

from collective_matmul.jaxprs.graph import Atom, Graph, Shape, type_of
from collective_matmul.jaxprs.sources import described
from collective_matmul.rewrite.find.commuting import (
    CommutingOp,
    ShardOp,
    commuting_op,
    divided,
    reshaping,
    scaling,
)
from collective_matmul.rewrite.find.supported_collectives import Collective
from collective_matmul.rewrite.match.matmuls import Matmul, matmul_of

#: Why a gather does not move into equations that may hold its matmuls, or past those that cut
#: arrays, and what the program could do instead.
_BORDERS = {
    **dict.fromkeys(
        ("slice", "dynamic_slice", "split"),
        ", which could cut x before the gather or the product after the matmul,",
    ),
    "scan": ", which would gather in every step,",
    "while": ", which would gather in every step,",
    "cond": ", which may not be taken,",
}
_NEEDED = "overlap needs a matmul there, as in all_gather(x) @ w"
_CONTRACTED = "its matmul contracts the gathered dimension"


@dataclass(frozen=True)
class GatheredView:
    """How to compute a variable from the gathered array.

    Apply `shard_ops` to each shard, gather, then reshape to `shape`.

    Attributes:
      shard_ops: turn the shard that the program gathers into the one that the ring gathers.
      base: shape of the whole array that the ring gathers.
      dimension: the gathered dimension of `base`.
      shape: shape of the variable; its elements are in the same order as in `base`.
    """

    shard_ops: tuple[ShardOp, ...]
    base: Shape
    dimension: int
    shape: Shape

    def after(self, op: CommutingOp, devices: int) -> GatheredView | str:
        """The view of the result of applying `op` to this variable; or why there is none."""
        dimension = op.dimension(self.dimension, devices) if self.shape == self.base else None
        if dimension is not None:
            shard_op = op.on_shard(dimension, devices)
            return GatheredView(
                (*self.shard_ops, shard_op), op.shape_after, dimension, op.shape_after
            )
        if op.reshapes:
            return replace(self, shape=op.shape_after)
        name = op.equation.primitive.name
        if self.shape == self.base or name in ("transpose", "sharding_constraint"):
            return f"{described(op.equation)} mixes the gathered dimension with others"
        shard_op = op.on_shard(None, devices)
        return replace(self, shard_ops=(*self.shard_ops, shard_op))


@dataclass(frozen=True)
class GatheredDot:
    """A dot that has the gathered array as an operand.

    Attributes:
      index: index of the dot's equation.
      matmul: the dot, with the gathered operand as x.
      contracts_rows: whether it contracts all but x's last dimension, as weight gradients do.
      view: view of x as [*rows, K].
      factor: what the viewed array is multiplied by in x, exactly.
    """

    index: int
    matmul: Matmul
    contracts_rows: bool
    view: GatheredView
    factor: float

    @property
    def result(self) -> Var:
        """The variable that the dot makes."""
        return self.matmul.equation.outvars[0]


@dataclass
class GatherMatch:
    """An all-gather and the dots that one ring can execute with it.

    Attributes:
      index: index of the gather's equation.
      collective: the gather.
      shard: the array that the program gathers, [..., m, ...] per device.
      root: the gathered array after the equations of `chain`.
      view: view of the root.
      dots: dots that multiply chunks as they arrive. Their x are one array.
      wgrads: dots that contract the rows. They take the gathered chunks, which the ring keeps.
      chain: indices of the equations from the gather to the root.
      between: indices of the equations from the root to the dots, each after its producers.
      can_recover_root: whether the root can be computed from what the ring gathers.
      needs_root: whether something other than these dots uses the root.
    """

    index: int
    collective: Collective
    shard: Atom
    root: Var
    view: GatheredView
    dots: list[GatheredDot]
    wgrads: list[GatheredDot]
    chain: tuple[int, ...]
    between: list[int]
    can_recover_root: bool
    needs_root: bool = False

    @property
    def products(self) -> list[Var]:
        """The variables that the dots make."""
        return [dot.result for dot in (*self.dots, *self.wgrads)]

    @property
    def terms(self) -> list[Matmul]:
        """The matmuls that multiply chunks as they arrive."""
        return [dot.matmul for dot in self.dots]

    @property
    def matmuls(self) -> int:
        """The number of `terms`."""
        return len(self.dots)

    @property
    def inputs(self) -> tuple[Atom, ...]:
        """The arrays that its replacement reads, without the weights."""
        return (self.shard,)


def match_gather(
    graph: Graph, index: int, collective: Collective, taken: Set[int] = frozenset()
) -> GatherMatch | str:
    """Matches the gather of equation `index` with its matmuls, or says why it is left alone.

    Args:
      graph: dataflow of the jaxpr.
      index: index of the gather's equation.
      collective: the gather.
      taken: indices of the matmuls that it cannot have.
    """
    devices = collective.devices
    chain, view = follow(graph, index, collective)
    if isinstance(view, str):
        return view
    (root,) = graph.equations[chain[-1]].outvars
    between: list[int] = []
    found = list(dots_of(graph, root, view, devices, between))
    dots = [dot for dot in found if isinstance(dot, GatheredDot) and dot.index not in taken]
    reasons = [dot for dot in found if isinstance(dot, str)]
    products = [dot for dot in dots if not dot.contracts_rows]
    if not products:
        reasons += [_CONTRACTED] * len(dots)
        reason = " and ".join(dict.fromkeys(reasons)) or "nothing uses the gathered array"
        return reason if dots or "its matmul" in reason else f"{reason}; {_NEEDED}"
    (chosen, _), *_ = Counter(dot.view for dot in products).most_common(1)
    # A dot of two arrays that are computed from the gathered one is found from either.
    wgrads = [dot for dot in dots if dot.contracts_rows]
    alike = {dot.index: dot for dot in (*wgrads, *products) if dot.view == chosen}.values()
    return GatherMatch(
        index,
        collective,
        graph.equations[index].invars[0],
        root,
        view,
        dots=[dot for dot in alike if not dot.contracts_rows],
        wgrads=[dot for dot in alike if dot.contracts_rows],
        chain=chain,
        between=between,
        can_recover_root=all(
            shard_op.keeps_values for shard_op in chosen.shard_ops[len(view.shard_ops) :]
        ),
    )


def view_of(graph: Graph, index: int, collective: Collective) -> GatheredView:
    """The view of the result of the gather of equation `index`."""
    (var,) = graph.equations[index].outvars
    dimension = collective.dimension
    assert dimension is not None
    shape, shard_ops = tuple(type_of(var).shape), ()
    if not collective.tiled:
        shard_ops = (reshaping(divided(shape, dimension, collective.devices)),)
    return GatheredView(shard_ops, shape, dimension, shape)


def follow(
    graph: Graph, index: int, collective: Collective
) -> tuple[tuple[int, ...], GatheredView | str]:
    """Follows the gathered array through equations that commute with the gather.

    Stops where the array has several users.

    Returns:
      The indices of the equations, the gather's first, and the view of the last one's result; or,
      in place of the view, why the next equation cannot be executed on shards.
    """
    (var,) = graph.equations[index].outvars
    chain, view = [index], view_of(graph, index, collective)
    while (user := graph.only_user(var)) is not None:
        op = commuting_op(graph, graph.equations[user])
        if op is None or op.operand is not var:
            break
        after = widens(op) or view.after(op, collective.devices)
        if isinstance(after, str):
            return (*chain,), after
        chain.append(user)
        (var,), view = graph.equations[user].outvars, after
    return (*chain,), view


def dots_of(
    graph: Graph,
    var: Var,
    view: GatheredView,
    devices: int,
    between: list[int],
    factor: float = 1.0,
) -> Iterator[GatheredDot | str]:
    """Yields each dot that uses the gathered array, or why another use is not such a dot.

    Args:
      graph: dataflow of the jaxpr.
      var: the gathered array, or an array computed from it.
      view: view of `var`.
      devices: size of the axis.
      between: filled with the indices of the equations between `var` and the dots.
      factor: what the viewed array is multiplied by in `var`, exactly. Arrays that differ by it
        alone, as a cotangent and its negative, are multiplied in one ring.
    """
    if var in graph.results:
        yield "the gathered array is a result of the function around it"
    for index in graph.users(var):
        equation = graph.equations[index]
        if equation.primitive.name == "dot_general":
            yield _gathered_dot(graph, index, var, view, factor)
            continue
        op = commuting_op(graph, equation)
        if op is None or op.operand is not var:
            border = _BORDERS.get(equation.primitive.name, "")
            yield f"{described(equation)}{border} uses the gathered array"
            continue
        exact, dtype = op.exact_factor, type_of(equation.outvars[0]).dtype
        before, scale = view, factor * (exact or 1.0)
        if abs(scale) != 1 and dtype == jnp.float16:  # It has few numbers near zero.
            before, scale = replace(view, shard_ops=(*view.shard_ops, scaling(scale))), 1.0
        after = before if exact else widens(op) or before.after(op, devices)
        if isinstance(after, str):
            yield after
        else:
            between.append(index)
            yield from dots_of(graph, equation.outvars[0], after, devices, between, scale)


def _gathered_dot(
    graph: Graph, index: int, var: Var, view: GatheredView, factor: float
) -> GatheredDot | str:
    """Describes a dot that uses `var`, or says why the ring cannot execute it."""
    equation = graph.equations[index]
    if equation.invars[0] is equation.invars[1]:
        return "the gathered array is multiplied by itself"
    matmul = matmul_of(equation, 0 if equation.invars[0] is var else 1)
    if isinstance(matmul, str):
        return matmul
    rows_last = tuple(range(len(view.shape)))
    if matmul.contracted + matmul.free == rows_last and matmul.free:
        depth = math.prod(matmul.free_shape)
        oriented = _as_rows(view, depth)
        if oriented is not None:
            return GatheredDot(index, matmul, True, oriented, factor)
    oriented = _oriented(view, matmul)
    if isinstance(oriented, str):
        return oriented
    return GatheredDot(index, matmul, False, oriented, factor)


def _oriented(view: GatheredView, matmul: Matmul) -> GatheredView | str:
    """The view with the contracted dimensions last and merged into one."""
    permutation = matmul.free + matmul.contracted
    if permutation != tuple(range(len(permutation))):
        if view.shape != view.base or view.dimension in matmul.contracted:
            return _CONTRACTED
        base = tuple(view.base[i] for i in permutation)
        shard_op = ShardOp(
            "transpose", permutation, lambda array: lax.transpose(array, permutation)
        )
        view = GatheredView(
            (*view.shard_ops, shard_op), base, permutation.index(view.dimension), base
        )
    rows = _as_rows(view, matmul.depth)
    return rows if rows is not None else _CONTRACTED


def _as_rows(view: GatheredView, depth: int) -> GatheredView | None:
    """The view with its last dimensions merged into one of size `depth`; None if it cannot be."""
    for first in range(view.dimension + 1, len(view.base) + 1):
        if math.prod(view.base[first:]) == depth:
            break
    else:
        return None
    base = (*view.base[:first], depth)
    if base == view.base:
        return replace(view, shape=base)
    shard_op = ShardOp(
        "merge", first, lambda array: lax.reshape(array, (*array.shape[:first], depth))
    )
    return GatheredView((*view.shard_ops, shard_op), base, view.dimension, base)


def widens(op: CommutingOp) -> str | None:
    """Why a cast must not be executed before the gather; None if it may."""
    equation = op.equation
    if equation.primitive.name != "convert_element_type":
        return None
    before, after = type_of(equation.invars[0]).dtype, type_of(equation.outvars[0]).dtype
    if after.itemsize <= before.itemsize:
        return None
    return f"gathered in {before} and multiplied in {after}: more would be communicated"
