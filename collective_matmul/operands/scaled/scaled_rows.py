"""`ScaledRows`: rows in 8 bits and their scales, apart, for products where they were made."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from collective_matmul.operands.scaled.scaling import spread


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledRows:
    """Rows [..., K] in 8 bits, which do not travel: `PackedRows` do.

    Attributes:
      values: [..., M, K].
      scales: float32 [..., M, scales of a row].
      block: how many numbers of a row have a scale in common; None if the whole row has one.
    """

    values: jax.Array
    scales: jax.Array
    block: int | None = field(default=None, metadata={"static": True})

    #: A weight gradient has the rows apart, as they were.
    array = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., M, K]."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        return jnp.dtype(self.values.dtype)

    @property
    def loaded(self) -> jax.Array:
        """The values, as kernels load them."""
        return self.values

    @property
    def without_array(self) -> ScaledRows:
        """The rows themselves."""
        return self

    def dequantized(self) -> jax.Array:
        """The numbers [..., M, K] that the rows stand for, float32."""
        scales = self.scales
        if self.block is not None:
            scales = spread(scales, self.shape[-1], -1, self.block)
        return self.values.astype(jnp.float32) * scales
