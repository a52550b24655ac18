"""A matched site as a function of arrays: what takes the place of its equations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import Var

from collective_matmul.einsum import einsum_of_gathered, einsum_scattered
from collective_matmul.gradients import (
    GatherResidual,
    OpParams,
    gather_matmul,
    matmul_all_reduce,
    matmul_scatter,
    pvary_all,
    tie_with_barrier,
    weight_gradients,
    whole_of,
)
from collective_matmul.rewrite.commuting import Step, divided
from collective_matmul.rewrite.einsum_matches import EinsumMatch
from collective_matmul.rewrite.gathers import GatherMatch
from collective_matmul.rewrite.graph import Atom, type_of
from collective_matmul.rewrite.grouped_wgrad import Launch
from collective_matmul.rewrite.matmuls import Matmul
from collective_matmul.rewrite.site_selection import Match, Placed
from collective_matmul.rewrite.sums import SumMatch
from collective_matmul.source_location import SourceLocation


@dataclass(frozen=True)
class Handle:
    """Stands for what a site keeps, where a variable would stand: a pytree of arrays.

    Attributes:
      index: of the gather, or of the launch.
      name: "gathered" or "products".
    """

    index: int
    name: str = "gathered"


@dataclass
class Replacement:
    """New equations for those of a site.

    Attributes:
      position: they come before the equation of this index; None for the site's own position.
      inputs: atoms or handles, the arguments of `fun`.
      outputs: variables or handles, the results of `fun`.
      fun: arrays to a tuple of arrays, or of what a handle stands for.
    """

    position: int | None
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    fun: Callable[..., tuple]


def gather_replacements(
    placed: Placed, shard: Atom, implementation: str | None, source: SourceLocation | None
) -> list[Replacement]:
    """The gather with all matmuls that it can have, those that come later, and the whole if needed.

    No product is used before the weight gradients beside it are there, as in the ops' backwards.
    """
    match = placed.match
    assert isinstance(match, GatherMatch)
    collective, uses = match.collective, match.uses
    view = uses[0].view
    later = bool(placed.launches) or match.keeps_root
    call = OpParams(
        collective.axis_name,
        view.dimension,
        implementation,
        transpose_w=all(use.matmul.w_lies_transposed for use in uses),
        keep_gathered=later or bool(placed.beside),
        source=source,
        replaces=collective.kind,
    )
    handle = Handle(match.index)
    beside = [use for launch in placed.beside for use in launch.uses]

    def all_gather_matmul(shard: jax.Array, *operands: jax.Array) -> tuple:
        ws, others = operands[: len(uses)], iter(operands[len(uses) :])
        matrices = [u.matmul.weight(w, call.transpose_w) for u, w in zip(uses, ws, strict=True)]
        ys, gathered = gather_matmul(replay(view.steps, shard), tuple(matrices), call)
        products = [_products(launch, gathered, others) for launch in placed.beside]
        if products:
            *ys, products = tie_with_barrier(gathered, *ys, products)
        results: list[Any] = [
            use.matmul.result(y, use.matmul.free_shape) for use, y in zip(uses, ys, strict=True)
        ]
        for launch, made in zip(placed.beside, products, strict=True):
            results += _results(launch, made)
        return (*results, *[gathered] * later)

    inputs = [shard, *(use.matmul.w for use in (*uses, *beside))]
    outputs = [*(use.result for use in (*uses, *beside)), *[handle] * later]
    replacements = [Replacement(None, inputs, outputs, all_gather_matmul)]
    replacements += launched(placed.launches, handle, {})
    if match.keeps_root:
        shape = type_of(match.root).shape

        def whole(gathered: GatherResidual) -> tuple[jax.Array]:
            return (lax.reshape(whole_of(gathered, view.dimension), shape),)

        replacements.append(Replacement(None, [handle], [match.root], whole))
    return replacements


def launched(
    launches: Sequence[Launch],
    handle: Handle,
    sums: Mapping[int | None, tuple[Sequence[Var], Sequence[Var]]],
) -> list[Replacement]:
    """Matmuls that contract the rows of what was gathered with those of other arrays.

    `sums` has, of those over devices that launches are tied to, the result and what is read in its
    place; each is one variable.
    """
    replacements = []
    for launch in launches:
        products = Handle(launch.position, "products")
        inputs = [handle, *(use.matmul.w for use in launch.uses)]
        outputs = [use.result for use in launch.uses]
        summed, read = sums.get(launch.tied, ((), ()))
        replacements += [
            Replacement(launch.position, inputs, [products], _contracting(launch)),
            Replacement(launch.ready, [products, *summed], [*read, *outputs], _finishing(launch)),
        ]
    return replacements


def _contracting(launch: Launch) -> Callable[..., tuple]:
    def weight_gradients(gathered: GatherResidual, *others: jax.Array) -> tuple:
        return (_products(launch, gathered, iter(others)),)

    return weight_gradients


def _finishing(launch: Launch) -> Callable[..., tuple]:
    def weight_gradients_as_they_lie(products: list[jax.Array], *sums: jax.Array) -> tuple:
        if sums:
            sums, products = lax.optimization_barrier((sums, products))
        return (*sums, *_results(launch, products))

    return weight_gradients_as_they_lie


def _products(
    launch: Launch, gathered: GatherResidual, others: Iterator[jax.Array]
) -> list[jax.Array]:
    """What a launch computes: matrices. It takes its other operands."""
    view, matmuls = launch.uses[0].view, [use.matmul for use in launch.uses]
    rows = []
    for matmul in matmuls:
        matrix = matmul.weight(next(others), transposed=False)
        rows.append(lax.reshape(matrix, (*view.base[:-1], matmul.columns)))
    if launch.gathered_first:
        return list(weight_gradients(gathered, (*rows,), view.dimension))
    return list(weight_gradients(rows[0], (gathered,), view.dimension))


def _results(launch: Launch, products: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of the dots, from their products."""
    return [
        use.matmul.contraction(product, transposed=not launch.gathered_first)
        for use, product in zip(launch.uses, products, strict=True)
    ]


