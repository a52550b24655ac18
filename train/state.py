"""The train state: parameters, optimizer state and step count.

The state is one pytree of global arrays::

    {"params": {"layers.0.attention.output.kernel": ..., ...}, "opt_state": ..., "step": int32 []}

Parameters are float32, keyed by their dotted path in the model. They are sharded over the tensor
axis as the layers specify, with ZeRO over the fsdp axis too, and replicated over the data axis. The
optimizer's moments are sharded like them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.llama import Llama
from models.sharded_weights import WeightShards, sharded_dimension, sharded_spec
from train.config import ONE_DEVICE, Config, MeshSizes, OptimizerConfig
from train.muon import muon

Params = dict[str, jax.Array]
TrainState = dict[str, Any]


class ModelFunctions:
    """The model as pure functions over a flat dictionary of parameters.

    Attributes:
      abstract_params: global shapes and dtypes by name.
      specs: `PartitionSpec` by name.
      unsharded_specs: the same without the fsdp axis.
      zero: the ZeRO level; 0 on a mesh that has nothing to shard over.
      weight_shards: how the fsdp axis shards parameters, by name; empty without ZeRO.
      gradient_dtype: dtype in which gradients are summed over data and fsdp.

    Args:
      config: the configuration.
      sizes: the mesh. Only ZeRO depends on it.

    Raises:
      ValueError: if the fsdp axis divides no parameter.
    """

    def __init__(self, config: Config, sizes: MeshSizes = ONE_DEVICE):
        def build() -> Llama:
            return self._build(config)

        self._config = config
        self.gradient_dtype = config.gradient_dtype
        self.zero = config.zero if sizes.fsdp > 1 else 0
        self._graph, abstract = nnx.split(nnx.eval_shape(build))
        self._variables = {_name(path): (path, leaf) for path, leaf in nnx.to_flat_state(abstract)}
        self.abstract_params = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for name, (_, leaf) in self._variables.items()
        }
        self.unsharded_specs: dict[str, P] = {
            _name(path): spec.get_value()
            for path, spec in nnx.to_flat_state(nnx.get_partition_spec(abstract))
        }
        self.specs = dict(self.unsharded_specs)
        self.weight_shards: dict[str, WeightShards] = {}
        if self.zero:
            self._shard_weights(config, sizes)

    def _shard_weights(self, config: Config, sizes: MeshSizes) -> None:
        """Shards the parameters over the fsdp axis too."""
        for name, leaf in self.abstract_params.items():
            spec = sharded_spec(leaf.shape, self.specs[name], "fsdp", sizes._asdict())
            dimension = sharded_dimension(spec, "fsdp")
            if dimension is not None:
                self.specs[name] = spec
                self._variables[name][1].set_metadata(out_sharding=tuple(spec))
                self.weight_shards[name] = WeightShards(
                    "fsdp", dimension, config.compute_dtype, config.gradient_dtype
                )
        if not self.weight_shards:
            raise ValueError(
                f"mesh.fsdp={sizes.fsdp}: divides no matrix of the model; choose a divisor of"
                f" model.features={config.model.features}"
            )

    @property
    def whole_matrices(self) -> list[str]:
        """The matrices that the fsdp axis does not divide, and which stay whole."""
        return [
            name
            for name, leaf in self.abstract_params.items()
            if len(leaf.shape) > 1 and name not in self.weight_shards
        ]

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the whole model."""
        return sum(math.prod(leaf.shape) for leaf in self.abstract_params.values())

    def _build(self, config: Config) -> Llama:
        rngs: Any = _Keys(config.seed)
        return Llama(
            config.model,
            implementation=_implementation(config.overlap),
            dtype=jnp.dtype(config.compute_dtype),
            remat=config.remat,
            weight_axis_name="fsdp" if self.zero == 3 else None,
            gradient_dtype=config.gradient_dtype,
            rngs=rngs,
        )

    def init(self) -> Params:
        """Initial parameters, global; the same for every mesh."""
        model = self._build(self._config)
        return {_name(path): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}

    def merge(self, params: Params) -> Llama:
        """The model with these parameters, global or local."""
        flat = [
            (path, leaf.replace(params[name])) for name, (path, leaf) in self._variables.items()
        ]
        return nnx.merge(self._graph, nnx.from_flat_state(flat))


class _Keys:
    """The keys of `nnx.Rngs`, counted in Python.

    `nnx.Rngs` counts with an array. In a trace, the time for that grows with the square of the
    number of layers.
    """

    def __init__(self, seed: int):
        self._key, self._count = jax.random.key(seed), itertools.count()

    def params(self) -> jax.Array:
        """The next key."""
        return jax.random.fold_in(self._key, next(self._count))


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of steps done: warm-up, then cosine decay.

    `steps` is the length of the run, which is that of the schedule unless the configuration has
    one.
    """
    decay_steps = config.with_schedule_of(steps).decay_steps
    assert decay_steps is not None
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=decay_steps,
        end_value=config.learning_rate * config.final_learning_rate_fraction,
    )


def make_optimizer(
    config: OptimizerConfig, steps: int, specs: Mapping[str, P]
) -> optax.GradientTransformation:
    """AdamW or Muon with `make_schedule`, and weight decay on matrices. It does not clip.

    Args:
      config: the optimizer.
      steps: the length of the run.
      specs: how each parameter is sharded, by its name.
    """
    schedule = make_schedule(config, steps)
    if config.kind == "adamw":
        return _adamw(config, schedule)
    # As in `optax.contrib.muon`, all momentum is Nesterov's.
    return muon(config, schedule, specs, _adamw(config, schedule, nesterov=True))


def _adamw(
    config: OptimizerConfig, schedule: optax.Schedule, *, nesterov: bool = False
) -> optax.GradientTransformation:
    def decayed(params: Params) -> Any:
        # Norms of stacked layers have two dimensions.
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not path[-1].key.endswith("norm.scale"), params
        )

    return optax.adamw(
        schedule,
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        mask=decayed,
        nesterov=nesterov,
    )


def abstract_state(model: ModelFunctions, optimizer: optax.GradientTransformation) -> TrainState:
    """Global shapes and dtypes of the state."""
    return {
        "params": model.abstract_params,
        "opt_state": jax.eval_shape(optimizer.init, model.abstract_params),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }


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
    return {"params": model.specs, "opt_state": opt_state, "step": P()}


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
      params: global parameters, sharded as the model says; default: random ones.
    """

    def init(params: Params) -> TrainState:
        return {"opt_state": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

    def init_all() -> TrainState:
        params = model.init()
        return {"params": params, **init(params)}

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state_on_mesh(model, optimizer, mesh))
    if params is None:
        return jax.jit(init_all, out_shardings=shardings)()
    own = shardings.pop("params")
    return {
        "params": jax.device_put(params, own),
        **jax.jit(init, in_shardings=(own,), out_shardings=shardings)(params),
    }


def _implementation(overlap: str) -> str | tuple[str, ...] | None:
    """The `implementation` of `Llama` for a value of `Config.overlap`."""
    if overlap == "auto":
        return None
    return "plain" if overlap == "rewrite" else tuple(overlap.split(","))


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
