"""Builds, for each matched site, the functions that replace its equations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jax.extend.core import Var

from collective_matmul._compat import vary_over
from collective_matmul.jaxprs.graph import Atom, type_of
from collective_matmul.operands.chunked import Gathered, tie_with_barrier
from collective_matmul.operands.format import PLAIN, Format
from collective_matmul.operands.quantized import Quantized
from collective_matmul.operands.sharded import Sharded
from collective_matmul.operands.varying import pvary_all
from collective_matmul.ops.matmul.call import Call
from collective_matmul.ops.matmul.einsum import einsum
from collective_matmul.ops.matmul.frozen import (
    gather_matmul_frozen,
    matmul_all_reduce_frozen,
    matmul_scatter_frozen,
)
from collective_matmul.ops.matmul.gradients import (
    gather_matmul,
    matmul_all_reduce,
    matmul_scatter,
)
from collective_matmul.rewrite.find.commuting import ShardOp, divided, scale
from collective_matmul.rewrite.match.einsum_matches import EinsumMatch
from collective_matmul.rewrite.match.gathers import GatherMatch
from collective_matmul.rewrite.match.matmuls import Matmul
from collective_matmul.rewrite.match.site_order import GroupedWgrad, PlacedMatch
from collective_matmul.rewrite.match.sums import SumMatch
from collective_matmul.rewrite.replace.gathered_uses import weight_gradients, whole_array

_SENT_PACKED_ONLY = (
    "the program uses the gathered array elsewhere too, and {!r} sends it in this format only;"
    " differentiate what overlap returns"
)


@dataclass(frozen=True)
class ResidualRef:
    """A placeholder for a pytree of arrays that one replacement makes and others read.

    Attributes:
      index: index of the gather, or position of the group of weight gradients.
      name: "gathered" or "products".
    """

    index: int
    name: str = "gathered"


@dataclass
class Replacement:
    """A function that replaces equations of a site.

    Attributes:
      position: index of the equation before which it is inserted; None for the site's own position.
      inputs: atoms or `ResidualRef`s, the arguments of `fun`.
      outputs: variables or `ResidualRef`s, the results of `fun`.
      fun: maps the arguments to a tuple of results, each an array or the pytree of a `ResidualRef`.
    """

    position: int | None
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    fun: Callable[..., tuple]


def _gather_replacements(
    placed: PlacedMatch, match: GatherMatch, call: Call, stored: Format
) -> list[Replacement]:
    """The gather with its matmuls, its later weight gradients, and the whole array if needed.

    Like the backwards of the ops, products are not used before the weight gradients that are
    computed with the gather are ready.
    """
    dots = match.dots
    view = dots[0].view
    keep = bool(placed.later_wgrads) or match.needs_root
    keeps = keep or bool(placed.immediate_wgrads)
    if keeps and stored.packs_gradients:
        call, stored = call.remarking(stored.refusal(_SENT_PACKED_ONLY.format(stored.name))), PLAIN
    transposed = stored == PLAIN and all(dot.matmul.w_is_transposed for dot in dots)
    call = replace(call, dimension=view.dimension, transpose_w=transposed, keep_gathered=keeps)
    residual = ResidualRef(match.index)
    wgrads = [dot for group in placed.immediate_wgrads for dot in group.dots]

    def all_gather_matmul(shard: jax.Array, *operands: jax.Array) -> tuple:
        ws, others = operands[: len(dots)], iter(operands[len(dots) :])
        weights = _weights(placed, ws, call, stored)
        x, weights = _varying(placed, call, (apply_shard_ops(view.shard_ops, shard), weights))
        if placed.frozen and not keeps and not placed.weights:
            ys, gathered = gather_matmul_frozen(x, (), weights, call)
        else:
            ys, gathered = gather_matmul(x, weights, call)
        products = [_products(group, gathered, others) for group in placed.immediate_wgrads]
        if products:
            *ys, products = tie_with_barrier(gathered, *ys, products)
        results: list[Any] = [
            scale(dot.matmul.result(y, dot.matmul.free_shape), dot.factor)
            for dot, y in zip(dots, ys, strict=True)
        ]
        for group, made in zip(placed.immediate_wgrads, products, strict=True):
            results += _results(group, made)
        return (*results, *[gathered] * keep)

    inputs = [match.shard, *_stored_weights(placed), *(dot.matmul.w for dot in wgrads)]
    outputs = [*(dot.result for dot in (*dots, *wgrads)), *[residual] * keep]
    replacements = [Replacement(None, inputs, outputs, all_gather_matmul)]
    replacements += wgrad_replacements(placed.later_wgrads, residual, {})
    if match.needs_root:
        replacements.append(_root_replacement(match, residual, view.dimension))
    return replacements


def _root_replacement(match: GatherMatch, residual: ResidualRef, dimension: int) -> Replacement:
    """The gathered array as the program has it, from what the ring gathered."""
    like = type_of(match.root)

    def whole(gathered: Gathered) -> tuple[jax.Array]:
        return (whole_array(gathered, dimension, like),)

    return Replacement(None, [residual], [match.root], whole)


def _stored_weights(placed: PlacedMatch) -> list[Atom]:
    """The weights of a site as the program stores them: shards, if the op gathers these."""
    return [weight.shard for weight in placed.weights] or [m.w for m in placed.match.terms]


def _weights(
    placed: PlacedMatch, ws: Sequence[jax.Array], call: Call, stored: Format
) -> tuple[Any, ...]:
    """The `_stored_weights` as operands [K, N] in a format, or as arrays [N, K] if transposed."""
    if placed.weights:
        pairs = zip(placed.weights, ws, strict=True)
        ws = [apply_shard_ops(weight.shard_ops, shard) for weight, shard in pairs]
    weights = [m.weight(w, call.transpose_w) for m, w in zip(placed.match.terms, ws, strict=True)]
    if stored != PLAIN:
        weights = [Quantized(w, None, None, stored) for w in weights]
    if placed.weights:
        sharding = placed.weights[0].sharding
        sharding = sharding.transposed if call.transpose_w else sharding
        weights = [Sharded(w, sharding) for w in weights]
    return tuple(weights)


def _varying(placed: PlacedMatch, call: Call, operands: Any) -> Any:
    """Operands, typed as varying over both axes of an op that gathers weights."""
    if not placed.weights:
        return operands
    operands = pvary_all(call.axis_name, operands)
    return pvary_all(placed.weights[0].sharding.axis_name, operands)


def wgrad_replacements(
    groups: Sequence[GroupedWgrad],
    residual: ResidualRef,
    sums: Mapping[int | None, tuple[Sequence[Var], Sequence[Var]]],
) -> list[Replacement]:
    """Weight gradients: matmuls that contract the gathered array's rows with those of other arrays.

    Args:
      groups: the weight gradients, by launch.
      residual: what the ring gathered.
      sums: for each sum over devices that a group is tied to, by index, its result and the variable
        that the program reads in its place, each in a sequence of one.
    """
    return [made for group in groups for made in _of_launch(group, residual, sums)]


def _of_launch(
    group: GroupedWgrad,
    residual: ResidualRef,
    sums: Mapping[int | None, tuple[Sequence[Var], Sequence[Var]]],
) -> list[Replacement]:
    """The products of one launch, and the weight gradients that are made of them."""

    def weight_gradients(gathered: Gathered, *others: jax.Array) -> tuple:
        return (_products(group, gathered, iter(others)),)

    def finished_weight_gradients(products: list[jax.Array], *sums: jax.Array) -> tuple:
        if sums:
            sums, products = lax.optimization_barrier((sums, products))
        return (*sums, *_results(group, products))

    ref = ResidualRef(group.position, "products")
    inputs = [residual, *(dot.matmul.w for dot in group.dots)]
    summed, read = sums.get(group.tied_sum, ((), ()))
    outputs = [*read, *(dot.result for dot in group.dots)]
    return [
        Replacement(group.position, inputs, [ref], weight_gradients),
        Replacement(group.ready_position, [ref, *summed], outputs, finished_weight_gradients),
    ]


def _products(
    group: GroupedWgrad, gathered: Gathered, others: Iterator[jax.Array]
) -> list[jax.Array]:
    """The matrices that a group computes. Takes the other operands from `others`."""
    view, matmuls = group.dots[0].view, [dot.matmul for dot in group.dots]
    rows = []
    for matmul in matmuls:
        matrix = matmul.weight(next(others), transposed=False)
        rows.append(lax.reshape(matrix, (*view.base[:-1], matmul.columns)))
    if group.gathered_first:
        return list(weight_gradients(gathered, (*rows,), view.dimension))
    return list(weight_gradients(rows[0], (gathered,), view.dimension))


def _results(group: GroupedWgrad, products: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of the dots, in the layouts of the program, from the products."""
    return [
        dot.matmul.contraction(scale(product, dot.factor), transposed=not group.gathered_first)
        for dot, product in zip(group.dots, products, strict=True)
    ]


