"""Replaces the linear layers and the attention of an nnx model by collective ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import jax
from flax import nnx
from flax.core import FrozenDict
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from collective_matmul.layers import layer_checks
from collective_matmul.layers.linear.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    check_alike,
)
from collective_matmul.layers.parallelize import path_patterns
from collective_matmul.layers.parallelize.nnx_adapters import (
    ColumnParallelLoRALinear,
    RowParallelLoRALinear,
    adapter_in,
    base_of,
    check_adapter,
    parallel_lora,
    specs_of_adapter,
)
from collective_matmul.layers.parallelize.nnx_attention import (
    can_share_gather,
    copy_heads_of_caches,
    parallel_attention,
    shard_caches,
)
from collective_matmul.layers.parallelize.nnx_shared import parallel_shared
from collective_matmul.layers.parallelize.parallel_styles import (
    Column,
    Heads,
    ParallelStyles,
    Row,
    Shared,
)
from collective_matmul.layers.parallelize.placement import mesh_of_arrays, place_variables
from collective_matmul.layers.sharding_context import known_axis_size, known_weight_devices

_OPTIONS_OF_LINEAR: dict[str, Any] = {
    "precision": None,
    "dot_general": lax.dot_general,
    "promote_dtype": promote_dtype,
    "preferred_element_type": None,
}
#: The layers without an adapter that Column and Row take. Each has options that change what it
#: computes, and the only values that are supported.
BASE_LAYERS: dict[type, dict[str, Any]] = {
    nnx.Linear: _OPTIONS_OF_LINEAR,
    nnx.LinearGeneral: {
        "precision": None,
        "dot_general": None,
        "dot_general_cls": None,
        "promote_dtype": promote_dtype,
        "preferred_element_type": None,
        "batch_axis": FrozenDict({}),
    },
}
#: All layers that Column and Row take.
LINEAR_LAYERS = {**BASE_LAYERS, nnx.LoRALinear: _OPTIONS_OF_LINEAR, nnx.LoRA: {}}
#: The modules that Heads takes. Its layers have options of their own.
ATTENTION_MODULES: dict[type, dict[str, Any]] = {nnx.MultiHeadAttention: {}}

#: A layer with its path, its style, and the pattern of the plan that gives it the style.
Entry = tuple[str, nnx.Linear | nnx.LinearGeneral | nnx.LoRA, Column | Row, str]
#: A module whose layers share a gather, likewise.
Group = tuple[str, nnx.Pytree, Shared, str]


def parallelize_nnx(model: nnx.Module, plan: ParallelStyles, options: dict[str, Any]) -> nnx.Module:
    """Replaces the layers that the plan matches, in place, and places the variables on the mesh.

    Args:
      model: the model.
      plan: styles by path pattern.
      options: options of the collective layers: axis_name, mesh, implementation,
        data_axis_name and weight_axis_name.

    Returns:
      The model.

    Raises:
      ValueError: if the plan does not fit the model, before anything is changed.
    """
    nodes = [("", model), *_nodes(model)]
    entries = _matched_layers(nodes, plan, options)
    dimension = _weight_dimension(entries.values(), options)
    collective = {
        key: _collective_layer(entry, dict(options, weight_dimension=dimension))
        for key, entry in entries.items()
    }
    groups = _sharing_modules(nodes, plan)
    for path, node, style, _ in groups:
        _check_group(path, [collective[id(getattr(node, name))] for name in style.names])
    # The model is changed from here on. Layers and parameters by identity, as both may be shared.
    fresh: dict[int, Any] = {}
    for key, (_, linear, _, _) in entries.items():
        fresh[id(base_of(linear))] = _with_parameters_of(linear, collective[key], fresh)
    for _, node in nodes:
        _replace_children(node, fresh)
    for _, node in nodes:
        if _is_attention(node) and can_share_gather(node):
            # The module stays the same object, since the model itself may be one.
            object.__setattr__(node, "__class__", parallel_attention(type(node)))
            copy_heads_of_caches(node)
            shard_caches(node)
        elif id(node) in entries and isinstance(node, nnx.LoRA):
            object.__setattr__(node, "__class__", parallel_lora(type(node)))
    for _, node, style, _ in groups:
        if not _is_attention(node):  # Attention shares its gather by itself.
            object.__setattr__(node, "__class__", parallel_shared(type(node), style.names))
    if (mesh := mesh_of_arrays(options["mesh"])) is not None:
        place_variables(model, mesh)
    return model


def _matched_layers(
    nodes: list[tuple[str, nnx.Pytree]], plan: ParallelStyles, options: dict[str, Any]
) -> dict[int, Entry]:
    """The layers that the plan matches, by their `id`.

    Raises:
      ValueError: if the plan does not fit the model.
    """
    entries: dict[int, Entry] = {}
    by_base: dict[int, tuple[str, str, Column | Row]] = {}
    inside = _paths_inside_adapted(nodes)

    def add(path: str, layer: Any, style: Column | Row, pattern: str) -> None:
        _check_linear(plan, pattern, path, layer)
        around, first, other = by_base.setdefault(id(base_of(layer)), (pattern, path, style))
        if other != style:
            which = "it" if path == first else f"{first!r}, which is the same layer"
            raise ValueError(
                f"plan: {pattern!r} has {style} for {path!r}, and {around!r} has {other} for"
                f" {which}; drop one entry"
            )
        entries.setdefault(id(layer), (path, layer, style, pattern))

    for path, node, style, pattern in _sharing_modules(nodes, plan):
        for name, of_layer in style.layers().items():
            add(".".join(filter(None, (path, name))), getattr(node, name), of_layer, pattern)
        _check_equal_heads(path, node, style)
    for path, node in nodes:
        pattern = path_patterns.matches(plan, path)
        if pattern is None or (not path and pattern and not _is_layer(node)):
            continue
        style = plan[pattern]
        assert not isinstance(style, Shared)  # `matches` leaves these out.
        if path in inside:
            _check_same_style(plan, pattern, path, inside[path])
            continue
        if not path and not isinstance(style, Heads):
            path_patterns.check_layer(plan, pattern, path, node, LINEAR_LAYERS, "nnx")
            raise ValueError(
                f"plan[{pattern!r}]: the model itself is the {type(node).__name__}, which cannot"
                " be replaced in place; make it an attribute of a module, or construct a"
                " collective_matmul.layers.ColumnParallelLinear or RowParallelLinear"
            )
        if not isinstance(style, Heads):
            add(path, node, style, pattern)
            continue
        path_patterns.check_layer(plan, pattern, path, node, ATTENTION_MODULES, "nnx")
        heads = layer_checks.heads(path, node, options["axis_name"], options["mesh"])
        for name, of_layer in style.layers(heads).items():
            add(".".join(filter(None, (path, name))), getattr(node, name), of_layer, pattern)
    paths = [path for path, node in nodes if _is_layer(node)]
    path_patterns.check_all_match(plan, paths, "nnx")
    return entries


def _sharing_modules(nodes: list[tuple[str, nnx.Pytree]], plan: ParallelStyles) -> list[Group]:
    """The modules with all layers that an entry `Shared` of the plan names."""
    found: dict[int, Group] = {}
    for path, node in nodes:
        pattern = path_patterns.matches_sharing(plan, path, vars(node))
        style = None if pattern is None else plan[pattern]
        if pattern is not None and isinstance(style, Shared):
            found.setdefault(id(node), (path, node, style, pattern))
    return [*found.values()]


def _check_group(path: str, layers: list[Any]) -> None:
    """Raises ValueError unless layers of the module at `path` can share a gather."""
    with layer_checks.naming(path):
        check_alike(layers)


def _check_equal_heads(path: str, module: Any, style: Shared) -> None:
    """Raises ValueError if the heads of layers of the module at `path` are not of one size."""
    heads = dict(style.heads)
    paths = {at: name for at, name in zip(style.paths(path), style.names, strict=True) if heads}
    outputs = {at: base_of(getattr(module, name)).out_features for at, name in paths.items()}
    layer_checks.equal_heads(
        {at: layer_checks.sizes("out_features", of) for at, of in outputs.items()},
        {at: heads[name] for at, name in paths.items()},
    )


def _check_linear(plan: ParallelStyles, pattern: str, path: str, layer: Any) -> None:
    """Raises ValueError for a layer that Column and Row do not take."""
    path_patterns.check_layer(plan, pattern, path, layer, LINEAR_LAYERS, "nnx")
    base = base_of(layer)
    if base is None:
        raise ValueError(
            f"plan[{pattern!r}]: {path!r} is an nnx.LoRA without a base module; construct it with"
            " base_module=, or leave it out of the plan"
        )
    if base is not layer:
        path_patterns.check_layer(plan, pattern, f"{path}.base_module", base, BASE_LAYERS, "nnx")
    if isinstance(base, nnx.LinearGeneral):
        path_patterns.check_trailing(pattern, path, base.axis)
    if adapter_in(layer) is not None:
        check_adapter(f"plan[{pattern!r}]: {path!r}", layer)


def _paths_inside_adapted(nodes: list[tuple[str, nnx.Pytree]]) -> dict[str, str]:
    """The paths of the parts of layers with an adapter, with the path of the layer."""
    parts = ((path, f"{path}." if path else "", node) for path, node in nodes)
    return {
        prefix + ("base_module" if isinstance(node, nnx.LoRA) else "lora"): path
        for path, prefix, node in parts
        if adapter_in(node) is not None
    }


def _check_same_style(plan: ParallelStyles, pattern: str, path: str, whole: str) -> None:
    """Raises ValueError unless a part of a layer with an adapter has the style of the layer."""
    of_whole = path_patterns.matches(plan, whole)
    if of_whole is None or plan[of_whole] != plan[pattern]:
        raise ValueError(
            f"plan[{pattern!r}]: {path!r} is a part of {whole!r}, a layer with an adapter, which"
            f" share a collective; name {whole!r} alone in the plan"
        )


def _is_layer(node: Any) -> bool:
    return path_patterns.class_that_calls(type(node)) in (*LINEAR_LAYERS, *ATTENTION_MODULES)


def _is_attention(node: Any) -> bool:
    return path_patterns.class_that_calls(type(node)) in ATTENTION_MODULES


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


def _weight_dimension(entries: Iterable[Entry], options: dict[str, Any]) -> Literal[0, 1]:
    """The dimension that a second axis shards of the kernels of all Column layers.

    It is one for all, as some share a gather: 1, their output features, which makes faster loops,
    if both axes divide these, which may be few heads; or else 0.
    """
    second, axis = options["weight_axis_name"], (options["axis_name"], options["mesh"])
    count = None if second is None else known_weight_devices(second, *axis)
    if count is None or (devices := known_axis_size(*axis)) is None:
        return 0
    columns = [base_of(layer) for _, layer, style, _ in entries if isinstance(style, Column)]
    outputs = (layer_checks.sizes("out_features", column.out_features) for column in columns)
    return 1 if all(first % (devices * count) == 0 for first, *_ in outputs) else 0


def _collective_layer(
    entry: Entry, options: dict[str, Any]
) -> ColumnParallelLinear | RowParallelLinear:
    """A collective layer like the one of `entry`; its parameters are shapes only."""
    path, layer, style, _ = entry
    linear, in_layer = base_of(layer), isinstance(layer, nnx.LoRALinear)

    def build() -> ColumnParallelLinear | RowParallelLinear:
        rest = dict(
            options,
            fp8=style.fp8,
            use_bias=linear.bias is not None,
            dtype=linear.dtype,
            param_dtype=linear.param_dtype,
            frozen=adapter_in(layer) is not None,
            rngs=nnx.Rngs(0),
        )
        sizes = linear.in_features, linear.out_features
        if isinstance(style, Column):
            column = ColumnParallelLoRALinear if in_layer else ColumnParallelLinear
            dimension, heads = style.gather_dimension, style.heads
            return column(*sizes, gather_dimension=dimension, heads=heads, **rest)
        row = RowParallelLoRALinear if in_layer else RowParallelLinear
        rest["weight_dimension"] = 1
        return row(*sizes, scatter_dimension=style.scatter_dimension, **rest)

    with layer_checks.naming(path):
        return nnx.eval_shape(build)


def _with_parameters_of(linear: Any, layer: Any, fresh: dict[int, Any]) -> Any:
    """Gives `layer` the parameter values of `linear`, with partition specs."""
    if (adapter := adapter_in(linear)) is not None:
        for name, names in specs_of_adapter(layer).items():
            _sharded(getattr(adapter, name), names, fresh)  # It is replaced where it is.
    for name in ("kernel", "bias"):
        if (param := getattr(base_of(linear), name)) is not None:
            names = getattr(layer, name).get_metadata("out_sharding")
            setattr(layer, name, _sharded(param, names, fresh))
    if isinstance(linear, nnx.LoRALinear):
        layer.lora = adapter
    return layer


def _sharded(param: Any, names: tuple[Any, ...], fresh: dict[int, Any]) -> Any:
    """The parameter in place of another one, sharded over axes unless the user has sharded it."""
    metadata = param.get_metadata()
    if id(param) not in fresh and "out_sharding" not in metadata:
        # Layers stacked for a scan have additional leading dimensions.
        metadata["out_sharding"] = (None,) * (len(param.shape) - len(names)) + names
        # Whether a parameter is placed on devices is fixed when it is made, so make a new one.
        metadata["eager_sharding"] = False
        fresh[id(param)] = type(param)(param.get_value(), **metadata)
    return fresh.get(id(param), param)


def _replace_children(node: nnx.Pytree, fresh: dict[int, Any]) -> None:
    """Replaces objects that attributes of `node` hold, directly or in a dict, list or tuple."""
    for name, value in list(vars(node).items()):
        children = jax.tree.leaves(value, is_leaf=_is_node)
        if any(id(child) in fresh for child in children):
            value = jax.tree.map(lambda child: fresh.get(id(child), child), value, is_leaf=_is_node)
            setattr(node, name, value if _is_node(value) else nnx.data(value))
