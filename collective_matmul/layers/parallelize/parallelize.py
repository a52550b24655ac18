"""`parallelize`: makes the linear layers and the attention of an existing model collective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, overload

from flax import linen, nnx
from jax.sharding import AbstractMesh, Mesh

from collective_matmul.layers import layer_checks
from collective_matmul.layers.parallelize import path_patterns
from collective_matmul.layers.parallelize.parallel_linen import ParallelModule
from collective_matmul.layers.parallelize.parallel_nnx import parallelize_nnx
from collective_matmul.layers.parallelize.parallel_styles import ParallelStyles
from collective_matmul.layers.sharding_context import known_axis_size
from collective_matmul.ops.matmul.checks import Implementation
from collective_matmul.ops.matmul.checks import implementation as check_implementation

Model = TypeVar("Model", bound=nnx.Module)


@overload
def parallelize(
    model: Model,
    plan: ParallelStyles,
    *,
    axis_name: str = "tensor",
    mesh: Mesh | AbstractMesh | None = None,
    implementation: Implementation = None,
    data_axis_name: str | tuple[str, ...] = (),
    weight_axis_name: str | None = None,
) -> Model: ...
@overload
def parallelize(
    model: linen.Module,
    plan: ParallelStyles,
    *,
    axis_name: str = "tensor",
    mesh: Mesh | AbstractMesh | None = None,
    implementation: Implementation = None,
    data_axis_name: str | tuple[str, ...] = (),
    weight_axis_name: str | None = None,
) -> ParallelModule: ...
def parallelize(
    model: Any,
    plan: ParallelStyles,
    *,
    axis_name: str = "tensor",
    mesh: Mesh | AbstractMesh | None = None,
    implementation: Implementation = None,
    data_axis_name: str | tuple[str, ...] = (),
    weight_axis_name: str | None = None,
) -> Any:
    """Makes linear layers and attention of a model collective; weights and paths stay the same.

    ::

        parallelize(
            model,
            {"layers.*.attention": Heads(), "layers.*.up": Column(), "layers.*.down": Row()},
            mesh=mesh,
        )

    A Column layer gathers its input [..., S, K] along S and shards its output features over the
    axis. A Row layer takes such features and scatters its result [..., S, N] along S. Heads divides
    the heads of Flax's attention: q, k and v share a gather if their inputs are one array, masks,
    dropout, cross-attention and decoding work as before. If the axis does not divide S, as in
    decoding with S = 1, nothing is gathered or scattered, and the results of Row are summed.

    With global arrays, under `jax.jit` or `overlap_jit`, the model computes the same as before.
    Inside a `shard_map` over the axis it computes on local shards, also of the parameters.

    If the mesh is known, the variables are placed on it. A model too large for one device is
    parallelized before its weights exist: from `nnx.eval_shape`, whose shapes get shardings, or
    inside `nnx.jit`, where each device makes its shards only.

    Args:
      model: a `flax.nnx.Module`, which is changed: every matched layer becomes a
        `ColumnParallelLinear` or `RowParallelLinear` with the same values in its parameters.
        Create its optimizer afterwards. Or a `flax.linen.Module`, which is not changed.
      plan: a style by path pattern. Patterns are those of `fnmatch` over dotted paths such as
        "layers.0.mlp.up", the paths of the parameters; ``*`` matches dots too.
        `Column` and `Row` take nnx.Linear, nnx.LinearGeneral, nnx.LoRALinear, nnx.LoRA around a
        linear layer, linen.Dense and linen.DenseGeneral; the first output feature dimension, or
        the first input feature dimension, is sharded. A layer with an adapter has a frozen kernel
        then, whose gradient is zero: see `Lora`. `Shared` is for the module around several such
        layers that it calls on one x, as q, k and v, or gate and up: they share its gather.
        `Heads` takes nnx.MultiHeadAttention,
        linen.MultiHeadDotProductAttention, linen.MultiHeadAttention and linen.SelfAttention.
      axis_name: the mesh axis to shard over.
      mesh: mesh of the global arrays; None uses the mesh of `jax.set_mesh`. With an `AbstractMesh`,
        `explain` tells about the model on devices that are not here.
      implementation: which backends execute the matmuls, as the ops take it; None chooses for each
        shape. See `collective_matmul.ops.matmul.backends`.
      data_axis_name: a mesh axis that shards dimension 0 of global activations, the batch, or
        several; needed for axes of type Auto alone. Results are the same without, but a layer then
        chooses backends for the whole batch: see `ColumnParallelLinear`.
      weight_axis_name: for nnx modules, a second mesh axis that shards the kernels of matched
        layers, as in fully sharded data parallelism: output features, or input features of all
        Column layers where both axes do not divide the output features of one. Where it is one of
        `data_axis_name`, the ops gather the kernels in their own loops.

    Returns:
      The nnx model itself; for a linen module, a `ParallelModule` with its `init` and `apply`.

    Raises:
      TypeError: if `model`, `plan`, `mesh` or `data_axis_name` has another type.
      ValueError: for an entry of the plan that matches no layer, or another module, or a layer
        with unsupported options; for two entries that say different things of one layer; for
        sizes and numbers of heads that the axes do not divide. For nnx it is raised at once,
        before anything is changed; for linen by the first `init` or `apply`, since its layers
        exist only there.
    """
    if isinstance(model, Mapping) and isinstance(plan, nnx.Module | linen.Module):
        raise TypeError(
            f"model, plan: a {type(model).__name__} and a {type(plan).__name__}, which are swapped;"
            " give the model first: parallelize(model, plan)"
        )
    path_patterns.check(plan)
    requested = check_implementation(implementation)
    data_axes = layer_checks.data_axes(data_axis_name, axis_name)
    known_axis_size(axis_name, mesh, data_axes)
    if isinstance(model, linen.Module):
        if weight_axis_name is not None:
            raise ValueError(
                f"weight_axis_name={weight_axis_name!r}: the layers of a linen module do not gather"
                " their kernels; leave it out, and shard the variables over that axis yourself, as"
                " docs/how_to/fsdp.md does"
            )
        return ParallelModule(model, plan, axis_name, mesh, requested, data_axes)
    if isinstance(model, nnx.Module):
        options = dict(axis_name=axis_name, mesh=mesh, implementation=requested)
        options |= dict(data_axis_name=data_axes, weight_axis_name=weight_axis_name)
        return parallelize_nnx(model, plan, options)
    raise TypeError(
        f"model: a {type(model).__name__}; expected a flax.nnx.Module or a flax.linen.Module"
    )
