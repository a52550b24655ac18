"""The registry of backends: every way to execute the ops, by the name that users give it.

A backend is one file or folder and one line here; `collective_matmul.backends.base` has the
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

from collections.abc import Mapping
from types import MappingProxyType

from collective_matmul.backends.fused.backend import Fused
from collective_matmul.backends.one_shot.backend import OneShot
from collective_matmul.backends.ring.backend import RINGS
from collective_matmul.backends.xla import Xla
from collective_matmul.dispatch.contract import Backend
from collective_matmul.source_location import warn_deprecated

_backends: dict[str, Backend] = {}
#: All backends by name, in the order in which they are listed.
BACKENDS: Mapping[str, Backend] = MappingProxyType(_backends)

#: The backend that others must beat, and that executes every site.
REFERENCE: Backend = Xla()
#: What replaces the reference where its `unprofitable_reason` speaks against it: permutes, which
#: XLA can split over the mesh axes that it shards by itself, and as much traffic.
SUBSTITUTE: Backend = RINGS["ring_direct"]

#: Names of earlier releases.
_RENAMED = {"bulk": "xla"}


def register(backend: Backend) -> None:
    """Adds a backend, to be requested by its name, compared with the others, and tuned.

    Raises:
      ValueError: if the name is taken.
    """
    if backend.name in _backends or backend.name in _RENAMED:
        raise ValueError(f"backend.name={backend.name!r}: it is taken; choose another name")
    _backends[backend.name] = backend


def unregister(name: str) -> None:
    """Removes a backend that was added by `register`."""
    del _backends[name]


def current_name(name: str) -> str:
    """Today's name of a backend, with a DeprecationWarning for a name of an earlier release."""
    if name not in _RENAMED:
        return name
    warn_deprecated(
        f"implementation={name!r} is now called {_RENAMED[name]!r}; the old name will be removed"
    )
    return _RENAMED[name]


for _backend in (REFERENCE, *RINGS.values(), OneShot(), Fused()):
    register(_backend)
