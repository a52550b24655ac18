"""Measures a matmul's request: its operands, also in 8 bits, and one repetition of it.

For a site of a backward pass, the program also computes the weight gradient from the gathered
array. As in a backward pass, the next repetition does not wait for it, and XLA may overlap it with
communication.

A site in 8 bits is measured with operands that are quantized already: every backend needs them
alike. They are those that the ops give to a backend: see `collective_matmul.fp8_gradients`.

Local shapes: x [m, K], w [K, N], or [N, K] for a site of a backward pass. Global arrays concatenate
the devices' shards along the first dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast, get_args

import jax

from collective_matmul import fp8_weight_gradients
from collective_matmul.backends import BACKENDS
from collective_matmul.backends.base import GatherResidual, MatmulBackend, Prediction
from collective_matmul.backends.chunked_array import weight_gradients, whole_of
from collective_matmul.backends.xla import SequentialBackend, xla_seconds
from collective_matmul.dispatch import contract
from collective_matmul.dispatch.contract import COMPUTE_ONLY
from collective_matmul.dispatch.registry import Op, register_op
from collective_matmul.fp8 import ScaledMatrix, quantize_rows
from collective_matmul.quantized_weights import copies_of
from collective_matmul.site import Op as OpName
from collective_matmul.site import Site
from collective_matmul.tuning.repetitions import AXIS, Repetitions


class StackOperands(NamedTuple):
    """Arguments of a program.

    Attributes:
      xs: x of every pair of operands; one for all pairs of an all-gather. Messages in 8 bits.
      aside: the co-gathered array; or, for a site that keeps the gathered array, x of the weight
        gradient. A message if the weight gradient is in 8 bits.
      weights: w of every pair, for every repetition. Scaled matrices in 8 bits.
      unquantized: what xs are messages of, if the weight gradient is not in 8 bits.
    """

    xs: Sequence[Any]
    aside: Any
    weights: Sequence[Sequence[Any]]
    unquantized: Sequence[Any] = ()


class Stack(Repetitions):
    """A flat site, repeated, on the first `axis_size` of some devices."""

    def __init__(self, site: Site, devices: Sequence[Any]):
        super().__init__(site, devices, seconds=xla_seconds(site))
        self.site = site
        self.bound = _ComputeOnly()
        self.prepares = site.fp8 is not None

    def execute(
        self, backend: contract.Backend, operands: StackOperands, weights: Sequence[Any]
    ) -> Any:
        """The products of the site, and its weight gradients."""
        return _repetition(cast(MatmulBackend, backend), self.site, operands, weights)

    def prepare_shards(self, operands: StackOperands) -> StackOperands:
        """A device's operands in 8 bits."""
        return quantized(self.site, operands)

    def plain_operands(self, implementation: str) -> StackOperands:
        """As `operands`, in the site's dtype also if it is multiplied in 8 bits."""
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
            [self.shards(*x, site.dtype) for x in xs],
            None if aside is None else self.shards(*aside, site.dtype),
            [[self.shards(*w, site.dtype) for w in ws] for _ in range(self.repetitions)],
        )


def quantized(site: Site, operands: StackOperands) -> StackOperands:
    """The operands of a flat site in 8 bits, from those in the site's dtype.

    Call it inside `jax.shard_map`.
    """
    recipe, backward = site.recipe, site.has_weight_gradient
    assert recipe is not None
    aside, unquantized = operands.aside, ()
    if backward and recipe.weight_gradient_in_fp8:
        (aside,) = quantize_rows([aside], recipe)
    elif backward:
        unquantized = operands.xs
    weights = jax.jit(functools.partial(_scaled_matrices, site))  # Traced once for all repetitions.
    return StackOperands(
        quantize_rows(operands.xs, recipe, recipe.gradient_dtype if backward else recipe.dtype),
        aside,
        [weights(ws) for ws in operands.weights],
        unquantized,
    )


def _scaled_matrices(site: Site, ws: Sequence[jax.Array]) -> list[ScaledMatrix]:
    """Weights of one repetition. Those of one sum of products have their scales in common."""
    recipe, transposed = site.recipe, site.has_weight_gradient
    assert recipe is not None
    sums = [[w] for w in ws] if site.op == "all_gather_matmul" else [ws]
    return [w for terms in sums for w in copies_of(terms, recipe, None, transposed=transposed)]


def _repetition(
    backend: MatmulBackend, site: Site, operands: StackOperands, ws: Sequence[Any]
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    """The products of a site, and the weight gradients if it is part of a backward pass."""
    xs, aside, unquantized = operands.xs, operands.aside, operands.unquantized
    if site.op == "matmul_all_reduce":
        return (backend.matmul_all_reduce(xs, ws, AXIS),), ()
    # Scaled matrices are never transposed.
    arguments = {"dimension": 0, "transpose_w": site.transpose_w and site.fp8 is None}
    if site.op == "all_gather_matmul":
        # Where the array itself is needed whole, it travels beside its message.
        kept = {"co_gathered": unquantized[0]} if unquantized else {}
        arguments["keep_gathered"] = site.keep_gathered and not unquantized
        products, gathered = backend.all_gather_matmul(xs[0], ws, AXIS, **kept, **arguments)
    else:
        product, gathered = backend.matmul_reduce_scatter(
            xs, ws, AXIS, co_gathered=aside, **arguments
        )
        products = (product,)
    return products, _weight_gradients(site, operands, gathered)


def _weight_gradients(
    site: Site, operands: StackOperands, gathered: GatherResidual
) -> Sequence[jax.Array]:
    """The weight gradients from the gathered array, if the site is part of a backward pass."""
    if not site.has_weight_gradient:
        return ()
    assert gathered is not None
    gathers, recipe = site.op == "all_gather_matmul", site.recipe
    if recipe is not None and recipe.weight_gradient_in_fp8:
        whole = whole_of(gathered, 0)
        xs, dys = ([operands.aside], [whole]) if gathers else ([whole], operands.xs)
        return fp8_weight_gradients.weight_gradients(
            xs, dys, recipe, site.dtype, shards=site.axis_size
        )
    x, ys = operands.aside, [gathered]
    if not gathers:
        x, ys = gathered, operands.unquantized or operands.xs
    return weight_gradients(x, ys, dimension=0)


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
