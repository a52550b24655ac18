"""The two contexts of a layer: local shards inside a `shard_map`, or global arrays.

Inside a `jax.shard_map` over the tensor axis, parameters and activations are this device's shards.
Elsewhere they are global, and the layer enters `shard_map` itself.

It makes the tensor axis manual and leaves other Auto axes to the compiler, so a batch sharded over
them stays sharded. Axes that a layer is told of as its `data_axis_name` become manual too, so that
its ops see one device's part of the batch. Explicit axes are part of an array's type, which
`shard_map` requires in its specs. They become manual likewise: leading dimensions stay sharded as
the type of x says, and parameters are gathered. Axes of size 1 become manual because XLA compiles a
`shard_map` over the whole mesh best.

JAX's default is Explicit axes, and refuses operations whose sharding it cannot infer. Most code is
not written for that. So a mesh that a layer is given has Auto axes for it, until it is called with
arrays whose types have Explicit axes. The mesh of `jax.set_mesh` is taken as it is.

Inside a `shard_map` over other axes only, a layer enters a nested `shard_map`. JAX can
differentiate that only if the outer one has ``check_vma=False``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from collective_matmul.operands.sharded import WeightShards
from collective_matmul.ops.matmul.checks import shown

#: A second mesh axis of a kernel [*K, *N], and which of its features it shards: the first of *K, 0,
#: or of *N, 1. Inside a `shard_map` over that axis, kernels are shards, of x's dtype or a wider
#: one, and the ops gather them.
WeightSharding = tuple[str, Literal[0, 1]]

#: The entries of a partition spec.
SpecEntries = tuple[str | tuple[str, ...] | None, ...]

#: The mesh axes that shard each dimension before the features, major first.
LeadingAxes = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class LocalShards:
    """Context inside a `shard_map` over the axis: arrays are this device's shards.

    Attributes:
      axis_name: the mesh axis; "" for a layer that works over no axis.
      further_axes: further axes that it works over.
    """

    axis_name: str
    further_axes: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """The size of the axis."""
        return lax.axis_size(self.axis_name)

    @property
    def parameter_shards(self) -> int:
        """The number of pieces that parameters are already split into."""
        return self.devices

    def leading_axes(self, x: jax.Array, count: int) -> LeadingAxes:
        """The axes that are known to shard the first `count` dimensions of x: none."""
        return ((),) * count

    def weight_shards(
        self, sharding: WeightSharding | None, leading: LeadingAxes = ()
    ) -> WeightShards | None:
        """How a second axis shards kernels, if the `shard_map` is over that axis too."""
        del leading
        if sharding is None or sharding[0] not in jax.sharding.get_abstract_mesh().manual_axes:
            return None
        axis_name, dimension = sharding
        return WeightShards(axis_name, lax.axis_size(axis_name), dimension)

    def shards(self, axes: tuple[str, ...]) -> int:
        """The number of pieces that a dimension sharded over `axes` is still to be split into."""
        return 1

    def map_shards(self, fun: Callable, operands: Any, in_specs: Any, out_specs: Any) -> Any:
        """``fun(*operands)``."""
        return fun(*operands)

    def reshard(self, y: jax.Array, sharding: Sharding | P | None) -> jax.Array:
        """The array itself: `shard_map` decides its sharding.

        Raises:
          ValueError: unless `sharding` is None.
        """
        if sharding is not None:
            raise ValueError(
                f"out_sharding={sharding}: inside shard_map the result is this device's shard;"
                " leave it out, and give shard_map the out_specs"
            )
        return y


@dataclass(frozen=True)
class GlobalArrays:
    """Context outside of a `shard_map` over the axis: arrays are global.

    Attributes:
      axis_name: the mesh axis; "" for a layer that works over no axis.
      mesh: the mesh of the arrays.
      further_axes: further axes that `map_shards` divides arrays over.
      data_axes: Auto axes that shard dimension 0 of activations where they divide it.
      parameter_shards: the number of pieces that parameters are already split into.
    """

    axis_name: str
    mesh: Mesh | AbstractMesh
    further_axes: tuple[str, ...] = ()
    data_axes: tuple[str, ...] = ()
    parameter_shards = 1

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that `map_shards` divides arrays over."""
        return (self.axis_name, *self.further_axes) if self.axis_name else ()

    @property
    def devices(self) -> int:
        """The size of the axis."""
        return self.mesh.shape[self.axis_name]

    def leading_axes(self, x: jax.Array, count: int) -> LeadingAxes:
        """The axes that are known to shard the first `count` dimensions, without the context's own.

        Types of arrays tell of Explicit axes. Those of the batch are known by `data_axes`.
        """
        others = set(self._explicit_axes()) - set(self.axes)
        named = (*_axes_of(jax.typeof(x).sharding.spec), *[()] * count)[:count]
        leading = tuple(tuple(axis for axis in axes if axis in others) for axes in named)
        if not self.data_axes or not leading:
            return leading
        batch = (*leading[0], *self.data_axes)
        return (batch, *leading[1:]) if x.shape[0] % self.shards(batch) == 0 else leading

    def weight_shards(
        self, sharding: WeightSharding | None, leading: LeadingAxes = ()
    ) -> WeightShards | None:
        """How a second axis shards kernels, if it shards the batch: dimension 0 in `leading`.

        None otherwise: the compiler gathers the kernels then.
        """
        if sharding is None or not leading or sharding[0] not in leading[0]:
            return None
        axis_name, dimension = sharding
        return WeightShards(axis_name, self.shards((axis_name,)), dimension)

    def shards(self, axes: tuple[str, ...]) -> int:
        """The number of pieces that a dimension sharded over `axes` is still to be split into."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def map_shards(self, fun: Callable, operands: Any, in_specs: Any, out_specs: Any) -> Any:
        """``fun(*operands)`` on every device's shards; `in_specs` is a pytree like `operands`."""
        single = (axis for axis in self.mesh.abstract_mesh.auto_axes if self.mesh.shape[axis] == 1)
        named = itertools.chain(*(itertools.chain(*_axes_of(s)) for s in jax.tree.leaves(in_specs)))
        return jax.shard_map(
            fun,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={*self.axes, *self._explicit_axes(), *single, *named},
        )(*jax.tree.map(self._with_type_of, operands, in_specs))

    def reshard(self, y: jax.Array, sharding: Sharding | P | None) -> jax.Array:
        """The array with another sharding; None leaves it as it is."""
        if sharding is None:
            return y
        if isinstance(sharding, P):
            sharding = NamedSharding(self.mesh, sharding)
        if self._explicit_axes():
            return jax.sharding.reshard(y, sharding)
        return lax.with_sharding_constraint(y, sharding)

    def _with_type_of(self, array: jax.Array, spec: P) -> jax.Array:
        """The array, resharded over the Explicit axes of the spec."""
        explicit = self._explicit_axes()
        if not explicit:
            return array
        kept = (tuple(axis for axis in axes if axis in explicit) for axes in _axes_of(spec))
        return jax.sharding.reshard(array, NamedSharding(self.mesh, partition_spec(tuple(kept))))

    def _explicit_axes(self) -> tuple[str, ...]:
        return tuple(self.mesh.abstract_mesh.explicit_axes)


