"""Registries: the backends of a family of ops by name, and the ops by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from collective_matmul.dispatch.contract import Backend, Backends, Measurement, Request
from collective_matmul.source_location import warn_deprecated

#: The name of every family's reference.
REFERENCE = "xla"


class UnknownBackendError(ValueError):
    """A name of no backend was requested.

    A program that takes these names from its own user can say with them what it expects.

    Attributes:
      known: the names of the backends.
    """

    def __init__(self, message: str, known: Sequence[str]):
        super().__init__(message)
        self.known = tuple(known)


class Registry(Backends):
    """The backends of one family of ops, in the order in which they are listed.

    Args:
      substitute: the name of the backend that replaces the reference where that is unprofitable;
        None if there is none.
      renamed: today's names by the names of earlier releases.
      argument: the name of the ops' argument that requests backends.
      reference_differs: what the reference does otherwise than the other backends, such as "stores
        all scores"; its time then does not say how much communication these hide. "" if it does the
        same.
    """

    def __init__(
        self,
        substitute: str | None = None,
        renamed: Mapping[str, str] | None = None,
        argument: str = "implementation",
        reference_differs: str = "",
    ):
        self._backends: dict[str, Backend] = {}
        self._substitute = substitute
        self._renamed = dict(renamed or {})
        self.argument = argument
        self.reference_differs = reference_differs

    def register(self, backend: Backend) -> None:
        """Adds a backend, to be requested by its name, compared with the others, and tuned.

        Raises:
          ValueError: if the name is taken.
        """
        if backend.name in self._backends or backend.name in self._renamed:
            raise ValueError(f"backend.name={backend.name!r}: it is taken; choose another name")
        self._backends[backend.name] = backend

    def unregister(self, name: str) -> None:
        """Removes a backend that was added by `register`."""
        del self._backends[name]

    def current_name(self, name: str) -> str:
        """Today's name of a backend, with a DeprecationWarning for a name of an earlier release."""
        if name not in self._renamed:
            return name
        current = self._renamed[name]
        warn_deprecated(
            f"{self.argument}={name!r} is now called {current!r}; the old name will be removed"
        )
        return current

    def requested(self, value: str | Sequence[str] | None) -> tuple[str, ...] | None:
        """The names that a user's argument `implementation` requests, best first, or None.

        Raises:
          UnknownBackendError: unless `value` is None, the name of a backend, or a sequence of such
            names.
        """
        if value is None:
            return None
        named = (value,) if isinstance(value, str) else value
        is_named = isinstance(named, Sequence) and all(isinstance(name, str) for name in named)
        names = tuple(map(self.current_name, named)) if is_named else ()
        if not names or not all(name in self._backends for name in names):
            raise UnknownBackendError(
                f"{self.argument}={value!r}: expected None (choose per shape), or one or several of"
                f" {', '.join(self._backends)}",
                list(self._backends),
            )
        return names

    @property
    def reference(self) -> Backend:
        """The backend that others must beat, and that executes every request."""
        return self._backends[REFERENCE]

    @property
    def substitute(self) -> Backend | None:
        """The backend to use where the reference has an `unprofitable_reason`."""
        return None if self._substitute is None else self._backends[self._substitute]

    def __getitem__(self, name: str) -> Backend:
        return self._backends[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._backends)

    def __len__(self) -> int:
        return len(self._backends)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True)
class Op:
    """An op as tables and `tune` need it.

    Attributes:
      name: the name that requests and tables have.
      backends: the backends of its family.
      request_of: reads a flat request from what `Request.fields` returned; raises a ValueError,
        LookupError or TypeError for other JSON values, and an `UnregisteredError` for those that a
        program can read which has registered more.
      measurement: the programs that measure a flat request, on the first `axis_size` of some
        devices.
      has_bound: whether its programs include one of the computation alone, `COMPUTE_ONLY`.
    """

    name: str
    backends: Registry
    request_of: Callable[[Mapping[str, Any]], Request]
    measurement: Callable[[Any, Sequence[Any]], Measurement]
    has_bound: bool = False


_ops: dict[str, Op] = {}
#: All ops by name.
OPS: Mapping[str, Op] = MappingProxyType(_ops)


def register_op(op: Op) -> None:
    """Adds an op, whose requests tables then may have, and `tune` measures.

    Raises:
      ValueError: if the name is taken.
    """
    if op.name in _ops:
        raise ValueError(f"op.name={op.name!r}: it is taken; choose another name")
    _ops[op.name] = op


def unregister_op(name: str) -> None:
    """Removes an op that was added by `register_op`."""
    del _ops[name]


def current_name(name: str) -> str:
    """Today's name of a backend of any op."""
    for backends in dict.fromkeys(op.backends for op in _ops.values()):
        if (current := backends.current_name(name)) != name:
            return current
    return name
