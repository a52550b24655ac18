"""The registry of backends of `context_attention`.

===========  ===================================================================================
name         what it does
===========  ===================================================================================
``xla``      XLA's all-gather of keys and values, and masks made of positions: the reference
``gather``   keys and values straight from their owners, then few large calls of a kernel
``ulysses``  parts of heads for parts of sequences, then one call as on one device, and back
``ring``     keys and values of one device after the other, while those of the next travel
===========  ===================================================================================
"""

from __future__ import annotations

from collective_matmul.ops.attention.context.context_ring import RingContext
from collective_matmul.ops.attention.context.gather import GatherContext
from collective_matmul.ops.attention.context.request import BACKENDS as BACKENDS
from collective_matmul.ops.attention.context.ulysses import UlyssesContext
from collective_matmul.ops.attention.context.xla import XlaContext

for _backend in (XlaContext(), GatherContext(), UlyssesContext(), RingContext()):
    BACKENDS.register(_backend)
