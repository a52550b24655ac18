"""The train state: parameters, optimizer state and step count.

The state is one pytree of global arrays::

    {"params": {"layers.0.attention.output.kernel": ..., ...}, "opt_state": ..., "step": int32 []}

Moments are sharded as their parameters are. The optimizer writes "weights" in the pass that updates
the parameters, for the next step to use: parameters in the compute dtype, sharded likewise, or the
largest magnitudes of those that it quantizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from train.parallel.kept_weights import MAGNITUDES_SPEC, made_of
from train.parallel.model import ModelFunctions, Params

TrainState = dict[str, Any]
#: The part of a state that no step changes, and no checkpoint has.
FROZEN = "frozen"
#: The part that is made of the parameters, which no checkpoint has either: see
#: `ModelFunctions.kept_weights` and `kept_magnitudes`.
WEIGHTS = "weights"


def trained_part(state: TrainState) -> TrainState:
    """The state without what is frozen and what is made of parameters: what checkpoints have."""
    return {name: part for name, part in state.items() if name not in (FROZEN, WEIGHTS)}


def weights_of(state: TrainState) -> Params:
    """All parameters of a state, trained and frozen."""
    return {**state["params"], **state.get(FROZEN, {})}


def with_weights(state: TrainState, abstract: TrainState) -> TrainState:
    """The state with the weights that `abstract` has, made of its parameters, and no others."""
    return weights_adder(abstract)(state)


def weights_adder(abstract: TrainState) -> Callable[[TrainState], TrainState]:
    """`with_weights` for one abstract state, compiled once for all calls."""
    kept = abstract.get(WEIGHTS, {})
    make = jax.jit(
        jax.shard_map(
            lambda params: made_of(params, kept),
            mesh=abstract["step"].sharding.mesh,
            in_specs=({name: abstract["params"][name].sharding.spec for name in kept},),
            out_specs=jax.tree.map(lambda leaf: leaf.sharding.spec, kept),
        )
    )

    def add(state: TrainState) -> TrainState:
        state = {name: part for name, part in state.items() if name != WEIGHTS}
        if not kept:
            return state
        return {**state, WEIGHTS: make({name: state["params"][name] for name in kept})}

    return add


def abstract_state(model: ModelFunctions, optimizer: optax.GradientTransformation) -> TrainState:
    """Global shapes and dtypes of the state."""
    state = {
        "params": model.abstract_params,
        "opt_state": jax.eval_shape(optimizer.init, model.abstract_params),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    state |= {FROZEN: model.frozen_params} if model.frozen_params else {}
    kept = model.kept_weights | model.kept_magnitudes
    return state | ({WEIGHTS: kept} if kept else {})


def state_specs(model: ModelFunctions, optimizer: optax.GradientTransformation) -> TrainState:
    """A `PartitionSpec` for every leaf of the state."""

    def masked(leaf: Any) -> bool:
        return isinstance(leaf, optax.MaskedNode)

    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, spec: leaf if masked(leaf) else spec,
        jax.eval_shape(optimizer.init, model.abstract_params),
        model.specs,
        transform_non_params=lambda _: P(),
        is_leaf=masked,
    )
    specs = {"params": model.specs, "opt_state": opt_state, "step": P()}
    specs |= {FROZEN: model.frozen_specs} if model.frozen_specs else {}
    kept = {name: model.specs[name] for name in model.kept_weights}
    kept |= jax.tree.map(lambda _: MAGNITUDES_SPEC, model.kept_magnitudes)
    return specs | ({WEIGHTS: kept} if kept else {})


def state_on_mesh(
    model: ModelFunctions, optimizer: optax.GradientTransformation, mesh: Mesh | AbstractMesh
) -> TrainState:
    """Global shapes, dtypes and shardings of the state, to restore a checkpoint into.

    The mesh may be abstract.
    """
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        abstract_state(model, optimizer),
        state_specs(model, optimizer),
    )
