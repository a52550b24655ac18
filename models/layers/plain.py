"""The layers of the model with JAX's own collectives, sharded as in Megatron-LM.

They have the names, parameters and results of those in `collective_matmul.layers`, and do not use
that library. Each matmul waits for its collective, unless `collective_matmul.overlap` rewrites the
program. Legend of local shapes: B is batch, S is the whole sequence, D is the size of the tensor
axis, s = S/D.
"""

from __future__ import annotations

import math
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

#: The checkpoint name of the results of the matmuls, for `jax.checkpoint` policies.
CHECKPOINT_NAME = "matmul"


class Options(TypedDict):
    """Options of every layer: see `models.llama.Llama`."""

    axis_name: str
    dtype: jax.typing.DTypeLike
    kernel_init: nnx.Initializer
    rngs: nnx.Rngs


class RowOptions(Options, total=False):
    """Options of row-parallel layers."""

    use_bias: bool


class ColumnOptions(RowOptions, total=False):
    """Options of column-parallel layers."""

    copies: int


class ColumnParallelLinear(nnx.Module):
    """A linear layer with sharded output features. It gathers the sequence, then multiplies.

    With `copies`, as many devices compute the same of out_features[0], and parameters are whole.
    """

    bias: nnx.Param[jax.Array] | None

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        **options: Unpack[ColumnOptions],
    ):
        columns = out_features if isinstance(out_features, tuple) else (out_features,)
        self.copies = options.get("copies", 1)
        self.axis_name, self.dtype = options["axis_name"], options["dtype"]
        axis_name = None if self.copies > 1 else self.axis_name
        self.kernel = _kernel((in_features,), columns, 1, options, axis_name)
        self.bias = nnx.data(None)
        if options.get("use_bias"):
            names = (axis_name, *[None] * (len(columns) - 1))
            # A key, so that the layers after it begin with the same weights as in the library.
            zeros = nnx.initializers.zeros(options["rngs"].params(), columns, jnp.float32)
            self.bias = nnx.Param(zeros, out_sharding=names, eager_sharding=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, s, in_features] -> [B, S, out_features[0]/D, *out_features[1:]]."""
        return self.of_gathered(lax.all_gather(x, self.axis_name, axis=1, tiled=True))

    def of_gathered(self, x: jax.Array) -> jax.Array:
        """[B, S, in_features] -> [B, S, out_features[0]/D, *out_features[1:]], without the
        gather."""
        y = jnp.tensordot(x, self._own(self.kernel[...].astype(self.dtype), 1), 1)
        y = checkpoint_name(y, CHECKPOINT_NAME)
        if self.bias is None:
            return y
        bias = self._own(self.bias[...].astype(self.dtype), 0)
        return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)

    def _own(self, parameter: jax.Array, dimension: int) -> jax.Array:
        """This device's part of a parameter that is whole on several."""
        if self.copies == 1:
            return parameter
        first = lax.axis_index(self.axis_name) // self.copies
        return lax.dynamic_slice_in_dim(parameter, first, 1, dimension)


class RowParallelLinear(nnx.Module):
    """A linear layer with sharded input features. It multiplies, then scatters the sum over
    devices. A bias is added once, after the sum."""

    bias: nnx.Param[jax.Array] | None

    def __init__(
        self, in_features: int | tuple[int, ...], out_features: int, **options: Unpack[RowOptions]
    ):
        rows = in_features if isinstance(in_features, tuple) else (in_features,)
        self.axis_name, self.dtype = options["axis_name"], options["dtype"]
        self.kernel = _kernel(rows, (out_features,), 0, options, self.axis_name)
        self.bias = nnx.data(None)
        if options.get("use_bias"):
            zeros = nnx.initializers.zeros(options["rngs"].params(), (out_features,), jnp.float32)
            self.bias = nnx.Param(zeros, out_sharding=(None,), eager_sharding=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, S, in_features[0]/D, *in_features[1:]] -> [B, s, out_features]."""
        kernel = self.kernel[...].astype(self.dtype)
        y = jnp.tensordot(x, kernel, kernel.ndim - 1)
        y = lax.psum_scatter(y, self.axis_name, scatter_dimension=1, tiled=True)
        return self.with_bias(checkpoint_name(y, CHECKPOINT_NAME))

    def with_bias(self, y: jax.Array) -> jax.Array:
        """[B, s, out_features] -> the same, with the bias if there is one."""
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)[None, None]


class AttentionProjection(nnx.Module):
    """Queries, keys and values; one gather feeds all three."""

    columns = ColumnParallelLinear

    def __init__(
        self,
        features: int,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        *,
        key_value_copies: int = 1,
        **options: Unpack[ColumnOptions],
    ):
        heads, others = (num_key_value_heads, head_dim), {**options, "copies": key_value_copies}
        self.query = self.columns(features, (num_heads, head_dim), **options)
        self.key = self.columns(features, heads, **others)
        self.value = self.columns(features, heads, **others)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[B, s, features] -> three of [B, S, heads/D, head_dim]."""
        return self.of_gathered(lax.all_gather(x, self.query.axis_name, axis=1, tiled=True))

    def of_gathered(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[B, S, features] -> three of [B, S, heads/D, head_dim]."""
        return self.query.of_gathered(x), self.key.of_gathered(x), self.value.of_gathered(x)


class GatedFeedForward(nnx.Module):
    """``down(silu(gate(x)) * up(x))``; one gather feeds gate and up."""

    columns, rows = ColumnParallelLinear, RowParallelLinear

    def __init__(self, features: int, hidden_features: int, **options: Unpack[Options]):
        self.gate = self.columns(features, hidden_features, **options)
        self.up = self.columns(features, hidden_features, **options)
        self.down = self.rows(hidden_features, features, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, s, features] -> [B, s, features]."""
        return self.of_gathered(lax.all_gather(x, self.gate.axis_name, axis=1, tiled=True))

    def of_gathered(self, x: jax.Array) -> jax.Array:
        """[B, S, features] -> [B, s, features]."""
        return self.down(jax.nn.silu(self.gate.of_gathered(x)) * self.up.of_gathered(x))


def _kernel(
    rows: tuple[int, ...],
    columns: tuple[int, ...],
    sharded: int,
    options: Options,
    axis_name: str | None,
) -> nnx.Param[jax.Array]:
    """A kernel [*rows, *columns], to be sharded in the given dimension over the axis, if any."""
    initial = options["kernel_init"](
        options["rngs"].params(), (math.prod(rows), math.prod(columns)), jnp.float32
    )
    shape = rows + columns
    names = tuple(axis_name if i == sharded else None for i in range(len(shape)))
    return nnx.Param(initial.reshape(shape), out_sharding=names, eager_sharding=False)
