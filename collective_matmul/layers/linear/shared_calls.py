"""Layers that are called one after the other on one x, and computed together by the first call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax

from collective_matmul.log import warn_once

#: Computes the results of several layers for one x.
Compute = Callable[[jax.Array], Sequence[jax.Array]]


class SharedCalls:
    """The calls of several layers on one x, which is gathered once.

    The first call computes the results of all layers. The others find theirs, and the next x begins
    anew.

    Args:
      where: the module that calls the layers, for messages.
      names: the names of the layers.
      compute: computes the results of all layers for x, in their order. A linen layer does so
        itself, in its call.
    """

    def __init__(self, where: str, names: Sequence[str], compute: Compute | None = None):
        self.where, self.names, self._compute = where, tuple(names), compute
        self._x: Any = None
        self._results: Mapping[str, jax.Array] = {}
        self._waiting: set[str] = set()
        self._options: object = None
        self._was_called = False

    def result(
        self, name: str, x: jax.Array, compute: Compute | None = None, options: object = None
    ) -> jax.Array:
        """The result of one layer.

        Args:
          name: its name.
          x: its input.
          compute: as for the class.
          options: options of the layer that all layers have alike.

        Raises:
          ValueError: if x is another array than that of the layers called before, or options are
            others.
        """
        if not self._waiting:
            compute = compute or self._compute
            assert compute is not None
            self._x, self._results = x, dict(zip(self.names, compute(x), strict=True))
            self._waiting, self._was_called, self._options = set(self.names), True, options
        elif x is not self._x:
            called = [other for other in self.names if other not in self._waiting]
            raise ValueError(
                f"{self.where}: {name!r} is called on another array than {_listed(called)}, with"
                " which it shares a gather; call them on one array, or give each layer Column()"
            )
        if options != self._options:
            raise ValueError(
                f"{self.where}: {name!r} has {options}, others that share a gather with it have"
                f" {self._options}; construct them alike, or give each layer Column()"
            )
        self._waiting.discard(name)
        return self._results[name]

    def check_complete(self) -> None:
        """Checks that every layer was called on the last x.

        Raises:
          ValueError: if some were, and some were not.
        """
        if self._waiting:
            raise ValueError(
                f"{self.where}: {_listed(sorted(self._waiting))} was not called on the array that"
                f" it shares with {_listed([n for n in self.names if n not in self._waiting])};"
                " give each layer Column()"
            )
        if not self._was_called:
            warn_once(
                f"{self.where}: {_listed(self.names)} were not called on it by its __call__, so"
                " each gathers its own input; use shared_gather where they are called"
            )


_Active = Mapping[int, tuple[SharedCalls, str]]
_ACTIVE: ContextVar[_Active | None] = ContextVar("shared_calls", default=None)


@contextlib.contextmanager
def sharing(calls: SharedCalls, layers: Sequence[Any]) -> Iterator[None]:
    """Makes `shared_calls_of` return `calls` for each of its layers."""
    names = {id(layer): (calls, name) for layer, name in zip(layers, calls.names, strict=True)}
    token = _ACTIVE.set({**(_ACTIVE.get() or {}), **names})
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def shared_calls_of(layer: Any) -> tuple[SharedCalls, str] | None:
    """The calls that a layer is one of, and its name in them; None if it shares no gather."""
    return (_ACTIVE.get() or {}).get(id(layer))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
