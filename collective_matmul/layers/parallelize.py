"""`parallelize`: the dense layers that a model already has, made collective."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from flax import linen, nnx
from jax.sharding import Mesh

from collective_matmul.checks import implementation as check_implementation
from collective_matmul.layers import parallel_styles as styles
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
    implementation: str | None = None,
) -> Model: ...
@overload
def parallelize(
    model: linen.Module,
    plan: ParallelStyles,
    *,
    axis_name: str = "tensor",
    mesh: Mesh | None = None,
    implementation: str | None = None,
) -> ParallelModule: ...
def parallelize(
    model: Any,
    plan: ParallelStyles,
    *,
    axis_name: str = "tensor",
    mesh: Mesh | None = None,
    implementation: str | None = None,
) -> Any:
    """Makes dense layers of a model collective; its weights and their paths stay as they are.

    ::

        parallelize(model, {"layers.*.mlp.up": Column(), "layers.*.mlp.down": Row()})

    A Column layer gathers its input [..., S, K] along S and spreads its output features over the
    axis; a Row layer takes such features and scatters its result [..., S, N] along S. Under
    `jax.jit`, or `overlap_jit` on GPUs, with global arrays the model computes what it did before;
    inside a `shard_map` over the axis it computes on local shards, of the parameters too.

    Args:
      model: a `flax.nnx.Module`, which is changed: every matched `nnx.Linear` becomes a
        `ColumnParallelLinear` or `RowParallelLinear` that holds the same `nnx.Param` objects. Make
        its optimizer afterwards. Or a `flax.linen.Module`, which is not changed.
      plan: `Column` or `Row` by path pattern, as of `fnmatch`, over dotted paths; ``*`` spans dots
        too. The path of a layer is that of its parameters: "layers.0.mlp.up".
      axis_name: the mesh axis to spread over.
      mesh: of global arrays; None means that of `jax.set_mesh`.
      implementation: None chooses per shape; or "xla", "ring", "ring_two_way", "ring_direct".

    Returns:
      The nnx model itself; for a linen module a `ParallelModule`, with its `init` and `apply`.

    Raises:
      TypeError: if `model` or `plan` is of another type.
      ValueError: for an entry of the plan that matches no layer, or one that is not an nnx.Linear
        or linen.Dense, or has options that cannot be honoured; for two entries that match one
        layer; for sizes that the axis does not divide. For nnx at once and before anything is
        changed; for linen from the first `init` or `apply`, since its layers exist only there.
    """
    styles.check(plan)
    check_implementation(implementation)
    known_axis_size(axis_name, mesh)
    if isinstance(model, linen.Module):
        return ParallelModule(model, plan, axis_name, mesh, implementation)
    if isinstance(model, nnx.Module):
        options = dict(axis_name=axis_name, mesh=mesh, implementation=implementation)
        return replace_linears(model, plan, options)
    raise TypeError(
        f"model: a {type(model).__name__}; expected a flax.nnx.Module or a flax.linen.Module"
    )
