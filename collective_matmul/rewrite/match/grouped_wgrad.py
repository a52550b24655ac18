"""Groups the weight gradients of one gathered array into kernel launches, and schedules them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from collective_matmul.jaxprs.bodies import executes_jaxprs
from collective_matmul.jaxprs.graph import Graph, is_pure, variables
from collective_matmul.rewrite.find.collective_equations import kind_of
from collective_matmul.rewrite.find.commuting import commuting_op
from collective_matmul.rewrite.match.gathers import GatheredDot


@dataclass(frozen=True)
class GroupedWgrad:
    """Dots that contract the rows of one gathered array [*rows, K] with others [*rows, N].

    They are executed in one launch.

    Attributes:
      dots: the dots, the last in the program first: gradients are made in the reverse order of
        their weights. Exactly one unless `gathered_first`.
      gathered_first: whether the products are computed as [K, N], not [N, K].
      tied_sum: index of a sum over devices, or None. Neither its result nor the products are used
        before both are ready.
    """

    dots: tuple[GatheredDot, ...]
    gathered_first: bool
    tied_sum: int | None = None

    @property
    def position(self) -> int:
        """The index of the equation before which the launch is inserted."""
        return self.dots[0].index

    @property
    def ready_position(self) -> int:
        """The index of the equation before which the products are ready."""
        return self.position if self.tied_sum is None else self.tied_sum + 1


def group_wgrads(
    graph: Graph, dots: Sequence[GatheredDot], fixed: Collection[int]
) -> list[GroupedWgrad]:
    """Groups the dots. Each is executed as early as possible, or later if that joins two groups.

    Args:
      graph: dataflow of the jaxpr.
      dots: dots that contract the rows of one array.
      fixed: indices of the equations that must not be deferred.
    """
    later_wgrads: list[GroupedWgrad] = []
    for dot in sorted(dots, key=lambda dot: dot.index):
        group = GroupedWgrad((dot,), _gathered_first(graph, dot))
        if later_wgrads and later_wgrads[-1].gathered_first and group.gathered_first:
            joined = _joined(graph, later_wgrads[-1], dot, fixed)
            if joined is not None:
                later_wgrads[-1] = joined
                continue
        later_wgrads.append(group)
    return later_wgrads


def group_immediate(graph: Graph, dots: Sequence[GatheredDot]) -> list[GroupedWgrad]:
    """Groups dots whose other operands are all available at once."""
    firsts = tuple(dot for dot in reversed(dots) if _gathered_first(graph, dot))
    others = [GroupedWgrad((dot,), False) for dot in dots if dot not in firsts]
    return [GroupedWgrad(firsts, True), *others] if firsts else others


def tie_to_sum(graph: Graph, group: GroupedWgrad) -> GroupedWgrad:
    """Ties the group to the sum over devices of products of the same operands, if there is one.

    These are the gradients of one gather's matmuls, and the ops tie them for the same reason:
    nothing waits for weight gradients, so XLA would defer them and keep their operands in memory
    until then.
    """
    for index in graph.users(group.dots[0].matmul.w):
        summed = _sum_of(graph, index)
        if summed is None or summed < group.position:
            continue
        if _can_wait_for(graph, group.dots, summed, ()):
            return replace(group, tied_sum=summed)
    return group


def _sum_of(graph: Graph, index: int) -> int | None:
    """The index of the sum over devices that is the only use of a dot; None if there is none."""
    equation = graph.equations[index]
    if equation.primitive.name != "dot_general":
        return None
    while (user := graph.only_user(equation.outvars[0])) is not None:
        equation = graph.equations[user]
        if kind_of(equation) == "reduce_scatter":
            return user
        added = equation.primitive.name in ("add", "add_any")
        if not added and commuting_op(graph, equation) is None:
            return None
    return None


def _joined(
    graph: Graph, group: GroupedWgrad, dot: GatheredDot, fixed: Collection[int]
) -> GroupedWgrad | None:
    """The group with one more dot; None if users of its products cannot wait for that dot."""
    if not _can_wait_for(graph, group.dots, dot.index, fixed):
        return None
    return GroupedWgrad((dot, *group.dots), True)


def _can_wait_for(
    graph: Graph, dots: Sequence[GatheredDot], last: int, fixed: Collection[int]
) -> bool:
    """Whether the equations before `last` that use the products can wait until after it."""
    made = {dot.result for dot in dots}
    consumed = {dot.index for dot in dots}
    for index in range(dots[-1].index + 1, last + 1):
        equation = graph.equations[index]
        if index in consumed or made.isdisjoint(variables(equation.invars)):
            continue
        if index == last or index in fixed or not _can_wait(graph, index):
            return False
        made.update(equation.outvars)
    return True


def _can_wait(graph: Graph, index: int) -> bool:
    """Whether the equation is cheap and not part of a site."""
    equation = graph.equations[index]
    if equation.primitive.name == "dot_general" or kind_of(equation) is not None:
        return False
    return is_pure(equation) and not executes_jaxprs(equation)


def _gathered_first(graph: Graph, dot: GatheredDot) -> bool:
    """Whether the result, once transposed, has the gathered array's columns first.

    A transpose after the dot in the program then cancels with the transpose of the product.
    """
    matmul, first = dot.matmul, 0
    user = graph.only_user(dot.result)
    if user is not None and graph.equations[user].primitive.name == "transpose":
        first = graph.equations[user].params["permutation"][0]
    if matmul.x_side == 0:
        return first < len(matmul.free)
    return first >= len(matmul.w_free)
