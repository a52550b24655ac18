"""Frozen kernels in 8 bits: their shapes and shardings, and how they are made one by one.

A kernel [*K, *N] becomes a matrix whose values are [N, K], with scales of columns or of blocks. It
is the only copy. The float32 kernel of one layer is all that exists of it in another format.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import Quantized, quantize_frozen

_STANDARD_DEVIATION = 0.02


def input_dimensions(model: nnx.Module) -> dict[str, int]:
    """The number of input dimensions of each kernel by its path, of layers that quantize."""
    found: dict[str, int] = {}
    module: Any
    for path, module in nnx.iter_modules(model):
        if getattr(module, "fp8", None) is not None and hasattr(module, "kernel_shape"):
            found[".".join(map(str, (*path, "kernel")))] = len(module.kernel_shape[0])
    return found


def quantized(kernel: jax.Array, inputs: int, fp8: str, dtype: str) -> Quantized:
    """A kernel [*K, *N] as a frozen matrix."""
    matrix = kernel.reshape(math.prod(kernel.shape[:inputs]), -1)
    return quantize_frozen(matrix, fp8, dtype)


def abstract(
    leaf: jax.ShapeDtypeStruct, inputs: int, fp8: str, dtype: str, stacked: int
) -> Quantized:
    """The shapes of the matrix of a kernel, or of those of stacked layers."""
    make = functools.partial(quantized, inputs=inputs, fp8=fp8, dtype=dtype)
    return jax.eval_shape(jax.vmap(make) if stacked else make, leaf)


def specs(made: Quantized, spec: P, inputs: int, stacked: int) -> Quantized:
    """The specs of a matrix, from that of its kernel [*K, *N]. Over fsdp only values are sharded,
    as a matrix is gathered without its scales."""
    layers, names = tuple(spec[:stacked]), tuple(spec[stacked:])
    rows, columns = names[0], names[inputs]
    in_blocks = made.forward.scales.ndim - stacked == 2
    scales = map(_without_fsdp, (columns, rows) if in_blocks else (columns,))
    values = P(*layers, columns, rows)
    leaves = [values, P(*layers, *scales)]
    return jax.tree.unflatten(jax.tree.structure(made), leaves)


def _without_fsdp(names: Any) -> Any:
    """The axes of a dimension but fsdp."""
    if isinstance(names, tuple):
        others = tuple(name for name in names if name != "fsdp")
        return others[0] if len(others) == 1 else others or None
    return None if names == "fsdp" else names


def on_mesh(made: Quantized, made_specs: Quantized, mesh: Mesh) -> Any:
    """The shardings of a matrix."""
    return jax.tree.map(lambda _, spec: NamedSharding(mesh, spec), made, made_specs)


def random_kernel(
    key: jax.Array, leaf: jax.ShapeDtypeStruct, shardings: Any, stacked: int, **options: Any
) -> Quantized:
    """A random matrix, made layer by layer: `options` are those of `quantized`."""

    def make(key: jax.Array) -> Quantized:
        kernel = _STANDARD_DEVIATION * jax.random.normal(key, leaf.shape[stacked:], jnp.float32)
        return quantized(kernel, **options)

    def every(key: jax.Array) -> Quantized:
        if not stacked:
            return make(key)
        return jax.lax.map(make, jax.random.split(key, leaf.shape[0]))

    return jax.jit(every, out_shardings=shardings)(key)


def convert(kernel: jax.Array, shardings: Any, stacked: int, **options: Any) -> Quantized:
    """The matrix of a kernel, whose memory is given back: `options` are those of `quantized`."""

    def every(kernel: jax.Array) -> Quantized:
        make = functools.partial(quantized, **options)
        return jax.lax.map(make, kernel) if stacked else make(kernel)

    made = jax.block_until_ready(jax.jit(every, out_shardings=shardings)(kernel))
    kernel.delete()
    return made


def names_of(kernels: Iterable[str], known: dict[str, int]) -> list[str]:
    """The kernels that become matrices."""
    return [name for name in kernels if name in known]
