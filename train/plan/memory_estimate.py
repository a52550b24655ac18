"""Predicted bytes of a run on a device, by arithmetic on shapes.

A step needs most of its memory either when its backward begins, with the activations of all blocks
and the logits, or when it ends, with all gradients, or in between, with what blocks compute. The
trainer's dry run traces the step instead, which is exact and takes seconds:
`train.memory.step_memory`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from train.config.config import Config, MeshSizes
from train.config.optimizers import OPTIMIZERS
from train.plan.activations import block_activations, sums_of_attention
from train.plan.rings import gathers_in_matmuls
from train.plan.shapes import Shapes


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted bytes of a device when most is in use.

    Attributes:
      parameters: float32 parameters, and those that are frozen.
      optimizer_state: moments.
      weights: in the compute dtype: made once per step, or gathered.
      gradients: those that are there at that time.
      activations: what forwards left and backwards make.
      logits: and their gradient.
    """

    parameters: float
    optimizer_state: float
    weights: float
    gradients: float
    activations: float
    logits: float

    @property
    def state(self) -> float:
        """Bytes that do not depend on the batch."""
        return self.parameters + self.optimizer_state

    @property
    def total(self) -> float:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def predict_memory(config: Config, sizes: MeshSizes) -> MemoryEstimate:
    """Predicts the memory of a configuration that fits the mesh."""
    return _Step(Shapes(config, sizes)).memory()


class _Moment(NamedTuple):
    """Bytes beside the state at one moment of a step."""

    weights: float
    gradients: float
    activations: float
    logits: float = 0.0


