"""The contract of a backend: it executes the ops, and answers questions about them.

Every backend executes the three ops on matrices; an `EinsumBackend` also executes the fourth,
einsums that are not matmuls; a `ShardedWeightBackend` also executes ops that gather their weights
over a second mesh axis. Shapes are local to one device: D devices are on the axis, K is
contracted, N are columns.

=========================  =======================================  ==========================
op                         takes                                    returns
=========================  =======================================  ==========================
``all_gather_matmul``      x [..., m, ..., K], each w [K, N]        each y [..., D*m, ..., N]
``matmul_reduce_scatter``  each x [..., M, ..., K], each w [K, N]   y [..., M/D, ..., N]
``matmul_all_reduce``      each x [..., K], each w [K, N]           y [..., N]
=========================  =======================================  ==========================

Operands in 8 bits (`collective_matmul.fp8`) take the same place: an x is then a message, and each w
a `ScaledMatrix`, which is never transposed. Results have the dtype that the weights name.

Sums between devices are sent in the arrays' own dtype; within a matmul they are float32. What an op
has gathered it may return as it is, whole or in chunks: the weight gradient, which is one undivided
matmul, takes either (`collective_matmul.backends.chunked_array.weight_gradients`).

A backend also answers three questions about a `Site`: can it execute it, how long does that take,
and which configurations could it be tuned over. `collective_matmul.dispatch` compares the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax

from collective_matmul.backends.arithmetic import Weight
from collective_matmul.backends.chunked_array import ChunkedArray
from collective_matmul.backends.weight_blocks import ShardedWeights
from collective_matmul.dispatch import contract
from collective_matmul.dispatch.contract import Configuration as Configuration
from collective_matmul.dispatch.contract import Prediction as Prediction
from collective_matmul.equation import Equation
from collective_matmul.mosaic_gpu import scaled_chunks
from collective_matmul.site import Site

#: What a gather returns beside its products: the gathered array whole, in chunks, or not at all.
GatherResidual = jax.Array | ChunkedArray | None


class MatmulBackend(contract.Backend, Protocol):
    """A way to execute the ops; `collective_matmul.dispatch.contract` has the questions."""

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
        """``all_gather(x) @ w`` for each w.

        Args:
          x: [..., m, ..., K], this device's shard along `dimension`.
          ws: each [K, N], or [N, K] if `transpose_w`.
          axis_name: the mesh axis to gather over.
          dimension: dimension of x to gather.
          transpose_w: whether each w is contracted along its last dimension.
          keep_gathered: whether to return x whole too.
          co_gathered: [..., m, ..., R], a shard to gather along `dimension` in the same loop, and
            to return whole instead of x. Only messages have one.

        Returns:
          Each product [..., D*m, ..., N]; and `co_gathered` or x whole, or None.
        """
        ...

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
        """``reduce_scatter(sum of x @ w)`` over pairs of x and w.

        Args:
          xs: each [..., M, ..., K].
          ws: each [K, N], or [N, K] if `transpose_w`.
          axis_name: the mesh axis to sum and scatter over.
          dimension: dimension of each x to scatter.
          transpose_w: whether each w is contracted along its last dimension.
          co_gathered: [..., m, ..., R], a shard to gather along `dimension` in the same loop.

        Returns:
          The sum [..., M/D, ..., N]; and `co_gathered` whole, or None.
        """
        ...

    def matmul_all_reduce(
        self, xs: Sequence[jax.Array], ws: Sequence[Weight], axis_name: str
    ) -> jax.Array:
        """``psum(sum of x @ w)`` over pairs of x and w.

        Args:
          xs: each [..., K].
          ws: each [K, N].
          axis_name: the mesh axis to sum over.

        Returns:
          The sum [..., N], typed as replicated over the axis.
        """
        ...

    def multiplied_dtypes(self, site: Site) -> tuple[str, str]:
        """The dtypes of x and w in which it multiplies them; see `Site.operand_dtypes`.

        While the site is being traced, call this inside its `jax.shard_map`.
        """
        rows = self.rows_of_matmul(site)
        if site.fp8 == "blockwise" and not scaled_chunks.multiplies(site, rows):
            return "float32", "float32"
        return site.operand_dtypes

    def rows_of_matmul(self, site: Site) -> int:
        """The rows that it multiplies at once: all, unless it multiplies chunks."""
        return site.product_rows

    def lacking_reason(self, request: Site) -> str | None:
        """Why it has no function for what is multiplied at a site."""
        if request.weight_shards is not None and not isinstance(self, ShardedWeightBackend):
            axis_name = request.weight_shards.axis_name
            return f"w is sharded over axis {axis_name!r}, and {self.name} multiplies whole weights"
        if request.einsum is not None and not isinstance(self, EinsumBackend):
            equation = request.einsum.equation
            return f"{equation!r} is not a matmul, and {self.name} executes nothing else"
        return None


#: The name that backends import.
Backend = MatmulBackend


@runtime_checkable
class EinsumBackend(Backend, Protocol):
    """A backend that also executes einsums that are not matmuls, for one label of them."""

    def gather_einsum(
        self,
        equation: Equation,
        a: jax.Array,
        b: jax.Array,
        axis_name: str,
        *,
        keep_gathered: bool = False,
    ) -> tuple[jax.Array, GatherResidual]:
        """The einsum of a, gathered along the equation's label, and b.

        Returns:
          The result, whole along the label if it has that; and a whole, or None.
        """
        ...

    def scatter_einsum(
        self,
        equation: Equation,
        a: jax.Array,
        b: jax.Array,
        axis_name: str,
        *,
        co_gathered: jax.Array | None = None,
    ) -> tuple[jax.Array, GatherResidual]:
        """The einsum of a and b, summed over the axis and scattered along the equation's label.

        Returns:
          This device's shard of the sum; and `co_gathered`, which has the labels of the result,
          gathered along the label.
        """
        ...


@runtime_checkable
class ShardedWeightBackend(Backend, Protocol):
    """A backend that also executes ops on sharded weights, which it gathers over their own axis.

    Weights are gathered in the dtype of x. Their gradients are summed over their axis in the dtype
    of `ShardedWeights.gradient_dtype`, and scattered like the weights.
    """

    def gather_with_shards(
        self,
        x: jax.Array,
        weights: ShardedWeights,
        axis_name: str,
        *,
        dimension: int,
        transpose_w: bool = False,
        keep_gathered: bool = False,
    ) -> tuple[tuple[jax.Array, ...], GatherResidual]:
        """``all_gather(x) @ w`` for each w; arguments and results as `all_gather_matmul`."""
        ...

    def gather_with_shards_gradients(
        self,
        x: jax.Array,
        weights: ShardedWeights,
        dys: Sequence[jax.Array],
        axis_name: str,
        *,
        dimension: int,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The gradients of x and of each shard, given those of the products."""
        ...

    def scatter_with_shards(
        self,
        xs: Sequence[jax.Array],
        weights: ShardedWeights,
        axis_name: str,
        *,
        dimension: int,
        transpose_w: bool = False,
    ) -> jax.Array:
        """``reduce_scatter(sum of x @ w)`` over pairs; shapes: see `matmul_reduce_scatter`."""
        ...

    def scatter_with_shards_gradients(
        self,
        x: jax.Array,
        weights: ShardedWeights,
        dy: jax.Array,
        axis_name: str,
        *,
        dimension: int,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The gradients of x and of the only shard, given that of the result."""
        ...
