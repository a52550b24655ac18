"""Finds the matmuls that an all-gather feeds: one ring can gather and multiply."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jax import lax
from jax.extend.core import Var

from collective_matmul.rewrite.collective_equations import Collective
from collective_matmul.rewrite.commuting import Passage, Shape, Step, divided, passage
from collective_matmul.rewrite.graph import Graph, type_of
from collective_matmul.rewrite.matmuls import Matmul, matmul_of, result_of

#: What has matmuls inside but no gather from outside: each has its reason not to take one in.
_BORDERS = {
    "scan": "a loop, which would gather in every step,",
    "while": "a loop, which would gather in every step,",
    "cond": "a branch, which may not be taken,",
    "custom_vjp_call": "a function with gradients of its own",
    "custom_jvp_call": "a function with gradients of its own",
}
_CONTRACTED = "its matmul contracts the gathered dimension"


@dataclass(frozen=True)
class View:
    """What a variable is, told by the gathered array: `steps` on each shard, then a reshape.

    Attributes:
      steps: from the shard that the program gathers to the one that the ring gathers.
      base: shape of the whole that the ring gathers.
      dimension: of base, which is divided.
      shape: of the variable, with base's elements in base's order.
    """

    steps: tuple[Step, ...]
    base: Shape
    dimension: int
    shape: Shape

    def after(self, graph: Graph, passed: Passage, devices: int) -> View | str:
        """The view of what an equation makes of the variable."""
        dimension = passed.leaving(self.dimension, devices) if self.shape == self.base else None
        if dimension is not None:
            step = passed.step(graph, dimension, devices)
            return View((*self.steps, step), passed.shape_after, dimension, passed.shape_after)
        if passed.reshapes:
            return replace(self, shape=passed.shape_after)
        name = passed.equation.primitive.name
        if self.shape == self.base or name in ("transpose", "sharding_constraint"):
            return f"{name} mixes the gathered dimension with others"
        step = passed.step(graph, None, devices)
        return replace(self, steps=(*self.steps, step))


@dataclass(frozen=True)
class Use:
    """A dot that multiplies what was gathered.

    Attributes:
      index: of the dot.
      matmul: x is what was gathered.
      result, casts: the product in the operands' dtype, and the equations that cast it.
      sums_rows: whether it contracts all but the last dimension, as weight gradients do.
      view: of x as [*rows, K].
    """

    index: int
    matmul: Matmul
    result: Var
    casts: tuple[int, ...]
    sums_rows: bool
    view: View


@dataclass
class GatherMatch:
    """An all-gather, and what one ring can do of its uses.

    Attributes:
      index: of the gather.
      root: what is gathered, once all that commutes with the gather is done before it.
      view: of the root.
      uses: the dots that multiply as the chunks arrive; all their x are one array.
      later: dots that contract the rows, for which the ring keeps what it gathers.
      chain: equations from the gather to the root.
      between: equations from the root to dots, each after what it reads.
      can_keep: whether the root can be had from what the ring gathers.
      keeps_root: whether something else needs it.
    """

    index: int
    collective: Collective
    root: Var
    view: View
    uses: list[Use]
    later: list[Use]
    chain: tuple[int, ...]
    between: list[int]
    can_keep: bool
    keeps_root: bool = False

    @property
    def matmuls(self) -> int:
        """How many multiply as the chunks arrive."""
        return len(self.uses)


def match_gather(graph: Graph, index: int, collective: Collective) -> GatherMatch | str:
    """The gather of equation `index` and its matmuls, or why it is left alone."""
    devices = collective.devices
    chain, view = follow(graph, index, collective)
    if isinstance(view, str):
        return view
    (root,) = graph.equations[chain[-1]].outvars
    between: list[int] = []
    found = list(uses_of(graph, root, view, devices, between))
    uses = [use for use in found if isinstance(use, Use)]
    reasons = [use for use in found if isinstance(use, str)]
    products = [use for use in uses if not use.sums_rows]
    if not products:
        reasons += [_CONTRACTED] * len(uses)
        return " and ".join(dict.fromkeys(reasons)) or "nothing uses it"
    (chosen, _), *_ = Counter(use.view for use in products).most_common(1)
    return GatherMatch(
        index,
        collective,
        root,
        view,
        uses=[use for use in products if use.view == chosen],
        later=[use for use in uses if use.view == chosen and use.sums_rows],
        chain=chain,
        between=between,
        can_keep=all(step.keeps_values for step in chosen.steps[len(view.steps) :]),
    )


def follow(graph: Graph, index: int, collective: Collective) -> tuple[tuple[int, ...], View | str]:
    """What was gathered, for as long as it has one use, which commutes with the gather.

    Returns:
      The equations from the gather on, and the view of what the last one makes; or why the next
      one cannot be passed.
    """
    (var,) = graph.equations[index].outvars
    dimension = collective.dimension
    assert dimension is not None
    shape, steps = tuple(type_of(var).shape), ()
    if not collective.tiled:
        local = divided(shape, dimension, collective.devices)
        steps = (Step("reshape", local, lambda array: lax.reshape(array, local)),)
    chain, view = [index], View(steps, shape, dimension, shape)
    while (user := graph.only_user(var)) is not None:
        passed = passage(graph, graph.equations[user])
        if passed is None or passed.operand is not var:
            break
        following = _widens(passed) or view.after(graph, passed, collective.devices)
        if isinstance(following, str):
            return (*chain,), following
        chain.append(user)
        (var,), view = graph.equations[user].outvars, following
    return (*chain,), view


def uses_of(
    graph: Graph, var: Var, view: View, devices: int, between: list[int]
) -> Iterator[Use | str]:
    """All uses of what was gathered: dots, or why something is none; notes what lies between."""
    if var in graph.results:
        yield "what is gathered is a result"
    for index in graph.users(var):
        equation = graph.equations[index]
        if equation.primitive.name == "dot_general":
            yield _use(graph, index, var, view)
            continue
        passed = passage(graph, equation)
        if passed is None or passed.operand is not var:
            name = equation.primitive.name
            yield _BORDERS.get(name, name) + " uses what is gathered"
            continue
        following = _widens(passed) or view.after(graph, passed, devices)
        if isinstance(following, str):
            yield following
        else:
            between.append(index)
            yield from uses_of(graph, equation.outvars[0], following, devices, between)


def _use(graph: Graph, index: int, var: Var, view: View) -> Use | str:
    equation = graph.equations[index]
    if equation.invars[0] is equation.invars[1]:
        return "what is gathered is multiplied by itself"
    matmul = matmul_of(equation, 0 if equation.invars[0] is var else 1)
    if isinstance(matmul, str):
        return matmul
    result = result_of(graph, equation)
    if isinstance(result, str):
        return result
    if not matmul.w_free:
        return "its matmul is a matrix times a vector"
    rows_last = tuple(range(len(view.shape)))
    if matmul.contracted + matmul.free == rows_last and matmul.free:
        depth = math.prod(matmul.free_shape)
        oriented = _as_rows(view, depth)
        if oriented is not None:
            return Use(index, matmul, *result, sums_rows=True, view=oriented)
    oriented = _oriented(view, matmul)
    if isinstance(oriented, str):
        return oriented
    return Use(index, matmul, *result, sums_rows=False, view=oriented)


def _oriented(view: View, matmul: Matmul) -> View | str:
    """The view with the contracted dimensions last, as one."""
    permutation = matmul.free + matmul.contracted
    if permutation != tuple(range(len(permutation))):
        if view.shape != view.base or view.dimension in matmul.contracted:
            return _CONTRACTED
        base = tuple(view.base[i] for i in permutation)
        step = Step("transpose", permutation, lambda array: lax.transpose(array, permutation))
        view = View((*view.steps, step), base, permutation.index(view.dimension), base)
    rows = _as_rows(view, matmul.depth)
    return rows if rows is not None else _CONTRACTED


def _as_rows(view: View, depth: int) -> View | None:
    """The view with its last dimensions, `depth` elements together, as one."""
    for i in range(view.dimension + 1, len(view.base) + 1):
        if math.prod(view.base[i:]) == depth:
            return _merged(view, i, depth)
    return None


def _merged(view: View, first: int, depth: int) -> View:
    base = (*view.base[:first], depth)
    if base == view.base:
        return replace(view, shape=base)
    step = Step("merge", first, lambda array: lax.reshape(array, (*array.shape[:first], depth)))
    return View((*view.steps, step), base, view.dimension, base)


def _widens(passed: Passage) -> str | None:
    equation = passed.equation
    if equation.primitive.name != "convert_element_type":
        return None
    before, after = type_of(equation.invars[0]).dtype, type_of(equation.outvars[0]).dtype
    if after.itemsize <= before.itemsize:
        return None
    return f"gathered in {before} and multiplied in {after}: more would be communicated"