@dataclass(frozen=True)
class _Step:
    """The moments of a step, with the sizes of what there is."""

    shapes: Shapes

    def memory(self) -> MemoryEstimate:
        shapes = self.shapes
        trained = 4 * shapes.local_weights
        parameters = trained + shapes.frozen_bytes
        optimizer = OPTIMIZERS[shapes.config.optimizer.kind]
        moments = optimizer.moments * trained
        if optimizer.orthogonalizes:  # One for matrices of blocks.
            moments -= trained - 4 * shapes.trained_vocabulary_weights / shapes.weight_shards
        layers = shapes.model.num_layers
        blocks = (self.block_after(done) for done in {min(1, layers - 1), layers - 1})
        most = max((self.begin(), self.head(), *blocks, self.end()), key=sum)
        added = sums_of_attention(shapes) + self.copied_frozen_weights
        most = most._replace(activations=most.activations + added)
        return MemoryEstimate(parameters, moments, *most)

    @property
    def width(self) -> int:
        """Bytes of a number of the compute dtype."""
        return np.dtype(self.shapes.config.compute_dtype).itemsize

    @property
    def stream(self) -> int:
        """Bytes of the residual stream of a microbatch."""
        return self.shapes.local_rows * self.shapes.model.features * self.width

    @property
    def table(self) -> int:
        """Numbers of the embedding, or of the head, before ZeRO shards them."""
        return self.shapes.model.features * self.shapes.vocabulary

    @property
    def is_summed(self) -> bool:
        """Whether gradients are summed over devices."""
        return self.shapes.sizes.data * self.shapes.sizes.weight_shards > 1

    @property
    def accumulates(self) -> bool:
        return self.shapes.microbatches > 1

    @property
    def gathers_float32(self) -> bool:
        """Whether all trained weights are gathered in float32, as beside frozen ones."""
        return self.shapes.training.freezes and self.shapes.zero in (1, 2)

    @property
    def all_weights(self) -> float:
        """Numbers of all trained weights before ZeRO shards them."""
        return self.shapes.dense_weights + self.shapes.all_expert_weights

    @property
    def gradients(self) -> float:
        """Bytes of all gradients of a microbatch."""
        shapes = self.shapes
        # XLA leaves a gradient in the compute dtype unless it is summed in float32. Those of a
        # microbatch are summed with the others', and over devices at the end.
        is_whole = self.accumulates and shapes.zero < 2 and not self.gathers_float32
        if not self.is_summed or is_whole:
            return self.width * self.all_weights
        if self.gathers_float32 and shapes.config.scan_layers:  # Scattered after the loop.
            return 4 * self.all_weights
        return 4 * shapes.local_weights

    @property
    def sums(self) -> float:
        """Bytes of the float32 sums over microbatches."""
        if not self.accumulates:
            return 0.0
        is_local = self.shapes.zero > 1 or self.gathers_float32
        return 4 * (self.shapes.local_weights if is_local else self.all_weights)

    @property
    def weights(self) -> float:
        """Bytes of the weights that a step makes once. The embedding is used once per microbatch,
        first of all."""
        shapes = self.shapes
        if shapes.zero == 3:
            return self.copies_of_shards
        if self.gathers_float32 and shapes.config.scan_layers:  # Each iteration casts its own.
            return 4 * self.all_weights
        is_used_again = shapes.model.tied_head or self.accumulates
        is_made = shapes.embedding_is_trained and not is_used_again
        numbers = self.all_weights - (self.table if is_made else 0)
        blocks = shapes.model.num_layers * shapes.block_weights
        makes_copies = shapes.config.fp8 and not shapes.training.freezes
        if makes_copies and shapes.config.remat == "none" and shapes.hidden:
            # Copies in 8 bits take their place, which XLA makes once for both directions.
            return self.width * (numbers - blocks) + blocks
        return self.width * numbers

    @property
    def kept_weights(self) -> float:
        """Bytes of those of `weights` that the state has."""
        return self.width * self.shapes.kept_weights

    @property
    def copies_of_shards(self) -> float:
        """Bytes of the copies in 8 bits of the shards of blocks; recomputed forwards need both."""
        shapes = self.shapes
        if not shapes.config.fp8 or shapes.zero < 3 or shapes.sizes.context > 1:
            return 0.0
        blocks = shapes.model.num_layers * shapes.block_weights / shapes.weight_shards
        return blocks * (1 if shapes.config.remat == "none" else 2)

    @property
    def block(self) -> float:
        """Bytes of the weights that level 3 makes for a block."""
        shapes = self.shapes
        if shapes.zero < 3:
            return 0.0
        dense = 2 * shapes.block_weights  # Those of the next block are gathered ahead.
        if gathers_in_matmuls(shapes):
            dense = max(linear.weights for linear in shapes.block) / 2
        return self.width * (dense + shapes.expert_weights)

    @property
    def loop(self) -> float:
        """Bytes that XLA adds to a loop which gathers the weights of blocks: a copy of those
        shards that are not of the first dimension, and float32 gradients of a block, whole."""
        shapes = self.shapes
        if shapes.zero < 3 or not shapes.config.scan_layers or gathers_in_matmuls(shapes):
            return 0.0
        rows = sum(linear.weights for linear in shapes.block if not linear.gathers)
        return 4 * (shapes.model.num_layers * rows / shapes.weight_shards + shapes.block_weights)

    @property
    def copied_frozen_weights(self) -> float:
        """Bytes of the copies of frozen shards that XLA makes before a loop over microbatches, for
        the gathers of matmuls that divide another dimension than the first."""
        shapes = self.shapes
        gathers = shapes.zero == 3 and gathers_in_matmuls(shapes) and shapes.sizes.tensor > 1
        if not (gathers and self.accumulates and shapes.training.freezes):
            return 0.0
        return shapes.model.num_layers * shapes.frozen_block_bytes / shapes.weight_shards

    @property
    def saved_weights(self) -> float:
        """Bytes of frozen weights that a loop over layers saves for its backward."""
        shapes = self.shapes
        if not shapes.config.scan_layers or shapes.config.remat != "none" or shapes.zero == 3:
            return 0.0
        return shapes.model.num_layers * shapes.frozen_block_bytes

    def begin(self) -> _Moment:
        """The begin of a forward: weights that are gathered in float32 are not cast yet."""
        weights = 4 * self.all_weights if self.gathers_float32 else 0.0
        return _Moment(weights, self.sums, 0.0)

    @property
    def logits(self) -> float:
        """Bytes of the logits that there are at one time; their gradient has as many."""
        return self.width * self.shapes.logit_rows * self.shapes.vocabulary

    @property
    def logits_for_the_head(self) -> float:
        """Bytes of the gradient of the logits in a loop over layers: the head's own gradient is
        computed after the loop, as nothing waits for it."""
        shapes = self.shapes
        if self.accumulates or shapes.loss_is_in_chunks or not shapes.head.is_trained:
            return 0.0
        return self.logits if shapes.config.scan_layers else 0.0

    def head(self) -> _Moment:
        """The backward of the head: all activations are there."""
        shapes, width = self.shapes, self.width
        saved = shapes.model.num_layers * block_activations(shapes).saved + 4 * self.stream
        saved += self.saved_weights
        logits = self.logits
        table = width * self.table
        weights = self.weights
        if shapes.zero == 3:
            weights += table + self.block
        own = 0.0  # The head's gradient, where it is not the last one that is used.
        if (shapes.zero == 3 and not shapes.model.tied_head) or self.accumulates:
            own = table if shapes.head.is_trained else 0.0
        gradients = self.sums
        if shapes.config.scan_layers:  # The gradients of all blocks are one array.
            share = shapes.trained_vocabulary_weights / self.all_weights
            gradients += self.gradients * (1 - share)
            if shapes.zero == 3:  # The head's are sharded before the loop.
                weights, own = self.weights + self.loop, 2 * table / shapes.weight_shards
                if not shapes.head.is_trained:  # Its matmul has it whole.
                    weights, own = weights + table, 0.0
        if shapes.loss_is_in_chunks:  # Gradients of all tokens are collected.
            saved += self.stream
        # XLA does not write the gradient of the logits in their place, but has them both.
        return _Moment(weights, gradients, saved, logits + max(logits, own))

    def block_after(self, done: int) -> _Moment:
        """The backward of a block, after that of `done` blocks. A loop has the arrays of all."""
        shapes, activations = self.shapes, block_activations(self.shapes)
        layers, is_loop = shapes.model.num_layers, bool(shapes.config.scan_layers)
        left, gone = (layers, layers) if is_loop else (layers - done, done)
        has_gradient = shapes.head.is_trained and not shapes.model.tied_head
        head = self.table if has_gradient else 0.0
        blocks = (self.all_weights - shapes.trained_vocabulary_weights) * gone / layers
        rest = self.gradients * (blocks + head) / self.all_weights
        if shapes.zero == 2 and not is_loop:  # XLA scatters the head's only at the end.
            rest += 4 * head * (1 - 1 / shapes.weight_shards)
        # Gradients of experts that are not sharded further are float32, one matrix after another.
        is_gathered = shapes.expert_shards > 1
        own = self.width * shapes.trained_block_weights
        own += (self.width if is_gathered else 4 / 3) * shapes.expert_weights
        kept = self.kept_weights
        stays = self.accumulates or is_loop
        weights = self.weights if stays else kept + (self.weights - kept) * left / layers
        used = activations.saved * left + activations.recomputed + activations.temporary
        used += self.saved_weights
        weights += self.block + self.loop
        used += self.stream * (1 if is_loop else 2 if self.accumulates else 4)
        return _Moment(weights, self.sums + rest + own, used, self.logits_for_the_head)

    def end(self) -> _Moment:
        """The end of the backward: all gradients are there."""
        gradients = self.sums + self.gradients
        in_features = self.shapes.zero == 3 and gathers_in_matmuls(self.shapes)
        is_whole = not (in_features and not self.shapes.model.tied_head)
        if self.is_summed and is_whole and self.shapes.embedding_is_trained:
            gradients += 4 * self.table  # That of the embedding before it is summed.
        weights = self.weights if self.accumulates else self.kept_weights
        return _Moment(weights, gradients, 2 * self.stream)
