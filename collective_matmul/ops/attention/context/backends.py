"""The registry of backends of `context_attention`.

===========  ===================================================================================
name         what it does
===========  ===================================================================================
``xla``      XLA's all-gather of keys and values, and masks made of positions: the reference
===========  ===================================================================================
"""

from __future__ import annotations

from collective_matmul.ops.attention.context.request import BACKENDS as BACKENDS
from collective_matmul.ops.attention.context.xla import XlaContext

for _backend in (XlaContext(),):
    BACKENDS.register(_backend)
