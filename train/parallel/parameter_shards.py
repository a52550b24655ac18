"""How the fsdp axis, and a context axis with it, shard parameters; weights from their shards.

A weight is gathered before it is used, and its gradient is scattered: each device gets the sum,
over the axis, of its own shard. Dimensions count from the end, -1 being the last, so that those of
stacked parameters are those of one layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul import Quantized
from models.parameters.use import Gathers, arrays_of, as_varying
from train.config.experts import expert_dimension
from train.parallel.mesh import shard_axes, token_axes

Tree = Any


def sharded_spec(
    shape: Sequence[int], spec: P, axes: tuple[str, ...], sizes: Mapping[str, int]
) -> P:
    """The spec of a parameter that further axes shard, together one dimension.

    Takes the largest dimension that no other axis shards, if these axes divide it; else the largest
    of which they divide the shards. For the kernels of a transformer that is the width of the
    residual stream. Vectors, what the axes do not divide, and what they shard already stay as they
    are.

    Args:
      shape: global shape of the parameter.
      spec: the axes that shard it, at most one for each dimension.
      axes: the axes to add, outermost first.
      sizes: size of each axis of the mesh.

    Returns:
      A spec with as many entries as dimensions, or `spec`.
    """
    names: list[Any] = [*spec, *[None] * (len(shape) - len(spec))]
    if sharded_dimension(spec, axes[0]) is not None:
        return P(*names)
    devices = math.prod(sizes[axis] for axis in axes)

    def local_size(dimension: int) -> int:
        return shape[dimension] // sizes.get(names[dimension], 1)

    dimensions = [d for d in range(len(shape)) if local_size(d) % devices == 0]
    if len(shape) < 2 or not dimensions:
        return spec
    chosen = max(dimensions, key=lambda d: (names[d] is None, shape[d], -d))
    added = axes if names[chosen] is None else (names[chosen], *axes)
    names[chosen] = added[0] if len(added) == 1 else added
    return P(*names)


def sharded_dimension(spec: P, axis_name: str) -> int | None:
    """The dimension that an axis shards, counted from the end of the spec, or None."""
    for place, names in enumerate(spec):
        if axis_name in _names(names):
            return place - len(spec)
    return None


def gathered_dimension(spec: P, experts: int | None) -> int | None:
    """The dimension of a parameter that the fsdp axis shards and uses gather, or None.

    Args:
      spec: the axes of the parameter.
      experts: `expert_dimension` of its name.
    """
    dimension = sharded_dimension(spec, "fsdp")
    return None if dimension == experts else dimension


def replica_axes(spec: P) -> tuple[str, ...]:
    """The axes of tokens along which devices have the same shard of a parameter.

    A gradient is summed over these alone. Along the axes that experts are divided over, devices
    exchange tokens, so the gradient of an expert has the terms of all of them already.
    """
    used = {name for names in spec for name in _names(names)}
    return tuple(axis for axis in token_axes() if axis not in used)


def _names(names: Any) -> tuple[Any, ...]:
    """The axes of one entry of a spec."""
    return names if isinstance(names, tuple) else (names,)


@dataclass(frozen=True)
class ZeroUse:
    """A `models.parameter_use.ParameterUse`: what ZeRO does where a block uses its parameters.

    Attributes:
      compute_dtype: dtype of gathered weights. A shard is cast before it travels, unless it has
        copies in 8 bits, which then travel.
      gradient_dtype: dtype in which gradients travel and are summed.
      gathers: "blocks", weights are gathered for each block; "matmuls", linear layers gather
        their weights themselves, and scatter their gradients; None, they were made before.
      sums: gradients are summed over all devices that have sequences of their own. Otherwise they
        are only scattered.
    """

    compute_dtype: str
    gradient_dtype: str
    gathers: Gathers | None
    sums: bool

    @jax.named_scope("weights")
    def weights(self, parameters: Tree, gathered: Tree | None, *, whole: bool = False) -> Tree:
        """Local parameters -> weights, typed as varying over the axes of tokens.

        If weights are gathered here or by layers, `gathered` only has their shards in 8 bits.
        """
        if gathered is None or self.gathers is not None:
            leaves, structure = jax.tree.flatten(parameters)
            before = leaves if gathered is None else structure.flatten_up_to(gathered)
            sources = zip(leaves, before, _dimensions(_specs(parameters)), strict=True)
            gathered = structure.unflatten(self._weight(*each, whole) for each in sources)
        return jax.tree.map(lambda leaf: as_varying(leaf, token_axes()), gathered)

    def _weight(
        self,
        parameter: jax.Array,
        before: jax.Array | Quantized,
        dimension: int | None,
        whole: bool,
    ) -> jax.Array | Quantized:
        """The weight of a parameter; `before` has its copies in 8 bits, if there are any."""
        if dimension is not None and (whole or self.gathers != "matmuls"):
            if isinstance(before, Quantized):
                return before.gathered(dimension)
            return gather(parameter, dimension, self.compute_dtype)
        if dimension is not None and self.gradient_dtype != "float32":
            parameter = parameter.astype(self.gradient_dtype)
        return before.with_array(parameter) if isinstance(before, Quantized) else parameter

    @jax.named_scope("weights")
    def gradients(self, gradients: Tree, *, whole: bool = False) -> Tree:
        """Gradients of weights -> gradients of local parameters, in float32 if they were summed in
        it, else as they came, which is half the memory."""
        gradients = arrays_of(gradients)
        leaves, structure = jax.tree.flatten(gradients)
        specs = _specs(gradients)
        for place, dimension in enumerate(_dimensions(specs)):
            if dimension is not None and (whole or self.gathers != "matmuls"):
                leaves[place] = scatter(leaves[place], dimension, self.gradient_dtype)
            if self.sums:
                replicas = replica_axes(specs[place][1])
                leaves[place] = sum_over(leaves[place], replicas, self.gradient_dtype)
        return jax.tree.unflatten(structure, leaves)


def gather(shard: jax.Array, dimension: int, dtype: str) -> jax.Array:
    """float32 [..., n, ...] -> [..., D*n, ...] in `dtype`; the dimension counts from the end."""
    axis = dimension % shard.ndim
    return lax.all_gather(shard.astype(dtype), shard_axes(), axis=axis, tiled=True)


def scatter(gradient: jax.Array, dimension: int, dtype: str) -> jax.Array:
    """The sum of all devices' gradients: any dtype [..., D*n, ...] -> [..., n, ...] in `dtype`."""
    axis, gradient = dimension % gradient.ndim, gradient.astype(dtype)
    return lax.psum_scatter(gradient, shard_axes(), scatter_dimension=axis, tiled=True)


def sum_over(gradient: jax.Array, axes: Sequence[str], dtype: str) -> jax.Array:
    """The sum of all devices' gradients along axes, in `dtype`; in the gradient's own dtype if
    there is one device."""
    if math.prod(map(lax.axis_size, axes)) > 1:
        gradient = gradient.astype(dtype)
    return lax.psum(gradient, tuple(axes))


def _specs(state: Tree) -> list[tuple[int | None, P]]:
    """The dimension of each array of a state that counts experts, and its spec."""
    specs = jax.tree_util.tree_leaves_with_path(
        nnx.get_partition_spec(state), is_leaf=lambda leaf: isinstance(leaf, P)
    )
    return [
        (expert_dimension(jax.tree_util.keystr(path, simple=True, separator=".")), spec)
        for path, spec in specs
    ]


def _dimensions(specs: Sequence[tuple[int | None, P]]) -> list[int | None]:
    """The dimension of each array that uses gather."""
    return [gathered_dimension(spec, experts) for experts, spec in specs]
