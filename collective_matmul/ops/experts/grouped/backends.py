"""The registry of what multiplies groups of rows.

==========  =====================================================================================
name        what it does
==========  =====================================================================================
``xla``     `jax.lax.ragged_dot`: the reference, slow on GPUs
``triton``  kernels of this library, which read rows by index and add gradients in place
==========  =====================================================================================
"""

from __future__ import annotations

from collective_matmul.ops.experts.grouped.request import GROUPED_BACKENDS as GROUPED_BACKENDS
from collective_matmul.ops.experts.grouped.triton import TritonGrouped
from collective_matmul.ops.experts.grouped.xla import XlaGrouped

for _backend in (XlaGrouped(), TritonGrouped()):
    GROUPED_BACKENDS.register(_backend)
