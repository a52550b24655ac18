"""The model as pure functions over a flat dictionary of parameters, and how a mesh shards these.

Parameters are float32 global arrays, keyed by their path in the model, such as
"layers.0.attention.output.kernel". The tensor axis shards them as the layers specify, with ZeRO the
fsdp axis too; the data axis replicates them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from collective_matmul import Quantized
from models.config import LlamaConfig
from models.llama import Llama
from models.parameters.adapters import Training, is_adapter
from models.parameters.fp8_layers import scopes
from models.parameters.stacked import Keys
from models.parameters.use import Gathers, ParameterUse, Unchanged
from models.prequantized import prequantized_state
from models.random_keys import random_key
from train.config.config import ONE_DEVICE, Config, MeshSizes
from train.config.context import context_implementation
from train.config.experts import (
    expert_axes,
    expert_dimension,
    expert_implementation,
    is_expert,
    is_expert_bias,
)
from train.config.loss_chunks import loss_chunk
from train.log.metrics import model_flops_per_token
from train.parallel import frozen_format
from train.parallel.kept_weights import (
    Magnitudes,
    keeps_magnitudes,
    keeps_weights,
    known_kernels,
    quantizing_layers,
)
from train.parallel.mesh import shard_axes_of
from train.parallel.parameter_shards import ZeroUse, sharded_dimension, sharded_spec
from train.parallel.weight_gather import where_gathered

Params = dict[str, jax.Array]
#: Parameters as the model computes with them.
Weights = dict[str, jax.Array | Quantized]


def is_vector(name: str) -> bool:
    """Whether a parameter is a norm, a bias or a sink, of one dimension but for those that count
    heads, experts and layers."""
    return name.endswith(("norm.scale", "bias", ".sinks")) or is_expert_bias(name)


class ModelFunctions:
    """The model as pure functions over a flat dictionary of parameters.

    Attributes:
      abstract_params: global shapes and dtypes by name, of what is trained.
      specs: `PartitionSpec` by name, of the same.
      freezes: whether some parameters are not trained, or there are adapters.
      frozen_params: global shapes and dtypes of what is not trained: matrices are in the dtype in
        which they are used.
      frozen_specs: `PartitionSpec` of the same.
      zero: the ZeRO level; 0 on a mesh that has nothing to shard over.
      matrices: the names of all parameters but norms, biases and routers, which are float32 and
        whole wherever they are used.
      sharded_dimensions: the dimensions that the fsdp axis shards, counted from the end, by name;
        empty without ZeRO.
      kept_weights: global shapes and dtypes, by name, of the parameters that a state has in
        `compute_dtype` too; see `keeps_weights`.
      kept_magnitudes: global shapes of the largest magnitudes that a state has of parameters, by
        name; see `keeps_magnitudes`.
      gathers: where weights are gathered: by linear layers in the loops of their matmuls, or for
        each block; None if not where they are used.
      accumulates: whether a step has several microbatches.
      stacks_layers: whether the parameters of layers are stacked.
      quantizes_shards: whether weights are gathered in 8 bits, of shards that were quantized.
      compute_dtype: dtype of gathered weights.
      gradient_dtype: dtype in which gradients are summed over data and fsdp.
      fp8: the recipe by which layers quantize their operands to 8 bits, or None.
      fp8_scopes: the `fp8` of `overlap` that quantizes those of the same layers.

    Args:
      config: the configuration.
      sizes: the mesh. Only ZeRO depends on it.
      local_devices: number of devices of a process; None: all.

    Raises:
      ValueError: if the fsdp axis divides no parameter; if weights are to be gathered in matmuls,
        and it does not divide the width of the residual stream, or gradients are to travel in a
        narrower dtype than weights.
    """

    def __init__(
        self, config: Config, sizes: MeshSizes = ONE_DEVICE, local_devices: int | None = None
    ):
        def build() -> Llama:
            return self._build(config)

        self._config, self._sizes = config, sizes
        training = Training(config.lora, config.freeze)
        self.compute_dtype, self.gradient_dtype = config.compute_dtype, config.gradient_dtype
        self.fp8 = None if config.overlap == "rewrite" else config.lora.base_format or config.fp8
        self.fp8_scopes = scopes(config.fp8, config.fp8_layers.split(","))
        self.accumulates = config.gradient_accumulation_steps > 1
        self.stacks_layers = config.scan_layers > 0
        self.freezes = training.freezes
        self.zero = config.zero if sizes.weight_shards > 1 else 0
        # A shard in 8 bits is of one axis.
        self.quantizes_shards = self.zero == 3 and self.fp8 is not None and sizes.context == 1
        self.gathers: Gathers | None = None
        if self.zero == 3:
            self.gathers = where_gathered(config, sizes, local_devices, freezes=self.freezes)
        self._graph, abstract = nnx.split(nnx.eval_shape(build))
        self._variables = {_name(path): (path, leaf) for path, leaf in nnx.to_flat_state(abstract)}
        self.abstract_params = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for name, (_, leaf) in self._variables.items()
        }
        self.specs: dict[str, P] = {
            _name(path): spec.get_value()
            for path, spec in nnx.to_flat_state(nnx.get_partition_spec(abstract))
        }
        # A router is small. Whole and in float32, it chooses the same experts on every mesh.
        self.matrices = frozenset(
            name
            for name in self.abstract_params
            if not is_vector(name) and not name.endswith(".router.kernel")
        )
        self.sharded_dimensions: dict[str, int] = {}
        if self.zero:
            self._shard_weights(config, sizes)
        self._set_frozen_apart(training)
        self.kept_weights = {
            name: jax.ShapeDtypeStruct(self.abstract_params[name].shape, self.compute_dtype)
            for name in self._names_of_kept_weights(config, sizes)
        }
        self.kept_magnitudes = self._kept_magnitudes(config, sizes)

    def _kept_magnitudes(self, config: Config, sizes: MeshSizes) -> dict[str, Magnitudes]:
        if not keeps_magnitudes(config, sizes):
            return {}
        kept: dict[str, Magnitudes] = {}
        kernels = known_kernels(self._abstract_model())
        for name, (fp8, inputs) in kernels.items():
            of = Magnitudes(None, fp8, self.compute_dtype, inputs, self._stacked(name))
            kept[name] = of.on_mesh(self.abstract_params[name], self.specs[name], sizes.tensor)
        # Formats that make no use of them have none.
        return {name: each for name, each in kept.items() if each.values is not None}

    def _abstract_model(self) -> Llama:
        """The model with shapes for parameters, all of which are trained."""
        shapes: Any = self.abstract_params
        return self.merge(shapes)

    def _names_of_kept_weights(self, config: Config, sizes: MeshSizes) -> list[str]:
        if not keeps_weights(config, sizes):
            return []
        kept = self.matrices
        if self.fp8 is not None:
            # What is quantized is read in float32, and stored in 8 bits.
            model = self._abstract_model()
            kept = kept - quantizing_layers(model).keys()
            kept -= {"embedding"} if model.head_fp8 is not None else set()
        # A table that only looks tokens up reads few rows.
        return sorted(name for name in kept if name != "embedding" or config.model.tied_head)

    def _set_frozen_apart(self, training: Training) -> None:
        """Moves what is not trained from the parameters to `frozen_params`."""
        training.check(self.abstract_params)
        frozen = {n for n in self.abstract_params if not training.trains(n)}
        self.frozen_params: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(
                leaf.shape, self.compute_dtype if name in self.matrices else leaf.dtype
            )
            for name, leaf in self.abstract_params.items()
            if name in frozen
        }
        self.frozen_specs: dict[str, Any] = {name: self.specs[name] for name in self.frozen_params}
        self.kernels_in_8_bits: dict[str, int] = {}
        if self._config.lora.base_format is not None:
            self._store_in_8_bits(self._config.lora.base_format)
        self.abstract_params = {
            n: leaf for n, leaf in self.abstract_params.items() if n not in frozen
        }
        self.specs = {name: self.specs[name] for name in self.abstract_params}

    def _store_in_8_bits(self, fp8: str) -> None:
        """Makes frozen kernels that layers multiply in 8 bits matrices: see `frozen_format`."""
        model = nnx.eval_shape(lambda: self._build(self._config))
        for name, inputs in frozen_format.input_dimensions(model).items():
            if name not in self.frozen_params:
                continue
            leaf, stacked = self.frozen_params[name], self._stacked(name)
            made = frozen_format.abstract(leaf, inputs, fp8, self.compute_dtype, stacked)
            spec = self.frozen_specs[name]
            self.kernels_in_8_bits[name] = inputs
            self.frozen_params[name] = made
            self.frozen_specs[name] = frozen_format.specs(made, spec, inputs, stacked)

    @property
    def all_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Global shapes and dtypes of all parameters, frozen or not."""
        return {**self.abstract_params, **self.frozen_params}

    @property
    def all_specs(self) -> dict[str, P]:
        """`PartitionSpec` of all parameters."""
        return {**self.specs, **self.frozen_specs}

    @property
    def base_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Global shapes of all parameters but adapters, float32, as checkpoints have them."""
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
            for name, (_, leaf) in self._variables.items()
            if not is_adapter(name)
        }

    @property
    def base_specs(self) -> dict[str, P]:
        """`PartitionSpec` of the same."""
        flat = nnx.from_flat_state([*self._variables.values()])
        every = nnx.to_flat_state(nnx.get_partition_spec(flat))
        return {_name(path): spec.get_value() for path, spec in every}

    def _shard_weights(self, config: Config, sizes: MeshSizes) -> None:
        """Shards the parameters over the fsdp axis too."""
        shards = shard_axes_of(sizes)
        training = Training(config.lora, config.freeze)
        for name in sorted(self.matrices):
            if not training.trains(name) and not self.gathered_by_layers(name):
                continue  # What is whole wherever it is used stays so.
            leaf, stacked = self.abstract_params[name], self._stacked(name)
            spec = self.specs[name]
            if is_expert(name):
                if sharded_dimension(spec, "fsdp") == expert_dimension(name):
                    continue
                stacked += 1  # Shards of matrices are gathered, and not their number.
            own = sharded_spec(leaf.shape[stacked:], P(*spec[stacked:]), shards, sizes.by_axis)
            dimension = sharded_dimension(own, "fsdp")
            if dimension is not None:
                self.specs[name] = P(*spec[:stacked], *own)
                self._variables[name][1].set_metadata(out_sharding=tuple(self.specs[name]))
                self.sharded_dimensions[name] = dimension
        if not self.sharded_dimensions:
            raise ValueError(
                f"mesh.fsdp={sizes.fsdp}{_and_context(sizes)}: divides no matrix of the model that"
                f" is trained; choose a divisor of model.features={config.model.features}"
            )

    def gathered_by_layers(self, name: str) -> bool:
        """Whether layers take shards of a parameter that the fsdp axis shards."""
        if self.gathers != "matmuls" or is_adapter(name):
            return False
        if name == "head.kernel":  # In chunks it is used several times.
            return loss_chunk(self._config, self._sizes) is None
        return name != "embedding" or not self._config.model.tied_head

    def _stacked(self, name: str) -> int:
        """The number of dimensions of a parameter that count layers: 1 if they are stacked."""
        return int(self.stacks_layers and name.startswith("layers."))

    @property
    def whole_matrices(self) -> dict[str, int]:
        """The trained parameters that the fsdp axis does not divide, which stay whole: the number
        of matrices of each, which is that of the layers if they are stacked."""
        whole = {
            name
            for name in self.matrices & self.specs.keys() - self.sharded_dimensions.keys()
            if sharded_dimension(self.specs[name], "fsdp") is None
        }
        return {
            name: leaf.shape[0] if self._stacked(name) else 1
            for name, leaf in self.abstract_params.items()
            if name in whole
        }

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the whole model."""
        return sum(math.prod(leaf.shape) for _, leaf in self._variables.values())

    @property
    def trained_count(self) -> int:
        """Number of parameters that are trained."""
        return sum(math.prod(leaf.shape) for leaf in self.abstract_params.values())

    @property
    def active_parameter_count(self) -> int:
        """Number of parameters that compute with one token: of experts, those that it is sent
        to."""
        return round(sum(map(self._active_size, self._variables)))

    def _active_size(self, name: str) -> float:
        """The numbers of a parameter that compute with one token, on average over experts."""
        size = math.prod(self._variables[name][1].shape)
        if expert_dimension(name) is None:
            return size
        model = self._config.model
        return size * (model.num_experts_per_token or 1) / (model.num_experts or 1)

    def flops_per_token(self, sequence_length: int) -> int:
        """`model_flops_per_token` of this model, with its adapters and what it freezes.

        Args:
          sequence_length: number of tokens that attend to each other.
        """
        model = self._config.model
        sizes = {n: self._active_size(n) for n in self._variables if self._multiplies(n)}
        frozen = sum(size for name, size in sizes.items() if name in self.frozen_params)
        adapters = sum(size for name, size in sizes.items() if is_adapter(name))
        return model_flops_per_token(
            matmul_parameters=model.matmul_parameters + round(adapters),
            layers=model.num_layers,
            heads=model.num_heads,
            head_dim=model.head_dim,
            sequence_length=sequence_length,
            frozen_parameters=round(frozen),
        )

    def _multiplies(self, name: str) -> bool:
        """Whether tokens are multiplied by a parameter. They only select rows of an embedding."""
        only_selects = name == "embedding" and not self._config.model.tied_head
        return name in self.matrices and not only_selects

    def _build(self, config: Config) -> Llama:
        return Llama(
            config.model,
            implementation=_implementation(config.overlap),
            fp8=self.fp8,
            fp8_layers=tuple(config.fp8_layers.split(",")),
            dtype=jnp.dtype(config.compute_dtype),
            remat=config.remat,
            attention=None if config.attention == "auto" else config.attention,
            scan_layers=config.scan_layers,
            parameter_use=self._parameter_use(config),
            weight_axis_name="fsdp" if self.gathers == "matmuls" else None,
            weight_dimension=1 if _divides_columns(config.model, self._sizes) else 0,
            key_value_copies=config.model.key_value_copies(self._sizes.tensor),
            loss_chunk=loss_chunk(config, self._sizes),
            context_axis_name="context" if self._sizes.context > 1 else None,
            context_implementation=context_implementation(config),
            expert_axis_name=expert_axes(config),
            expert_hidden_axis_name=config.expert_hidden_axis,
            expert_implementation=expert_implementation(config.overlap),
            recompute_expert_hidden=config.recompute_expert_hidden,
            training=Training(config.lora, config.freeze),
            rngs=Keys(random_key(config.seed)),
        )

    def _parameter_use(self, config: Config) -> ParameterUse | None:
        """Returns what is done to parameters where they are used; None if some are frozen."""
        if Training(config.lora, config.freeze).freezes:
            return None
        if self.accumulates and self.zero < 2:
            return Unchanged()
        return ZeroUse(
            config.compute_dtype,
            config.gradient_dtype,
            gathers=self.gathers,
            sums=not self.accumulates,
        )

    def init(self, *, stacked: bool = False) -> Params:
        """Initial parameters, global; the same for every mesh. `stacked`: as with scan_layers."""
        config = dataclasses.replace(self._config, scan_layers=1) if stacked else self._config
        model = self._build(config)
        params = {_name(path): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}
        return {
            name: leaf.astype(self._dtype_of(name)) if self.freezes else leaf
            for name, leaf in params.items()
        }

    def _dtype_of(self, name: str) -> Any:
        """The dtype of a parameter, also of one that is stacked here and not in the model."""
        frozen = not Training(self._config.lora, self._config.freeze).trains(name)
        matrix = name in self.matrices or name.replace("layers.", "layers.0.", 1) in self.matrices
        return self.compute_dtype if frozen and matrix else jnp.float32

    def random_in_8_bits(self, name: str, number: int, shardings: Any) -> Quantized:
        """A random kernel in 8 bits, of which there is never more than a layer in float32."""
        key = jax.random.fold_in(random_key(self._config.seed), number)
        _, leaf = self._variables[name]
        return frozen_format.random_kernel(key, leaf, shardings, **self._in_8_bits(name))

    def in_8_bits(self, name: str, kernel: jax.Array, shardings: Any) -> Quantized:
        """A loaded kernel in 8 bits; the array is deleted."""
        return frozen_format.convert(kernel, shardings, **self._in_8_bits(name))

    def _in_8_bits(self, name: str) -> dict[str, Any]:
        return {
            "stacked": self._stacked(name),
            "inputs": self.kernels_in_8_bits[name],
            "fp8": self._config.lora.base_format,
            "dtype": self.compute_dtype,
        }

    def prequantize(self, weights: Params | Weights) -> Weights:
        """Local weights, of which those that layers multiply in 8 bits are quantized.

        With level 3 they are shards.
        """
        if self.fp8 is None:
            return {**weights}
        shard_axis_name = "fsdp" if self.zero == 3 else None
        state = prequantized_state(self.merge(weights), weight_axis_name=shard_axis_name)
        return {_name(path): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}

    def merge(self, params: Params | Weights) -> Llama:
        """The model with these parameters, global or local."""
        return nnx.merge(self._graph, self.model_state(params))

    def model_state(self, params: Params | Weights) -> nnx.State:
        """The state of the model with these parameters."""
        return nnx.from_flat_state(
            [(path, leaf.replace(params[name])) for name, (path, leaf) in self._variables.items()]
        )


