"""One optimizer step: a pure function of the state, inside one `shard_map` over the whole mesh.

Legend of local shapes: b is the number of sequences of a device and its tensor group, S is the
number of their tokens that the group has, which is all of them unless a context axis divides the
sequences, D is the size of the tensor axis. Parameters and moments are local shards. The
types of `shard_map` say which values vary over which axes, so JAX itself sums the gradients of
parameters that are replicated over the tensor axis. Over the other axes `train.parallel.zero` sums
them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import overlap, overlap_jit
from collective_matmul.layers import RouterStatistics
from models.layers.experts import no_statistics as statistics_of_none
from models.random_keys import random_key
from train.config.config import Config
from train.optimizer.optimizer import make_schedule
from train.parallel.batches import batch_specs
from train.parallel.explicit_step import Batch, explicit_loss_and_grads, with_explicit_axes
from train.parallel.mesh import all_axes, token_axes
from train.parallel.model import (
    FROZEN,
    ModelFunctions,
    Params,
    TrainState,
    Weights,
    state_specs,
)
from train.parallel.router_losses import RouterLosses, of_all_devices, router_metrics
from train.parallel.zero import gathered_weights, summed_gradients, variables, whole_trained

Metrics = dict[str, jax.Array]
#: The loss of this device's targets, the statistics of routers on its tokens, and gradients.
_Sums = tuple[jax.Array, RouterStatistics | None, Params]

#: The minimum number of sites in the forward of the plain model. Attention and feed-forward have a
#: gather and a scatter each, the head has a gather. All blocks are calls of one function, whose
#: sites count once.
FORWARD_SITES = 2 + 2 + 1
#: The same in a step. The backward of each site is the other collective.
_SITES = 2 * FORWARD_SITES
#: Tells keys of dropout from those of initial weights, which have the same seed.
_DROPOUT = 2**31 - 1


def make_step(
    config: Config, model: ModelFunctions, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The compiled step: (state, batch) -> (state, metrics). The state is donated.

    The batch has "inputs" and "targets", int32 [batch_size, sequence_length], sharded and in the
    order that `train.parallel.batches.global_arrays` says, where documents are kept apart
    "document_lengths", as `Llama` takes them, and of conversations "answers", 1 for targets that
    count.
    Metrics are float32 scalars: "loss", in nats per token that counts, "grad_norm", before
    clipping, "learning_rate", which the step was made with, and with experts those of
    `router_metrics`.
    """
    step = sharded_step(config, model, optimizer, mesh)
    # XLA hides gradient sums and gathered weights, which kernels that address peers would forbid.
    return overlap_jit(step, peer_kernels=False, donate_argnums=0)


def sharded_step(
    config: Config,
    model: ModelFunctions,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    *,
    rewrite: bool = True,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step before compilation. The mesh may be abstract.

    With overlap "rewrite" it is passed to `collective_matmul.overlap`, with "rewrite-jit" its loss
    is, unless `rewrite` is False. With "rewrite-jit" there is no `shard_map`: the program is of
    global arrays.

    Raises:
      ValueError: when traced with one of these, if a matmul that communicates is not replaced.
    """
    specs = state_specs(model, optimizer)
    by_types = config.overlap == "rewrite-jit"
    loss_and_grads = _loss_and_grads
    schedule = make_schedule(config.optimizer, config.steps)

    def update(state: TrainState, grads: Params) -> tuple[TrainState, Metrics]:
        with jax.named_scope("gradient_norm"):
            grad_norm = _global_norm(grads)
        if math.isfinite(config.optimizer.clip_norm):  # Else no update waits for all gradients.
            clip = jnp.minimum(1.0, config.optimizer.clip_norm / jnp.maximum(grad_norm, 1e-12))
            grads = jax.tree.map(lambda g: g * clip, grads)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
            params = optax.apply_updates(state["params"], updates)
        new_state = {**state, "params": params, "opt_state": opt_state, "step": state["step"] + 1}
        learning_rate = jnp.asarray(schedule(state["step"]), jnp.float32)
        return new_state, {"grad_norm": grad_norm, "learning_rate": learning_rate}

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        options: dict[str, Any] = {"frozen": state[FROZEN]} if FROZEN in state else {}
        if config.lora.dropout:
            options["dropout_key"] = _dropout_key(config.seed, state["step"])
        losses, grads = loss_and_grads(config, model, state["params"], batch, **options)
        new_state, metrics = update_state(state, grads)
        return new_state, losses | metrics

    update_state = update
    if by_types:
        loss_and_grads = functools.partial(explicit_loss_and_grads, rewrite=rewrite)
        # Optimizers are of local shards.
        update_state = jax.shard_map(update, in_specs=(specs, model.specs), out_specs=(specs, P()))
        return with_explicit_axes(step, specs, mesh)

    def sharded(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        in_specs = specs, batch_specs(batch, mesh)
        local = jax.shard_map(
            step, mesh=mesh, in_specs=in_specs, out_specs=(specs, P()), check_vma=True
        )
        return local(state, batch)

    if rewrite and config.overlap == "rewrite":
        return overlap(sharded, require=_SITES, fp8=model.fp8_scopes)
    return sharded


def make_parameter_norm(model: ModelFunctions, mesh: Mesh) -> Callable[[Params], jax.Array]:
    """A function that returns the global norm of the parameters, float32 [].

    The squares overflow for a norm above about 1e19, which then is infinite.
    """
    return jax.jit(jax.shard_map(_global_norm, mesh=mesh, in_specs=(model.specs,), out_specs=P()))


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
    """The same from what `variables` and `gathered_weights` return; and the statistics of routers
    on this device's tokens, if the model has any."""
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


def _dropout_key(seed: int, step: jax.Array) -> jax.Array:
    """The random key of dropout in a step, another for each device with tokens of its own. The
    tensor axis is folded in by adapters."""
    key = jax.random.fold_in(random_key(seed), _DROPOUT)
    for number in (step, *map(lax.axis_index, token_axes())):
        key = jax.random.fold_in(key, number)
    return key


def _loss_and_grads(
    config: Config,
    model: ModelFunctions,
    params: Params,
    batch: Batch,
    frozen: Params | None = None,
    dropout_key: jax.Array | None = None,
) -> tuple[Metrics, Params]:
    """Mean loss of the whole batch, and the gradient of all losses with respect to the local
    parameters that are trained. `frozen` has the others."""
    tokens = counted_tokens(config, batch)
    gathered = gathered_weights(model, params)
    local = variables(model, params, gathered)
    routers = RouterLosses.of(config)

    def loss(
        local: Params, microbatch: Batch, whole: RouterStatistics | None, key: jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, RouterStatistics | None]]:
        each, own = losses(model, local | (frozen or {}), gathered, microbatch, key)
        total = cross_entropy = jnp.sum(each) / tokens
        if own is not None:
            total += routers.share(own, of_all_devices(own) if whole is None else whole)
        return total, (cross_entropy, own)

    def loss_and_grads(
        microbatch: Batch, whole: RouterStatistics | None = None, key: jax.Array | None = None
    ) -> _Sums:
        of_loss = jax.value_and_grad(loss, has_aux=True)
        (_, (total, own)), grads = of_loss(local, microbatch, whole, key)
        return total, own, grads

    if config.gradient_accumulation_steps == 1:
        sums = loss_and_grads(batch, key=dropout_key)
    else:
        arguments = loss_and_grads, local, gathered, batch, dropout_key
        sums = _accumulated(config, model, *arguments)
    total, own, grads = sums
    metrics = {"loss": lax.psum(total, token_axes())}
    if own is not None:
        metrics |= router_metrics(of_all_devices(own))
    return metrics, summed_gradients(model, grads)


