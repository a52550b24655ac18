"""The expert op with its gradient. Call it inside `jax.shard_map`.

Both passes visit the tokens of all devices in the same order. Backward, tokens travel again, and
the gradients of results beside them, so nothing that was gathered is kept. Kept are this device's
tokens, its weights, what routers decided, what the backend made of it, and the products of gate and
up, unless they are to be computed again. With a format that packs gradients, the tokens are kept in
it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from collective_matmul._compat import axis_index
from collective_matmul.dispatch.contract import Direction
from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.dispatch.selection import choose
from collective_matmul.operands.format import PLAIN, Format
from collective_matmul.operands.grouped import separate_rows
from collective_matmul.operands.multiply import contracted, multiplied
from collective_matmul.operands.quantized import Quantized, gradient_of
from collective_matmul.ops.experts.backend import ExpertBackend
from collective_matmul.ops.experts.biases import ExpertBiases
from collective_matmul.ops.experts.request import ExpertRequest
from collective_matmul.ops.experts.routing import Plan, Routing, plans_of
from collective_matmul.ops.experts.stored_weights import ExpertWeights, are_trained, read_by_pass
from collective_matmul.ops.experts.work import (
    ExpertWork,
    GradientRows,
    Hidden,
    HiddenGradients,
    PassWeights,
)
from collective_matmul.ops.matmul.reverse_mode import ReverseMode, undifferentiated
from collective_matmul.source_location import SourceLocation
from collective_matmul.transport import transport_over

#: Name of the products of gate and up, for policies of `jax.checkpoint`.
HIDDEN_CHECKPOINT_NAME = "collective_matmul_expert_hidden"

#: Weight gradients of this many visits are one product. More would keep the rows of more visits;
#: with one, each visit would read and write all gradients.
_VISITS_AT_ONCE = 2


@dataclass(frozen=True)
class ExpertCall:
    """The static parameters of a call.

    Attributes:
      axis_names: the mesh axes that experts are divided over.
      all_axes: the mesh axes whose devices exchange tokens: those, and the one that divides hidden
        features. They are in the order of the mesh, which permutes count devices in.
      experts: E, of all devices together.
      activation: its name.
      recompute_hidden: whether the backward pass computes the products of gate and up again.
      weight_axis_name: a further mesh axis that shards the weights, or None.
      weight_dimension: the dimension of weights that it shards.
      implementation: names of the requested backends, best first, or None.
      grouped_implementation: likewise, of grouped matmuls.
      divergent_axes, source, remarks: see `ExpertRequest`.
      format: how operands are stored while they travel and are multiplied.
    """

    axis_names: tuple[str, ...]
    all_axes: tuple[str, ...]
    experts: int
    activation: str
    recompute_hidden: bool
    weight_axis_name: str | None
    weight_dimension: int
    implementation: tuple[str, ...] | None
    grouped_implementation: tuple[str, ...] | None
    divergent_axes: tuple[str, ...]
    source: SourceLocation | None = field(default=None, compare=False)
    remarks: tuple[str, ...] = ()
    format: Format = PLAIN

    def choose(
        self, x: jax.Array, choices: int, ws: ExpertWeights, direction: Direction
    ) -> tuple[ExpertBackend, ExpertRequest]:
        """The backend of a pass, and its request."""
        devices = devices_of(self.axis_names)
        hidden = ws.gate.shape[2]
        if self.weight_dimension == 2 and self.weight_axis_name is not None:
            hidden *= lax.axis_size(self.weight_axis_name)
        request = ExpertRequest(
            tokens=x.shape[0],
            width=x.shape[1],
            hidden=hidden,
            experts=self.experts,
            choices=choices,
            dtype=np.dtype(x.dtype),
            axis_name=self.all_axes,
            axis_size=devices_of(self.all_axes),
            expert_devices=devices,
            expert_axes=self.axis_names,
            keeps_hidden=not self.recompute_hidden,
            format=self.format,
            trained=are_trained(ws),
            direction=direction,
            divergent_axes=self.divergent_axes,
            source=self.source,
            remarks=self.remarks,
            transport=transport_over(self.all_axes),
        )
        return cast(ExpertBackend, choose(request, self.implementation)), request

    def work(self, request: ExpertRequest, plans: list[Plan]) -> ExpertWork:
        """The computations of a pass."""
        rows = max(plan.tokens.size for plan in plans)
        return ExpertWork(request, rows, self.activation, self.grouped_implementation)

    def read(self, ws: ExpertWeights, direction: Direction) -> ExpertWeights:
        """Returns the parts of the weights that a pass reads."""
        backward = direction == "backward"
        return read_by_pass(ws, forward=not backward or self.recompute_hidden, backward=backward)

    def whole(self, backend: ExpertBackend, ws: ExpertWeights, dtype: Any) -> ExpertWeights:
        """The weights of a pass, gathered if they are shards."""
        axis = self.weight_axis_name
        if axis is None:
            return ws

        def gather(w: Any) -> Any:
            if isinstance(w, Quantized):
                return w.with_whole_matrices
            return backend.gathered(w.astype(dtype), axis, self.weight_dimension)

        return ExpertWeights(*map(gather, ws))

    def shards(
        self, backend: ExpertBackend, gradients: ExpertWeights, ws: ExpertWeights
    ) -> ExpertWeights:
        """The gradients of the weights as they are stored."""
        if self.weight_axis_name is None:
            return gradients
        scatter = functools.partial(
            backend.scattered, axis_name=self.weight_axis_name, dimension=self.weight_dimension
        )
        wide = [g.astype(w.dtype) for g, w in zip(gradients, ws, strict=True)]
        return ExpertWeights(*map(scatter, wide))


def devices_of(axis_names: tuple[str, ...]) -> int:
    """The number of devices along several mesh axes."""
    return int(np.prod([lax.axis_size(name) for name in axis_names], dtype=np.int64))


#: Returns its arguments; refuses to be differentiated. Rules of gradients begin with it.
_once_differentiable = undifferentiated(
    lambda *values: values,
    "second derivatives of expert_mlp, as by jax.hessian or by jax.grad of jax.grad: the op defines"
    " first derivatives alone; differentiate it once",
)


def backward_pass(call: ExpertCall, kept: Any, dy: jax.Array) -> Any:
    """The backward pass of `routed_experts`, to be measured by itself.

    Args:
      call: the static parameters.
      kept: x, in rows of the format if it packs gradients; the weights; the biases; plans of all
        visits; what the backend made of the routings; and the products of gate and up in each
        visit, or none.
      dy: [T, h], the gradient of the result.

    Returns:
      Gradients of the arguments of `routed_experts`.
    """
    return _backward(call, kept, dy)


@functools.partial(ReverseMode, nondiff_argnums=(5,))
def routed_experts(
    x: jax.Array,
    weights: jax.Array,
    ws: ExpertWeights,
    biases: ExpertBiases,
    ids: jax.Array,
    call: ExpertCall,
) -> jax.Array:
    """Each token's weighted sum over its experts.

    Args:
      x: [T, h], this device's tokens.
      weights: [T, k], in float32, or in float64 for tokens of float64.
      ws: the weights of this device's experts, or shards of them.
      biases: the biases of this device's experts.
      ids: int32 [T, k].
      call: the static parameters.

    Returns:
      [T, h].
    """
    return _forward(x, weights, ws, biases, ids, call)[0]


def _keeping(
    x: jax.Array,
    weights: jax.Array,
    ws: ExpertWeights,
    biases: ExpertBiases,
    ids: jax.Array,
    call: ExpertCall,
) -> tuple[jax.Array, Any]:
    """The forward pass of a program with gradients.

    Both passes have the backend of the backward pass, which is twice as long: what is kept has the
    order of its visits.
    """
    with record_decisions(hidden=True):
        backend, _ = call.choose(x, ids.shape[1], ws, "backward")
    remarks = () if call.implementation else ("the backward pass decides for both",)
    pinned = replace(call, implementation=(backend.name,), remarks=remarks)
    return _forward(x, weights, ws, biases, ids, pinned)


def _forward(
    x: jax.Array,
    weights: jax.Array,
    ws: ExpertWeights,
    biases: ExpertBiases,
    ids: jax.Array,
    call: ExpertCall,
) -> tuple[jax.Array, Any]:
    x, weights, ws, biases = _once_differentiable(x, weights, ws, biases)
    backend, request = call.choose(x, ids.shape[1], ws, "forward")
    first = axis_index(call.axis_names) * np.int32(request.local_experts)
    routings, of_backend = backend.routings(request, Routing(ids, weights))
    plans = plans_of(routings, first, request.local_experts)
    (rows,) = separate_rows(call.format, [x])
    # Tokens leave after the routings, which everything waits for.
    rows, plans = lax.optimization_barrier((rows, plans))
    work, pieces = call.work(request, plans), backend.pieces(request)
    hidden: list[Hidden] = []

    def visit(number: int, tokens: Any, ws: PassWeights) -> Any:
        plan, parts = plans[number], pieces[number]
        products = work.hidden(tokens, plan, ws)
        if not call.recompute_hidden:
            products = Hidden(*(checkpoint_name(p, HIDDEN_CHECKPOINT_NAME) for p in products))
            hidden.append(products)
        width = x.shape[1] // parts

        def piece(i: int, activated: Any) -> jax.Array:
            columns = None if parts == 1 else (i * width, (i + 1) * width)
            return work.down(activated, plan, ws, columns)

        makers = [functools.partial(piece, i) for i in range(parts)]
        return makers, work.activated(products, plan)

    y, _ = backend.round_trip(
        request,
        multiplied(rows),
        of_backend,
        visit,
        lambda number, rest, ws, carry: carry,
        work.weights(call.whole(backend, call.read(ws, "forward"), x.dtype), biases),
        (),
    )
    kept = contracted(rows) if are_trained(ws) else multiplied(rows)
    return y, (kept, ws, biases, plans, of_backend, hidden)


def _backward(call: ExpertCall, residuals: Any, dy: jax.Array) -> Any:
    x, ws, biases, plans, of_backend, hidden = residuals
    dy, ws, biases = _once_differentiable(dy, ws, biases)
    (rows,) = separate_rows(call.format, [dy], of_gradient=True)
    trains = are_trained(ws)
    # Without the barrier, XLA would keep what the forward gathered.
    x = x if trains or call.recompute_hidden else None
    travels = contracted(rows) if trains else multiplied(rows)
    held = x, travels, call.read(ws, "backward")
    x, sent, stored = lax.optimization_barrier(held)
    backend, request = call.choose(dy, plans[0].places.shape[1], ws, "backward")
    work = call.work(request, plans)

    def visit(number: int, tokens: Any, operands: Any) -> Any:
        (x, dy), (ws, kept), plan = tokens, operands, plans[number]
        products = work.hidden(x, plan, ws) if call.recompute_hidden else kept[number]
        made = work.hidden_gradients(dy, products, plan, ws)

        def gradients(state: tuple[Any, Any, HiddenGradients]) -> tuple[jax.Array, jax.Array]:
            made = state[-1]
            return work.input_gradient(made, plan, ws), made.weights

        return [gradients], (x, dy, made)

    def finish(number: int, state: Any, operands: Any, carry: Any) -> Any:
        """Weight gradients of `_VISITS_AT_ONCE` visits, which are added in registers."""
        del operands
        waiting, gradients, of_biases = carry
        x, dy, made = state
        waiting = [*waiting, GradientRows(x, dy, made.hidden, made.weighted, plans[number])]
        if len(waiting) < _VISITS_AT_ONCE and number + 1 < len(plans):
            return waiting, gradients, of_biases
        of_biases = work.bias_gradients(waiting, biases, of_biases)
        if trains:
            gradients = work.weight_gradients(waiting, gradients)
        return [], gradients, of_biases

    operands = work.weights(call.whole(backend, stored, dy.dtype), biases), hidden
    (dx, dweights), (_, gradients, of_biases) = backend.round_trip(
        request, (x, sent), of_backend, visit, finish, operands, ([], None, None)
    )
    gradients = call.shards(backend, gradients, ws) if trains else ExpertWeights(None, None, None)
    gradients = ExpertWeights(*map(gradient_of, ws, gradients))
    of_biases = jax.tree.map(lambda g, b: g.astype(b.dtype), of_biases, biases)
    ids = np.zeros(dweights.shape, jax.dtypes.float0)
    return dx, dweights, gradients, of_biases, ids


routed_experts.defvjp(_keeping, _backward)
