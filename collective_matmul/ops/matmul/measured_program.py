"""Measures a matmul's request: its operands, in its format, and one repetition of it.

For a site of a backward pass, the program also computes the weight gradient from the gathered
array. As in a backward pass, the next repetition does not wait for it, and XLA may overlap it with
communication.

Operands are converted to the format of the site before: every backend needs them alike. They are
those that the ops give to a backend: see `collective_matmul.ops.matmul.gradients`.

Local shapes: x [m, K], w [K, N], or [N, K] for a site of a backward pass. Global arrays concatenate
the devices' shards along the first dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast, get_args

import jax

from collective_matmul.dispatch import contract
from collective_matmul.dispatch.contract import COMPUTE_ONLY, Prediction
from collective_matmul.dispatch.registry import Op, register_op
from collective_matmul.dispatch.repetitions import AXIS, Repetitions
from collective_matmul.operands.format import PLAIN
from collective_matmul.operands.multiply import contracted, multiplied, weight_gradients
from collective_matmul.ops.matmul.backend import MatmulBackend
from collective_matmul.ops.matmul.backends import BACKENDS
from collective_matmul.ops.matmul.request import Op as OpName
from collective_matmul.ops.matmul.request import Site
from collective_matmul.ops.matmul.xla import SequentialBackend, xla_seconds


class StackOperands(NamedTuple):
    """Arguments of a program.

    Attributes:
      xs: x of every pair of operands; one for all pairs of an all-gather. Rows in the format.
      aside: the co-gathered rows; or, for a site that keeps what it gathered, x of the weight
        gradient. Rows in the format if it packs gradients.
      weights: w of every pair, for every repetition. Matrices in the format.
    """

    xs: Sequence[Any]
    aside: Any
    weights: Sequence[Sequence[Any]]


class Stack(Repetitions):
    """A flat site, repeated, on the first `axis_size` of some devices."""

    def __init__(self, site: Site, devices: Sequence[Any]):
        super().__init__(site, devices, seconds=xla_seconds(site))
        self.site = site
        self.bound = _ComputeOnly()
        self.prepares = site.format != PLAIN

    def execute(
        self, backend: contract.Backend, operands: StackOperands, weights: Sequence[Any]
    ) -> Any:
        """The products of the site, and its weight gradients."""
        return _repetition(cast(MatmulBackend, backend), self.site, operands, weights)

    def prepare_shards(self, operands: StackOperands) -> StackOperands:
        """A device's operands in the format of the site."""
        return in_format(self.site, operands)

    def plain_operands(self, implementation: str) -> StackOperands:
        """`operands` in arrays of the site's dtype."""
        site = self.site
        gathered = site.axis_size if implementation == COMPUTE_ONLY else 1
        xs = [x for x, _ in site.operands]
        aside = None
        if site.op == "all_gather_matmul":
            (rows, columns), *_ = xs
            xs = [(rows * gathered, columns)]
            if site.keep_gathered:
                aside = (site.product_rows, site.columns)
        if site.co_gathered is not None:
            aside = (site.co_gathered[0] * gathered, site.co_gathered[1])
        ws = [w[::-1] if site.transpose_w else w for _, w in site.operands]
        return StackOperands(
            [self._shards(x) for x in xs],
            None if aside is None else self._shards(aside),
            [[self._shards(w) for w in ws] for _ in range(self.repetitions)],
        )

    def _shards(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        rows, columns = shape
        return self.shards(rows, columns, self.site.dtype)


def in_format(site: Site, operands: StackOperands) -> StackOperands:
    """The operands of a flat site in its format, from arrays. Call it inside `jax.shard_map`."""
    stored, backward = site.format, site.has_weight_gradient
    aside = operands.aside
    if backward:
        (rows,) = stored.rows([aside])
        aside = contracted(rows)
    weights = jax.jit(functools.partial(_matrices, site))  # Traced once for all repetitions.
    rows = stored.rows(operands.xs, of_gradient=backward)
    return StackOperands(rows, aside, [weights(ws) for ws in operands.weights])


def _matrices(site: Site, ws: Sequence[jax.Array]) -> list[Any]:
    """Weights of one repetition, converted together if they are those of one sum of products."""
    transposed = site.has_weight_gradient
    sums = [[w] for w in ws] if site.op == "all_gather_matmul" else [ws]
    return [w for terms in sums for w in site.format.matrices(terms, transposed=transposed)]


def _repetition(
    backend: MatmulBackend, site: Site, operands: StackOperands, ws: Sequence[Any]
) -> tuple[Any, Sequence[jax.Array]]:
    """The products of a site, and the weight gradients if it is part of a backward pass."""
    request = replace(site, axis_name=AXIS)
    co_gathered = operands.aside if site.co_gathered is not None else None
    xs = operands.xs if site.keep_gathered else [*map(multiplied, operands.xs)]
    results, gathered = backend.execute(request, xs, ws, co_gathered)
    products = results if site.op == "all_gather_matmul" else (results,)
    if not site.has_weight_gradient:
        return products, ()
    pairs = [operands.aside], [gathered]
    if site.op != "all_gather_matmul":
        pairs = [gathered], operands.xs
    options = {"shards": site.axis_size, "dimension": 0}
    return products, weight_gradients(site.format, *pairs, site.dtype, **options)


class _ComputeOnly(SequentialBackend):
    """The matmuls of a site without its communication: a bound for every backend.

    Arrays to gather are gathered already, and of a sum each device keeps its own part.
    """

    name = COMPUTE_ONLY

    def all_gather(self, x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        del axis_name, dimension
        return x

    def reduce_scatter(self, x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        del axis_name, dimension
        return x

    def all_reduce(self, x: jax.Array, axis_name: str) -> jax.Array:
        del axis_name
        return x

    def unsupported_reason(self, site: Site) -> str | None:
        del site

    def predict(self, site: Site) -> Prediction | None:
        del site


for _name in get_args(OpName):
    register_op(Op(_name, BACKENDS, Site.from_fields, Stack, has_bound=True))
