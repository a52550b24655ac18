"""The loss of the tokens of a device, and its gradients, one microbatch after the other.

Legend of local shapes: b is the number of sequences of a device and its tensor group, S is the
number of their tokens that the group has, which is all of them unless a context axis divides the
sequences. Parameters are local shards. The functions here are for use inside a `shard_map` over the
mesh.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul.layers import RouterStatistics
from models.layers.experts import no_statistics as statistics_of_none
from train.config.config import Config
from train.parallel.batches import Batch
from train.parallel.mesh import all_axes, token_axes
from train.parallel.model import ModelFunctions, Params, Weights
from train.parallel.router_losses import RouterLosses, of_all_devices
from train.parallel.zero import gathered_weights, variables, whole_trained

#: The minimum number of sites in the forward of the plain model. Attention and feed-forward have a
#: gather and a scatter each, the head has a gather. All blocks are calls of one function, whose
#: sites count once.
FORWARD_SITES = 2 + 2 + 1


class Sums(NamedTuple):
    """Sums over the microbatches of a device.

    Attributes:
      loss: the cross-entropy of its targets, over the number of targets of all devices.
      statistics: those of routers on its tokens; None for a model without experts.
      gradients: with respect to the variables.
    """

    loss: jax.Array
    statistics: RouterStatistics | None
    gradients: Params


@dataclass(frozen=True)
class LocalLoss:
    """The loss of a device's targets as a function of the variables, to be differentiated.

    Attributes:
      config: the configuration.
      model: the model.
      gathered: what `gathered_weights` returns.
      frozen: the local parameters that are not trained.
      tokens: the number of targets of the whole batch that count.
    """

    config: Config
    model: ModelFunctions
    gathered: Weights | None
    frozen: Params
    tokens: jax.Array | int

    def __call__(
        self,
        variables: Params,
        microbatch: Batch,
        whole: RouterStatistics | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, RouterStatistics | None]]:
        """Returns the loss of a microbatch, and beside it the cross-entropy and the statistics of
        routers.

        Args:
          variables: the local parameters or weights to differentiate with respect to.
          microbatch: this device's part of it.
          whole: the statistics of all tokens of the step; default: of this microbatch's.
          dropout_key: the random key of dropout, if there is any.
        """
        parameters = variables | self.frozen
        each, own = losses(self.model, parameters, self.gathered, microbatch, dropout_key)
        total = cross_entropy = jnp.sum(each) / self.tokens
        if own is not None:
            whole = of_all_devices(own) if whole is None else whole
            total += RouterLosses.of(self.config).share(own, whole)
        return total, (cross_entropy, own)

    def with_gradients(
        self,
        variables: Params,
        microbatch: Batch,
        whole: RouterStatistics | None = None,
        dropout_key: jax.Array | None = None,
    ) -> Sums:
        """Differentiates the loss of one microbatch."""
        of_loss = jax.value_and_grad(self, has_aux=True)
        (_, (total, own)), gradients = of_loss(variables, microbatch, whole, dropout_key)
        return Sums(total, own, gradients)


def batch_losses(model: ModelFunctions, params: Params, batch: Batch) -> jax.Array:
    """The loss of each target in nats, float32 [b, S], 0 for one that does not count. Parameters
    and batch are local."""
    gathered = gathered_weights(model, params)
    return losses(model, variables(model, params, gathered), gathered, batch)[0]


def losses(
    model: ModelFunctions,
    variables: Params,
    gathered: Weights | None,
    batch: Batch,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, RouterStatistics | None]:
    """The loss of each target, as in `batch_losses`, from what `variables` and `gathered_weights`
    return; and the statistics of routers on this device's tokens, if the model has any."""
    state = None if gathered is None else model.model_state(gathered)
    documents = batch.get("document_lengths")
    inputs, targets = batch["inputs"], batch["targets"]
    llama = model.merge(whole_trained(model, variables))
    each, statistics = llama.loss_and_statistics(inputs, targets, documents, state, dropout_key)
    return each if "answers" not in batch else each * batch["answers"], statistics


def counted_tokens(config: Config, batch: Batch) -> jax.Array | int:
    """The number of targets of the whole batch that count, at least 1."""
    if "answers" not in batch:
        return config.batch_size * config.sequence_length
    return jnp.maximum(lax.psum(jnp.sum(batch["answers"]), token_axes()), 1)


def loss_and_gradients(
    loss: LocalLoss, variables: Params, batch: Batch, dropout_key: jax.Array | None = None
) -> Sums:
    """The loss of a device's part of the batch and its gradients, summed over its microbatches."""
    count, model = loss.config.gradient_accumulation_steps, loss.config.model
    if count == 1:
        return loss.with_gradients(variables, batch, dropout_key=dropout_key)
    microbatches = jax.tree.map(lambda array: array.reshape(count, -1, array.shape[-1]), batch)
    everywhere = lax.pcast(jnp.zeros((), jnp.float32), all_axes(), to="varying")
    no_statistics = statistics_of_none(model, everywhere)
    whole = None
    if no_statistics is not None:
        whole = _statistics_of_all(loss, variables, microbatches, no_statistics)

    def add(sums: Sums, own: tuple[Batch, jax.Array | None]) -> tuple[Sums, None]:
        microbatch, key = own
        one = loss.with_gradients(variables, microbatch, whole, key)
        with jax.named_scope("gradient_accumulation"):
            return jax.tree.map(jnp.add, sums, one), None

    nothing = lax.pcast(jnp.zeros((), jnp.float32), token_axes(), to="varying")
    no_gradients = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), variables)
    keys = None if dropout_key is None else jax.random.split(dropout_key, count)
    none = Sums(nothing, no_statistics, no_gradients)
    return lax.scan(add, none, (microbatches, keys))[0]


def _statistics_of_all(
    loss: LocalLoss, variables: Params, microbatches: Batch, nothing: RouterStatistics
) -> RouterStatistics:
    """The statistics of routers on all microbatches and devices, which each microbatch's share of
    their losses depends on.

    How many tokens each expert gets is known after a forward of all microbatches. It is left out if
    no loss reads these numbers.
    """
    config = loss.config
    if not RouterLosses.of(config).balance:
        tokens = jnp.full(
            nothing.tokens.shape, config.batch_size * config.sequence_length, "float32"
        )
        return dataclasses.replace(of_all_devices(nothing), tokens=tokens)

    def add(total: RouterStatistics, microbatch: Batch) -> tuple[RouterStatistics, None]:
        _, own = losses(loss.model, variables, loss.gathered, microbatch)
        assert own is not None
        return total + own, None

    with jax.named_scope("router_statistics"):
        return of_all_devices(lax.scan(add, nothing, microbatches)[0])