def _sum_replacement(
    placed: PlacedMatch, match: SumMatch, call: Call, stored: Format
) -> Replacement:
    """The matmuls and the sum over devices of their products, by one op."""
    collective, terms, rows, path = match.collective, match.terms, match.rows, match.path
    sums_alone = collective.kind == "psum"
    as_stored = stored == PLAIN and not sums_alone
    transposed = as_stored and all(term.w_is_transposed for term in terms)
    call = replace(call, dimension=match.dimension, transpose_w=transposed)

    def matmul_sum(*operands: jax.Array) -> tuple[jax.Array]:
        y = scale(summed(*pvary_all(call.axis_name, operands)), path.factor)
        return (_typed_as(match.result, apply_shard_ops(path.shard_ops[::-1], y)),)

    def summed(*operands: jax.Array) -> jax.Array:
        scaled = [*map(_scale_smaller, operands[::2], operands[1::2], match.factors)]
        xs = tuple(
            lax.reshape(term.operand(x), (*rows, term.depth))
            for term, (x, _) in zip(terms, scaled, strict=True)
        )
        ws = _weights(placed, [w for _, w in scaled], call, stored)
        if placed.frozen and not placed.weights:
            op = matmul_all_reduce_frozen if sums_alone else matmul_scatter_frozen
            y, _ = op(xs, (), ws, call)
        else:
            op = matmul_all_reduce if sums_alone else matmul_scatter
            y = op(*_varying(placed, call, (xs, ws)), call)
        if path.shape is None:
            return terms[0].result(y, divided(rows, match.dimension, collective.devices))
        return lax.reshape(y, divided(path.shape, path.dimension, collective.devices))

    pairs = zip(terms, _stored_weights(placed), strict=True)
    inputs = [atom for term, w in pairs for atom in (term.x, w)]
    return Replacement(None, inputs, [match.result], matmul_sum)


