"""Processes that tune together and compare decisions; started as `tests.processes` is.

Each writes what it found: the table, its own file of it, and what it says of differing decisions.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import jax

from collective_matmul import record_decisions, tune
from collective_matmul.agreement import DisagreementError, check_same, exchange
from collective_matmul.compiler import overlap_jit
from collective_matmul.ops.matmul.model_requests import sites
from tests.processes import PROCESSES, place
from tests.reference import AXIS, Case


def main(address: str, number: int, file: Path) -> None:
    jax.distributed.initialize(address, PROCESSES, number, initialization_timeout=60)
    assert exchange(number) == list(range(PROCESSES))
    path = file.with_name(f"table{number}.jsonl")
    measured = list(sites(["tiny"], [16], jax.device_count(), "float32"))[:2]
    quick: dict[str, Any] = {"groups": 1, "seconds_per_group": 0.001}
    table = tune(measured, implementations=["ring"], path=path, **quick)
    found = {
        "seconds": sorted([str(site), entry.seconds] for site, entry in table.entries.items()),
        "fields": [site.fields() for site in table.entries],
        "file": path.read_text(),
        "decisions": decisions_of_a_program(),
        "difference": difference(number),
    }
    file.write_text(json.dumps(found))


def decisions_of_a_program() -> list[str]:
    """The decisions of a program that is compared between the processes, and run."""
    case = Case("all_gather_matmul", "ring", jax.device_count(), (8,), 4, ((4,),), dtype="float32")
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    x, ws, dys = case.arrays()
    arrays = jax.tree.map(
        lambda array, spec: place(array, jax.sharding.NamedSharding(mesh, spec)),
        (x, tuple(ws), tuple(dys)),
        case.specs,
    )
    with record_decisions() as decisions:
        jax.block_until_ready(case.run(mesh, arrays, overlap_jit))
    return [each.implementation for each in decisions]


def difference(number: int) -> str:
    """What the second process says of other decisions than those of the first."""
    check_same("same (1, 2)", ["gather: ring"])
    try:
        check_same("step (1, 2)", ["gather: ring", ["scatter: ring", "scatter: xla"][number]])
    except DisagreementError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    except BaseException:
        # An orderly exit would wait for the others, and they wait for this one.
        traceback.print_exc()
        os._exit(1)
