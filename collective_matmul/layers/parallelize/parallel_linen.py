"""Executes the dense layers and the attention of a linen module by collective matmuls."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from flax import linen
from flax.linen.dtypes import promote_dtype
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from collective_matmul.layers import layer_checks
from collective_matmul.layers.linear.functions import (
    KernelShape,
    column_parallel,
    own_columns,
    row_parallel,
)
from collective_matmul.layers.linear.linear import SharedProjections
from collective_matmul.layers.linear.shared_calls import SharedCalls, shared_calls_of
from collective_matmul.layers.parallelize import (
    linen_attention,
    linen_specs,
    path_patterns,
)
from collective_matmul.layers.parallelize.linen_specs import KernelRanks, unboxed
from collective_matmul.layers.parallelize.parallel_styles import (
    Column,
    Heads,
    ParallelStyles,
    Row,
    Shared,
)
from collective_matmul.layers.parallelize.placement import mesh_of_arrays, place
from collective_matmul.layers.sharding_context import (
    ShardingContext,
    current_context,
    known_axis_size,
)
from collective_matmul.ops.matmul.checks import Implementation
from collective_matmul.ops.matmul.checks import implementation as check_implementation

#: The layers that Column and Row take. Each has options that change what it computes, and the only
#: values that are supported.
LINEAR_LAYERS: dict[type, dict[str, Any]] = {
    kind: {
        "precision": None,
        "dot_general": None,
        "dot_general_cls": None,
        "promote_dtype": promote_dtype,
    }
    for kind in (linen.Dense, linen.DenseGeneral)
}
LINEAR_LAYERS[linen.DenseGeneral]["batch_dims"] = ()

#: How an error begins that is about one layer, which shares a gather with the one that is called.
_NAMES_A_LAYER = re.compile(r"'[^']*': ")


@dataclass(frozen=True)
class ParallelModule:
    """A linen module whose matched layers are collective: see `parallelize`.

    Its variables are those of the module itself, so checkpoints of the module stay valid.

    Args:
      module: the module.
      plan: styles by path pattern.
      axis_name: the mesh axis to shard over.
      mesh: mesh of the global arrays; None uses the mesh of `jax.set_mesh`.
      implementation: which backends execute the matmuls, as the ops take it; None chooses for each
        shape.
      data_axis_name: mesh axes that shard dimension 0 of global activations: see `parallelize`.
    """

    module: linen.Module
    plan: ParallelStyles
    axis_name: str = "tensor"
    mesh: Mesh | AbstractMesh | None = None
    implementation: Implementation = None
    data_axis_name: str | tuple[str, ...] = ()
    # A kernel's shape does not tell an additional feature dimension from layers stacked by
    # linen.scan. The layer does, when it is called.
    _kernel_ranks: KernelRanks = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        # Checked here, once, and not by every op.
        object.__setattr__(self, "implementation", check_implementation(self.implementation))
        data_axes = layer_checks.data_axes(self.data_axis_name, self.axis_name)
        object.__setattr__(self, "data_axis_name", data_axes)

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own ``init``, on global arrays, outside `shard_map`.

        Under `jax.jit`, with a known mesh, each device makes only its shards of the variables.

        Returns:
          Its variables, global, with the same values. If the mesh is known they are placed on it,
          as `shardings` says.

        Raises:
          ValueError: if the plan does not fit the module: see `parallelize`.
        """
        with self._intercepted() as layers:
            variables = self.module.init(rngs, *args, **kwargs)
        self._check_all_match(layers, variables)
        mesh = mesh_of_arrays(self.mesh)
        if mesh is None:
            return variables
        return jax.tree.map(
            lambda spec, boxed: jax.tree.map(lambda leaf: place(leaf, mesh, spec), boxed),
            self._placement_specs(variables, set(mesh.axis_names)),
            variables,
        )

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own ``apply``, with its matched layers collective.

        Args:
          variables: global; inside a `shard_map` over the axis, local shards by the specs that
            `partition_specs` returns.
          *args: passed on; global or local arrays likewise.
          **kwargs: passed on, likewise; and those of `linen.Module.apply`.

        Raises:
          ValueError: if the plan does not fit the module, or the axis does not divide sizes: see
            `parallelize`.
        """
        with self._intercepted() as layers:
            result = self.module.apply(variables, *args, **kwargs)
        self._check_all_match(layers, variables)
        return result

    def partition_specs(self, variables: Mapping[str, Any]) -> Any:
        """A `PartitionSpec` for every variable; P() for those that the plan does not match.

        Call `init` before, or `jax.eval_shape` of it, if matched layers have several feature
        dimensions.

        Args:
          variables: as returned by `init`, or their shapes.

        Raises:
          ValueError: if an entry of the plan matches no variable.
        """
        self._check_all_match(set(), variables)
        return self._placement_specs(variables, set())

    def shardings(self, variables: Mapping[str, Any]) -> Any:
        """A `NamedSharding` for every variable, as `jax.jit` and Orbax take them.

        They are those of `partition_specs`. A variable that the plan does not match and that has
        the metadata of `linen.with_partitioning` is sharded as they say.

        Args:
          variables: as returned by `init`, or their shapes, as from `jax.eval_shape`.

        Raises:
          ValueError: if no mesh is known, or an entry of the plan matches no variable.
        """
        self._check_all_match(set(), variables)
        mesh = mesh_of_arrays(self.mesh)
        if mesh is None:
            raise ValueError(
                "mesh=None: there is no mesh here; pass mesh= to parallelize, or call this inside"
                " `with jax.set_mesh(mesh):`"
            )
        specs = self._placement_specs(variables, set(mesh.axis_names))
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def _placement_specs(self, variables: Mapping[str, Any], axes: set[str]) -> Any:
        """Specs by the plan, else by metadata that name only `axes`, else P()."""
        devices = known_axis_size(self.axis_name, self.mesh)
        return linen_specs.partition_specs(
            variables,
            lambda path: self._style(path)[1],
            self._kernel_ranks,
            self.axis_name,
            devices,
            axes,
        )

    def _style(self, path: str) -> tuple[str, Column | Row | Heads] | tuple[None, None]:
        """The pattern that matches a module or the attention around it, and the module's style.

        Raises:
          ValueError: if two entries of the plan say different things.
        """
        pattern = path_patterns.matches(self.plan, path)
        own = None if pattern is None else self.plan[pattern]
        assert not isinstance(own, Shared)  # `matches` leaves these out.
        above, _, name = path.rpartition(".")
        for around in (
            path_patterns.matches(self.plan, above),
            path_patterns.sharing_layer(self.plan, path),
        ):
            group = None if around is None else self.plan[around]
            inside = group.layers().get(name) if isinstance(group, Heads | Shared) else None
            if around is None or inside is None:
                continue
            if own is not None and own != inside:
                raise ValueError(
                    f"plan: {pattern!r} has {own} for {path!r}, and {around!r} has {inside}; drop"
                    " one entry"
                )
            return around, inside
        return (None, None) if pattern is None or own is None else (pattern, own)

    @contextlib.contextmanager
    def _intercepted(self) -> Iterator[set[str]]:
        """Makes the matched layers collective; yields the paths of all layers called."""
        layers: set[str] = set()
        shared: dict[str, SharedCalls] = {}

        def intercept(call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
            module = context.module
            if context.method_name != "__call__" or module.scope is None:
                return call(*args, **kwargs)
            path, kind = ".".join(module.path), path_patterns.class_that_calls(type(module))
            is_layer = kind in LINEAR_LAYERS or kind in linen_attention.ATTENTION_MODULES
            if is_layer:
                layers.add(path)
            # A "*" is not meant for the model as a whole, unless it is a layer.
            is_meant = path or is_layer or "" in self.plan
            pattern, style = self._style(path) if is_meant else (None, None)
            if pattern is None or style is None:
                return call(*args, **kwargs)
            try:
                if isinstance(style, Heads):
                    kinds = linen_attention.ATTENTION_MODULES
                    path_patterns.check_layer(self.plan, pattern, path, module, kinds, "linen")
                    return self._attention(call, module, style, args, kwargs)
                path_patterns.check_layer(self.plan, pattern, path, module, LINEAR_LAYERS, "linen")
                calls = self._shared_calls(module, path, shared)
                return self._dense(call, module, pattern, style, calls, *args, **kwargs)
            except ValueError as error:
                if path in str(error) or _NAMES_A_LAYER.match(str(error)):
                    raise
                raise ValueError(f"{path!r}: {error}") from error

        with linen.intercept_methods(intercept):
            yield layers
        for calls in shared.values():
            calls.check_complete()

    def _shared_calls(
        self, module: linen.Module, path: str, known: dict[str, SharedCalls]
    ) -> SharedCalls | None:
        """The calls that the one of a layer is part of, by `shared_gather` or by the plan."""
        if module.is_initializing():
            return None  # Each layer makes its parameters by itself.
        if (active := shared_calls_of(module)) is not None:
            return active[0]
        pattern = path_patterns.sharing_layer(self.plan, path)
        style = None if pattern is None else self.plan[pattern]
        if not isinstance(style, Shared):
            return None
        above = path.rpartition(".")[0]
        return known.setdefault(above, SharedCalls(repr(above), style.names))

    def _context(self, arrays: Any) -> ShardingContext:
        data_axes = layer_checks.data_axes(self.data_axis_name)
        return current_context(self.axis_name, self.mesh, arrays, data_axes=data_axes)

    def _attention(
        self, call: Callable, module: linen.Module, style: Heads, args: Any, kwargs: Any
    ) -> Any:
        """The result of an attention module. One gather for each distinct input."""
        layer_checks.heads(".".join(module.path), module, self.axis_name, self.mesh)
        if module.is_initializing():
            return call(*args, **kwargs)
        context = self._context((args, kwargs, module.variables))
        implementation = check_implementation(self.implementation)
        arguments = linen_attention.shared_projections(
            module, args, kwargs, context, style, implementation
        )
        caches = module, arguments, self.axis_name, mesh_of_arrays(self.mesh)
        linen_attention.keep_caches_divided(*caches)
        y = call(**arguments)
        linen_attention.keep_caches_divided(*caches)
        return y

    def _dense(
        self,
        call: Callable,
        module: Any,
        pattern: str,
        style: Column | Row,
        calls: SharedCalls | None,
        inputs: Any,
    ) -> jax.Array:
        """The result of a dense layer for `inputs`, computed by the ops."""
        features = linen_specs.sizes(module.features)
        axes = linen_specs.sizes(getattr(module, "axis", -1))
        path = ".".join(module.path)
        path_patterns.check_trailing(pattern, path, axes, len(inputs.shape))
        self._kernel_ranks[path] = len(axes), len(features)
        if isinstance(inputs, SharedProjections):
            return inputs.results[module.name]
        # The layer itself makes its parameters, and reports missing ones.
        if module.is_initializing() or not module.has_variable("params", "kernel"):
            return call(inputs)
        kernel = unboxed(module.get_variable("params", "kernel"))
        context = self._context((inputs, kernel))
        shape = kernel.shape[: len(axes)], features
        if isinstance(style, Row):
            return self._row(module, style, context, inputs, shape)
        place = context.axis_name, context.devices
        if layer_checks.copies(1, style.heads, features, *place) == 1:
            layer_checks.kernel(kernel, shape, len(axes), context, None)
        if calls is None:
            (y,) = self._columns(module, None, context, inputs)
            return y
        compute = functools.partial(self._columns, module, calls.names, context)
        options = {"style": replace(style, heads=None), "axis": axes, "dtype": module.dtype}
        return calls.result(module.name, inputs, compute, options)

    def _row(
        self, module: Any, style: Row, context: ShardingContext, x: jax.Array, shape: KernelShape
    ) -> jax.Array:
        """The result of a row-parallel layer for x."""
        own = unboxed(module.variables["params"])
        x, kernel, bias = promote_dtype(x, own["kernel"], own.get("bias"), dtype=module.dtype)
        (rows, *others), features = shape
        return row_parallel(
            context,
            x,
            kernel,
            bias,
            ((rows * context.parameter_shards, *others), features),
            scatter_dimension=style.scatter_dimension,
            implementation=check_implementation(self.implementation),
            fp8=style.fp8,
        )

    def _columns(
        self, module: Any, names: tuple[str, ...] | None, context: ShardingContext, x: jax.Array
    ) -> tuple[jax.Array, ...]:
        """The results of a column-parallel layer for x, or of those `names` beside it."""
        if names is None:
            parameters = [unboxed(module.variables["params"])]
            styles: list[Any] = [self._style(".".join(module.path))[1]]
        else:
            beside = unboxed(module.parent.variables["params"])
            styles = [self._style(".".join((*module.path[:-1], name)))[1] for name in names]
            alike = {isinstance(s, Column) and replace(s, heads=None) for s in styles}
            if not {*names} <= {*beside} or len(alike) > 1:
                raise ValueError(
                    f"{', '.join(map(repr, names))} share a gather; expected layers with one"
                    f" Column() for all, found {', '.join(map(str, styles))}"
                )
            parameters = [beside[name] for name in names]
        pairs = [(each["kernel"], each.get("bias")) for each in parameters]
        x, *arrays = promote_dtype(x, *(a for pair in pairs for a in pair), dtype=module.dtype)
        count = len(linen_specs.sizes(getattr(module, "axis", -1)))
        above = module.path[:-1]  # Of the model itself the path and the name are empty.
        paths = [".".join(filter(None, (*above, n))) for n in names or (module.name,)]
        copies = _copies_of_layers(paths, styles, arrays[::2], count, context)

        def own(array: Any, dimension: int, copies: int) -> Any:
            return own_columns(context, array, dimension, copies)

        kernels = [own(k, count, n) for k, n in zip(arrays[::2], copies, strict=True)]
        shards = context.parameter_shards
        outputs = [(k.shape[count] * shards, *k.shape[count + 1 :]) for k in kernels]
        return column_parallel(
            context,
            x,
            kernels,
            [own(b, 0, n) for b, n in zip(arrays[1::2], copies, strict=True)],
            [(k.shape[:count], sizes) for k, sizes in zip(kernels, outputs, strict=True)],
            gather_dimension=styles[0].gather_dimension,
            implementation=check_implementation(self.implementation),
            fp8=styles[0].fp8,
        )

    def _check_all_match(self, layers: set[str], variables: Mapping[str, Any]) -> None:
        """Refuses entries that match neither a layer that was called nor a kernel."""
        paths = layers | linen_specs.layer_paths(variables)
        path_patterns.check_all_match(self.plan, paths, "linen")


def _copies_of_layers(
    paths: Sequence[str],
    styles: Sequence[Column],
    kernels: Sequence[jax.Array],
    inputs: int,
    context: ShardingContext,
) -> list[int]:
    """The numbers of devices that compute each head of layers that share a gather.

    Args:
      paths: their paths, for errors.
      styles: their styles.
      kernels: [*in_features, *out_features], shards in a `shard_map` unless heads have copies.
      inputs: the number of in_features.
      context: the axis.
    """
    axis = context.axis_name, context.devices
    copies, outputs = [], {}
    for path, style, kernel in zip(paths, styles, kernels, strict=True):
        with layer_checks.naming(path):
            number = layer_checks.copies_of_heads(style.heads, *axis)
            size, *others = kernel.shape[inputs:]
            outputs[path] = size * (context.parameter_shards if number == 1 else 1), *others
            if number == 1:
                layer_checks.features("out_features", outputs[path], *axis)
        copies.append(number)
    heads = {path: style.heads for path, style in zip(paths, styles, strict=True) if style.heads}
    layer_checks.equal_heads(outputs, heads)
    return copies
