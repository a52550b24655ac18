"""`Xla`, the reference: XLA's collective and XLA's matmul, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax import lax

from collective_matmul._compat import partly_automatic, psum, psum_scatter
from collective_matmul.dispatch.contract import Prediction
from collective_matmul.hardware import assumed_rates, rates
from collective_matmul.operands.arithmetic import add, einsum
from collective_matmul.operands.chunked import Gathered
from collective_matmul.operands.multiply import matmul, multiplied
from collective_matmul.operands.sharded import whole
from collective_matmul.ops.matmul.backend import MatmulBackend
from collective_matmul.ops.matmul.matmul_cost import multiplication_seconds
from collective_matmul.ops.matmul.request import Site


class SequentialBackend(MatmulBackend, Protocol):
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
        self, request: Site, x: Any, ws: Sequence[Any]
    ) -> tuple[tuple[jax.Array, ...], Gathered]:
        """Gathers x, then multiplies; see `MatmulBackend`."""
        weights = tuple(map(whole, ws))
        gathered = self._gathered(request, x)
        rows = multiplied(gathered)
        ys = tuple(matmul(rows, w, request.transpose_w) for w in weights)
        return ys, gathered if request.keep_gathered else None

    def matmul_reduce_scatter(
        self, request: Site, xs: Sequence[Any], ws: Sequence[Any], co_gathered: Any = None
    ) -> tuple[jax.Array, Gathered]:
        """Multiplies, then reduce-scatters; see `MatmulBackend`."""
        pairs = zip(xs, tuple(map(whole, ws)), strict=True)
        terms = [matmul(x, w, request.transpose_w) for x, w in pairs]
        axis_name, dimension = request.axis_name, request.shard_dimension
        y = jax.tree.map(
            lambda *term: self.reduce_scatter(add(*term), axis_name, dimension), *terms
        )
        return y, None if co_gathered is None else self._gathered(request, co_gathered)

    def matmul_all_reduce(self, request: Site, xs: Sequence[Any], ws: Sequence[Any]) -> jax.Array:
        """Multiplies, then all-reduces; see `MatmulBackend`."""
        return self.all_reduce(add(*map(matmul, xs, ws)), request.axis_name)

    def _gathered(self, request: Site, rows: Any) -> Any:
        """Rows of all devices, in any format."""
        gather = functools.partial(
            self.all_gather, axis_name=request.axis_name, dimension=request.shard_dimension
        )
        return jax.tree.map(gather, rows)


class Xla(SequentialBackend):
    """XLA's own collectives. Other backends must be faster."""

    name = "xla"
    executes_einsums = True
    gathers_weights = True
    sends_columns_beside = True

    def all_gather(self, x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """[..., m, ...] -> [..., D*m, ...]."""
        return lax.all_gather(x, axis_name, axis=dimension, tiled=True)

    def reduce_scatter(self, x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """[..., D*m, ...] -> [..., m, ...]."""
        return psum_scatter(x, axis_name, dimension)

    def all_reduce(self, x: jax.Array, axis_name: str) -> jax.Array:
        """[...] -> [...], typed as replicated over the axis."""
        return psum(x, axis_name)

    def gather_einsum(self, request: Site, a: jax.Array, b: jax.Array) -> tuple[Any, Gathered]:
        """Gathers a, then contracts; see `MatmulBackend`."""
        equation = request.labels
        gathered = self.all_gather(a, request.axis_name, equation.a.index(equation.label))
        return einsum(equation, gathered, b), gathered if request.keep_gathered else None

    def scatter_einsum(
        self, request: Site, a: jax.Array, b: jax.Array, co_gathered: Any = None
    ) -> tuple[Any, Gathered]:
        """Contracts, then reduce-scatters; see `MatmulBackend`."""
        axis_name, dimension = request.axis_name, request.labels.y.index(request.labels.label)
        y = self.reduce_scatter(einsum(request.labels, a, b), axis_name, dimension)
        if co_gathered is None:
            return y, None
        return y, self.all_gather(co_gathered, axis_name, dimension)

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
    on_device = multiplication_seconds(site) + site.communication_seconds
    return max(on_device, assumed_rates().host_seconds)
