"""Measures one pass of an expert op: its operands, and one repetition of it.

Routers are random and balanced: each expert has equally many tokens, up to one, and which ones is
random. A repetition of a backward pass begins with what the forward pass keeps. As in a training
step, the next repetition waits for the gradients of tokens, and not for those of weights.

Local shapes: x and dy [T, h], ids and weights [T, k], w_gate and w_up [E, h, f], w_down [E, f, h],
products of gate and up [D T k, f]. Global arrays concatenate the devices' shards along the first
dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul._compat import axis_index
from collective_matmul.dispatch.contract import COMPUTE_ONLY, Backend, Direction, Prediction
from collective_matmul.dispatch.registry import Op, register_op
from collective_matmul.dispatch.repetitions import AXIS, Repetitions
from collective_matmul.operands.grouped import separate_rows
from collective_matmul.ops.experts import expert_cost
from collective_matmul.ops.experts.backend import ExpertBackend
from collective_matmul.ops.experts.backends import BACKENDS
from collective_matmul.ops.experts.biases import ExpertBiases
from collective_matmul.ops.experts.gradients import ExpertCall, backward_pass, routed_experts
from collective_matmul.ops.experts.request import OP, ExpertRequest
from collective_matmul.ops.experts.routing import Plan, Routing, plans_of
from collective_matmul.ops.experts.stored_weights import ExpertWeights
from collective_matmul.ops.experts.work import Hidden
from collective_matmul.ops.experts.xla import XlaExperts

#: The second mesh axis of the programs, along which hidden features are divided.
HIDDEN_AXIS = "hidden"


class ExpertOperands(NamedTuple):
    """Arguments of a program.

    Attributes:
      x: [T, h]; of a backward pass, in the format of the request if it packs gradients.
      dy: [T, h], or None for a forward pass.
      ids: int32 [T, k]; before `prepare`, a random number for each token, [T, 1].
      router: float32 [T, k], the weights of each token's experts.
      hidden: the products of gate and up that a forward pass keeps, or None.
      plans: of a backward pass's visits, as `_stored` makes them; and what the backend keeps.
      weights: `ExpertWeights` of each repetition.
    """

    x: Any
    dy: Any
    ids: Any
    router: Any
    hidden: Hidden | None
    plans: Any
    weights: Sequence[ExpertWeights]


@dataclass(frozen=True, kw_only=True)
class _MeasuredCall(ExpertCall):
    """A call whose backend and request are given."""

    backend: ExpertBackend
    request: ExpertRequest

    def choose(
        self, x: jax.Array, choices: int, ws: ExpertWeights, direction: Direction
    ) -> tuple[ExpertBackend, ExpertRequest]:
        del x, choices, ws, direction
        return self.backend, self.request


class ExpertRepetitions(Repetitions):
    """A flat request, repeated, on the first `axis_size` of some devices."""

    prepares = True

    def __init__(self, request: ExpertRequest, devices: Sequence[Any]):
        seconds = expert_cost.compute_seconds(request) + request.communication_seconds
        super().__init__(request, devices, seconds)
        self.request: ExpertRequest = request
        self.bound = _ExpertsComputeOnly()
        sizes = request.expert_devices, request.axis_size // request.expert_devices
        self.mesh = jax.make_mesh(
            sizes,
            (AXIS, HIDDEN_AXIS),
            axis_types=(AxisType.Auto,) * 2,
            devices=devices[: request.axis_size],
        )
        self._spec = P((AXIS, HIDDEN_AXIS))

    def plain_operands(self, implementation: str) -> ExpertOperands:
        """The tokens of all devices for `COMPUTE_ONLY`."""
        request, devices = self.request, self.request.axis_size
        rows = devices * request.tokens * (devices if implementation == COMPUTE_ONLY else 1)
        tokens = self._array((rows, request.width), request.dtype)
        is_backward = request.direction == "backward"
        hidden = None
        if is_backward and request.keeps_hidden:
            pairs = devices * devices * request.tokens * request.choices
            products = self._array((pairs, request.hidden), request.dtype)
            hidden = Hidden(products, products)
        experts = devices * request.local_experts
        into = self._array((experts, request.width, request.hidden), request.dtype)
        out = self._array((experts, request.hidden, request.width), request.dtype)
        return ExpertOperands(
            x=tokens,
            dy=tokens if is_backward else None,
            ids=self._array((rows, 1), jnp.float32),
            router=self._array((rows, request.choices), jnp.float32),
            hidden=hidden,
            plans=(),
            weights=[ExpertWeights(into, into, out)] * self.repetitions,
        )

    def prepare_shards(self, operands: ExpertOperands) -> ExpertOperands:
        """Balanced ids from random numbers; and x as the forward pass keeps it for the backward."""
        request, x = self.request, operands.x
        ids = balanced_ids(operands.ids[:, 0], request.choices, request.experts)
        if request.direction == "backward" and request.format.packs_gradients:
            (x,) = separate_rows(request.format, [x])
        return operands._replace(x=x, ids=ids)

    def program(self, backend: str | Backend) -> Callable[[ExpertOperands], Any]:
        """Executes all repetitions. A backward pass has its plans made before, once."""
        found = self._named(backend) if isinstance(backend, str) else backend
        repeated = super().program(found)
        if self.request.direction == "forward":
            return repeated
        planned = self._on_devices(functools.partial(self._plans, cast(ExpertBackend, found)))

        def run(operands: ExpertOperands) -> Any:
            return repeated(operands._replace(plans=planned(operands)))

        return run

    def execute(
        self, backend: Backend, operands: ExpertOperands, weights: ExpertWeights
    ) -> tuple[Any, Any]:
        """One pass."""
        call = self._call(cast(ExpertBackend, backend))
        if self.request.direction == "forward":
            x, router = operands.x, operands.router
            return routed_experts(x, router, weights, ExpertBiases(), operands.ids, call), ()
        stored_plans, of_backend = operands.plans
        of_backend = jax.tree.map(lambda x: x[0], of_backend)
        plans = [_plan(*stored) for stored in stored_plans]
        hidden: list[Hidden] = []
        if operands.hidden is not None:
            start = 0
            for plan in plans:
                pairs = slice(start, start + plan.tokens.size)
                hidden.append(Hidden(*(product[pairs] for product in operands.hidden)))
                start += plan.tokens.size
        kept = operands.x, weights, ExpertBiases(), plans, of_backend, hidden
        dx, dweights, gradients, *_ = backward_pass(call, kept, operands.dy)
        return (dx, dweights), gradients

    @property
    def _request_here(self) -> ExpertRequest:
        return replace(self.request, axis_name=(AXIS, HIDDEN_AXIS), expert_axes=(AXIS,))

    def _call(self, backend: ExpertBackend) -> _MeasuredCall:
        return _MeasuredCall(
            axis_names=(AXIS,),
            all_axes=(AXIS, HIDDEN_AXIS),
            experts=self.request.experts,
            activation="silu",
            recompute_hidden=not self.request.keeps_hidden,
            weight_axis_name=None,
            weight_dimension=1,
            implementation=None,
            grouped_implementation=None,
            divergent_axes=(),
            format=self.request.format,
            backend=backend,
            request=self._request_here,
        )

    def _plans(self, backend: ExpertBackend, operands: ExpertOperands) -> Any:
        """The plans of all visits, and what the backend keeps; no array is a scalar."""
        local, routing = self.request.local_experts, Routing(operands.ids, operands.router)
        routings, of_backend = backend.routings(self._request_here, routing)
        plans = plans_of(routings, axis_index((AXIS,)) * local, local)
        of_devices = jax.tree.map(lambda x: x[None], of_backend)
        return [_stored(plan) for plan in plans], of_devices

    def _array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, self._spec))

    def _on_devices(self, fun: Callable) -> Callable:
        return jax.shard_map(
            fun, mesh=self.mesh, in_specs=self._spec, out_specs=self._spec, check_vma=False
        )


def balanced_ids(numbers: jax.Array, choices: int, experts: int) -> jax.Array:
    """int32 [T, choices] from random numbers [T]: each expert occurs equally often, up to one."""
    rank = jnp.argsort(jnp.argsort(numbers)).astype(jnp.int32)
    pairs = rank[:, None] * choices + jnp.arange(choices, dtype=jnp.int32)[None, :]
    return lax.rem(pairs, jnp.int32(experts))


def _stored(plan: Plan) -> tuple[jax.Array, ...]:
    """The arrays of a plan that the others follow from; none is a scalar."""
    return plan.tokens, plan.places, plan.sizes, plan.weights


def _plan(tokens: jax.Array, places: jax.Array, sizes: jax.Array, weights: jax.Array) -> Plan:
    return Plan(tokens, places, sizes, sizes.sum(dtype=jnp.int32), weights)


class _ExpertsComputeOnly(XlaExperts):
    """The computation of a pass without its communication: a bound for every backend.

    Tokens are gathered already, and nothing is added to the results of other devices.
    """

    name = COMPUTE_ONLY

    def _gathered(self, request: ExpertRequest, values: Any) -> Any:
        del request
        return values

    def _sum(self, request: ExpertRequest, result: jax.Array) -> jax.Array:
        del request
        return result

    def predict(self, request: ExpertRequest) -> Prediction | None:
        del request


register_op(Op(OP, BACKENDS, ExpertRequest.from_fields, ExpertRepetitions, has_bound=True))
