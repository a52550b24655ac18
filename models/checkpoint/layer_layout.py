"""Two layouts of the parameters of layers: one array for each layer, or one of all, stacked.

``{"layers.0.norm.scale": [features], "layers.1.norm.scale": [features]}`` is
``{"layers.norm.scale": [2, features]}`` with ``--scan-layers``. The optimizer's state has the same
names. A checkpoint has the layout of the run that saved it, and each run reads both.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Tree = Any

_LAYER = re.compile(r"\blayers\.(\d+)\.(.*)")
_STACKED = re.compile(r"\blayers\.(?!\d+\.)(.*)")


def same_layout(names: Iterable[str], others: Iterable[str]) -> bool:
    """Whether two sets of names of arrays both have an array for each layer, or both do not."""
    return any(map(_LAYER.search, names)) == any(map(_LAYER.search, others))


def other_layout(abstract: Tree) -> Tree:
    """The shapes, dtypes and shardings of a state in the other layout.

    Args:
      abstract: a tree with dictionaries of `jax.ShapeDtypeStruct` by name of the parameter.
    """
    count = _number_of_layers(abstract)
    return jax.tree.map(functools.partial(_other_names, count=count), abstract, is_leaf=_is_by_name)


def move_layout(state: Tree, abstract: Tree) -> Tree:
    """A state in another layout, bit for bit. The arrays of the given one are deleted.

    Args:
      state: global arrays, as `other_layout` of `abstract` describes them.
      abstract: shapes, dtypes and shardings of the result.
    """

    def move(arrays: Tree, target: Tree) -> Tree:
        return _moved(arrays, target) if _is_by_name(arrays) else arrays

    return jax.tree.map(move, state, abstract, is_leaf=_is_by_name)


def _is_by_name(tree: Tree) -> bool:
    return isinstance(tree, dict) and any(
        _LAYER.match(name) or _STACKED.match(name) for name in tree if isinstance(name, str)
    )


def _number_of_layers(abstract: Tree) -> int:
    numbers = {0}
    for by_name in jax.tree.leaves(abstract, is_leaf=_is_by_name):
        for name, leaf in by_name.items() if _is_by_name(by_name) else ():
            if layer := _LAYER.match(name):
                numbers.add(int(layer[1]) + 1)
            elif _STACKED.match(name) and not _is_masked(leaf):
                numbers.add(leaf.shape[0])
    return max(numbers)


def _is_masked(leaf: Any) -> bool:
    """Whether an optimizer of other parameters has no state of this one."""
    return isinstance(leaf, optax.MaskedNode)


def _other_names(by_name: Tree, count: int) -> Tree:
    """The other layout of one dictionary."""
    if not _is_by_name(by_name):
        return by_name
    found = {}
    for name, leaf in by_name.items():
        if layer := _LAYER.match(name):
            found[f"layers.{layer[2]}"] = _reshaped(leaf, [count])
        elif stacked := _STACKED.match(name):
            own = {f"layers.{n}.{stacked[1]}": _reshaped(leaf, []) for n in range(count)}
            found.update(own)
        else:
            found[name] = leaf
    return found


def _reshaped(leaf: Any, layers: list[int]) -> Any:
    """The leaf of one layer with a dimension of layers, or that of all without it."""
    if _is_masked(leaf):
        return leaf
    shape = (*layers, *leaf.shape) if layers else leaf.shape[1:]
    sharding = leaf.sharding
    if sharding is not None:
        spec = sharding.spec
        sharding = NamedSharding(sharding.mesh, P(None, *spec) if layers else P(*spec[1:]))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def _moved(arrays: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """One dictionary of arrays in the layout of the target, one parameter after the other."""
    found = {}
    for name, leaf in target.items():
        layer, stacked = _LAYER.match(name), _STACKED.match(name)
        if not (layer or stacked):
            found[name] = arrays[name]
        elif _is_masked(leaf):
            found[name] = leaf
        elif stacked:
            count = leaf.shape[0]
            own = [arrays.pop(f"layers.{n}.{stacked[1]}") for n in range(count)]
            found[name] = _stack(leaf.sharding)(*own)
            _delete(own)
        elif layer and name not in found:
            one = arrays.pop(f"layers.{layer[2]}")
            names = [f"layers.{n}.{layer[2]}" for n in range(len(one))]
            found.update(zip(names, _split(leaf.sharding, len(one))(one), strict=True))
            _delete([one])
    return found


@functools.cache
def _stack(sharding: NamedSharding) -> Any:
    return jax.jit(lambda *arrays: jnp.stack(arrays), out_shardings=sharding)


@functools.cache
def _split(sharding: NamedSharding, count: int) -> Any:
    return jax.jit(list, out_shardings=[sharding] * count)


def _delete(arrays: Iterable[jax.Array]) -> None:
    for array in arrays:
        array.delete()
