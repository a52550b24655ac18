"""Decisions of all processes of a run: to refuse invalid input, and to stop after a step.

Every process calls these functions in the same order, as each waits for the others. Texts go
through the coordination service of `jax.distributed`, so they arrive where devices cannot
communicate. In a run of one process nothing is communicated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from train._compat import exchange
from train.processes.shutdown import Shutdown


class AgreedError(ValueError):
    """Invalid input that all processes refuse together. Process 0 prints it."""

    agreed = True


def is_agreed(error: BaseException | None) -> bool:
    """Whether all processes raise this error and end together."""
    return getattr(error, "agreed", False)


@contextlib.contextmanager
def together(*others: type[Exception]) -> Iterator[None]:
    """Refuses invalid input on all processes, if one of them does.

    Args:
      *others: types of errors besides those of invalid input that end all processes.

    Raises:
      AgreedError: a process refuses its input. With one process its own error is raised.
    """
    own: Exception | None = None
    try:
        yield
    except (ValueError, ImportError, *others) as error:
        if not jax.distributed.is_initialized():
            raise
        own = error
    for number, message in enumerate(exchange("" if own is None else str(own))):
        if message:
            where = "" if number == 0 else f"process {number}: "
            raise AgreedError(where + message) from own


def check_same(what: str, value: Any, advice: str) -> None:
    """Checks that all processes have the same JSON value.

    Raises:
      AgreedError: they do not; the message names what differs, and ends with the advice.
    """
    values = exchange(value)
    for number, other in enumerate(values):
        if other != values[0]:
            named = ", ".join(_differences("", values[0], other))
            raise AgreedError(
                f"process {number} has another {what} than process 0: {named}; {advice}"
            )


def _differences(name: str, one: Any, other: Any) -> Iterator[str]:
    if one == other:
        return
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            yield from _differences(f"{name}.{key}".lstrip("."), one.get(key), other.get(key))
        return
    yield f"{name} {other}, not {one}".lstrip()


class StopRequest:
    """Whether a signal asks any process to stop. All of them get the same answer.

    The number of the signal travels as a sum on the devices behind each step, and is read once the
    host has waited for that step anyway. So the devices are never waited for, and an answer is one
    step old.
    """

    def __init__(self, shutdown: Shutdown, mesh: Mesh) -> None:
        self._shutdown = shutdown
        self._answer: jax.Array | None = None
        self._ask: Callable[[int], jax.Array] | None = None
        self.signal = 0
        """The number of the signal that all processes know of; 0 for none."""
        if jax.process_count() > 1:
            self._ask = _maximum(mesh)

    def __call__(self) -> bool:
        """Whether to stop. Every process calls it equally often, after it has started a program."""
        if self.signal:
            return True
        if self._ask is None:
            self.signal = self._shutdown.requested
            return bool(self.signal)
        if self._answer is not None:
            self.signal = int(self._answer)
        if not self.signal:
            self._answer = self._ask(self._shutdown.requested)
        return bool(self.signal)


def _maximum(mesh: Mesh) -> Callable[[int], jax.Array]:
    """A function that returns the largest of the numbers of all processes, int32 []."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))
    placed: dict[int, jax.Array] = {}

    def maximum(number: int) -> jax.Array:
        if number not in placed:
            own = np.full(jax.local_device_count(), number, np.int32)
            placed[number] = jax.make_array_from_process_local_data(sharding, own, (mesh.size,))
        return largest(placed[number])

    return maximum
