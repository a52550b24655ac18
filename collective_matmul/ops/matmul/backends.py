"""The registry of backends: every way to execute the ops, by the name that users give it.

A backend is one file or folder and one line here; `collective_matmul.ops.matmul.backend` has the
contract.

================  ==============================================================================
name              what it does
================  ==============================================================================
``xla``           XLA's collective and XLA's matmul, one after the other: the reference
``ring``          chunks travel round a ring of permutes, each multiplied as it arrives
``ring_two_way``  the same, with half of every chunk in either direction
``ring_direct``   every chunk travels straight from its owner, without passing the others
``one_shot``      XLA's matmul, with collectives that write to all peers at once, for few rows
``fused``         one kernel for the op, which sends or receives tiles while it multiplies
================  ==============================================================================
"""

from __future__ import annotations

from collective_matmul.ops.matmul.backend import MatmulBackend
from collective_matmul.ops.matmul.fused.backend import Fused
from collective_matmul.ops.matmul.one_shot.backend import OneShot
from collective_matmul.ops.matmul.request import BACKENDS as BACKENDS
from collective_matmul.ops.matmul.ring.backend import RINGS
from collective_matmul.ops.matmul.xla import Xla

#: The backend that others must beat, and that executes every site.
REFERENCE: MatmulBackend = Xla()

for _backend in (REFERENCE, *RINGS.values(), OneShot(), Fused()):
    BACKENDS.register(_backend)

register, unregister = BACKENDS.register, BACKENDS.unregister
current_name = BACKENDS.current_name
