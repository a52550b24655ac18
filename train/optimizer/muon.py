"""Muon: the momentum of each matrix is orthogonalized, on one device, before it becomes an update.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Liu et al., "Muon is
Scalable for LLM Training", 2025, distribute it and scale its updates. The mathematics are those of
`optax.contrib.muon`. Parameters and momentum stay sharded as the model says; the iterations of
Newton and Schulz need a whole matrix. So matrices of equal shape and sharding travel together: an
all-to-all makes each whole on one device, and another one sends it back. All devices of the mesh
share the work. Replicas would compute the same, so each takes a part, and they gather the results.
Devices that have different experts are no replicas: each orthogonalizes its own.

Legend: P is the number of devices that have parts or replicas of the same matrices, n a number of
matrices that P divides. A matrix may
have more than two dimensions, as attention kernels [features, heads, head_dim] do; *local is its
local shape, *whole its global one. A sharding has the mesh axes of each dimension, outermost first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from models.families import parameter_of
from train.config.config import OptimizerConfig
from train.config.experts import is_expert
from train.config.optimizers import OPTIMIZERS
from train.parallel.mesh import all_axes

Params = dict[str, jax.Array]
Sharding = tuple[tuple[str, ...], ...]

#: A group of matrices of one shape and sharding travels in at most as many batches. While one
#: travels, another one is orthogonalized.
_BATCHES = 4


def muon(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    specs: Mapping[str, P],
    rest: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks; another optimizer for embedding, head and norms.

    The update is for use inside a `shard_map` over the mesh, on local shards. The state has one
    moment of each matrix, sharded as the matrix is.

    Args:
      config: its momentum and weight decay, the size of its updates, and the dtype of the
        iterations.
      schedule: the learning rate.
      specs: how each parameter is sharded, by its name.
      rest: the other optimizer.
    """
    matrices = {name: dimensions for name in specs if (dimensions := matrix_dimensions(name))}

    def dimension_numbers(updates: Any) -> Any:
        # Optax masks the parameters of the other optimizer.
        return {name: matrices.get(name, leaf) for name, leaf in updates.items()}

    def orthogonalize(updates: Any, _: Any) -> Any:
        return _orthogonalize_all(updates, config, specs)

    # Without iterations, and with a preconditioner that is part of the first, it is momentum alone.
    momentum = scale_by_muon(
        beta=config.muon_momentum,
        ns_steps=0,
        preconditioning="aol",
        weight_dimension_numbers=dimension_numbers,
    )
    return optax.partition(
        {
            "muon": optax.chain(
                momentum,
                optax.stateless(orthogonalize),
                optax.add_decayed_weights(config.weight_decay),
                optax.scale_by_learning_rate(schedule),
            ),
            "rest": rest,
        },
        {name: "muon" if name in matrices else "rest" for name in specs},
    )


def matrix_dimensions(name: str) -> MuonDimensionNumbers | None:
    """The dimensions of a parameter that are a matrix, or None for those that Muon leaves alone.

    They are its last ones. Those before them count matrices, as those of experts and of stacked
    layers do. The matrix of a router is small and left alone.
    """
    parameter = parameter_of(name)
    if parameter is None or parameter.role not in ("linear", "expert"):
        return None
    kept = len(parameter.outputs)
    contracted = tuple(range(-len(parameter.inputs) - kept, -kept))
    return MuonDimensionNumbers(contracted, tuple(range(-kept, 0)))


