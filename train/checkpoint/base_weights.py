"""The weights that a run does not train: where they come from, and that they are the same again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from models.checkpoint.checksums import checksums, json_checksum
from train.checkpoint.initial_weights import InitialWeights
from train.checkpoint.new_state import init_state
from train.optimizer.state import FROZEN, TrainState
from train.parallel import frozen_format
from train.parallel.model import ModelFunctions, Params

#: The key of a checkpoint's configuration with the checksum of the weights beside it.
_KEY = "base"


def load_base(saved: InitialWeights, model: ModelFunctions, mesh: Mesh) -> Params:
    """The parameters that begin as those of saved weights: all but adapters.

    Args:
      saved: the weights.
      model: the model.
      mesh: its mesh.
    """
    specs = model.base_specs
    abstract = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, specs[name])
        )
        for name, leaf in model.base_params.items()
    }
    # Each is converted before the next is read, where the source has them one by one.
    parts = [{name: leaf} for name, leaf in abstract.items()]
    loaded: dict[str, Any] = {}
    for part in parts if saved.reads_parts else [abstract]:
        for name, array in saved.restore_params(part).items():
            if name in model.kernels_in_8_bits:
                made, spec = model.frozen_params[name], model.frozen_specs[name]
                array = model.in_8_bits(name, array, frozen_format.on_mesh(made, spec, mesh))
            elif name in model.frozen_params:
                array = array.astype(model.frozen_params[name].dtype)
            loaded[name] = array
    return loaded


def frozen_weights(base: InitialWeights | None, model: ModelFunctions, mesh: Mesh) -> Params:
    """The weights that are not trained, of saved weights or, without these, random."""
    params = None if base is None else load_base(base, model, mesh)
    return init_state(model, optax.identity(), mesh, params)[FROZEN]


def base_identity(state: TrainState) -> dict[str, Any]:
    """The entry of a checkpoint's configuration that tells its frozen weights from others; none if
    nothing is frozen."""
    if FROZEN not in state:
        return {}
    # Stacked layers have other names and the same numbers; a run keeps its layout.
    leaves = jax.tree_util.tree_leaves_with_path(state[FROZEN])
    return {_KEY: json_checksum(checksums({jax.tree_util.keystr(p): leaf for p, leaf in leaves}))}


def check_base(saved: Mapping[str, Any], state: TrainState, source: str | None) -> None:
    """Checks that the frozen weights are those that a checkpoint was trained beside.

    Raises:
      ValueError: they are others.
    """
    was, now = saved.get(_KEY), base_identity(state).get(_KEY)
    if was != now:
        where = f"init_from={source!r}" if source else f"random weights of seed {saved.get('seed')}"
        raise ValueError(
            f"{where}: other weights than those that the checkpoint's adapters were trained beside"
            f" (checksum {str(now)[:12]}, not {str(was)[:12]}); give --init-from with the weights"
            " that the run began with, and its --compute-dtype and --scan-layers"
        )
