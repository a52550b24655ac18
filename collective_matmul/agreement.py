"""Exchanges of JSON values between processes, through the key-value store of `jax.distributed`.

No device takes part. One process, or processes that are not connected, are alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    own = {key: list(values) for key, values in choices.items()}
    for number, others in _told_before(program, own):
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


def check_same_order(program: str, order: Sequence[str]) -> None:
    """Checks that a program communicates here as in the processes that came here before.

    Args:
      program: the name of the program, as for `check_same`.
      order: what communicates, in order.

    Raises:
      DisagreementError: another process communicates in another order.
    """
    for number, others in _told_before(program, list(order)):
        for place, (own, other) in enumerate(itertools.zip_longest(order, others), start=1):
            if own != other:
                raise DisagreementError(
                    f"{program}: XLA has not compiled one program for all processes: number"
                    f" {place} of what communicates is {own or 'missing'} in process"
                    f" {jax.process_index()}, and {other or 'missing'} in process {number}. They"
                    " would wait for each other for ever, or exchange wrong data. Give all"
                    " processes the same versions and XLA_FLAGS, and leave"
                    " --xla_gpu_shard_autotuning on, by which they take the same kernels"
                )


def _told_before(program: str, value: Any) -> Iterator[tuple[int, Any]]:
    """Tells the other processes a JSON value; the numbers and values of those that told theirs."""
    if is_alone():
        return
    store: Any = key_value_store()
    digest = hashlib.sha256(program.encode()).hexdigest()[:16]
    name = f"collective_matmul/choices/{digest}/{_checked[digest]}"
    _checked[digest] += 1
    store.key_value_set(f"{name}/{jax.process_index()}", json.dumps(value))
    for key, told in sorted(store.key_value_dir_get(f"{name}/")):
        yield int(key.rpartition("/")[2]), json.loads(told)