ShardingContext = LocalShards | GlobalArrays


def current_context(
    axis_name: str,
    mesh: Mesh | AbstractMesh | None,
    arrays: Any = (),
    further_axes: tuple[str, ...] = (),
    data_axes: tuple[str, ...] = (),
) -> ShardingContext:
    """The context of the caller.

    Args:
      axis_name: the mesh axis.
      mesh: mesh of the global arrays; None uses the mesh of `jax.set_mesh`.
      arrays: a pytree of the arrays that the layer is called with, and of its parameters.
      further_axes: further mesh axes that the layer works over.
      data_axes: mesh axes that shard dimension 0 of the layer's activations. Inside a `shard_map`
        over one of them arrays are shards already, and types tell it of Explicit axes.

    Raises:
      TypeError: if `mesh` is something else.
      ValueError: if there is no mesh, it has no such axis, or a `shard_map` is over some of the
        axes only.
    """
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"mesh={shown(mesh)}: expected a jax.sharding.Mesh, as jax.make_mesh((8,),"
            f' ("{axis_name}",)) makes, an AbstractMesh, or None for that of jax.set_mesh'
        )
    around = jax.sharding.get_abstract_mesh()
    axes = (axis_name, *further_axes)
    if all(axis in around.manual_axes for axis in axes):
        return LocalShards(axis_name, further_axes)
    if any(axis in around.manual_axes for axis in axes):
        raise ValueError(
            f"the layer's axes {axes}: jax.shard_map is over {tuple(around.manual_axes)} here; call"
            " the layer inside a jax.shard_map over all of its axes, or over none of them"
        )
    # Inside a shard_map over other axes only the mesh around knows which those are.
    found = around if mesh is None or around.manual_axes else mesh
    if found.empty:
        raise ValueError(
            f"axis_name={shown(axis_name)}: there is no mesh here; call the layer inside"
            " `with jax.set_mesh(mesh):`, construct it with mesh=mesh, or call it inside"
            " jax.shard_map over that axis"
        )
    known_axes("axis_name", axes, found.axis_names)
    known_axes("data_axis_name", data_axes, found.axis_names)
    if around.empty and not any(map(has_explicit_axes, jax.tree.leaves(arrays))):
        found = with_auto_axes(found)
    free = set(found.abstract_mesh.auto_axes) - {*axes, *around.manual_axes}
    data = tuple(axis for axis in data_axes if axis in free)
    return GlobalArrays(axis_name, found, further_axes, data)


