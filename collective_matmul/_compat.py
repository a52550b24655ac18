"""The private parts of JAX that the library uses, and differences between JAX versions.

Supported are jax 0.10.2 to 0.12. Each use names the versions that it is for.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# 0.10.2 to 0.12: no public names. Outside all transformations, the state is clean.
from jax._src.core import ShardingTypeError as ShardingTypeError
from jax._src.core import trace_ctx, trace_state_clean

# 0.10.2 to 0.12: `jax.nn.dot_product_attention` does not take offsets of packed sequences.
from jax._src.cudnn import fused_attention_stablehlo as cudnn

# 0.10.2 to 0.12: lowered modules of these primitives are cached by device, not by mesh shape only.
from jax._src.dispatch import prim_requires_devices_during_lowering

# 0.10.2 to 0.12: no public access to the key-value store of `jax.distributed`. Public exchanges
# between processes, of `multihost_utils`, run programs, which is impossible while one is lowered.
from jax._src.distributed import global_state

# 0.10.2 to 0.12: `pl.kernel` calls this without `input_output_aliases`. It can update only mutable
# refs in place, and these can neither vary over mesh axes nor be used inside `custom_vmap`.
from jax._src.pallas.mpmd import _mpmd_map

# 0.10.2 to 0.12: `jax.set_mesh` also types arrays that are made while it is set.
from jax._src.sharding_impls import _internal_use_concrete_mesh

# 0.10.2 to 0.12: equations that are traced in place of others keep the source lines of these.
from jax._src.source_info_util import user_context
from jax.core import ShapedArray
from jax.experimental.pallas import mosaic_gpu
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

#: Whether Mosaic's matmuls take operands of both 8-bit dtypes.
MULTIPLIES_MIXED_FP8 = jax.__version_info__ >= (0, 11)


def traced_as(source_info: Any) -> Any:
    """A context in which traced equations have the source lines and name scope of another."""
    return user_context(source_info.traceback, name_stack=source_info.name_stack)


def knowing_devices_of(arguments: Any) -> contextlib.AbstractContextManager:
    """A context that knows the devices of the mesh over which the first argument is sharded.

    Without it or `jax.set_mesh`, a `shard_map` in a program over Explicit axes knows no devices: it
    has its mesh from the types of arrays.
    """
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    named = (s for s in shardings if isinstance(s, jax.sharding.NamedSharding))
    mesh = next((s.mesh for s in named if s.mesh.explicit_axes), None)
    if not isinstance(mesh, jax.sharding.Mesh):
        return contextlib.nullcontext()
    return _internal_use_concrete_mesh(mesh)


def calls_run_programs() -> bool:
    """Whether calls of jitted functions run programs here.

    They do not where JAX traces another function, nor in `jax.disable_jit`.
    """
    config: Any = jax.config
    return trace_state_clean() and not config.jax_disable_jit


def differentiates() -> bool:
    """Whether JAX differentiates what is called here, outside of other traces."""
    return type(trace_ctx.trace).__name__ in ("JVPTrace", "LinearizeTrace")


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which `x` may differ between devices, according to its type.

    Empty inside a `shard_map` with ``check_vma=False``, which does not track them.
    """
    return jax.typeof(x).manual_axis_type.varying


def tracks_varying_axes(axis_name: str) -> bool:
    """Whether the enclosing `shard_map` over `axis_name` has ``check_vma=True``."""
    return axis_name in varying_axes(lax.axis_index(axis_name))


