"""Exchanges of JSON values between processes, through the key-value store of `jax.distributed`.

No device takes part. One process, or processes that are not connected, are alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from collective_matmul._compat import key_value_store

_numbers = itertools.count()

#: A process may compile for long while the others wait. If it dies, JAX ends them.
_TIMEOUT_MILLISECONDS = 7 * 24 * 3600 * 1000


def is_alone() -> bool:
    """Whether there is no other process to agree with."""
    return key_value_store() is None or jax.process_count() == 1


def exchange(value: Any) -> list[Any]:
    """Returns the JSON values of all processes, in order.

    Every process calls it equally often, from one thread: a call waits for the same call of the
    others.
    """
    if is_alone():
        return [value]
    store: Any = key_value_store()
    name = f"collective_matmul/exchange/{next(_numbers)}"
    store.key_value_set(f"{name}/{jax.process_index()}", json.dumps(value))
    store.wait_at_barrier(name, _TIMEOUT_MILLISECONDS)
    told = dict(store.key_value_dir_get(f"{name}/"))
    return [json.loads(told[f"{name}/{number}"]) for number in range(jax.process_count())]


def of_first_process(value: Any) -> Any:
    """Returns the JSON value of process 0, on all of them; see `exchange`."""
    return exchange(value)[0]


class DisagreementError(RuntimeError):
    """Processes would run different programs, which would wait for each other for ever."""


#: How many programs were checked under each name.
_checked: Counter[str] = Counter()


def check_same(program: str, choices: Mapping[str, Sequence[str]]) -> None:
    """Checks that no other process has chosen differently for a program that they run together.

    A process compares its choices with those of the processes that came here before. So nothing
    waits, and the last one knows all. What only one of two has is no difference: JAX does not trace
    again what it has traced for another program.

    Args:
      program: the name of the program. Those of equal names are told apart by their order.
      choices: what was chosen, by what it was chosen for.

    Raises:
      DisagreementError: another process has chosen something else.
    """
    if is_alone():
        return
    store: Any = key_value_store()
    digest = hashlib.sha256(program.encode()).hexdigest()[:16]
    name = f"collective_matmul/choices/{digest}/{_checked[digest]}"
    _checked[digest] += 1
    own = {key: list(values) for key, values in choices.items()}
    store.key_value_set(f"{name}/{jax.process_index()}", json.dumps(own))
    for key, told in sorted(store.key_value_dir_get(f"{name}/")):
        number, others = key.rpartition("/")[2], json.loads(told)
        for problem in own.keys() & others.keys():
            if own[problem] != others[problem]:
                raise DisagreementError(
                    f"{problem}: process {jax.process_index()} has chosen"
                    f" {' and '.join(own[problem])}, and process {number}"
                    f" {' and '.join(others[problem])}; the programs would wait for each other for"
                    " ever: give all processes the same versions, arguments, environment variables"
                    " and tables of measurements (collective_matmul.tune, called in all of them,"
                    " writes the same tables)"
                )