def sum_replacement(
    match: SumMatch, result: Var, implementation: str | None, source: SourceLocation | None
) -> Replacement:
    """The matmuls with their sum over devices."""
    collective, terms, rows = match.collective, match.terms, match.rows
    call = OpParams(
        collective.axis_name,
        match.dimension,
        implementation,
        transpose_w=collective.kind != "psum" and all(term.w_lies_transposed for term in terms),
        source=source,
        replaces=collective.kind,
    )

    def matmul_sum(*operands: jax.Array) -> tuple[jax.Array]:
        pairs = list(zip(terms, operands[::2], operands[1::2], strict=True))
        xs = [lax.reshape(term.operand(x), (*rows, term.depth)) for term, x, _ in pairs]
        if collective.kind == "psum":
            ((term, _, w),) = pairs
            x, w = pvary_all(call.axis_name, xs[0], term.weight(w, False))
            y = matmul_all_reduce(x, w, call)
            return (replay(match.path.steps[::-1], term.result(y, term.free_shape)),)
        assert match.dimension is not None and match.path.dimension is not None
        ws = [term.weight(w, call.transpose_w) for term, _, w in pairs]
        y = matmul_scatter(tuple(xs), tuple(ws), call)
        if match.path.shape is None:
            y = terms[0].result(y, divided(rows, match.dimension, collective.devices))
        else:
            y = lax.reshape(y, divided(match.path.shape, match.path.dimension, collective.devices))
        return (replay(match.path.steps[::-1], y),)

    inputs = [atom for term in terms for atom in (term.x, term.w)]
    return Replacement(None, inputs, [result], matmul_sum)


def einsum_replacement(
    match: EinsumMatch, shard: Atom, implementation: str | None, source: SourceLocation | None
) -> Replacement:
    """The dot with its gather or its scatter."""
    collective = match.collective
    gathers = collective.kind == "all_gather"
    call = OpParams(
        collective.axis_name, None, implementation, source=source, replaces=collective.kind
    )

    def of_gathered(shard: jax.Array, b: jax.Array) -> tuple[jax.Array]:
        a, b = replay(match.steps, shard), lax.reshape(b, match.shape)
        y = einsum_of_gathered(*pvary_all(call.axis_name, a, b), match.einsum, call)
        return (lax.reshape(y, type_of(match.result).shape),)

    def scattered(a: jax.Array, b: jax.Array) -> tuple[jax.Array]:
        y = einsum_scattered(*pvary_all(call.axis_name, a, b), match.einsum, call)
        return (replay(match.steps, y),)

    a, b = match.operands
    inputs = [shard if gathers else a, b]
    return Replacement(None, inputs, [match.result], of_gathered if gathers else scattered)


def replay(steps: Sequence[Step], array: jax.Array) -> jax.Array:
    """Carries out the steps."""
    for step in steps:
        array = step.apply(array)
    return array


def signature(placed: Placed, replacements: Sequence[Replacement]) -> tuple:
    """Equal for sites that the same equations can replace, but for their variables."""
    match = placed.match
    types = tuple(
        type_of(item)
        for replacement in replacements
        for item in (*replacement.inputs, *replacement.outputs)
        if not isinstance(item, Handle)
    )
    if isinstance(match, EinsumMatch):
        return match.collective, match.einsum, match.shape, match.steps, types
    if isinstance(match, SumMatch):
        return match.collective, match.path, types, tuple(map(_dimensions, match.terms))
    launches = (*placed.beside, *placed.launches)
    uses = (*match.uses, *(use for launch in launches for use in launch.uses))
    return (
        match.collective,
        match.keeps_root,
        types,
        tuple((use.view, use.sums_rows, _dimensions(use.matmul)) for use in uses),
        len(placed.beside),
        tuple((len(launch.uses), launch.gathered_first) for launch in launches),
    )


def _dimensions(matmul: Matmul) -> tuple:
    return matmul.x_side, matmul.equation.params["dimension_numbers"], type_of(matmul.x)


def moves_layout(match: Match) -> bool:
    """Whether arrays are transposed for the op that were not before."""
    if isinstance(match, EinsumMatch):
        return False  # As they lie, chunk by chunk.
    if isinstance(match, SumMatch):
        return any(term.moves_layout or _transposes_x(term) for term in match.terms)
    return any(use.matmul.moves_layout or _transposes_x(use.matmul) for use in match.uses)


def _transposes_x(matmul: Matmul) -> bool:
    return matmul.free + matmul.contracted != tuple(range(matmul.x.aval.ndim))