def vary_over(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Types `x` as varying over `axes` too. The transpose sums over the added axes."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values of a `scan`, by its parameters."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # Since 0.11.
    return len(list(consts)), len(list(carry))


def key_value_store() -> Any | None:
    """The key-value store that `jax.distributed.initialize` connects processes to, or None."""
    return global_state.client


# 0.10.2 to 0.12: where these functions trace branches and the bodies of loops.
_CONTROL_FLOW = ("lax/control_flow/conditionals.py", "lax/control_flow/loops.py")


def inside_branch_or_loop() -> bool:
    """Whether JAX traces a branch, or a loop whose number of steps is computed, at the moment.

    True inside `jax.lax.cond`, `switch` and `while_loop`, also where a function in between is
    jitted; False inside `scan`, whose number of steps is fixed.
    """
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        code = frame.f_code
        if code.co_name in ("cond", "switch", "while_loop") and code.co_filename.endswith(
            _CONTROL_FLOW
        ):
            return True
    return False


def partly_automatic() -> bool:
    """Whether the compiler still divides arrays over other mesh axes, automatic or explicit."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in (*mesh.auto_axes, *mesh.explicit_axes))


def automatic_axes() -> tuple[str, ...]:
    """Auto axes of several devices, which the compiler may divide arrays over: ``"data=2"``."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(f"{axis}={mesh.shape[axis]}" for axis in mesh.auto_axes if mesh.shape[axis] > 1)


def on_one_device() -> bool:
    """Whether each array here is on one device: the compiler divides none."""
    mesh = jax.sharding.get_abstract_mesh()
    return not partly_automatic() if mesh.manual_axes else jax.device_count() == 1


def psum(x: jax.Array, axis_name: str) -> jax.Array:
    """`lax.psum` over one axis, also beside mesh axes that are left to the compiler."""
    return _reduced(lambda x: lax.psum(x, axis_name), x, axis_name)


def pmax(x: jax.Array, axis_name: str) -> jax.Array:
    """`lax.pmax`, likewise."""
    return _reduced(lambda x: lax.pmax(x, axis_name), x, axis_name)


def psum_scatter(x: jax.Array, axis_name: str | tuple[str, ...], dimension: int) -> jax.Array:
    """A tiled `lax.psum_scatter` over one axis or several, likewise."""

    def scatter(x: jax.Array) -> jax.Array:
        return lax.psum_scatter(x, axis_name, scatter_dimension=dimension, tiled=True)

    return _widened(scatter, x)


def _reduced(reduction: Callable, x: jax.Array, axis_name: str) -> jax.Array:
    """A reduction over an axis that keeps the shape."""
    if lax.axis_size(axis_name) > 1 or not partly_automatic():
        return _widened(reduction, x)
    # 0.10.2 to 0.12: XLA refuses a reduction over one device beside automatic axes, but no gather
    # ("Cross-partition allreduce must be in (partial) manual partitioning mode").
    if not tracks_varying_axes(axis_name):
        return x
    whole = lax.all_gather(lax.expand_dims(x, (0,)), axis_name, tiled=True, to="invarying")
    return lax.squeeze(whole, (0,))


def _widened(reduction: Callable, x: jax.Array) -> jax.Array:
    """A reduction over an axis, in 32 bits where XLA cannot compile it in 16 bits."""
    if not (partly_automatic() and ends_the_process(x.dtype)):
        return reduction(x)
    return reduction(x.astype(jnp.float32)).astype(x.dtype)


def ends_the_process(dtype: Any) -> bool:
    """Whether reductions over devices of this dtype do, beside axes that the compiler shards.

    0.10.2 to 0.12: XLA for CPUs stops at those in 16 bits ("Invalid binary instruction opcode
    copy"). The mesh tells what the program is for, or else the default backend.
    """
    if dtype.itemsize != 2 or not jnp.issubdtype(dtype, jnp.floating):
        return False
    of_mesh = jax.sharding.get_abstract_mesh().abstract_device
    return (of_mesh or jax.devices()[0]).device_kind == "cpu"


_axis_indices: contextvars.ContextVar[Mapping[str, jax.Array]] = contextvars.ContextVar(
    "axis_indices", default=types.MappingProxyType({})
)


@contextlib.contextmanager
def axis_indices(indices: Mapping[str, jax.Array]) -> Iterator[None]:
    """Inside the block, `axis_index` returns these."""
    token = _axis_indices.set(indices)
    try:
        yield
    finally:
        _axis_indices.reset(token)


def axis_index(axis_name: str | tuple[str, ...]) -> jax.Array:
    """This device's index along a manual axis, or along several, the last of them fastest."""
    if isinstance(axis_name, tuple):
        index = jnp.zeros((), jnp.int32)
        for name in axis_name:
            index = index * lax.axis_size(name) + axis_index(name)
        return index
    if axis_name in _axis_indices.get():
        return _axis_indices.get()[axis_name]
    if jax.__version_info__ >= (0, 11) or not partly_automatic():
        return lax.axis_index(axis_name)
    # jaxlib 0.10 cannot compile some programs with a few dozen shard_maps that leave axes automatic
    # and use an axis index ("PartitionId instruction is not supported for SPMD partitioning").
    # Scattering the sum of all indices gives the same number.
    devices = lax.axis_size(axis_name)
    return lax.psum_scatter(jnp.arange(devices, dtype=jnp.int32), axis_name) // devices


def load_in_layout(ref: Any, layout: Any) -> jax.Array:
    """Loads a reference in a layout of registers. Within kernels."""
    index = () if jax.__version_info__ >= (0, 11, 2) else ((),)
    plgpu: Any = mosaic_gpu
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def in_place_kernel(
    body: Callable, mesh: Any, outs: Sequence[jax.Array], *, writes_all: bool = False, **kwargs: Any
) -> Callable:
    """A `pl.kernel` that updates `outs` in place: ``kernel(*operands)`` returns the new `outs`.

    `body` receives refs of the operands and of the outs. Elements that it does not write keep their
    value. The compiler copies an out only if its old value is used afterwards.

    With `writes_all` it writes every element, and the outs only tell their types: results are new
    arrays. XLA may allocate an empty array long before the kernel that it is for.

    Kernels compute indices in int32, so they are traced without 64-bit types.
    """

    def kernel(*operands: jax.Array) -> tuple[jax.Array, ...]:
        with jax.enable_x64(False):
            return launch(*operands)

    def launch(*operands: jax.Array) -> tuple[jax.Array, ...]:
        count = len(operands)
        types = tuple(map(jax.typeof, outs))
        if writes_all:
            results = _mpmd_map([(mesh, body)], types, **kwargs)(*operands)
            # 0.10.2: what does not overwrite an array varies over no axes.
            return tuple(map(vary_over, results, map(varying_axes, outs)))

        def run(*refs: Any) -> None:
            # Each out has two refs to the same memory: as an operand, and as a result.
            body(*refs[:count], *refs[count + len(outs) :])

        aliases = {count + i: i for i in range(len(outs))}
        call = _mpmd_map([(mesh, run)], types, input_output_aliases=aliases, **kwargs)
        # XLA would let a kernel write into the slice of a stacked array that its result is copied
        # to, as it does for a scan, and what the kernel does not write would be lost.
        return tuple(lax.optimization_barrier(call(*operands, *outs)))

    return kernel


_device_constant = Primitive("device_constant")


def device_constant(
    make: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """A constant array that is computed from the devices of the mesh.

    It is computed while the program is lowered: a traced program is shared by all meshes of one
    shape, and does not know its devices. Call it inside `jax.shard_map`.

    Args:
      make: a hashable function from an array of devices, in the shape of the mesh, to the constant.
      shape: shape of the constant.
      dtype: dtype of the constant.

    Raises:
      ValueError: while lowering, if the mesh has no devices, or if the program is exported.
    """
    return _device_constant.bind(make=make, shape=shape, dtype=np.dtype(dtype))


@_device_constant.def_abstract_eval
def _(*, make: Any, shape: tuple[int, ...], dtype: np.dtype) -> ShapedArray:
    del make
    return ShapedArray(shape, dtype)


def _lower_device_constant(
    context: mlir.LoweringRuleContext, *, make: Any, shape: tuple[int, ...], dtype: np.dtype
) -> Any:
    module = context.module_context
    mesh = getattr(module.axis_context, "mesh", None)
    if module.lowering_parameters.for_export or not isinstance(mesh, jax.sharding.Mesh):
        what = f"a program for {mesh} without devices" if mesh else "a program outside a mesh"
        raise ValueError(
            f"{'an exported program' if module.lowering_parameters.for_export else what}:"
            " addresses of memory are those of one process's devices; set the jax.sharding.Mesh"
            " with jax.set_mesh (a jax.shard_map within another knows its devices only so), or"
            " give it to jax.shard_map, or compile without peer_kernels=True"
        )
    value = make(mesh.devices)
    assert value.shape == shape and value.dtype == dtype
    return [mlir.ir_constant(value)]


mlir.register_lowering(_device_constant, _lower_device_constant)
prim_requires_devices_during_lowering.add(_device_constant)


_nan_like = Primitive("nan_like")


def nan_like(array: jax.Array) -> jax.Array:
    """An array of NaN of the same type, with a batch dimension where `array` has one.

    A constant has none: then `jax.vmap` of a `jax.custom_vjp` that takes it sums the gradients of
    a batch. Nothing reads `array`. What `jax.checkpoint` computes again does not take it either,
    so that it need not stay in memory.
    """
    return _nan_like.bind(array, type_of_result=None)


@_nan_like.def_abstract_eval
def _(*arrays: ShapedArray, type_of_result: ShapedArray | None) -> ShapedArray:
    return type_of_result or arrays[0]


@_nan_like.def_impl
def _(*arrays: jax.Array, type_of_result: ShapedArray | None) -> jax.Array:
    like = type_of_result or arrays[0]
    return jnp.full(like.shape, jnp.nan, like.dtype)


def _lower_nan_like(context: mlir.LoweringRuleContext, *arrays: Any, **params: Any) -> Any:
    del arrays, params
    (result,) = context.avals_out
    make = mlir.lower_fun(
        lambda: lax.full(result.shape, np.nan, result.dtype), multiple_results=False
    )
    return make(context.replace(avals_in=()))


def _without_operand(used: Sequence[bool], *others: Any) -> tuple[list[bool], Any]:
    """The equation with no operand: how JAX drops what no result depends on."""
    equation = others[-1]  # 0.10.2: (used, equation); 0.12: (used, operands in use, equation).
    (result,) = equation.outvars
    without = equation.replace(invars=[], params={"type_of_result": result.aval})
    return [False] * len(equation.invars), without if used[0] else None


mlir.register_lowering(_nan_like, _lower_nan_like)
ad.primitive_jvps[_nan_like] = lambda primals, tangents, **params: (
    _nan_like.bind(*primals, **params),
    ad.Zero(jax.typeof(primals[0]).to_tangent_aval()),
)
batching.primitive_batchers[_nan_like] = lambda arrays, dimensions, **params: (
    _nan_like.bind(*arrays, **params),
    dimensions[0],
)
pe.dce_rules[_nan_like] = _without_operand


def packed_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    scale: float,
) -> jax.Array:
    """Causal attention by cuDNN within documents that are packed into blocks. Needs Hopper GPUs.

    Legend: B is the number of blocks, S tokens of a block, N query heads, K key and value heads, H
    head size, M the largest number of documents that begin in a block.

    Args:
      query: [B, S, N, H], bfloat16 or float16.
      key: [B, S, K, H].
      value: [B, S, K, H].
      starts: int32 [B, M] with M > 1, where documents begin in each block, ascending; then -1.
      lengths: int32 [B, M], their lengths, at most S; then -1. A document may continue in the next
        block.
      scale: what scores are multiplied with.

    Returns:
      [B, S, N, H]. Rows of no document are not written, nor are their gradients.

    Raises:
      ValueError: for more elements than cuDNN can address.
    """
    if query.size >= 2**31:
        raise ValueError(
            f"query of shape {query.shape}: packed attention addresses fewer than 2**31 elements;"
            " give fewer sequences to a device at once"
        )
    axes = varying_axes(query)
    starts, lengths = vary_over(starts, axes), vary_over(lengths, axes)
    if jax.__version_info__ < (0, 11):
        # The offsets of keys are computed with the number of query heads.
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    # One column more than there are documents.
    offsets = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
    attention: Any = cudnn.dot_product_attention
    return attention(
        query,
        key,
        value,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=scale,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )
