"""Replaces the `nnx.Linear` layers of a model by collective ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from collective_matmul.layers import path_patterns
from collective_matmul.layers.linear import ColumnParallelLinear, RowParallelLinear
from collective_matmul.layers.parallel_styles import Column, ParallelStyles, Row

#: Options of nnx.Linear that change what it computes, and the only values that are supported.
PLAIN_OPTIONS = {
    "precision": None,
    "dot_general": lax.dot_general,
    "promote_dtype": promote_dtype,
    "preferred_element_type": None,
}


def replace_linears(model: nnx.Module, plan: ParallelStyles, options: dict[str, Any]) -> nnx.Module:
    """Replaces the layers that the plan matches, in place.

    Args:
      model: the model.
      plan: Column or Row by path pattern.
      options: options of the collective layers.

    Returns:
      The model.

    Raises:
      ValueError: if the plan does not fit the model, before anything is changed.
    """
    entries: dict[int, tuple[str, Any, Column | Row]] = {}
    nodes = list(_nodes(model))
    for path, node in nodes:
        if (pattern := path_patterns.matches(plan, path)) is None:
            continue
        path_patterns.check_layer(plan, pattern, path, node, nnx.Linear, PLAIN_OPTIONS)
        first, _, entry = entries.setdefault(id(node), (path, node, plan[pattern]))
        if entry != plan[pattern]:
            raise ValueError(
                f"plan: {first!r} and {path!r} are one layer, and the plan has {entry} and"
                f" {plan[pattern]} for it; drop one entry"
            )
    linears = [path for path, node in nodes if type(node) is nnx.Linear]
    path_patterns.check_all_match(plan, linears, "nnx.Linear")
    collective = {
        key: _collective_layer(path, linear, entry, options)
        for key, (path, linear, entry) in entries.items()
    }
    # The model is changed from here on. Layers and parameters by identity, as both may be shared.
    fresh: dict[int, Any] = {}
    for key, (_, linear, _) in entries.items():
        fresh[key] = _with_parameters_of(linear, collective[key], fresh)
    for node in [model, *(node for _, node in nodes)]:
        _replace_children(node, fresh)
    return model


def _nodes(
    node: nnx.Pytree, path: tuple[str, ...] = (), above: frozenset[int] = frozenset()
) -> Iterator[tuple[str, nnx.Pytree]]:
    """Yields every path below `node` with its object. Several paths may lead to one object."""
    above |= {id(node)}
    for name, value in vars(node).items():
        for keys, child in jax.tree.leaves_with_path(value, is_leaf=_is_node):
            if isinstance(child, nnx.Pytree) and id(child) not in above:
                below = (*path, name, *(jax.tree_util.keystr((k,), simple=True) for k in keys))
                yield ".".join(below), child
                yield from _nodes(child, below, above)


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _collective_layer(
    path: str, linear: nnx.Linear, entry: Column | Row, options: dict[str, Any]
) -> ColumnParallelLinear | RowParallelLinear:
    """A collective layer like `linear`; its parameters are shapes only."""

    def build() -> ColumnParallelLinear | RowParallelLinear:
        rest = dict(
            options,
            use_bias=linear.bias is not None,
            dtype=linear.dtype,
            param_dtype=linear.param_dtype,
            rngs=nnx.Rngs(0),
        )
        sizes = linear.in_features, linear.out_features
        if isinstance(entry, Column):
            return ColumnParallelLinear(*sizes, gather_dimension=entry.gather_dimension, **rest)
        return RowParallelLinear(*sizes, scatter_dimension=entry.scatter_dimension, **rest)

    try:
        return nnx.eval_shape(build)
    except ValueError as error:
        raise ValueError(f"{path!r}: {error}") from None


def _with_parameters_of(linear: nnx.Linear, layer: Any, fresh: dict[int, Any]) -> Any:
    """Gives `layer` the parameter values of `linear`, with partition specs."""
    for name in ("kernel", "bias"):
        param = getattr(linear, name)
        if param is None:
            continue
        metadata = param.get_metadata()
        # Keep a sharding that the user has given it.
        if id(param) not in fresh and "out_sharding" not in metadata:
            names = getattr(layer, name).get_metadata("out_sharding")
            # Layers stacked for a scan have additional leading dimensions.
            metadata["out_sharding"] = (None,) * (len(param.shape) - len(names)) + names
            # Whether a parameter is placed on devices is fixed when it is made, so make a new one.
            metadata["eager_sharding"] = False
            fresh[id(param)] = type(param)(param.get_value(), **metadata)
        setattr(layer, name, fresh.get(id(param), param))
    return layer


def _replace_children(node: nnx.Pytree, fresh: dict[int, Any]) -> None:
    """Replaces objects that attributes of `node` hold, directly or in a dict, list or tuple."""
    for name, value in list(vars(node).items()):
        children = jax.tree.leaves(value, is_leaf=_is_node)
        if any(id(child) in fresh for child in children):
            value = jax.tree.map(lambda child: fresh.get(id(child), child), value, is_leaf=_is_node)
            setattr(node, name, value if _is_node(value) else nnx.data(value))
