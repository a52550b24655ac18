"""The train state before the first step: random weights, or given ones beside them."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from models.checkpoint.layer_layout import move_layout, other_layout
from train.optimizer.state import FROZEN, WEIGHTS, TrainState, state_on_mesh, with_weights
from train.parallel.model import ModelFunctions, Params


def init_state(
    model: ModelFunctions,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    params: Params | None = None,
) -> TrainState:
    """The initial state. Every shard is made on the device that keeps it.

    Args:
      model: the model.
      optimizer: the optimizer.
      mesh: the mesh of the state.
      params: global parameters, sharded as the model says; those that it lacks, or all by default,
        are random.
    """

    def init(params: Params) -> TrainState:
        return {"opt_state": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

    abstract = state_on_mesh(model, optimizer, mesh)
    shardings = _shardings(abstract)
    own, frozen = shardings.pop("params"), shardings.pop(FROZEN, {})
    shardings.pop(WEIGHTS, None)
    whole = abstract["params"] | abstract.get(FROZEN, {})
    params = params or {}
    if params.keys() != whole.keys():
        in_8_bits = model.kernels_in_8_bits.keys()
        random: dict[str, Any] = _random_params(model, whole, {*params, *in_8_bits})
        for number, name in enumerate(sorted(in_8_bits - params.keys())):
            random[name] = model.random_in_8_bits(name, number, frozen[name])
        params = random | params
    trained = jax.device_put({name: params[name] for name in own}, own)
    state = {
        "params": trained,
        **jax.jit(init, in_shardings=(own,), out_shardings=shardings)(trained),
    }
    if frozen:
        base = {
            n: params[n] if n in model.kernels_in_8_bits else params[n].astype(whole[n].dtype)
            for n in frozen
        }
        state[FROZEN] = jax.device_put(base, frozen)
    return with_weights(state, abstract)


def _random_params(
    model: ModelFunctions, abstract: Params, without: Set[str] = frozenset()
) -> Params:
    """Initial parameters as `abstract` describes them, without some.

    Layers are made stacked and then taken apart: so the time to compile does not depend on their
    number. XLA takes seconds for the random numbers of one matrix.
    """
    abstract = {name: leaf for name, leaf in abstract.items() if name not in without}
    target = abstract if model.stacks_layers else other_layout(abstract)

    def init() -> Params:
        made = model.init(stacked=True)
        return {name: made[name] for name in target}

    params = jax.jit(init, out_shardings=_shardings(target))()
    return params if model.stacks_layers else move_layout(params, abstract)


def _shardings(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)
