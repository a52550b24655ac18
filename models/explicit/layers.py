"""The layers of the model over global arrays, on mesh axes of type Explicit.

They have the names, parameters and results of those in `models.layers.plain`, and no collectives:
the types of arrays say how they are sharded. Legend of global shapes: B is batch, S sequence. The
batch is sharded over the axes that the type of the input names, the sequence between blocks over
the tensor axis, as are heads and hidden features within them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from models.layers import plain
from models.layers.plain import CHECKPOINT_NAME


class ColumnParallelLinear(plain.ColumnParallelLinear):
    """A linear layer with sharded output features."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, S, in_features], the sequence sharded -> [B, S, *out_features], features sharded."""
        return self.of_gathered(reshard(x, P(batch_axes(x))))

    def _own(self, parameter: jax.Array, dimension: int) -> jax.Array:
        """A parameter that is whole on several devices, repeated so that they can shard it."""
        if self.copies == 1:
            return parameter
        repeated = jnp.repeat(parameter, self.copies, dimension)
        names = [None] * repeated.ndim
        return reshard(repeated, P(*names[:dimension], self.axis_name, *names[dimension + 1 :]))


class RowParallelLinear(plain.RowParallelLinear):
    """A linear layer with sharded input features."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, S, *in_features], features sharded -> [B, S, out_features], the sequence sharded."""
        kernel = self.kernel[...].astype(self.dtype)
        rows = P(batch_axes(x), self.axis_name)
        y = jnp.tensordot(x, kernel, kernel.ndim - 1, out_sharding=rows)
        return self.with_bias(checkpoint_name(y, CHECKPOINT_NAME))


class AttentionProjection(plain.AttentionProjection):
    """Queries, keys and values; one gather feeds all three."""

    columns = ColumnParallelLinear

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[B, S, features], the sequence sharded -> three of [B, S, heads, head_dim], heads
        sharded."""
        return self.of_gathered(reshard(x, P(batch_axes(x))))


class GatedFeedForward(plain.GatedFeedForward):
    """``down(silu(gate(x)) * up(x))``; one gather feeds gate and up."""

    columns, rows = ColumnParallelLinear, RowParallelLinear

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, S, features] -> the same, the sequence sharded."""
        return self.of_gathered(reshard(x, P(batch_axes(x))))


def batch_axes(x: jax.Array) -> str | tuple[str, ...] | None:
    """The mesh axes that shard the first dimension of an array, by its type."""
    return jax.typeof(x).sharding.spec[0]
