"""Processes that compare what they choose; each is started by `tests.processes.run`.

Each writes to FILE what it found: how often a program was traced and compiled, what was said of
another, and what was tuned.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, overlap_jit, tune
from collective_matmul.agreement import exchange, of_first_process
from collective_matmul.ops.matmul.model_requests import sites
from tests.processes import PROCESSES, ending_at_once, place
from tests.reference import AXIS

_compiled: list[str] = []


def _count(event: str, duration_secs: float, **kwargs: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(event)


def main(address: str, number: int, file: Path) -> None:
    jax.distributed.initialize(address, PROCESSES, number, initialization_timeout=60)
    assert exchange(number) == list(range(PROCESSES))
    assert of_first_process(number) == 0
    jax.monitoring.register_event_duration_secs_listener(_count)
    found: dict[str, Any] = {"traces": traces_of_equal_choices(), "compiled": len(_compiled)}
    found["error"] = error_of_different_choices(number)
    file.write_text(json.dumps(found | tuned(file.with_name(f"table{number}.jsonl"))))


def tuned(path: Path) -> dict[str, Any]:
    """The seconds by backend of a site of all devices, its fields, and the file of the table."""
    site, *_ = sites(["tiny"], [16], jax.device_count(), "float32")
    quick: dict[str, Any] = {"groups": 1, "seconds_per_group": 0.001}
    table = tune([site], implementations=["ring"], path=path, **quick)
    ((measured, entry),) = table.entries.items()
    return {"seconds": entry.seconds, "fields": measured.fields(), "table": path.read_text()}


def run(implementation: str, traces: list[str], **options: Any) -> None:
    """Gathers and multiplies over the devices of all processes."""
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    specs = P(AXIS), P(None, AXIS)

    def gather(x: jax.Array, w: jax.Array) -> jax.Array:
        traces.append(implementation)
        return all_gather_matmul(x, w, AXIS, implementation=implementation)

    fun = jax.shard_map(gather, mesh=mesh, in_specs=specs, out_specs=specs[1])
    jitted = overlap_jit(fun, **options)
    arrays = (place(np.ones((8, 8), np.float32), NamedSharding(mesh, spec)) for spec in specs)
    x, w = arrays
    _compiled.clear()
    for _ in range(2):
        jax.block_until_ready(jitted(x, w))


def traces_of_equal_choices() -> list[str]:
    traces: list[str] = []
    run("ring", traces)
    return traces


def error_of_different_choices(number: int) -> str:
    """Message of the last process. The first one cannot compile the program, or it would wait."""
    options: dict[str, Any] = {"compiler_options": {"no_such_option": True}} if number == 0 else {}
    if number:
        exchange(None)
    try:
        run(["xla", "ring"][number], [], **options)
    except RuntimeError as error:
        if number == 0:
            exchange(None)
        return f"{type(error).__name__}: {error}"
    return "none"


if __name__ == "__main__":
    with ending_at_once():
        main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