def _einsum_replacement(match: EinsumMatch, call: Call, stored: Format) -> Replacement:
    """The dot and its gather or scatter, by one collective einsum."""
    if not match.einsum.is_matmul and stored != PLAIN:
        reason = f"{match.einsum} is not a matmul of whole dimensions"
        call, stored = call.remarking(stored.refusal(reason)), PLAIN

    def gather_einsum(shard: jax.Array, b: jax.Array) -> tuple[jax.Array]:
        a = apply_shard_ops(match.shard_ops, shard)
        a, b = pvary_all(call.axis_name, (a, lax.reshape(b, match.shape)))
        y = einsum(a, b, match.einsum, call, stored, scatters=False)
        return (lax.reshape(y, type_of(match.result).shape),)

    def einsum_scatter(a: jax.Array, b: jax.Array) -> tuple[jax.Array]:
        a, b = pvary_all(call.axis_name, (a, b))
        y = scale(einsum(a, b, match.einsum, call, stored, scatters=True), match.factor)
        return (_typed_as(match.result, apply_shard_ops(match.shard_ops, y)),)

    fun = gather_einsum if match.collective.kind == "all_gather" else einsum_scatter
    return Replacement(None, match.inputs, [match.result], fun)


def _typed_as(atom: Atom, array: jax.Array) -> jax.Array:
    """The array, typed as varying over the mesh axes that `atom` varies over."""
    return vary_over(array, type_of(atom).manual_axis_type.varying)


def _scale_smaller(x: jax.Array, w: jax.Array, factor: float) -> tuple[jax.Array, jax.Array]:
    """The operands of a matmul, the smaller of which is multiplied by a factor."""
    return (scale(x, factor), w) if x.size <= w.size else (x, scale(w, factor))


def apply_shard_ops(shard_ops: Sequence[ShardOp], array: jax.Array) -> jax.Array:
    """Applies the ops to a shard, in order."""
    for shard_op in shard_ops:
        array = shard_op.apply(array)
    return array


def signature(placed: PlacedMatch, replacements: Sequence[Replacement]) -> tuple:
    """A key that is equal for sites whose replacements differ only in variables."""
    match = placed.match
    types = tuple(
        type_of(item)
        for replacement in replacements
        for item in (*replacement.inputs, *replacement.outputs)
        if not isinstance(item, ResidualRef)
    )
    weights = tuple((weight.shard_ops, weight.sharding) for weight in placed.weights)
    key = match.collective, types, weights, placed.frozen
    if isinstance(match, EinsumMatch):
        return *key, match.einsum, match.shape, match.factor, match.shard_ops
    if isinstance(match, SumMatch):
        return *key, match.path, match.factors, *map(_dimensions, match.terms)
    groups = (*placed.immediate_wgrads, *placed.later_wgrads)
    dots = (*match.dots, *(dot for group in groups for dot in group.dots))
    return (
        *key,
        match.needs_root,
        tuple((dot.view, dot.contracts_rows, dot.factor, _dimensions(dot.matmul)) for dot in dots),
        len(placed.immediate_wgrads),
        tuple((len(group.dots), group.gathered_first) for group in groups),
    )


def _dimensions(matmul: Matmul) -> tuple:
    return matmul.x_side, matmul.equation.params["dimension_numbers"], type_of(matmul.x)


def replacements_of(placed: PlacedMatch, call: Call, stored: Format) -> Sequence[Replacement]:
    """The replacements of a site.

    Args:
      placed: the site.
      call: parameters of the op, without those that depend on the match.
      stored: the format of the operands.
    """
    match = placed.match
    if isinstance(match, GatherMatch):
        return _gather_replacements(placed, match, call, stored)
    if isinstance(match, EinsumMatch):
        return [_einsum_replacement(match, call, stored)]
    return [_sum_replacement(placed, match, call, stored)]
