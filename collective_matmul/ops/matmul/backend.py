"""The contract of a backend of the matmuls: how it executes a request.

Shapes are local to one device: D devices are on the axis, K is contracted, N are columns.

=========================  =======================================  ==========================
op                         takes                                    returns
=========================  =======================================  ==========================
``all_gather_matmul``      x [..., m, ..., K], each w [K, N]        each y [..., D*m, ..., N]
``matmul_reduce_scatter``  each x [..., M, ..., K], each w [K, N]   y [..., M/D, ..., N]
``matmul_all_reduce``      each x [..., K], each w [K, N]           y [..., N]
=========================  =======================================  ==========================

An x is an array or rows in another format, a w an array, a matrix in that format, or a shard of
either: see `collective_matmul.operands`. `operands.multiply` multiplies any of them. Results are
arrays of the program's dtype.

Sums between devices are sent in the arrays' own dtype; within a matmul they are float32. What an op
has gathered it may return as it is, whole or `Chunked`: the weight gradient, which is one undivided
matmul, takes either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import jax

from collective_matmul.dispatch.contract import Backend
from collective_matmul.operands.chunked import Gathered, tie_with_barrier
from collective_matmul.operands.format import RowsOperand, WeightOperand
from collective_matmul.operands.multiply import weight_gradients
from collective_matmul.ops.matmul.einsum_execution import as_matrices, split_result, split_rows
from collective_matmul.ops.matmul.request import Site

RowsOperands = Sequence[RowsOperand]
WeightOperands = Sequence[WeightOperand]
#: An array, or one for each weight of an all-gather.
Results = jax.Array | tuple[jax.Array, ...]


class MatmulBackend(Backend, Protocol):
    """A way to execute matmuls with communication. Subclasses inherit what suits most.

    Attributes:
      executes_einsums: whether it also executes einsums that are not matmuls.
      gathers_weights: whether it also executes ops that gather their weights over a second axis.
      sends_columns_beside: whether it executes requests with `columns_beside`: rows and results
        that are pytrees.
    """

    executes_einsums: bool = False
    gathers_weights: bool = False
    sends_columns_beside: bool = False

    def execute(
        self,
        request: Site,
        xs: RowsOperands,
        ws: WeightOperands,
        co_gathered: RowsOperand = None,
    ) -> tuple[Results, Gathered]:
        """Executes a request.

        Args:
          request: the op and how its arrays are laid out.
          xs: rows; one for all weights of an all-gather, else one for each.
          ws: weights, sharded if `request.weight_shards` says so.
          co_gathered: rows of other columns, to be gathered in the loop of a reduce-scatter.

        Returns:
          The result, or one for each weight of an all-gather; and what was gathered, if
          `request.keep_gathered` or `co_gathered` asks for it, else None.
        """
        if request.equation is not None:
            return self._execute_einsum(request, xs[0], ws[0], co_gathered)
        if request.op == "all_gather_matmul":
            return self.all_gather_matmul(request, xs[0], ws)
        if request.op == "matmul_reduce_scatter":
            return self.matmul_reduce_scatter(request, xs, ws, co_gathered)
        return self.matmul_all_reduce(request, xs, ws), None

    def all_gather_matmul(
        self, request: Site, x: RowsOperand, ws: WeightOperands
    ) -> tuple[tuple[jax.Array, ...], Gathered]:
        """``all_gather(x) @ w`` for each w; and x gathered, if `request.keep_gathered`."""
        ...

    def matmul_reduce_scatter(
        self,
        request: Site,
        xs: RowsOperands,
        ws: WeightOperands,
        co_gathered: RowsOperand = None,
    ) -> tuple[jax.Array, Gathered]:
        """``reduce_scatter(sum of x @ w)`` over pairs; and `co_gathered` gathered, or None."""
        ...

    def matmul_all_reduce(self, request: Site, xs: RowsOperands, ws: WeightOperands) -> jax.Array:
        """``psum(sum of x @ w)`` over pairs, typed as replicated over the axis."""
        ...

    def gather_einsum(self, request: Site, a: jax.Array, b: jax.Array) -> tuple[Results, Gathered]:
        """The einsum of a, gathered along the equation's label, and b; and a gathered, or None."""
        raise TypeError(f"{self.name}: an einsum that is no matmul")

    def scatter_einsum(
        self, request: Site, a: jax.Array, b: jax.Array, co_gathered: RowsOperand = None
    ) -> tuple[Results, Gathered]:
        """The einsum of a and b, summed over the axis and scattered along the equation's label.

        Returns:
          This device's shard of the sum; and `co_gathered`, which has the labels of the result,
          gathered along the label, or None.
        """
        raise TypeError(f"{self.name}: an einsum that is no matmul")

    def _execute_einsum(
        self, request: Site, a: jax.Array, b: jax.Array, co_gathered: RowsOperand
    ) -> tuple[Results, Gathered]:
        """By the op if reshapes make the equation a matmul, else by the backend's own einsum."""
        equation = request.labels
        gathers = request.op == "all_gather_matmul"
        if not equation.is_matmul:
            if gathers:
                return self.gather_einsum(request, a, b)
            return self.scatter_einsum(request, a, b, co_gathered)
        x, w = as_matrices(equation, a, b)
        if gathers:
            (y,), gathered = self.all_gather_matmul(request, x, (w,))
            gathered = split_rows(gathered, a.shape[x.ndim - 1 :])
        else:
            y, gathered = self.matmul_reduce_scatter(request, (x,), (w,), co_gathered)
        return split_result(equation, y, b), gathered

    def weight_gradients(
        self,
        request: Site,
        dxs: Results,
        ws: WeightOperands,
        xs: RowsOperands,
        ys: RowsOperands,
        scatter: Callable[[WeightOperand, jax.Array], jax.Array],
    ) -> tuple[Results, tuple[jax.Array, ...]]:
        """The gradients of weights in a backward pass, after those of the other operands.

        Args:
          request: the backward pass.
          dxs: gradients of the xs of the op.
          ws: the weights as the user stores them.
          xs: rows of the op's operands; one for all weights, or one for each.
          ys: rows of the gradients of the op's results; likewise. One of the two was gathered.
          scatter: ``scatter(w, dw)`` returns the gradient of what is stored of w.

        Returns:
          dxs, and a gradient for each weight.
        """
        reduces = request.op == "matmul_reduce_scatter"
        transposed = not request.transpose_w
        options = {"shards": request.axis_size, "dimension": request.dimension}
        left, right = (ys, xs) if transposed and not reduces else (xs, ys)
        dws = weight_gradients(request.format, left, right, request.dtype, **options)
        if transposed and reduces:
            dws = tuple(dw.swapaxes(0, 1) for dw in dws)
        dxs, dws = tie_with_barrier((xs if reduces else ys)[0], dxs, dws)
        return dxs, tuple(map(scatter, ws, dws))

    def gathers_under_weight_gradients(self, request: Site) -> bool:
        """Whether a backward pass begins with the weight gradients, under which weights travel."""
        del request
        return False

    def weight_gradients_first(
        self,
        request: Site,
        ws: WeightOperands,
        xs: RowsOperands,
        ys: RowsOperands,
    ) -> tuple[tuple[jax.Array, ...], WeightOperands, RowsOperands]:
        """The gradients of sharded weights, the gathered weights, and ys to use from then on."""
        raise TypeError(f"{self.name}: weights that travel under weight gradients")

    def lacking_reason(self, request: Site) -> str | None:
        """Why it has no function for what is multiplied."""
        if request.weight_shards is not None and not self.gathers_weights:
            axis_name = request.weight_shards.axis_name
            return f"w is sharded over axis {axis_name!r}, and {self.name} multiplies whole weights"
        if request.columns_beside and not self.sends_columns_beside:
            count = request.columns_beside
            return f"{count} columns of adapters travel with x, and {self.name} sends x alone"
        if request.einsum is not None and not self.executes_einsums:
            equation = request.einsum.equation
            return f"{equation!r} is not a matmul, and {self.name} executes nothing else"
        return None

    def rows_of_matmul(self, request: Site) -> int:
        """The rows that it multiplies at once: all, unless it multiplies chunks."""
        return request.product_rows

    def multiplied_dtypes(self, request: Site) -> tuple[str, str]:
        """The dtypes of x and w in which it multiplies them.

        While the request is being traced, call this inside its `jax.shard_map`.
        """
        return request.multiplied_dtypes(self.rows_of_matmul(request))
