"""Which weight gradients of one gathered array are computed in one launch, and when."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from jax.extend.core import jaxprs_in_params

from collective_matmul.rewrite.collective_equations import kind_of
from collective_matmul.rewrite.commuting import passage
from collective_matmul.rewrite.gathers import Use
from collective_matmul.rewrite.graph import Graph, is_pure, variables


@dataclass(frozen=True)
class Launch:
    """Dots that contract the rows of one gathered array [*rows, K] with others [*rows, N].

    Attributes:
      uses: the dots, the last first: one, unless gathered_first. Gradients are made in the reverse
        order of what they are gradients of.
      gathered_first: whether the products are computed as [K, N] or as [N, K].
      put_off: equations that need the products, and wait until they are ready.
      tied: a sum over devices, neither of whose result nor of the products is used before the
        other is there; None for no such sum.
    """

    uses: tuple[Use, ...]
    gathered_first: bool
    put_off: tuple[int, ...] = ()
    tied: int | None = None

    @property
    def position(self) -> int:
        """It comes before the equation of this index."""
        return self.uses[0].index

    @property
    def ready(self) -> int:
        """The products are ready before the equation of this index."""
        return self.position if self.tied is None else self.tied + 1


def launches_of(graph: Graph, uses: Sequence[Use], fixed: Collection[int]) -> list[Launch]:
    """All uses, each as soon as it can be, or a little later if that makes one of several.

    Args:
      graph: of the jaxpr.
      uses: that contract the rows of one array.
      fixed: indices of equations that must not be put off.
    """
    launches: list[Launch] = []
    for use in sorted(uses, key=lambda use: use.index):
        launch = Launch((use,), _gathered_first(graph, use))
        if launches and launches[-1].gathered_first and launch.gathered_first:
            joined = _joined(graph, launches[-1], use, fixed)
            if joined is not None:
                launches[-1] = joined
                continue
        launches.append(launch)
    return launches


def beside(graph: Graph, uses: Sequence[Use]) -> list[Launch]:
    """Uses whose other operands are all there at once."""
    firsts = tuple(use for use in reversed(uses) if _gathered_first(graph, use))
    others = [Launch((use,), False) for use in uses if use not in firsts]
    return [Launch(firsts, True), *others] if firsts else others


def tied(graph: Graph, launch: Launch) -> Launch:
    """The launch tied to the sum over devices of products of the same operands, if there is one.

    Those are the gradients of one gather's matmuls, which the ops tie for the same reason: XLA puts
    off weight gradients, since nothing waits for them, and what they need takes memory until then.
    """
    for index in graph.users(launch.uses[0].matmul.w):
        summed = _sum_of(graph, index)
        if summed is None or summed < launch.position:
            continue
        put_off = _waiting(graph, launch.uses, summed, ())
        if put_off is not None:
            return replace(launch, put_off=put_off, tied=summed)
    return launch


def _sum_of(graph: Graph, index: int) -> int | None:
    """The sum over devices that alone needs the product of a dot, or a sum that it is part of."""
    equation = graph.equations[index]
    if equation.primitive.name != "dot_general":
        return None
    while (user := graph.only_user(equation.outvars[0])) is not None:
        equation = graph.equations[user]
        if kind_of(equation) == "reduce_scatter":
            return user
        added = equation.primitive.name in ("add", "add_any")
        if not added and passage(graph, equation) is None:
            return None
    return None


def _joined(graph: Graph, launch: Launch, use: Use, fixed: Collection[int]) -> Launch | None:
    """The launch with one more dot; None if what needs its products cannot wait for that."""
    put_off = _waiting(graph, launch.uses, use.index, fixed)
    return None if put_off is None else Launch((use, *launch.uses), True, put_off)


def _waiting(
    graph: Graph, uses: Sequence[Use], last: int, fixed: Collection[int]
) -> tuple[int, ...] | None:
    """What needs the products and stands before the equation `last`; None if it cannot wait."""
    made = {use.result for use in uses}
    consumed = {index for use in uses for index in (use.index, *use.casts)}
    put_off = []
    for index in range(uses[-1].index + 1, last + 1):
        equation = graph.equations[index]
        if index in consumed or made.isdisjoint(variables(equation.invars)):
            continue
        if index == last or index in fixed or not _can_wait(graph, index):
            return None
        put_off.append(index)
        made.update(equation.outvars)
    return tuple(put_off)


def _can_wait(graph: Graph, index: int) -> bool:
    """Whether it is cheap, and no part of a site."""
    equation = graph.equations[index]
    if equation.primitive.name == "dot_general" or kind_of(equation) is not None:
        return False
    return is_pure(equation) and not any(jaxprs_in_params(equation.params))


def _gathered_first(graph: Graph, use: Use) -> bool:
    """Whether the result has the columns of what was gathered first, once it is transposed.

    A transpose that a program has behind the dot then cancels with that of the product.
    """
    matmul, first = use.matmul, 0
    user = graph.only_user(use.result)
    if user is not None and graph.equations[user].primitive.name == "transpose":
        first = graph.equations[user].params["permutation"][0]
    if matmul.x_side == 0:
        return first < len(matmul.free)
    return first >= len(matmul.w_free)
