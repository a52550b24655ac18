"""Which weight gradients of one gathered array are computed in one launch, and when."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jax.extend.core import jaxprs_in_params

from collective_matmul.rewrite.collectives import kind_of
from collective_matmul.rewrite.gathers import Use
from collective_matmul.rewrite.graph import Graph, is_pure, variables


@dataclass(frozen=True)
class Launch:
    """Dots that contract the rows of one gathered array [*rows, K] with others [*rows, N].

    Attributes:
      uses: the dots, the last first: one, unless gathered_first. Gradients are made in the reverse
        order of what they are gradients of.
      gathered_first: whether the products are computed as [K, N] or as [N, K].
      put_off: equations that need the products, and come after the last dot instead of before.
    """

    uses: tuple[Use, ...]
    gathered_first: bool
    put_off: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """It comes before the equation of this index."""
        return self.uses[0].index


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


def _joined(graph: Graph, launch: Launch, use: Use, fixed: Collection[int]) -> Launch | None:
    """The launch with one more dot; None if what needs its products cannot wait for that."""
    made = {earlier.result for earlier in launch.uses}
    consumed = {index for earlier in launch.uses for index in (earlier.index, *earlier.casts)}
    put_off = []
    for index in range(launch.uses[-1].index + 1, use.index + 1):
        equation = graph.equations[index]
        if index in consumed or made.isdisjoint(variables(equation.invars)):
            continue
        if index == use.index or index in fixed or not _can_wait(graph, index):
            return None
        put_off.append(index)
        made.update(equation.outvars)
    return Launch((use, *launch.uses), True, tuple(put_off))


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
