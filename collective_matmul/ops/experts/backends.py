"""The registry of backends of expert ops.

================  ==============================================================================
name              what it does
================  ==============================================================================
``xla``           XLA's all-gather of tokens and reduce-scatter of results: the reference
``ring``          tokens travel round a ring of permutes; results go straight home
``ring_two_way``  the same, with half of the tokens in either direction
``ring_direct``   tokens travel straight from their owner
``exchange``      a token travels to the devices that have its experts, once to each
================  ==============================================================================
"""

from __future__ import annotations

from collective_matmul.ops.experts.exchange import ExchangeExperts
from collective_matmul.ops.experts.request import BACKENDS as BACKENDS
from collective_matmul.ops.experts.ring import RINGS
from collective_matmul.ops.experts.xla import XlaExperts

for _backend in (XlaExperts(), *RINGS.values(), ExchangeExperts()):
    BACKENDS.register(_backend)
