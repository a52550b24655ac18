"""Finds the gathers of weights over a second mesh axis, as in fully sharded data parallelism.

The ops gather such weights in the loop in which they multiply them; see `weight_axis_name` there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from collective_matmul.jaxprs.graph import Atom, Graph, type_of
from collective_matmul.operands.sharded import WeightShards
from collective_matmul.rewrite.find.commuting import CommutingOp, ShardOp, back_through
from collective_matmul.rewrite.find.report import is_ours
from collective_matmul.rewrite.find.supported_collectives import collective_of, kind_of
from collective_matmul.rewrite.match.einsum_matches import EinsumMatch
from collective_matmul.rewrite.match.gathers import GatherMatch, view_of, widens
from collective_matmul.rewrite.match.matmuls import Matmul
from collective_matmul.rewrite.match.sums import SumMatch


@dataclass(frozen=True)
class GatheredWeight:
    """A gather whose result is a weight of a matmul.

    Attributes:
      chain: indices of the equations from the gather to the weight.
      shard: the array that is gathered.
      shard_ops: turn `shard` into this device's block of the weight, in the dot's layout.
      sharding: how the weight is sharded, as a matrix [K, N].
    """

    chain: tuple[int, ...]
    shard: Atom
    shard_ops: tuple[ShardOp, ...]
    sharding: WeightShards


def weights_of(
    graph: Graph, match: GatherMatch | SumMatch | EinsumMatch, axis_sizes: Mapping[str, int]
) -> tuple[GatheredWeight, ...]:
    """The gathers of the weights of a match, if its op can execute all of them; else none."""
    if match.collective.kind == "psum":
        return ()  # Nothing of an all-reduce is divided into chunks, under which a gather can hide.
    found = [_weight_gather(graph, matmul, axis_sizes) for matmul in match.terms]
    weights = tuple(weight for weight in found if weight is not None)
    shardings = {weight.sharding for weight in weights}
    alike = len(weights) == len(found) and len(shardings) == 1
    own = match.collective.axis_name
    if not alike or weights[0].sharding.axis_name == own:
        return ()
    # What is gathered may be multiplied by itself. Then it is needed whole.
    gathered = [graph.equations[index].outvars[0] for each in weights for index in each.chain]
    return () if any(matmul.x is var for matmul in match.terms for var in gathered) else weights


def _weight_gather(
    graph: Graph, matmul: Matmul, axis_sizes: Mapping[str, int]
) -> GatheredWeight | None:
    """The gather of a matmul's w, if each device has a block of its rows or of its columns."""
    ops: list[CommutingOp] = []
    chain: list[int] = []
    for index, op in back_through(graph, matmul.w):
        chain.insert(0, index)
        if op is not None and widens(op):
            return None
        if op is not None and op.equation.primitive.name != "pvary":
            ops.insert(0, op)  # The replacement types its operands.
    gather = graph.equations[chain[0]] if chain else None
    if gather is None or kind_of(gather) != "all_gather" or is_ours(gather):
        return None
    collective = collective_of(gather, axis_sizes)
    if isinstance(collective, str):
        return None
    view = view_of(graph, chain[0], collective)
    for op in ops:
        view = view.after(op, collective.devices)
        if isinstance(view, str) or view.shape != view.base:
            return None
    dimension = _matrix_dimension(matmul, view.dimension)
    if dimension is None:
        return None
    sharding = WeightShards(collective.axis_name, collective.devices, dimension)
    return GatheredWeight(tuple(chain), gather.invars[0], view.shard_ops, sharding)


def _matrix_dimension(matmul: Matmul, dimension: int) -> Literal[0, 1] | None:
    """The dimension of w [K, N] whose blocks are those of a dimension of w; None if neither's."""
    shape = type_of(matmul.w).shape
    for side, group in ((0, matmul.w_contracted), (1, matmul.w_free)):
        if dimension in group and all(shape[i] == 1 for i in group[: group.index(dimension)]):
            return 0 if side == 0 else 1
    return None