def describe_muon(config: OptimizerConfig, params: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
    """Which of the parameters Muon updates, as lines to print; none for another optimizer.

    Args:
      config: the optimizer.
      params: global shapes of the parameters, by name.
    """
    if not OPTIMIZERS[config.kind].orthogonalizes:
        return []
    count = sum(
        math.prod(leaf.shape[: -sum(map(len, _axes_of(numbers)))])
        for name, leaf in params.items()
        if (numbers := matrix_dimensions(name)) is not None
    )
    return [f"optimizer: muon for {count} matrices, in {config.muon_dtype}; adamw for all else"]


def to_whole(shards: jax.Array, sharding: Sharding, divided: Sequence[str] = ()) -> jax.Array:
    """Makes each of n matrices whole on one device: [n, *local] -> [n/P, *whole].

    The axes of the mesh that shard nothing are its replicas. Each takes its part of the matrices.

    Args:
      shards: this device's parts.
      sharding: the axes of each dimension of a matrix.
      divided: the axes whose devices have different matrices.
    """
    replicas, axes = _axes(sharding, divided)
    if replicas:
        parts = shards.reshape(_size(replicas), -1, *shards.shape[1:])
        shards = lax.dynamic_index_in_dim(parts, lax.axis_index(replicas), keepdims=False)
    if not axes:
        return shards
    pieces = lax.all_to_all(shards, axes, split_axis=0, concat_axis=0, tiled=True)
    local = pieces.shape[1:]
    pieces = pieces.reshape(*map(lax.axis_size, axes), -1, *local)
    whole = (size * _size(names) for size, names in zip(local, sharding, strict=True))
    return pieces.transpose(_order(sharding)).reshape(-1, *whole)


def to_shards(whole: jax.Array, sharding: Sharding, divided: Sequence[str] = ()) -> jax.Array:
    """The inverse, the same on all replicas: [n/P, *whole] -> [n, *local]."""
    replicas, axes = _axes(sharding, divided)
    shards = whole
    if axes:
        local = [size // _size(n) for size, n in zip(whole.shape[1:], sharding, strict=True)]
        sizes = (
            (*map(lax.axis_size, names), size) for size, names in zip(local, sharding, strict=True)
        )
        pieces = whole.reshape(-1, *itertools.chain(*sizes))
        order = _order(sharding)
        pieces = pieces.transpose(sorted(range(len(order)), key=order.__getitem__))
        shards = lax.all_to_all(
            pieces.reshape(-1, *local), axes, split_axis=0, concat_axis=0, tiled=True
        )
    if replicas:
        shards = lax.all_gather(shards, replicas, axis=0, tiled=True, to="invarying")
    return shards


class _Group(NamedTuple):
    """Properties that matrices share if they travel together.

    Attributes:
      local: local shape of a matrix.
      sharding: the axes of each dimension.
      divided: the axes whose devices have different matrices.
      numbers: the dimensions of the matrix.
    """

    local: tuple[int, ...]
    sharding: Sharding
    divided: tuple[str, ...]
    numbers: MuonDimensionNumbers


def _orthogonalize_all(updates: Params, config: OptimizerConfig, specs: Mapping[str, P]) -> Params:
    """The updates of matrices, orthogonalized and scaled; local shards."""
    groups: dict[_Group, list[str]] = {}
    for name, leaf in updates.items():
        if matrix_dimensions(name) is not None:
            groups.setdefault(_group(name, leaf.shape, specs[name]), []).append(name)
    results = dict(updates)
    for group, names in groups.items():
        arrays = [
            updates[name].astype(config.muon_dtype).reshape(-1, *group.local) for name in names
        ]
        for name, shards in zip(names, _orthogonalize_group(arrays, group), strict=True):
            own = shards.reshape(updates[name].shape).astype(updates[name].dtype)
            results[name] = own * _scale(group, config)
    return results


def _orthogonalize_group(arrays: Sequence[jax.Array], group: _Group) -> list[jax.Array]:
    """Orthogonalizes matrices of one group, each array [any number, *local], without the scale.

    A batch depends on its own matrices alone, so XLA may communicate it before, while or after it
    multiplies another one.
    """
    devices = _size([name for name in all_axes() if name not in group.divided])
    rounds = -(-sum(map(len, arrays)) // devices)
    done: list[list[jax.Array]] = [[] for _ in arrays]
    for pieces in _batches([*map(len, arrays)], -(-rounds // _BATCHES) * devices):
        parts = [arrays[number][rows] for number, rows in pieces]
        ends = [*itertools.accumulate(map(len, parts))]
        filler = jnp.zeros((-ends[-1] % devices, *group.local), parts[0].dtype)
        axes = group.sharding, group.divided
        whole = to_whole(jnp.concatenate([*parts, filler]), *axes)
        shards = to_shards(_orthogonalize(whole, group.numbers), *axes)
        for (number, _), part, end in zip(pieces, parts, ends, strict=True):
            done[number].append(shards[end - len(part) : end])
    return [jnp.concatenate(parts) for parts in done]


def _batches(counts: Sequence[int], size: int) -> Iterator[list[tuple[int, slice]]]:
    """Batches of `size` matrices, the last one maybe of fewer: arrays by number, and their rows."""
    starts = [0, *itertools.accumulate(counts)]
    for first in range(0, starts[-1], size):
        bounds = [
            (max(first - start, 0), min(first + size - start, count))
            for start, count in zip(starts, counts, strict=False)
        ]
        yield [(number, slice(*rows)) for number, rows in enumerate(bounds) if rows[0] < rows[1]]


def _orthogonalize(whole: jax.Array, numbers: MuonDimensionNumbers) -> jax.Array:
    """Matrices [n, *whole], each orthogonalized."""
    # Without momentum, it is the orthogonalization alone.
    iterations = scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=numbers)
    orthogonal: Any = iterations.update(whole, iterations.init(whole))[0]
    return orthogonal


def _scale(group: _Group, config: OptimizerConfig) -> float:
    """The factor that makes updates of all shapes alike."""
    whole = [n * _size(names) for n, names in zip(group.local, group.sharding, strict=True)]
    fan_in, fan_out = (math.prod(whole[axis] for axis in axes) for axes in _axes_of(group.numbers))
    if config.muon_update_rms is None:
        return math.sqrt(max(1, fan_out / fan_in))
    return math.sqrt(max(fan_in, fan_out)) * config.muon_update_rms


def _group(name: str, shape: tuple[int, ...], spec: P) -> _Group:
    """The group of a parameter, of which `shape` is the local shape.

    Raises:
      ValueError: if a dimension of layers is sharded.
    """
    numbers = matrix_dimensions(name)
    assert numbers is not None
    names = [n if isinstance(n, tuple) else (n,) for n in spec]
    names += [()] * (len(shape) - len(names))
    sharding = tuple(tuple(n for n in dim if n and lax.axis_size(n) > 1) for dim in names)
    matrix = len(shape) - sum(map(len, _axes_of(numbers)))
    if any(sharding[: matrix - is_expert(name)]):
        raise ValueError(
            f"optimizer.kind='muon': {name} is sharded by {spec} over the layers that are stacked"
            " in it; expected its matrices to be sharded"
        )
    divided = tuple(itertools.chain(*sharding[:matrix]))
    return _Group(shape[matrix:], sharding[matrix:], divided, numbers)


def _axes_of(numbers: MuonDimensionNumbers) -> list[Sequence[int]]:
    """The dimensions that a matmul contracts, and those that it keeps."""
    return [(axes,) if isinstance(axes, int) else axes for axes in numbers]


def _order(sharding: Sharding) -> list[int]:
    """From [*sizes of the axes, n, *local] to [n, sizes of the axes of 0, local 0, ...]."""
    count = sum(map(len, sharding))
    axes = iter(range(count))
    order = [count]
    for dimension, names in enumerate(sharding):
        order += [*itertools.islice(axes, len(names)), count + 1 + dimension]
    return order


def _axes(sharding: Sharding, divided: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of replicas, and those that shard matrices, in the order of the dimensions."""
    axes = tuple(itertools.chain(*sharding))
    used = (*axes, *divided)
    return tuple(n for n in all_axes() if lax.axis_size(n) > 1 and n not in used), axes


def _size(names: Sequence[str]) -> int:
    return math.prod(map(lax.axis_size, names))
