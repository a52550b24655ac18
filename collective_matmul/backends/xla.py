"""`Xla`, the reference: XLA's collective and XLA's matmul, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax import lax

from collective_matmul._compat import partly_automatic, psum, psum_scatter
from collective_matmul.backends.arithmetic import Weight, add, contract_rows, einsum, matmul
from collective_matmul.backends.base import (
    Backend,
    EinsumBackend,
    GatherResidual,
    Prediction,
    ShardedWeightBackend,
)
from collective_matmul.backends.matmul_cost import communication_seconds, multiplication_seconds
from collective_matmul.backends.weight_blocks import ShardedWeights
from collective_matmul.equation import Equation
from collective_matmul.hardware import assumed_rates, rates
from collective_matmul.site import Site


class SequentialBackend(Backend, Protocol):
    """A backend whose collectives and matmuls follow each other; subclasses add the collectives."""

    def all_gather(self, x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """[..., m, ...] -> [..., D*m, ...]."""
        ...

    def reduce_scatter(self, x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """[..., D*m, ...] -> [..., m, ...]."""
        ...

    def all_reduce(self, x: jax.Array, axis_name: str) -> jax.Array:
        """[...] -> [...], typed as replicated over the axis."""
        ...

    def all_gather_matmul(
        self,
        x: jax.Array,
        ws: Sequence[Weight],
        axis_name: str,
        *,
        dimension: int,
        transpose_w: bool = False,
        keep_gathered: bool = False,
        co_gathered: jax.Array | None = None,
    ) -> tuple[tuple[jax.Array, ...], GatherResidual]:
        """Gathers x, then multiplies; see `Backend`."""
        gathered = self.all_gather(x, axis_name, dimension)
        ys = tuple(matmul(gathered, w, transpose_w) for w in ws)
        if co_gathered is not None:
            return ys, self.all_gather(co_gathered, axis_name, dimension)
        return ys, gathered if keep_gathered else None

    def matmul_reduce_scatter(
        self,
        xs: Sequence[jax.Array],
        ws: Sequence[Weight],
        axis_name: str,
        *,
        dimension: int,
        transpose_w: bool = False,
        co_gathered: jax.Array | None = None,
    ) -> tuple[jax.Array, GatherResidual]:
        """Multiplies, then reduce-scatters; see `Backend`."""
        partial = add(*(matmul(x, w, transpose_w) for x, w in zip(xs, ws, strict=True)))
        y = self.reduce_scatter(partial, axis_name, dimension)
        if co_gathered is None:
            return y, None
        return y, self.all_gather(co_gathered, axis_name, dimension)

    def matmul_all_reduce(
        self, xs: Sequence[jax.Array], ws: Sequence[Weight], axis_name: str
    ) -> jax.Array:
        """Multiplies, then all-reduces; see `Backend`."""
        return self.all_reduce(add(*map(matmul, xs, ws)), axis_name)


class Xla(SequentialBackend, EinsumBackend, ShardedWeightBackend):
    """XLA's own collectives. Other backends must be faster."""

    name = "xla"

    def all_gather(self, x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """[..., m, ...] -> [..., D*m, ...]."""
        return lax.all_gather(x, axis_name, axis=dimension, tiled=True)

    def reduce_scatter(self, x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """[..., D*m, ...] -> [..., m, ...]."""
        return psum_scatter(x, axis_name, dimension)

    def all_reduce(self, x: jax.Array, axis_name: str) -> jax.Array:
        """[...] -> [...], typed as replicated over the axis."""
        return psum(x, axis_name)

    def gather_einsum(
        self,
        equation: Equation,
        a: jax.Array,
        b: jax.Array,
        axis_name: str,
        *,
        keep_gathered: bool = False,
    ) -> tuple[jax.Array, GatherResidual]:
        """Gathers a, then contracts; see `EinsumBackend`."""
        whole = self.all_gather(a, axis_name, equation.a.index(equation.label))
        return einsum(equation, whole, b), whole if keep_gathered else None

    def scatter_einsum(
        self,
        equation: Equation,
        a: jax.Array,
        b: jax.Array,
        axis_name: str,
        *,
        co_gathered: jax.Array | None = None,
    ) -> tuple[jax.Array, GatherResidual]:
        """Contracts, then reduce-scatters; see `EinsumBackend`."""
        dimension = equation.y.index(equation.label)
        y = self.reduce_scatter(einsum(equation, a, b), axis_name, dimension)
        if co_gathered is None:
            return y, None
        return y, self.all_gather(co_gathered, axis_name, dimension)

    def gather_with_shards(
        self, x: jax.Array, weights: ShardedWeights, axis_name: str, **options: Any
    ) -> tuple[tuple[jax.Array, ...], GatherResidual]:
        """Gathers the weights and x, then multiplies."""
        return self.all_gather_matmul(x, self._whole(weights), axis_name, **options)

    def gather_with_shards_gradients(
        self,
        x: jax.Array,
        weights: ShardedWeights,
        dys: Sequence[jax.Array],
        axis_name: str,
        *,
        dimension: int,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Gathers the weights, then multiplies and reduce-scatters."""
        whole = self._whole(weights)
        dx, gathered = self.matmul_reduce_scatter(
            dys, whole, axis_name, dimension=dimension, transpose_w=True, co_gathered=x
        )
        assert isinstance(gathered, jax.Array)
        return dx, tuple(self._scattered(weights, contract_rows(gathered, dy)) for dy in dys)

    def scatter_with_shards(
        self, xs: Sequence[jax.Array], weights: ShardedWeights, axis_name: str, **options: Any
    ) -> jax.Array:
        """Gathers the weights, multiplies, then reduce-scatters."""
        return self.matmul_reduce_scatter(xs, self._whole(weights), axis_name, **options)[0]

    def scatter_with_shards_gradients(
        self,
        x: jax.Array,
        weights: ShardedWeights,
        dy: jax.Array,
        axis_name: str,
        *,
        dimension: int,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Gathers the weights and dy, then multiplies and reduce-scatters."""
        whole = self._whole(weights)
        (dx,), gathered = self.all_gather_matmul(
            dy, whole, axis_name, dimension=dimension, transpose_w=True, keep_gathered=True
        )
        assert isinstance(gathered, jax.Array)
        return dx, (self._scattered(weights, contract_rows(x, gathered)),)

    def _whole(self, weights: ShardedWeights) -> tuple[jax.Array, ...]:
        axis_name, dimension = weights.sharding.axis_name, weights.sharding.dimension
        return tuple(self.all_gather(shard, axis_name, dimension) for shard in weights.shards)

    def _scattered(self, weights: ShardedWeights, gradient: jax.Array) -> jax.Array:
        """This device's shard of the sum of a weight's gradients."""
        gradient = gradient.astype(weights.gradient_dtype)
        sharding = weights.sharding
        return self.reduce_scatter(gradient, sharding.axis_name, sharding.dimension)

    def unsupported_reason(self, site: Site) -> str | None:
        """None: it executes every site."""
        del site

    def unprofitable_reason(self, site: Site) -> str | None:
        """XLA cannot split these collectives over mesh axes that it shards by itself.

        It would first gather what such an axis shards, such as the batch. All-reduces it can split.
        """
        if site.op != "matmul_all_reduce" and partly_automatic():
            return "would gather what the automatic mesh axes shard"
        return None

    def predict(self, site: Site) -> Prediction | None:
        """The time of collectives and matmuls in sequence, or of the host's launches if longer."""
        gpu = rates()
        return None if gpu is None else Prediction(xla_seconds(site), 0.0, gpu.basis)


def xla_seconds(site: Site) -> float:
    """Predicted seconds; on Hopper GPUs if the device of the traced program is not known."""
    on_device = multiplication_seconds(site) + communication_seconds(site)
    return max(on_device, assumed_rates().host_seconds)
