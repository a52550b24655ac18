"""The private part of JAX that the trainer uses. Supported are jax 0.10.2 to 0.12."""

from __future__ import annotations

import itertools
import json
from typing import Any

# 0.10.2 to 0.12: no public names. `jax.process_index` and collectives open all devices, and which
# ones a process opens depends on what the others say.
from jax._src.distributed import global_state

_numbers = itertools.count()
# A process may read a large text while the others wait. If it dies, JAX ends them.
_TIMEOUT_MILLISECONDS = 7 * 24 * 3600 * 1000


def process_id() -> int:
    """The number of this process; 0 for one of its own. Opens no device."""
    return global_state.process_id


def exchange(value: Any) -> list[Any]:
    """The JSON values of all processes, on all of them, in order. Opens no device.

    Every process calls it equally often: a call waits for the same call of the others.
    """
    client = global_state.client
    if client is None:
        return [value]
    name = f"exchange/{next(_numbers)}"
    client.key_value_set(f"{name}/{process_id()}", json.dumps(value))
    client.wait_at_barrier(name, _TIMEOUT_MILLISECONDS)
    told = dict(client.key_value_dir_get(f"{name}/"))
    return [json.loads(told[f"{name}/{n}"]) for n in range(global_state.num_processes)]
