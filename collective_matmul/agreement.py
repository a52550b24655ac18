"""What several processes tell each other by JAX's key-value store, without a device.

A run of one process has nobody to tell.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from collective_matmul._compat import distributed_state

_numbers = itertools.count()

#: A process may compile for long while the others wait.
_TIMEOUT_MILLISECONDS = 3_600_000


def is_alone() -> bool:
    """Whether this is the only process."""
    return distributed_state().client is None


def exchange(value: Any) -> list[Any]:
    """Returns the JSON values of all processes, in order.

    Every process calls it equally often, from one thread: a call waits for the same call of the
    others.
    """
    state = distributed_state()
    if state.client is None:
        return [value]
    name = f"collective_matmul/{next(_numbers)}"
    state.client.key_value_set(f"{name}/{state.process_id}", json.dumps(value))
    state.client.wait_at_barrier(name, _TIMEOUT_MILLISECONDS)
    told = dict(state.client.key_value_dir_get(f"{name}/"))
    return [json.loads(told[f"{name}/{number}"]) for number in range(state.num_processes)]


def of_first_process(value: Any) -> Any:
    """Returns the JSON value of process 0, on all of them; see `exchange`."""
    return exchange(value)[0]


class DisagreementError(RuntimeError):
    """Processes would compile different programs, which would wait for each other for ever."""


#: How often each program was compared.
_compared: Counter[str] = Counter()

#: After this time, process 0 does not trace a program that another process does.
_FIRST_PROCESS_MILLISECONDS = 120_000


def check_same(program: str, lines: Sequence[str]) -> None:
    """Checks that this process decided about a program as process 0 did.

    Process 0 waits for nobody. The others wait until it has traced the program.

    Args:
      program: what identifies the program in all processes.
      lines: the decisions, one line for each.

    Raises:
      DisagreementError: some decision differs.
    """
    state = distributed_state()
    if state.client is None:
        return
    digest = hashlib.sha256(program.encode()).hexdigest()[:16]
    key = f"collective_matmul/decisions/{digest}/{_compared[digest]}"
    _compared[digest] += 1
    if state.process_id == 0:
        state.client.key_value_set(key, json.dumps(list(lines)))
        return
    try:
        told = state.client.blocking_key_value_get(key, _FIRST_PROCESS_MILLISECONDS)
    except jax.errors.JaxRuntimeError:
        return  # A program of some processes alone.
    expected = json.loads(told)
    if expected != list(lines):
        raise DisagreementError(_difference(state.process_id, program, expected, list(lines)))


def _difference(process: int, program: str, expected: list[str], lines: list[str]) -> str:
    """The first difference, in words."""
    pairs = itertools.zip_longest(expected, lines, fillvalue="no further op")
    first, own = next((a, b) for a, b in pairs if a != b)
    return (
        f"process {process} decides differently from process 0 about {program.partition(' ')[0]}:"
        f" {own}, where process 0 has {first}; give all processes the same versions, arguments,"
        " environment variables, and tables of measurements (collective_matmul.tune in all"
        " processes writes the same)"
    )
