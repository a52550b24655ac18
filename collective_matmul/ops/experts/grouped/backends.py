"""The registry of what multiplies groups of rows.

==========  =====================================================================================
name        what it does
==========  =====================================================================================
``xla``     `jax.lax.ragged_dot`: the reference, slow on GPUs
``mosaic``  kernels of this library for Hopper GPUs, also of operands in 8 bits
``triton``  kernels of this library, which read rows by index and add gradients in place
==========  =====================================================================================
"""

from __future__ import annotations

from collective_matmul.ops.experts.grouped.mosaic import MosaicGrouped
from collective_matmul.ops.experts.grouped.request import GROUPED_BACKENDS as GROUPED_BACKENDS
from collective_matmul.ops.experts.grouped.triton import TritonGrouped
from collective_matmul.ops.experts.grouped.xla import XlaGrouped

for _backend in (XlaGrouped(), TritonGrouped(), MosaicGrouped()):
    GROUPED_BACKENDS.register(_backend)
