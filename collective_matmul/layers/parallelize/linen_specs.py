"""Partition specs for the variables of a linen module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax.core import meta
from jax.sharding import PartitionSpec as P

from collective_matmul.layers import layer_checks
from collective_matmul.layers.parallelize.parallel_styles import Column, Heads, ParallelStyle, Row

#: By the path of a layer: the numbers of dimensions that its kernel contracts, and of the others.
KernelRanks = dict[str, tuple[int, int]]

CACHES = ("cached_key", "cached_value")


def partition_specs(
    variables: Mapping[str, Any],
    style: Callable[[str], ParallelStyle | None],
    ranks: KernelRanks,
    axis_name: str,
    devices: int | None,
    metadata_axes: set[str],
) -> Any:
    """A spec for each variable, in the structure of the variables without boxes.

    Args:
      variables: the variables or their shapes.
      style: the style of the module at a path.
      ranks: of layers whose kernel has several input or output features.
      axis_name: the mesh axis.
      devices: its size, or None if it is not known.
      metadata_axes: variables that no style matches are sharded as their boxes say, if these name
        only such axes.
    """

    def spec(keys: Any, leaf: Any) -> P:
        collection, *path, name = names_of(keys)
        names = _sharded_names(style, path, name, ranks, (axis_name, devices))
        if names is not None and collection == ("cache" if name in CACHES else "params"):
            # Layers stacked by linen.scan have additional leading dimensions.
            return P(*[None] * (unboxed(leaf).ndim - len(names)), *names)
        given = leaf.get_partition_spec() if isinstance(leaf, meta.Partitioned) else P()
        return given if set(jax.tree.leaves(tuple(given))) <= metadata_axes else P()

    return jax.tree.map_with_path(spec, variables, is_leaf=_is_box)


def _sharded_names(
    style: Callable[[str], ParallelStyle | None],
    path: Sequence[str],
    name: str,
    ranks: KernelRanks,
    axis: tuple[str, int | None],
) -> tuple[str | None, ...] | None:
    """The axes of the last dimensions of a variable; None if no style says anything of it."""
    entry, (axis_name, _) = style(".".join(path)), axis
    if isinstance(entry, Heads):
        return (axis_name, None) if name in CACHES else None
    if entry is None or name not in ("kernel", "bias"):
        return None
    in_attention = isinstance(style(".".join(path[:-1])), Heads)
    unknown = (1, 1) if not in_attention else (1, 2) if isinstance(entry, Column) else (2, 1)
    inputs, outputs = ranks.get(".".join(path), unknown)
    rows: list[str | None] = [None] * inputs
    columns: list[str | None] = [None] * outputs
    if isinstance(entry, Row):
        rows[0] = axis_name
    elif isinstance(entry, Column) and layer_checks.copies_of_heads(entry.heads, *axis) == 1:
        columns[0] = axis_name
    return (*rows, *columns) if name == "kernel" else tuple(columns)


def layer_paths(variables: Mapping[str, Any]) -> set[str]:
    """The paths of all modules with a kernel, and of attention modules."""
    paths: set[str] = set()
    for keys, _ in jax.tree.leaves_with_path(unboxed(variables.get("params", {}))):
        *path, name = names_of(keys)
        if name == "kernel":
            paths.add(".".join(path))
    above = {path.rpartition(".")[0] for path in paths}
    parts = {"query", "key", "value", "out"}
    return paths | {a for a in above if {f"{a}.{n}".lstrip(".") for n in parts} <= paths}


def names_of(keys: Any) -> list[str]:
    """A path of pytree keys as strings."""
    return [jax.tree_util.keystr((key,), simple=True) for key in keys]


def sizes(value: int | Sequence[int]) -> tuple[int, ...]:
    """One size or several as a tuple."""
    return tuple(value) if isinstance(value, Sequence) else (value,)


def unboxed(tree: Any) -> Any:
    """The arrays without Flax's boxes. Flax's own unboxing would also constrain their sharding."""
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, meta.Partitioned) else meta.unbox(leaf),
        tree,
        is_leaf=_is_box,
    )


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, meta.AxisMetadata)