def _accumulated(
    config: Config,
    model: ModelFunctions,
    loss_and_grads: Callable[..., _Sums],
    local: Params,
    gathered: Weights | None,
    batch: Batch,
    dropout_key: jax.Array | None,
) -> _Sums:
    """The sums of what `loss_and_grads` returns for each microbatch."""
    microbatches = jax.tree.map(
        lambda array: array.reshape(config.gradient_accumulation_steps, -1, array.shape[-1]), batch
    )
    everywhere = lax.pcast(jnp.zeros((), jnp.float32), all_axes(), to="varying")
    no_statistics = statistics_of_none(config.model, everywhere)
    whole = None
    if no_statistics is not None:
        whole = _statistics_of_all(config, model, no_statistics, local, gathered, microbatches)

    def add(sums: _Sums, own: tuple[Batch, jax.Array | None]) -> tuple[_Sums, None]:
        microbatch, key = own
        one = loss_and_grads(microbatch, whole, key)
        with jax.named_scope("gradient_accumulation"):
            return jax.tree.map(jnp.add, sums, one), None

    nothing = lax.pcast(jnp.zeros((), jnp.float32), token_axes(), to="varying")
    no_grads = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), local)
    keys = dropout_key
    if keys is not None:
        keys = jax.random.split(keys, config.gradient_accumulation_steps)
    return lax.scan(add, (nothing, no_statistics, no_grads), (microbatches, keys))[0]


def _statistics_of_all(
    config: Config,
    model: ModelFunctions,
    nothing: RouterStatistics,
    local: Params,
    gathered: Weights | None,
    microbatches: Batch,
) -> RouterStatistics:
    """The statistics of routers on all microbatches and devices, which each microbatch's share of
    their losses depends on.

    How many tokens each expert gets is known after a forward of all microbatches. It is left out if
    no loss reads these numbers.
    """
    if not RouterLosses.of(config).balance:
        tokens = jnp.full(
            nothing.tokens.shape, config.batch_size * config.sequence_length, "float32"
        )
        return dataclasses.replace(of_all_devices(nothing), tokens=tokens)

    def add(total: RouterStatistics, microbatch: Batch) -> tuple[RouterStatistics, None]:
        _, own = losses(model, local, gathered, microbatch)
        assert own is not None
        return total + own, None

    with jax.named_scope("router_statistics"):
        return of_all_devices(lax.scan(add, nothing, microbatches)[0])


def _global_norm(leaves: Params) -> jax.Array:
    """The norm over all shards. Squares are summed over the axes that shard a leaf, once for all
    leaves of the same axes."""
    squares: dict[tuple[str, ...], list[jax.Array]] = {}
    for leaf in leaves.values():
        axes = tuple(sorted(jax.typeof(leaf).manual_axis_type.varying))
        squares.setdefault(axes, []).append(jnp.sum(jnp.square(leaf)))
    total = jnp.zeros((), jnp.float32)
    for axes, parts in squares.items():
        part = jnp.sum(jnp.stack(parts))
        total += lax.psum(part, axes) if axes else part
    return jnp.sqrt(total)
