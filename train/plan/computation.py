"""Predicted seconds of what a device computes in a training step."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from models.blocks.rematerialization import (
    recomputes_feed_forward,
    recomputes_projections,
)
from train.config.experts import balance_weight
from train.config.optimizers import OPTIMIZERS
from train.plan.activations import block_activations
from train.plan.rates import DeviceRates
from train.plan.shapes import Linear, Shapes

#: Arrays that pass through memory, each read or written once, in both directions together. These
#: are more than the algorithms need: fitted to a profile of a step (report step-1-h200).
_NORM_AND_RESIDUAL_ARRAYS = 16
_SWIGLU_ARRAYS = 11
_ROTARY_ARRAYS = 5
_LOSS_ARRAYS = 5
_EMBEDDING_ARRAYS = 6
#: The same for each array that the products of an adapter are added to: fitted to nine steps of
#: 8B and 70B (report lora-2-h100), of which predictions are 6.0 % less to 2.2 % more.
_ADAPTER_ARRAYS = 5.5
#: The share of the others that a forward has.
_FORWARD_SHARE = 1 / 3
#: Arrays in a forward of experts: rows read by index, products, their sum.
_EXPERT_ROW_ARRAYS, _EXPERT_HIDDEN_ARRAYS = 3, 5
#: Seconds of the small kernels that find out which token goes where.
_ROUTING_SECONDS = 1e-4
#: Bytes of passes for each number that is quantized: its maximum, and copies for both directions.
#: Recipes with one scale for the array read it once more.
_QUANTIZATION_BYTES = 8
_TENSORWISE_QUANTIZATION_BYTES = 11
#: An optimizer reads and writes each parameter and each of its moments in float32.
_READ_AND_WRITTEN = 8
#: Steps of Newton and Schulz, of Muon.
_MUON_STEPS = 5
#: Times that a loop over stacked layers copies what its backward needs.
_LOOP_COPIES = 3.0
#: Heads narrower than 128 take this many times as long for their FLOPs.
_NARROW_HEADS = 1.3


@dataclass(frozen=True)
class Computation:
    """The arithmetic of what one device computes. `kernel` is the one of attention."""

    shapes: Shapes
    rates: DeviceRates
    kernel: str

    @property
    def width(self) -> int:
        """Bytes of a number of the compute dtype."""
        return np.dtype(self.shapes.config.compute_dtype).itemsize

    def moved(self, numbers: float, width: float | None = None) -> float:
        """Seconds in which numbers pass through memory."""
        return numbers * (self.width if width is None else width) / self.rates.memory_bytes

    def matmul(self, m: int, k: int, n: int, fp8: bool = False) -> float:
        """Seconds of [m, k] @ [k, n]: limited by power, by waves of tiles or by memory."""
        rates = self.rates
        tiles = max(math.ceil(m / 128) * math.ceil(n / 256), 1)
        waves = math.ceil(tiles / rates.multiprocessors)
        if tiles < rates.multiprocessors:  # Few tiles are split along k.
            waves = 1 / (rates.multiprocessors // tiles)
        of_waves = waves * rates.multiprocessors * (2 * 128 * 256 * k) / rates.tile_flops
        computed = max(2 * m * k * n / rates.matmul_flops, of_waves) * self.width / 2
        return max(computed / (rates.fp8_speedup if fp8 else 1), self.moved(m * k + k * n + m * n))

    def forward_matmul(self, linear: Linear) -> float:
        """Seconds of a linear layer's forward."""
        return self.matmul(self.shapes.rows, linear.inputs, linear.columns, bool(linear.fp8))

    def data_gradient(self, linear: Linear) -> float:
        """Seconds of the gradient of a linear layer's input."""
        return self.matmul(self.shapes.rows, linear.columns, linear.inputs, bool(linear.fp8))

    def weight_gradient(self, linear: Linear) -> float:
        """Seconds of the gradient of a weight, in 8 bits only tensor-wise."""
        in_8_bits = linear.fp8 == "tensorwise"
        return self.matmul(linear.inputs, self.shapes.rows, linear.columns, in_8_bits)

    @functools.cached_property
    def block_forward(self) -> float:
        """Seconds of the matmuls of a block's forward."""
        return sum(self.forward_matmul(linear) for linear in self.shapes.block)

    @functools.cached_property
    def block_backward(self) -> float:
        """Seconds of the matmuls of its backward, and of those that it repeats."""
        seconds = sum(map(self._gradients, self.shapes.block))
        return seconds + sum(self.forward_matmul(linear) for linear in self.repeated)

    def _gradients(self, linear: Linear) -> float:
        """Seconds of a linear layer's gradients."""
        weight = self.weight_gradient(linear) if linear.is_trained else 0.0
        return self.data_gradient(linear) + weight

    @functools.cached_property
    def adapters(self) -> float:
        """Seconds of the adapters of a block, forward and backward: products with few columns or
        rows, each beside an operand of all tokens, and sums into what the layers compute."""
        return sum(map(self._adapters, self.shapes.block))

    def _adapters(self, linear: Linear) -> float:
        before, after = self.shapes.local_rows, self.shapes.rows
        if not linear.gathers:
            before, after = after, before
        rank, ranks = linear.rank, linear.rank * linear.adapters
        if not ranks:
            return 0.0
        numbers = after * linear.adapted + before * linear.inputs * linear.adapters
        products = (
            (before, linear.inputs, ranks),  # x A
            (after, rank, linear.adapted),  # (x A) B
            (after, linear.adapted, rank),  # Gradients of x A, of B, of A and of x.
            (rank, after, linear.adapted),
            (linear.inputs, before, ranks),
            (before, ranks, linear.inputs),
        )
        seconds = sum(self.matmul(*product) for product in products)
        return seconds + self.moved(_ADAPTER_ARRAYS * numbers)

    @functools.cached_property
    def repeated(self) -> tuple[Linear, ...]:
        """The layers of a block whose matmuls the backward repeats."""
        remat, block = self.shapes.config.remat, self.shapes.block
        # No gradient needs the result of the last one.
        feed_forward = block[2:-1] if recomputes_feed_forward(remat) else ()
        return (*(block[:2] if recomputes_projections(remat) else ()), *feed_forward)

    @functools.cached_property
    def head(self) -> float:
        """Seconds of the head's matmuls; chunks of a loss repeat its forward."""
        head, times = self.shapes.head, 2 if self.shapes.loss_is_in_chunks else 1
        return times * self.forward_matmul(head) + self._gradients(head)

    @functools.cached_property
    def _attention_flops(self) -> float:
        """FLOPs of the forward of a block's attention; the mask halves them."""
        shapes, length = self.shapes, self.shapes.config.sequence_length
        window = min(shapes.model.sliding_window or length, length)
        pairs = window * length - window * window / 2  # Of a query and a key.
        queries = shapes.attention_columns[0] / shapes.sizes.context
        return 4 * pairs * queries * shapes.sequences

    @functools.cached_property
    def attention_forward(self) -> float:
        """Seconds of a block's attention."""
        return self._attention(self.rates.attention[self.kernel].forward, 1.0)

    @functools.cached_property
    def attention_backward(self) -> float:
        """Seconds of its gradients, which have 2.5 times the FLOPs, and of what is repeated."""
        seconds = self._attention(self.rates.attention[self.kernel].backward, 2.5)
        return seconds + (self.shapes.config.remat == "full") * self.attention_forward

    def _attention(self, rate, times: float) -> float:
        model, length = self.shapes.model, self.shapes.config.sequence_length
        factor = times if model.head_dim >= 128 else times * _NARROW_HEADS
        return factor * self._attention_flops / rate.at(min(model.sliding_window or length, length))

    @functools.cached_property
    def experts_forward(self) -> float:
        """Seconds of a block's experts and their router."""
        shapes, model = self.shapes, self.shapes.model
        if model.num_experts is None:
            return 0.0
        pairs, hidden = shapes.expert_pairs, shapes.expert_hidden
        flops = 6 * pairs * model.features * hidden * self.width / 2
        computed = flops / self.rates.grouped_matmul_flops
        arrays = _EXPERT_ROW_ARRAYS * model.features + _EXPERT_HIDDEN_ARRAYS * hidden
        router = 2 * shapes.local_rows * model.features * model.num_experts
        router_seconds = router / self.rates.float32_flops + _ROUTING_SECONDS
        products = max(computed, self.moved(shapes.expert_weights))
        return products + self.moved(pairs * arrays) + router_seconds

    @functools.cached_property
    def experts_backward(self) -> float:
        """Seconds of their gradients, and of what is repeated."""
        config = self.shapes.config
        again = recomputes_feed_forward(config.remat) or config.recompute_expert_hidden
        seconds = self.experts_forward * (2 + 2 / 3 * again)
        if self.shapes.microbatches > 1 and balance_weight(config):
            seconds += self.experts_forward  # Statistics of all microbatches come first.
        return seconds

    def quantization(self) -> float:
        """Seconds in which the operands of a microbatch become 8 bits."""
        shapes = self.shapes
        block = sum(self._quantized(linear) for linear in shapes.block)
        return shapes.model.num_layers * block + self._quantized(shapes.head)

    def _quantized(self, linear: Linear) -> float:
        shapes = self.shapes
        if linear.fp8 is None:
            return 0.0
        before, after = shapes.local_rows, shapes.rows
        if not linear.gathers:
            before, after = after, before
        # With ZeRO 3 each device makes those of its shards; else once for all microbatches.
        share = shapes.weight_shards if shapes.zero == 3 else shapes.microbatches
        weights = linear.weights / share
        if shapes.is_stored_in_8_bits(linear):  # The backward transposes its bytes.
            weights = linear.weights * 2 / _QUANTIZATION_BYTES
        numbers = before * linear.inputs + after * linear.columns + weights
        is_tensorwise = linear.fp8 == "tensorwise"
        return self.moved(
            numbers, _TENSORWISE_QUANTIZATION_BYTES if is_tensorwise else _QUANTIZATION_BYTES
        )

    def passes(self) -> float:
        """Seconds of passes over the activations of a microbatch, forward and backward."""
        shapes, model, config = self.shapes, self.shapes.model, self.shapes.config
        local, rows = shapes.local_rows, shapes.rows
        heads = _ROTARY_ARRAYS * (3 if model.query_key_norm else 1)
        block = _NORM_AND_RESIDUAL_ARRAYS * local * model.features
        block += (
            heads * rows * sum(shapes.attention_columns) + _SWIGLU_ARRAYS * rows * shapes.hidden
        )
        block *= 1 if config.remat == "none" else 1 + _FORWARD_SHARE
        others = _EMBEDDING_ARRAYS * local * model.features
        others += _LOSS_ARRAYS * rows * shapes.vocabulary
        seconds = self.moved(model.num_layers * block + others)
        if config.scan_layers:
            weights = self.width * shapes.trained_block_weights + shapes.frozen_block_bytes
            copied = block_activations(shapes).saved + weights
            seconds += self.moved(_LOOP_COPIES * model.num_layers * copied, 1)
        return seconds

    def casts(self) -> float:
        """Seconds of a step in which parameters become weights of the compute dtype."""
        if self.width == 4:
            return 0.0
        shapes, kept = self.shapes, self.shapes.kept_weights
        times = 2 * shapes.microbatches if shapes.zero == 3 else 1
        made = times * self.moved(shapes.local_weights - kept, 4 + self.width)
        return made + self.moved(kept, self.width)

    def accumulation(self) -> float:
        """Seconds in which the gradients of microbatches are added up."""
        shapes = self.shapes
        if shapes.microbatches == 1:
            return 0.0
        weights = shapes.dense_weights + shapes.all_expert_weights
        if shapes.zero > 1:
            weights = shapes.local_weights
        return shapes.microbatches * self.moved(weights, 8 + self.width)

    def optimizer(self) -> float:
        """Seconds of the gradient's norm and of the update."""
        shapes = self.shapes
        groups = shapes.sizes.data * shapes.sizes.weight_shards
        # XLA leaves a gradient in the compute dtype unless it is summed, or added up.
        gradient = 4 if groups > 1 or shapes.microbatches > 1 else self.width
        optimizer = OPTIMIZERS[shapes.config.optimizer.kind]
        width = _READ_AND_WRITTEN * (1 + optimizer.moments) + 2 * gradient
        seconds = self.moved(shapes.local_weights, width)
        return seconds + (self._muon() if optimizer.orthogonalizes else 0.0)

    def _muon(self) -> float:
        """Seconds of Newton and Schulz's steps: products of [n, m], n <= m, and of [n, n]."""
        shapes, model = self.shapes, self.shapes.model
        queries, keys = (n * model.head_dim for n in (model.num_heads, model.num_key_value_heads))
        hidden = 3 * (model.num_experts or 1)
        flops = 0.0
        for columns, count in ((queries, 2), (keys, 2), (model.hidden_features, hidden)):
            n, m = sorted((model.features, columns))
            flops += count * _MUON_STEPS * (4 * n * n * m + 2 * n**3)
        devices = shapes.sizes.tensor * shapes.weight_shards
        return model.num_layers * flops / devices / self.rates.matmul_flops
