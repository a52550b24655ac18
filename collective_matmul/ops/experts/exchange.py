"""The exchange: a token travels to the devices that have its experts, once to each.

An all-to-all of blocks of tokens, as in GShard (Lepikhin et al., 2020), but no token is dropped,
and a token whose experts share a device travels there once. At balance a token travels to a share
of about 1 - (1 - 1/D)^k of the other devices, where a gather brings it to all. So this is for many
devices and few experts of a token.

**Capacity.** Shapes are static: a block has room for the tokens that one device sends to another at
balance, times a factor. If any block of any device overflows, all devices send all their tokens
instead, as a gather does. All devices take the same branch, since the permutes of a branch wait for
all of them: the predicate is a maximum over all of the program's devices.

**One visit** has D T rows in either branch: the own tokens, then a block from each device, as long
as in this branch, then rows of no token. So plans and products, which are kept, have one shape,
that of the worst case, and are compiled once. Rows of no token cost passes over memory, but no
product multiplies them.

**Sums.** A token's results are added in the order of the devices in both branches, so the others'
tokens do not change them.

Legend: T tokens of a device, D devices, C the capacity of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from collective_matmul._compat import axis_index, tracks_varying_axes, vary_over
from collective_matmul.dispatch.branches import no_permutes_reason
from collective_matmul.dispatch.contract import Prediction
from collective_matmul.hardware import rates
from collective_matmul.operands.arithmetic import add
from collective_matmul.ops.experts import expert_cost
from collective_matmul.ops.experts.backend import Finish, Work
from collective_matmul.ops.experts.request import ExpertRequest
from collective_matmul.ops.experts.routing import Routing
from collective_matmul.ops.experts.slots import Slots, assign_slots
from collective_matmul.ops.experts.xla import XlaExperts
from collective_matmul.schedule.walk import walk_exchange

#: The room of a block, relative to the tokens that it has at balance.
_CAPACITY_FACTOR = 1.25
#: Its model is not compared with measurements yet, and it hides nothing if it is wrong.
_ERROR = 0.25


class ExchangeExperts(XlaExperts):
    """Tokens travel only where they are needed, if blocks of the capacity hold them.

    Args:
      capacity_factor: the room of a block, relative to the tokens that it has at balance.
    """

    name = "exchange"
    predicts_precisely = False

    def __init__(self, capacity_factor: float = _CAPACITY_FACTOR):
        self.capacity_factor = capacity_factor

    def capacity(self, request: ExpertRequest) -> int:
        """The slots of a block: at most T, with which no block overflows."""
        elsewhere = request.experts - request.local_experts
        without = math.comb(elsewhere, request.choices)
        share = 1 - without / math.comb(request.experts, request.choices) if without else 1.0
        slots = math.ceil(self.capacity_factor * share * request.tokens)
        return max(1, min(request.tokens, slots))

    def routings(
        self, request: ExpertRequest, routing: Routing
    ) -> tuple[Sequence[Routing], Slots | None]:
        """Routings of the tokens that arrive, and where this device's tokens go."""
        if request.axis_size == 1:
            return [routing], None
        slots = self._slots(request, routing.ids)
        # Rows of no token are 0.
        return [routing.unpacked(_dispatched(request, slots, routing.packed))], slots

    def _slots(self, request: ExpertRequest, ids: jax.Array) -> Slots | None:
        """Slots, with an `overflow` of all devices together; None if no block can overflow."""
        capacity, devices = self.capacity(request), request.axis_size
        if capacity == request.tokens:
            return None
        offsets = axis_index(request.axis_name) + lax.iota(jnp.int32, devices)
        targets = jnp.asarray(_owners(request))[lax.rem(offsets, np.int32(devices))]
        owners = ids // np.int32(request.local_experts)
        copies = min(devices, request.choices * (devices // request.expert_devices))
        slots = assign_slots(owners, targets, capacity, copies)
        return slots._replace(overflow=_anywhere(slots.overflow, request.axis_name[0]))

    def round_trip(
        self,
        request: ExpertRequest,
        tokens: Any,
        residuals: Slots | None,
        work: Work,
        finish: Finish,
        operands: Any,
        carry: Any,
    ) -> tuple[Any, Any]:
        """See `ExpertBackend`."""
        pieces, state = work(0, _dispatched(request, residuals, tokens), operands)
        (result,) = (piece(state) for piece in pieces)
        carry = finish(0, state, operands, carry)
        return _combined(request, residuals, result), carry

    def unsupported_reason(self, request: ExpertRequest) -> str | None:
        """Permutes meet on all devices, and so does the predicate of its branches."""
        return no_permutes_reason(request)

    def predict(self, request: ExpertRequest) -> Prediction | None:
        """The computation and the blocks, in turn; None if it sends as much as a gather."""
        gpu, capacity = rates(), self.capacity(request)
        if gpu is None or request.axis_size == 1 or capacity == request.tokens:
            return None
        error = _ERROR if request.transport == "peer_copies" else expert_cost.NCCL_ERROR
        return Prediction(expert_cost.exchange_seconds(request, capacity), error, gpu.basis)


def _owners(request: ExpertRequest) -> np.ndarray:
    """int32 [D], the index along the axes of experts of each device along all axes."""
    sizes = [lax.axis_size(name) for name in request.axis_name]
    indices = dict(zip(request.axis_name, np.indices(sizes, np.int32), strict=True))
    owner = np.zeros(sizes, np.int32)
    for name in request.expert_axes:
        owner = owner * np.int32(lax.axis_size(name)) + indices[name]
    return owner.reshape(-1)


def _anywhere(predicate: jax.Array, axis_name: str) -> jax.Array:
    """Whether a predicate is true on any device of the program.

    Over further axes too: a permute waits for all devices, whatever axis it is over.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    number = predicate.astype(jnp.int32)
    if tracks_varying_axes(axis_name):
        number = vary_over(number, frozenset(axes))
    return lax.pmax(number, tuple(axes)) > 0


def _in_branches(
    slots: Slots | None, all_tokens: Callable, some_tokens: Callable, values: Any
) -> Any:
    if slots is None:
        return all_tokens(values)
    return lax.cond(slots.overflow, all_tokens, some_tokens, values)


def _dispatched(request: ExpertRequest, slots: Slots | None, values: Any) -> Any:
    """[T, ...] of each device -> [D T, ...], the rows of the visit. Rows of no token are 0."""
    devices, tokens = request.axis_size, request.tokens
    if devices == 1:
        return values

    def all_tokens(values: Any) -> Any:
        arrived = walk_exchange([values] * devices, request.axis_name)
        return jax.tree.map(lambda *blocks: lax.concatenate(blocks, 0), *arrived)

    def some_tokens(values: Any) -> Any:
        assert slots is not None
        blocks = [jax.tree.map(lambda x, b=block: _rows(x, b), values) for block in slots.tokens]
        arrived = walk_exchange([values, *blocks], request.axis_name)

        def joined(*blocks: jax.Array) -> jax.Array:
            rows = lax.concatenate(blocks, 0)
            return jnp.pad(rows, [(0, devices * tokens - rows.shape[0]), (0, 0)])

        return jax.tree.map(joined, *arrived)

    return _in_branches(slots, all_tokens, some_tokens, values)


def _combined(request: ExpertRequest, slots: Slots | None, results: Any) -> Any:
    """[D T, ...], results of the visit -> [T, ...], the sums of this device's tokens."""
    devices, tokens = request.axis_size, request.tokens
    if devices == 1:
        return results

    def returned(results: Any, size: int) -> list[Any]:
        """Blocks from each offset. A visit has blocks of the devices before this one."""
        starts = [0, *range(tokens, tokens + (devices - 1) * size, size)]
        sizes = [tokens, *[size] * (devices - 1)]
        blocks = [
            jax.tree.map(lambda x, i=i, n=n: lax.slice_in_dim(x, i, i + n), results)
            for i, n in zip(starts, sizes, strict=True)
        ]
        return _reversed(walk_exchange(_reversed(blocks), request.axis_name))

    def all_tokens(results: Any) -> Any:
        return jax.tree.map(add, *returned(results, tokens))

    def some_tokens(results: Any) -> Any:
        assert slots is not None
        places = slots.places

        def summed(*blocks: jax.Array) -> jax.Array:
            rows = lax.concatenate(blocks, 0)
            return add(*(_rows(rows, places[:, j]) for j in range(places.shape[1])))

        return jax.tree.map(summed, *returned(results, slots.tokens.shape[1]))

    return _in_branches(slots, all_tokens, some_tokens, results)


def _reversed(blocks: Sequence[Any]) -> list[Any]:
    """Blocks by the places after this device from blocks by the places before it, or back."""
    return [blocks[-i % len(blocks)] for i in range(len(blocks))]


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """The rows at the index; 0 beyond the last."""
    return x.at[index].get(mode="fill", fill_value=0)
