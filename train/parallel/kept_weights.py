"""Weights in the compute dtype, and largest magnitudes of those in 8 bits, for the next step.

The optimizer's pass over the parameters writes both. If the step that uses them made them,
that would be a pass of its own, which reads the parameters once more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from collective_matmul import Quantized, prescale
from collective_matmul.layers import ColumnParallelLinear, RowParallelLinear
from models.parameters.adapters import Training
from train.config.config import Config, MeshSizes

Params = dict[str, jax.Array]


def keeps_weights(config: Config, sizes: MeshSizes) -> bool:
    """Whether a state has parameters in the compute dtype too.

    They are kept where this costs no memory: where weights are not gathered over devices, and most
    memory is in use when all weights stand beside the activations of all blocks. With remat that
    moment is later, when a step that makes its weights has freed them.

    Args:
      config: the configuration.
      sizes: the mesh.
    """
    gathers = config.zero > 0 and sizes.weight_shards > 1
    freezes = Training(config.lora, config.freeze).freezes
    if gathers or freezes or config.remat != "none" or config.compute_dtype == "float32":
        return False
    # Programs that `overlap` rewrites make their weights, and quantize them, themselves.
    return config.overlap != "rewrite-jit" and not (config.overlap == "rewrite" and config.fp8)


def keeps_magnitudes(config: Config, sizes: MeshSizes) -> bool:
    """Whether a state has the largest magnitudes of weights that layers multiply in 8 bits.

    They are kept where XLA finds them in the one pass of the optimizer: where gradients reach it in
    half precision, as they are neither summed over devices nor added up. Beside float32 gradients,
    XLA divides that pass into two if it also has to find them, and moves more bytes.

    Args:
      config: the configuration.
      sizes: the mesh.
    """
    if config.fp8 is None or config.overlap in ("rewrite", "rewrite-jit"):
        return False
    if config.compute_dtype == "float32" or config.gradient_accumulation_steps > 1:
        return False
    is_summed = sizes.data * sizes.fsdp * sizes.context > 1
    return not is_summed and not Training(config.lora, config.freeze).freezes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Magnitudes:
    """The largest magnitudes of a parameter [*K, *N] that layers multiply in 8 bits.

    Attributes:
      values: what `prescale` finds of this device's shard, each array [1, ...], or of all layers
        that are stacked, [1, layers, ...]; globally [tensor, ...].
      fp8: the recipe.
      dtype: the dtype in which it is multiplied.
      inputs: the number of dimensions *K.
      stacked: the number of dimensions before *K, which count layers.
    """

    values: Any
    fp8: str = field(metadata={"static": True})
    dtype: str = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})
    stacked: int = field(metadata={"static": True})

    def of(self, parameter: jax.Array) -> Magnitudes:
        """The magnitudes of another local parameter."""

        def found(kernel: jax.Array) -> Any:
            return prescale(self._matrix(kernel), self.fp8).magnitudes

        values = jax.vmap(found)(parameter) if self.stacked else found(parameter)
        return dataclasses.replace(self, values=jax.tree.map(lambda leaf: leaf[None], values))

    def weight(self, kernel: jax.Array) -> Quantized:
        """The local weight that has these magnitudes, as layers take it, from its array."""

        def made(kernel: jax.Array, magnitudes: Any) -> Quantized:
            known = prescale(self._matrix(kernel), self.fp8, magnitudes=magnitudes)
            return known.with_array(kernel)

        magnitudes = jax.tree.map(lambda leaf: leaf[0], self.values)
        return (jax.vmap(made) if self.stacked else made)(kernel, magnitudes)

    def _matrix(self, kernel: jax.Array) -> jax.Array:
        """[*K, *N] -> [K, N], in the dtype of the matmul."""
        inputs = math.prod(kernel.shape[: self.inputs])
        return kernel.astype(self.dtype).reshape(inputs, -1)

    def on_mesh(self, kernel: jax.ShapeDtypeStruct, spec: P, tensor: int) -> Magnitudes:
        """Global shapes of the magnitudes of a parameter.

        Args:
          kernel: global shape and dtype of the parameter.
          spec: its axes, at most the tensor axis.
          tensor: the size of this axis.
        """
        shards = [tensor if axes == "tensor" else 1 for axes in spec]
        shards += [1] * (len(kernel.shape) - len(shards))
        shape = tuple(size // parts for size, parts in zip(kernel.shape, shards, strict=True))
        local = jax.eval_shape(self.of, jax.ShapeDtypeStruct(shape, kernel.dtype))
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((tensor, *leaf.shape[1:]), leaf.dtype), local
        )


#: The spec of every array of `Magnitudes`.
MAGNITUDES_SPEC = P("tensor")


def quantizing_layers(model: nnx.Module) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
    """The layers that quantize their kernels, by the path of the kernel."""
    return {
        ".".join(map(str, (*path, "kernel"))): layer
        for path, layer in nnx.iter_modules(model)
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear)
        if layer.fp8 is not None and getattr(layer, "gather_dimension", 0) is not None
    }


def known_kernels(model: nnx.Module) -> dict[str, tuple[str, int]]:
    """The kernels that layers quantize as devices have them, by their path.

    Not those of which several devices have all columns, and each takes its own.

    Returns:
      Of each kernel the recipe, and the number of dimensions that are input features.
    """
    return {
        name: (layer.fp8, len(layer.kernel_shape[0]))
        for name, layer in quantizing_layers(model).items()
        if layer.fp8 is not None and getattr(layer, "copies", 1) == 1
    }


def made_of(params: Params, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Makes of local parameters what a state keeps of them.

    Args:
      params: the parameters.
      kept: what to make by name, as arrays or shapes: weights, and `Magnitudes`.
    """
    return {
        name: like.of(params[name])
        if isinstance(like, Magnitudes)
        else params[name].astype(like.dtype)
        for name, like in kept.items()
    }
