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
        self._x_before: Any = None
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
            others; if some layers were called more often than others.
        """
        if not self._waiting:
            compute = compute or self._compute
            assert compute is not None
            self._x_before, self._x = self._x, x
            self._results = dict(zip(self.names, compute(x), strict=True))
            self._waiting, self._was_called, self._options = set(self.names), True, options
        elif x is not self._x and name not in self._waiting:
            self.check_complete()
        elif x is not self._x:
            raise ValueError(
                f"{self.where}: {name!r} is called on another array than {_listed(self._called)},"
                " with which it shares a gather; call them on one array, or give each layer"
                " Column()"
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
          ValueError: if some were, and some were not, or not as often.
        """
        missing, called = _listed(sorted(self._waiting)), _listed(self._called)
        if self._waiting and self._x is self._x_before:
            raise ValueError(
                f"{self.where}: {called} is called more often than {missing} on the array that they"
                " share; call each once and use its result again, or give each layer Column()"
            )
        if self._waiting:
            raise ValueError(
                f"{self.where}: {missing} was not called on the array that it shares with {called};"
                " give each layer Column()"
            )
        if not self._was_called:
            warn_once(
                f"{self.where}: {_listed(self.names)} were not called on it by its __call__, so"
                " each gathers its own input; use shared_gather where they are called"
            )

    @property
    def _called(self) -> list[str]:
        """The layers that were called on the last x."""
        return [name for name in self.names if name not in self._waiting]


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
