"""Predicted seconds that communication adds to a training step.

What nothing hides counts. A ring of a matmul hides each chunk's copy under the matmul of the chunk
before. NCCL's collectives delay the matmuls beside them by a share of their own time. What a step
waits for, such as sums after the last of several microbatches, counts whole.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from train.config.experts import expert_axes, expert_devices
from train.plan.computation import Computation
from train.plan.rates import DeviceRates
from train.plan.rings import GPUS_OF_A_NODE, gathers_in_matmuls, leaves_matmuls_to_xla
from train.plan.shapes import Linear, Shapes

#: Queries, keys, values and output of attention; gate, up and down.
_WEIGHTS_OF_A_BLOCK = 7
#: The share of a copy's time that rings of weights, experts and keys lose though they hide it.
_RING_LOSS = 0.1


class _WeightGroup(NamedTuple):
    """Weights that are sharded alike, and used alike.

    Attributes:
      weights: numbers of a device that are trained, before ZeRO shards them.
      used: numbers that level 3 gathers, also those that are frozen.
      shards: devices that share them.
      zero: the level of ZeRO, over these.
      replicas: devices that have the same shard.
      forward: seconds of computation of a microbatch that may hide their gather.
      backward: the same of its backward, for gathers and for sums of gradients.
      arrays: number of weights that matmuls read, each of which travels by itself in a ring.
      in_8_bits: whether level 3 gathers copies in 8 bits.
    """

    weights: float
    used: float
    shards: int
    zero: int
    replicas: int
    forward: float
    backward: float
    arrays: int
    in_8_bits: bool = False


@dataclass(frozen=True)
class Communication:
    """The arithmetic of what devices send. `network_bytes` is of each GPU, beyond its node."""

    computation: Computation
    network_bytes: float

    @property
    def shapes(self) -> Shapes:
        return self.computation.shapes

    @property
    def rates(self) -> DeviceRates:
        return self.computation.rates

    def bandwidth(self, devices: int, stride: int, *, copies: bool = False) -> float:
        """Bytes per second that each device of an axis sends to the next one, `stride` further."""
        if devices * stride <= GPUS_OF_A_NODE:
            return self.rates.link_bytes if copies else self.rates.collective_bytes
        # All GPUs of a node that are in the axis share what crosses the node's border.
        within = max(min(GPUS_OF_A_NODE // stride, devices), 1)
        return min(self.rates.collective_bytes, within * self.network_bytes)

    def _beside(self, seconds: float, compute: float) -> float:
        """Seconds by which NCCL's collectives delay a step that computes beside them."""
        hidden = min(seconds, compute)
        return seconds - hidden + self.rates.collective_slowdown * hidden

    # Over the tensor axis.

    def tensor(self) -> float:
        """Seconds of a microbatch's collective matmuls beyond those of their matmuls."""
        shapes, computation = self.shapes, self.computation
        devices = shapes.sizes.tensor
        if devices == 1:
            return 0.0
        block = 0.0
        for linear in shapes.block:
            forward = self._collective_matmul(linear, computation.forward_matmul(linear), 1)
            # The gradient of what gathers scatters its own, and gathers x again.
            arrays = 2 if linear.gathers and linear.is_trained else 1
            gradient = computation.data_gradient(linear)
            block += forward + self._collective_matmul(linear, gradient, arrays)
        for linear in computation.repeated:
            block += self._collective_matmul(linear, computation.forward_matmul(linear), 1)
        head = self._collective_matmul(shapes.head, computation.forward_matmul(shapes.head), 1)
        head *= 3 if shapes.head.is_trained else 2
        # Embeddings are scattered, their gradients gathered; nothing hides them.
        width = computation.width
        sent = (devices - 1) * shapes.local_rows * shapes.model.features * width
        embedding = 2 * (self.rates.collective_seconds + sent / self.bandwidth(devices, 1))
        return shapes.model.num_layers * block + head + embedding

    def _collective_matmul(self, linear: Linear, matmul: float, arrays: int) -> float:
        """Seconds beyond the matmul, by the faster of a ring and a collective.

        Args:
          linear: the layer.
          matmul: seconds of the matmul that a ring cuts into chunks.
          arrays: number of arrays that travel.
        """
        shapes, rates, devices = self.shapes, self.rates, self.shapes.sizes.tensor
        features = linear.inputs if linear.gathers else linear.columns
        width = 1 if linear.fp8 and linear.gathers else self.computation.width
        chunk, steps = arrays * shapes.local_rows * features * width, devices - 1
        collective = arrays * rates.collective_seconds
        # Beside a step's passes the GPU clocks higher, so links set the time, not NCCL's kernels.
        collective += steps * chunk / min(rates.link_bytes, self.bandwidth(devices, 1, copies=True))
        if devices > GPUS_OF_A_NODE or leaves_matmuls_to_xla(shapes.config):
            return collective
        wait = max(0.0, chunk / rates.link_bytes - matmul / devices) + arrays * rates.copy_seconds
        ring = steps * (wait + 1.5 * chunk / rates.memory_bytes)
        host = rates.host_seconds * (1 + arrays * steps) - matmul
        return min(collective, max(ring, host))

    # Over the axes of replicas and shards.

    @functools.cached_property
    def _groups(self) -> list[_WeightGroup]:
        """Blocks without experts, the vocabulary, experts."""
        shapes, sizes, computation = self.shapes, self.shapes.sizes, self.computation
        layers, others = shapes.model.num_layers, sizes.data * sizes.weight_shards
        forward = computation.block_forward + computation.attention_forward
        backward = computation.block_backward + computation.attention_backward
        under = (
            layers * (forward + computation.experts_forward),
            layers * (backward + computation.experts_backward),
        )
        head = computation.forward_matmul(shapes.head)
        dense = shapes.weight_shards, shapes.zero, others // shapes.weight_shards
        # Copies in 8 bits are of one axis.
        in_8_bits = any(linear.fp8 for linear in shapes.block) and sizes.context == 1
        blocks = layers * shapes.trained_block_weights, layers * shapes.block_weights
        vocabulary = shapes.trained_vocabulary_weights, shapes.vocabulary_weights
        groups = [
            _WeightGroup(*blocks, *dense, *under, _WEIGHTS_OF_A_BLOCK * layers, in_8_bits),
            _WeightGroup(*vocabulary, *dense, head, computation.head - head, 1),
        ]
        if shapes.expert_weights:
            shards = shapes.expert_shards
            apart = sizes.fsdp if "fsdp" in expert_axes(shapes.config) else 1
            own = shards, shapes.zero if shards > 1 else 0, others // shards // apart
            experts = shapes.all_expert_weights
            groups.append(_WeightGroup(experts, experts, *own, *under, 3 * layers))
        return groups

    def weights(self) -> float:
        """Seconds that gathers of weights add to a step."""
        return sum(self._gathers(group) for group in self._groups if group.zero)

    def _gathers(self, group: _WeightGroup) -> float:
        shapes = self.shapes
        gathered = group.used if group.zero == 3 else group.weights
        sent = (group.shards - 1) / group.shards * gathered
        bandwidth = self.bandwidth(group.shards, shapes.sizes.tensor)
        if group.zero < 3:  # Once per step, before the first block.
            return sent * self.computation.width / bandwidth
        times = shapes.microbatches
        if self._is_ring(group) and not group.in_8_bits:
            # Matmuls that are recomputed gather once more.
            repeated = sum(linear.weights for linear in self.computation.repeated)
            forward = self._ring(group, group.used, group.forward)
            again = repeated / shapes.block_weights * forward
            together = 2 if group.weights else 1
            backward = self._ring(group, group.used, group.backward, together)
            return times * (forward + backward + again)
        travels = sent * (1 if group.in_8_bits else self.computation.width) / bandwidth
        delays = sum(self._beside(travels, under) for under in (group.forward, group.backward))
        launches = 2 * shapes.model.num_layers * self.rates.collective_seconds
        return times * (delays + launches)

    def _is_ring(self, group: _WeightGroup) -> bool:
        """Whether matmuls gather the weights of a group in rings, which stay within a node."""
        within = group.shards * self.shapes.sizes.tensor <= GPUS_OF_A_NODE
        return within and gathers_in_matmuls(self.shapes)

    def _ring(
        self, group: _WeightGroup, numbers: float, compute: float, together: int = 1
    ) -> float:
        """Seconds that gathers or sums of weights add to matmuls that compute so long, by the
        faster of rings of all shards, which may wait for their host, and of collectives, which
        nothing hides there.

        Args:
          group: the weights.
          numbers: how many travel.
          compute: seconds of the matmuls.
          together: 2 if gathers and sums travel beside the same matmuls, of which this is one.
        """
        rates, share = self.rates, (group.shards - 1) / group.shards
        sent = share * numbers * self.computation.width
        travels = sent / rates.link_bytes
        ring = max(0.0, travels - share * compute) + _RING_LOSS * travels
        host = group.arrays * (group.shards - 1) * rates.host_seconds - compute / together
        bandwidth = self.bandwidth(group.shards, self.shapes.sizes.tensor)
        collectives = sent / bandwidth + group.arrays * rates.collective_seconds
        return min(collectives, max(ring, host))

    def gradients(self) -> float:
        """Seconds that sums of gradients add to a step."""
        return sum(self._sums(group) for group in self._groups)

    def _sums(self, group: _WeightGroup) -> float:
        shapes, width = self.shapes, np.dtype(self.shapes.config.gradient_dtype).itemsize
        count, tensor = shapes.microbatches, shapes.sizes.tensor
        sent = (group.shards - 1) / group.shards * group.weights
        seconds = 0.0
        if group.zero == 3 and self._is_ring(group):
            seconds += count * self._ring(group, group.weights, group.backward, 2)
        elif group.zero:
            scatter = sent * width / self.bandwidth(group.shards, tensor)
            once = group.zero == 1 and count > 1
            seconds += scatter if once else count * self._beside(scatter, group.backward)
        if group.replicas == 1:
            return seconds
        bandwidth = self.bandwidth(group.replicas, tensor * group.shards)
        both_ways = 2 * (group.replicas - 1) / group.replicas * width / bandwidth
        whole = both_ways * group.weights / group.shards
        return seconds + (whole if count > 1 else self._beside(whole, group.backward))

    # Over the axes of sequences and experts.

    def keys(self) -> float:
        """Seconds that keys and values of a block add, over the context axis."""
        shapes, computation, sizes = self.shapes, self.computation, self.shapes.sizes
        if sizes.context == 1:
            return 0.0
        numbers = (sizes.context - 1) * 2 * shapes.attention_columns[1] * shapes.rows
        bandwidth = self.bandwidth(sizes.context, sizes.tensor, copies=True)
        gather = numbers * computation.width / bandwidth
        forward, backward = computation.attention_forward, computation.attention_backward
        # The backward gathers them again, and scatters their gradients.
        times = ((1, forward), (2, backward))
        return sum(max(0.0, n * gather - under) + _RING_LOSS * n * gather for n, under in times)

    def tokens(self) -> float:
        """Seconds that a block's exchange of tokens adds, over the axes of experts."""
        shapes, computation, sizes = self.shapes, self.computation, self.shapes.sizes
        devices, model = expert_devices(shapes.config, sizes), shapes.model
        if devices == 1:
            return 0.0
        stride = 1 if "tensor" in expert_axes(shapes.config) else sizes.tensor * sizes.context
        # A token goes once to each device that has some of its experts.
        reached = (devices - 1) * (1 - (1 - 1 / devices) ** (model.num_experts_per_token or 1))
        sent = reached * shapes.local_rows * model.features * computation.width
        one = sent / self.bandwidth(devices, stride, copies=True)
        # Forward: tokens, and sums home; backward: tokens and gradients, and sums home.
        forward, backward = computation.experts_forward, computation.experts_backward
        seconds = (devices - 1) * 5 * self.rates.copy_seconds
        for arrays, under in ((2, forward), (3, backward)):
            seconds += max(0.0, arrays * one - under) + 2 * _RING_LOSS * arrays * one
        return seconds