def describe_trained(model: ModelFunctions) -> list[str]:
    """How many parameters are trained, as a line to print; none if all are."""
    if not model.frozen_params:
        return []
    trained, every = model.trained_count, model.parameter_count
    return [
        f"trains {trained:,} parameters, {trained / every:.2%} of {every:,}; others are frozen, and"
        " MFU does not count gradients for them"
    ]


def _and_context(sizes: MeshSizes) -> str:
    return f" × mesh.context={sizes.context}" if sizes.context > 1 else ""


def _divides_columns(model: LlamaConfig, sizes: MeshSizes) -> bool:
    """Whether heads, hidden features and vocabulary can be sharded over tensor and fsdp."""
    columns = [model.num_heads, model.num_key_value_heads, model.vocabulary_rows]
    if model.num_experts is None:
        columns.append(model.hidden_features)
    return all(n % (sizes.tensor * sizes.fsdp) == 0 for n in columns)


def _implementation(overlap: str) -> str | tuple[str, ...] | None:
    """The `implementation` of `Llama` for a value of `Config.overlap`.

    A step of "rewrite-jit" computes with the parameters of that model, in layers of its own.
    """
    if overlap in ("auto", "rewrite-jit"):
        return None
    return "plain" if overlap == "rewrite" else tuple(overlap.split(","))


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
