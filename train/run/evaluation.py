"""The loss of parameters on held-out text.

It is a function of the parameters and the text: sequences are read in the order of the text, and
nothing is drawn at random. Nothing of a training run is changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import overlap, overlap_jit
from train.config.config import Config
from train.data.dataset import TextData
from train.log.metrics import Evaluation
from train.parallel.batches import Batch, batch_specs, global_arrays, local_rows
from train.parallel.loss import FORWARD_SITES, batch_losses
from train.parallel.mesh import BATCH_AXES, token_axes
from train.parallel.model import ModelFunctions, Params
from train.run.programs import compile_together

_WEIGHT_SPEC = P(BATCH_AXES)


class Evaluator:
    """Computes the loss on a text. Compiles when it is made, in all processes together.

    Works on as many sequences at a time as a microbatch of the training has, so that it needs no
    more memory. The number does not change the result beyond rounding.

    Args:
      config: batch size, gradient accumulation, number of batches and backends.
      model: the model.
      mesh: the mesh of the parameters.
      text: the text, of which the last tokens, fewer than a sequence, are left out.
    """

    def __init__(self, config: Config, model: ModelFunctions, mesh: Mesh, text: TextData):
        self._text, self._mesh = text, mesh
        self._size = config.batch_size // config.gradient_accumulation_steps
        self.sequences = evaluated_sequences(config, text)
        self._local_rows = local_rows(mesh, self._size)
        params = jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
            ),
            model.all_params,
            model.all_specs,
        )
        total_loss = overlap_jit(_sharded_total_loss(config, model, mesh))
        self._total_loss = compile_together(total_loss, params, *self._batch(0)).run

    def __call__(
        self, params: Params, should_stop: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Evaluates global parameters that are sharded as the training shards them.

        Returns:
          The evaluation, or None if `should_stop` returned True before it was complete.
        """
        started = time.perf_counter()
        totals: list[np.ndarray] = []
        running = None
        for first in range(0, self.sequences, self._size):
            if should_stop():
                return None
            # The devices work on this batch while the host waits for the one before.
            previous, running = running, self._total_loss(params, *self._batch(first))
            if previous is not None:
                totals.append(np.asarray(previous, np.float64))
        if running is not None:
            totals.append(np.asarray(running, np.float64))
        total, counted = np.sum(totals, axis=0)
        tokens = round(counted)
        loss = float(total) / max(tokens, 1)
        perplexity = math.exp(loss) if loss < math.log(np.finfo(np.float64).max) else math.inf
        return Evaluation(loss, perplexity, tokens, time.perf_counter() - started)

    def _batch(self, first: int) -> tuple[Batch, jax.Array]:
        """Sequences from `first` on, and the weight of each: 0 for those that fill up the last
        batch."""
        numbers = np.arange(first, first + self._size)
        weights = (numbers < self.sequences).astype(np.float32)
        within = np.where(numbers < self.sequences, numbers, 0)
        batch = self._text.sequences(within[self._local_rows].tolist())
        rows = NamedSharding(self._mesh, _WEIGHT_SPEC)
        own = self._local_rows
        weighted = jax.make_array_from_process_local_data(rows, weights[own], (self._size,))
        return global_arrays(batch, self._mesh, self._size), weighted


def evaluated_sequences(config: Config, text: TextData) -> int:
    """The number of sequences of the held-out text that are evaluated: those of `eval_batches`
    batches, or all."""
    if config.eval_batches is None:
        return text.sequences_per_epoch
    return min(config.eval_batches * config.batch_size, text.sequences_per_epoch)


def _sharded_total_loss(
    config: Config, model: ModelFunctions, mesh: Mesh
) -> Callable[[Params, Batch, jax.Array], jax.Array]:
    """The weighted sums of the losses of a batch and of the tokens that count, before compilation:
    float32 [2]."""

    def total_loss(params: Params, batch: Batch, weights: jax.Array) -> jax.Array:
        losses = batch_losses(model, params, batch)
        counted = batch.get("answers", jnp.ones_like(batch["inputs"]))
        sums = jnp.stack([jnp.sum(x * weights[:, None]) for x in (losses, counted)])
        return lax.psum(sums, token_axes())

    def sharded(params: Params, batch: Batch, weights: jax.Array) -> jax.Array:
        local = jax.shard_map(
            total_loss,
            mesh=mesh,
            in_specs=(model.all_specs, batch_specs(batch, mesh), _WEIGHT_SPEC),
            out_specs=P(),
            check_vma=True,
        )
        return local(params, batch, weights)

    if config.overlap != "rewrite":
        return sharded
    return overlap(sharded, require=FORWARD_SITES, fp8=model.fp8_scopes)
