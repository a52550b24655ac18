"""One optimizer step: a pure function of the state, inside one `shard_map` over the whole mesh.

Parameters and moments are local shards. The types of `shard_map` say which values vary over which
axes, so JAX itself sums the gradients of parameters that are replicated over the tensor axis. Over
the other axes `train.parallel.zero` sums them.
"""

from __future__ import annotations

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
from models.random_keys import random_key
from train.config.config import Config
from train.optimizer.schedule import make_schedule
from train.optimizer.state import FROZEN, WEIGHTS, TrainState, state_specs
from train.parallel.batches import Batch, batch_specs
from train.parallel.explicit_step import explicit_loss_and_grads, with_explicit_axes
from train.parallel.kept_weights import made_of
from train.parallel.loss import FORWARD_SITES, LocalLoss, counted_tokens, loss_and_gradients
from train.parallel.mesh import token_axes
from train.parallel.model import ModelFunctions, Params
from train.parallel.router_losses import router_metrics
from train.parallel.zero import gathered_weights, summed_gradients, variables

Metrics = dict[str, jax.Array]
#: (state, batch) -> (state, metrics).
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]

#: The minimum number of sites in a step of the plain model. The backward of each site is the other
#: collective.
_SITES = 2 * FORWARD_SITES
#: Tells keys of dropout from those of initial weights, which have the same seed.
_DROPOUT = 2**31 - 1


def make_step(
    config: Config, model: ModelFunctions, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Step:
    """The step: (state, batch) -> (state, metrics). The state is donated.

    `overlap_jit` decides whether it has kernels that address peers' memory: what they save is
    weighed against the sums of gradients and gathers of weights that XLA hides without them.

    The batch has "inputs" and "targets", int32 [batch_size, sequence_length], sharded and in the
    order that `train.parallel.batches.global_arrays` says, where documents are kept apart
    "document_lengths", as `Llama` takes them, and of conversations "answers", 1 for targets that
    count.
    Metrics are float32 scalars: "loss", in nats per token that counts, "grad_norm", before
    clipping, "learning_rate", which the step was made with, and with experts those of
    `router_metrics`.
    """
    return overlap_jit(sharded_step(config, model, optimizer, mesh), donate_argnums=0)


def sharded_step(
    config: Config,
    model: ModelFunctions,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    *,
    rewrite: bool = True,
) -> Step:
    """The step before compilation. The mesh may be abstract.

    With overlap "rewrite" it is passed to `collective_matmul.overlap`, with "rewrite-jit" its loss
    is, unless `rewrite` is False. With "rewrite-jit" there is no `shard_map`: the program is of
    global arrays.

    Raises:
      ValueError: when traced with one of these, if a matmul that communicates is not replaced.
    """
    specs = state_specs(model, optimizer)
    if config.overlap == "rewrite-jit":
        explicit = _explicit_step(config, model, optimizer, specs, rewrite=rewrite)
        return with_explicit_axes(explicit, specs, mesh)
    step = functools.partial(local_step, config, model, optimizer)

    def sharded(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        in_specs = specs, batch_specs(batch, mesh)
        local = jax.shard_map(
            step, mesh=mesh, in_specs=in_specs, out_specs=(specs, P()), check_vma=True
        )
        return local(state, batch)

    if rewrite and config.overlap == "rewrite":
        return overlap(sharded, require=_SITES, fp8=model.fp8_scopes)
    return sharded


def local_step(
    config: Config,
    model: ModelFunctions,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Batch,
) -> tuple[TrainState, Metrics]:
    """One step of a device, with its shards of the state and its part of the batch."""
    params, frozen = state["params"], state.get(FROZEN, {})
    dropout_key = _dropout_key(config, state["step"])
    tokens = counted_tokens(config, batch)

    # Gather weights that are made once per step. Other weights are gathered where they are used.
    gathered = gathered_weights(model, params, state.get(WEIGHTS, {}))

    # The loss of this device's targets and its gradients, one microbatch after the other.
    loss = LocalLoss(config, model, gathered, frozen, tokens)
    local = variables(model, params, gathered)
    sums = loss_and_gradients(loss, local, batch, dropout_key)

    # Reduce both over devices with other tokens, where the backward has not.
    losses = {"loss": lax.psum(sums.loss, token_axes()), **router_metrics(sums.statistics)}
    gradients = summed_gradients(model, sums.gradients)

    # Update the shards of parameters and moments.
    new_state, metrics = apply_gradients(config, optimizer, state, gradients)
    return new_state, losses | metrics


def apply_gradients(
    config: Config,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    gradients: Params,
) -> tuple[TrainState, Metrics]:
    """Clips gradients, which are those of the whole batch, and updates the state; all local."""
    with jax.named_scope("gradient_norm"):
        grad_norm = _global_norm(gradients)
    if math.isfinite(config.optimizer.clip_norm):  # Else no update waits for all gradients.
        clip = jnp.minimum(1.0, config.optimizer.clip_norm / jnp.maximum(grad_norm, 1e-12))
        gradients = jax.tree.map(lambda g: g * clip, gradients)
    with jax.named_scope("optimizer"):
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        params: Any = optax.apply_updates(state["params"], updates)
        # XLA writes them in the pass that writes the parameters. A pass of its own, in the next
        # step, would read these again.
        weights = made_of(params, state.get(WEIGHTS, {}))
    new_state = {**state, "params": params, "opt_state": opt_state, "step": state["step"] + 1}
    new_state |= {WEIGHTS: weights} if weights else {}
    learning_rate = make_schedule(config.optimizer, config.steps)(state["step"])
    learning_rate = jnp.asarray(learning_rate, jnp.float32)
    return new_state, {"grad_norm": grad_norm, "learning_rate": learning_rate}


def _explicit_step(
    config: Config,
    model: ModelFunctions,
    optimizer: optax.GradientTransformation,
    specs: TrainState,
    *,
    rewrite: bool,
) -> Step:
    """A step of global arrays, to be traced with axes of type Explicit."""
    # Optimizers are of local shards.
    update = jax.shard_map(
        functools.partial(apply_gradients, config, optimizer),
        in_specs=(specs, model.specs),
        out_specs=(specs, P()),
    )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        losses, gradients = explicit_loss_and_grads(
            config, model, state["params"], batch, rewrite=rewrite
        )
        new_state, metrics = update(state, gradients)
        return new_state, losses | metrics

    return step


def make_parameter_norm(model: ModelFunctions, mesh: Mesh) -> Callable[[Params], jax.Array]:
    """A function that returns the global norm of the parameters, float32 [].

    The squares overflow for a norm above about 1e19, which then is infinite.
    """
    return jax.jit(jax.shard_map(_global_norm, mesh=mesh, in_specs=(model.specs,), out_specs=P()))


def _dropout_key(config: Config, step: jax.Array) -> jax.Array | None:
    """The random key of dropout in a step, another for each device with tokens of its own; None
    without dropout. The tensor axis is folded in by adapters."""
    if not config.lora.dropout:
        return None
    key = jax.random.fold_in(random_key(config.seed), _DROPOUT)
    for number in (step, *map(lax.axis_index, token_axes())):
        key = jax.random.fold_in(key, number)
    return key


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
