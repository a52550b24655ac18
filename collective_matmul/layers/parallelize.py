"""`parallelize`: makes the dense layers of an existing model collective."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from flax import linen, nnx
from jax.sharding import Mesh

from collective_matmul.checks import Implementation
from collective_matmul.checks import implementation as check_implementation
from collective_matmul.layers import path_patterns
from collective_matmul.layers.parallel_linen import ParallelModule
from collective_matmul.layers.parallel_nnx import replace_linears
from collective_matmul.layers.parallel_styles import ParallelStyles
from collective_matmul.layers.sharding_context import known_axis_size

Model = TypeVar("Model", bound=nnx.Module)


@overload
def parallelize(
    model: Model,
    plan: ParallelStyles,
    *,
    axis_name: str = "tensor",
    mesh: Mesh | None = None,
    implementation: Implementation = None,
) -> Model: ...
@overload
def parallelize(
    model: linen.Module,
    plan: ParallelStyles,
    *,
    axis_name: str = "tensor",
    mesh: Mesh | None = None,
    implementation: Implementation = None,
) -> ParallelModule: ...
def parallelize(
    model: Any,
    plan: ParallelStyles,
    *,
    axis_name: str = "tensor",
    mesh: Mesh | None = None,
    implementation: Implementation = None,
) -> Any:
    """Makes dense layers of a model collective; its weights and their paths stay the same.

    ::

        parallelize(model, {"layers.*.mlp.up": Column(), "layers.*.mlp.down": Row()})

    A Column layer gathers its input [..., S, K] along S and shards its output features over the
    axis. A Row layer takes such features and scatters its result [..., S, N] along S. With global
    arrays, under `jax.jit` or `overlap_jit`, the model computes the same as before. Inside a
    `shard_map` over the axis it computes on local shards, also of the parameters.

    Args:
      model: a `flax.nnx.Module`, which is changed: every matched `nnx.Linear` becomes a
        `ColumnParallelLinear` or `RowParallelLinear` that holds the same `nnx.Param` objects.
        Create its optimizer afterwards. Or a `flax.linen.Module`, which is not changed.
      plan: `Column` or `Row` by path pattern. Patterns are those of `fnmatch` over dotted paths
        such as "layers.0.mlp.up", the paths of the parameters; ``*`` matches dots too.
      axis_name: the mesh axis to shard over.
      mesh: mesh of the global arrays; None uses the mesh of `jax.set_mesh`.
      implementation: which backends execute the matmuls, as the ops take it; None chooses for each
        shape. See `collective_matmul.backends`.

    Returns:
      The nnx model itself; for a linen module, a `ParallelModule` with its `init` and `apply`.

    Raises:
      TypeError: if `model` or `plan` has another type.
      ValueError: for an entry of the plan that matches no layer, or a layer that is not an
        nnx.Linear or linen.Dense or has unsupported options; for two entries that match one layer;
        for sizes that the axis does not divide. For nnx it is raised at once, before anything is
        changed; for linen by the first `init` or `apply`, since its layers exist only there.
    """
    path_patterns.check(plan)
    requested = check_implementation(implementation)
    known_axis_size(axis_name, mesh)
    if isinstance(model, linen.Module):
        return ParallelModule(model, plan, axis_name, mesh, requested)
    if isinstance(model, nnx.Module):
        options = dict(axis_name=axis_name, mesh=mesh, implementation=requested)
        return replace_linears(model, plan, options)
    raise TypeError(
        f"model: a {type(model).__name__}; expected a flax.nnx.Module or a flax.linen.Module"
    )