def known_weight_devices(
    weight_axis_name: str, axis_name: str, mesh: Mesh | AbstractMesh | None
) -> int | None:
    """The size of a second axis of kernels; None if no mesh is known yet, or kernels are shards.

    Raises:
      ValueError: if the mesh has no such axes.
    """
    if known_axis_size(axis_name, mesh) is None:
        return None
    context = current_context(axis_name, mesh)
    if isinstance(context, LocalShards):
        return None
    known_axes("weight_axis_name", (weight_axis_name,), context.mesh.axis_names)
    return context.mesh.shape[weight_axis_name]


def known_axes(argument: str, names: Sequence[str], available: Sequence[str]) -> None:
    """Checks that a mesh has axes.

    Raises:
      ValueError: if it does not.
    """
    for name in names:
        if name not in available:
            raise ValueError(
                f"{argument}={shown(name)}: the mesh has the axes {tuple(available)}; name one of"
                " them"
            )


def with_auto_axes(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh with all its axes Auto."""
    if not mesh.abstract_mesh.explicit_axes:
        return mesh
    axis_types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=axis_types)
    return mesh.update(axis_types=axis_types)


def has_explicit_axes(value: Any) -> bool:
    """Whether it is an array whose type says how Explicit axes shard it."""
    return isinstance(value, jax.Array) and bool(jax.typeof(value).sharding.mesh.explicit_axes)


def known_axis_size(
    axis_name: str, mesh: Mesh | AbstractMesh | None, data_axes: tuple[str, ...] = ()
) -> int | None:
    """The size of the axis, or None if no mesh that has it is known yet.

    Raises:
      ValueError: if `mesh` has no such axis, or not the axes `data_axes`.
    """
    around = jax.sharding.get_abstract_mesh()
    if mesh is None and axis_name not in around.axis_names:
        return None
    return current_context(axis_name, mesh, data_axes=data_axes).devices


def sharded(leading: LeadingAxes, dimension: int | None, axis_name: str) -> LeadingAxes:
    """`leading` with one dimension also sharded over the axis, which is the minor axis there."""
    return tuple((*axes, axis_name) if i == dimension else axes for i, axes in enumerate(leading))


def kernel_spec(
    features: tuple[int, int], dimension: int | None, axis_name: str, weights: WeightSharding | None
) -> SpecEntries:
    """How a kernel is sharded.

    Args:
      features: its numbers of input and of output dimensions.
      dimension: the dimension that the axis shards, or None.
      axis_name: the axis; it is the major one where both shard a dimension.
      weights: a second axis, or None.
    """
    inputs, outputs = features
    axes = sharded(((),) * (inputs + outputs), dimension, axis_name)
    if weights is not None:
        second, side = weights
        axes = sharded(axes, inputs if side else 0, second)
    return tuple(names[0] if len(names) == 1 else names or None for names in axes)


def partition_spec(leading: LeadingAxes, *features: str | None) -> P:
    """The spec of an array with these leading axes and feature dimensions."""
    return P(*(axes or None for axes in leading), *features)


def _axes_of(spec: P) -> LeadingAxes:
    """The axes that each entry of a spec names."""
    return tuple(
        () if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec
    )
