"""Executes the `linen.Dense` layers of a module by collective matmuls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen
from flax.core import meta
from flax.linen.dtypes import promote_dtype
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul.checks import Implementation
from collective_matmul.checks import implementation as check_implementation
from collective_matmul.layers import path_patterns
from collective_matmul.layers.functions import column_parallel, row_parallel
from collective_matmul.layers.parallel_styles import Column, ParallelStyles, Row
from collective_matmul.layers.sharding_context import current_context

#: Options of linen.Dense that change what it computes, and the only values that are supported.
PLAIN_OPTIONS = {
    "precision": None,
    "dot_general": None,
    "dot_general_cls": None,
    "promote_dtype": promote_dtype,
}


@dataclass(frozen=True)
class ParallelModule:
    """A linen module whose matched `linen.Dense` layers are collective: see `parallelize`.

    Its variables are those of the module itself, so checkpoints of the module stay valid.

    Args:
      module: the module.
      plan: Column or Row by path pattern.
      axis_name: the mesh axis to shard over.
      mesh: mesh of the global arrays; None uses the mesh of `jax.set_mesh`.
      implementation: which backends execute the matmuls, as the ops take it; None chooses for each
        shape.
    """

    module: linen.Module
    plan: ParallelStyles
    axis_name: str = "tensor"
    mesh: Mesh | None = None
    implementation: Implementation = None

    def __post_init__(self) -> None:
        # Checked here, once, and not by every op.
        object.__setattr__(self, "implementation", check_implementation(self.implementation))

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own ``init``, on global arrays, outside `shard_map`.

        Returns:
          Its variables, global, with the same values.

        Raises:
          ValueError: if the plan does not fit the module: see `parallelize`.
        """
        with self._intercepted() as dense_paths:
            variables = self.module.init(rngs, *args, **kwargs)
        self._check_all_match(dense_paths, variables)
        return variables

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
        with self._intercepted() as dense_paths:
            result = self.module.apply(variables, *args, **kwargs)
        self._check_all_match(dense_paths, variables)
        return result

    def partition_specs(self, variables: Mapping[str, Any]) -> Any:
        """A `PartitionSpec` for every variable; P() for those that the plan does not match.

        Args:
          variables: as returned by `init`, or their shapes.

        Raises:
          ValueError: if an entry of the plan matches no variable.
        """
        self._check_all_match(set(), variables)

        def spec(keys: Any, leaf: Any) -> P:
            collection, *path, name = (jax.tree_util.keystr((k,), simple=True) for k in keys)
            pattern = path_patterns.matches(self.plan, ".".join(path))
            if collection != "params" or pattern is None:
                return P()
            names = {"kernel": (None, self.axis_name), "bias": (self.axis_name,)}[name]
            if isinstance(self.plan[pattern], Row):
                names = {"kernel": (self.axis_name, None), "bias": (None,)}[name]
            # Layers stacked by linen.scan have additional leading dimensions.
            return P(*[None] * (leaf.ndim - len(names)), *names)

        return jax.tree.map_with_path(spec, _unboxed(variables))

    @contextlib.contextmanager
    def _intercepted(self) -> Iterator[set[str]]:
        """Makes the matched layers collective; yields the paths of all Dense layers called."""
        dense_paths: set[str] = set()

        def intercept(call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
            module = context.module
            if context.method_name != "__call__" or module.scope is None:
                return call(*args, **kwargs)
            path = ".".join(module.path)
            if type(module) is linen.Dense:
                dense_paths.add(path)
            pattern = path_patterns.matches(self.plan, path)
            if pattern is None:
                return call(*args, **kwargs)
            path_patterns.check_layer(self.plan, pattern, path, module, linen.Dense, PLAIN_OPTIONS)
            # The layer itself makes its parameters, and reports missing ones.
            if module.is_initializing() or not module.has_variable("params", "kernel"):
                return call(*args, **kwargs)
            try:
                return self._dense(module, self.plan[pattern], *args, **kwargs)
            except ValueError as error:
                raise ValueError(f"{path!r}: {error}") from error

        with linen.intercept_methods(intercept):
            yield dense_paths

    def _dense(self, module: linen.Dense, entry: Column | Row, inputs: jax.Array) -> jax.Array:
        """The result of `module` for `inputs`, computed by the ops."""
        context = current_context(self.axis_name, self.mesh)
        kernel = _unboxed(module.get_variable("params", "kernel"))
        bias = _unboxed(module.get_variable("params", "bias")) if module.use_bias else None
        x, kernel, bias = promote_dtype(inputs, kernel, bias, dtype=module.dtype)
        if isinstance(entry, Column):
            (y,) = column_parallel(
                context,
                x,
                [kernel],
                [bias],
                [(kernel.shape[0], module.features)],
                gather_dimension=entry.gather_dimension,
                implementation=self.implementation,
            )
            return y
        return row_parallel(
            context,
            x,
            kernel,
            bias,
            (x.shape[-1] * context.parameter_shards, module.features),
            scatter_dimension=entry.scatter_dimension,
            implementation=self.implementation,
        )

    def _check_all_match(self, dense_paths: set[str], variables: Mapping[str, Any]) -> None:
        """Refuses entries that match neither a layer that was called nor a kernel."""
        paths = set(dense_paths)
        for keys, _ in jax.tree.leaves_with_path(_unboxed(variables.get("params", {}))):
            *path, name = (jax.tree_util.keystr((k,), simple=True) for k in keys)
            if name == "kernel":
                paths.add(".".join(path))
        path_patterns.check_all_match(self.plan, paths, "linen.Dense")


def _unboxed(tree: Any) -> Any:
    """The arrays without Flax's boxes. Flax's own unboxing would also constrain their sharding."""
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, meta.Partitioned) else meta.unbox(leaf),
        tree,
        is_leaf=lambda leaf: isinstance(leaf, meta.AxisMetadata),
    )
