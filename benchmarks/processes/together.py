"""Several processes that measure together, each with devices of its own."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from benchmarks.comparison.communication import AXIS
from benchmarks.measuring import environment
from benchmarks.measuring.settings import Settings

_KILLED_AFTER_SECONDS = 150.0


@dataclass(frozen=True)
class Participant:
    """One of the processes.

    Attributes:
      address: where the first of them listens.
      number: which it is.
      processes: how many they are.
      devices: how many devices they have together.
    """

    address: str
    number: int
    processes: int
    devices: int

    def join(self) -> Mesh:
        """Finds the other processes; returns a mesh of all their devices."""
        if self.processes > 1:
            whom = self.address, self.processes, self.number
            jax.distributed.initialize(*whom, initialization_timeout=60)
        return jax.make_mesh((self.devices,), (AXIS,), axis_types=(AxisType.Auto,))

    def tell(self, case: dict[str, Any]) -> None:
        """Hands a measured case to the process that started this one; only the first does so."""
        if self.number == 0:
            print(json.dumps({**case, "gpus": environment.gpu_state()}), flush=True)


def device_kinds(platform: str, devices: int) -> list[str]:
    """The kinds of this many devices; raises ValueError if there are fewer."""
    kinds = environment.device_kinds(platform, devices)
    if len(kinds) < devices:
        raise ValueError(f"devices={devices}: there are {len(kinds)}; ask for fewer")
    return kinds


def run_together(
    module: str,
    settings: Settings,
    processes: int,
    devices: int,
    variables: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The cases that the first of several processes tells.

    Args:
      module: what each process runs; it calls `participate`.
      settings: the benchmark's.
      processes: how many.
      devices: of all processes, which share them evenly.
      variables: of the environment of each, besides those of this process.

    Raises:
      RuntimeError: with what the first printed, if one of them fails.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    fields = json.dumps(dataclasses.asdict(settings) | {"output": None})
    started = []
    for number in range(processes):
        participant = dataclasses.asdict(Participant(address, number, processes, devices))
        own = _environment(settings.platform, devices // processes, number)
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", module, fields, json.dumps(participant)],
                env=own | dict(variables or {}),
                stdout=subprocess.DEVNULL if number else subprocess.PIPE,
                text=True,
            )
        )
    try:
        printed, _ = started[0].communicate(timeout=_KILLED_AFTER_SECONDS)
        codes = [process.wait(timeout=20) for process in started]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{processes} processes: not done in time") from error
    finally:
        for process in started:
            process.kill()
    if any(codes):
        raise RuntimeError(f"{processes} processes ended with {codes}: {printed}")
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def participate(kind: type[Settings], work: Callable[[Any, Participant], None]) -> None:
    """Works in one of the processes that `run_together` starts, with the settings that it gave.

    One that is not done in time says where it is before it is killed.
    """
    faulthandler.dump_traceback_later(_KILLED_AFTER_SECONDS - 10, exit=False)
    try:
        fields, participant = map(json.loads, sys.argv[1:])
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        work(kind(**fields | lists), Participant(**participant))
    except BaseException:
        # An orderly exit would wait for the other processes.
        traceback.print_exc()
        os._exit(1)


def _environment(platform: str, devices: int, number: int) -> dict[str, str]:
    """The environment of the process of a number, which has so many devices of its own."""
    if platform == "cpu":
        more = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        return {**os.environ, **more, "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    own = [
        names[index] if names != [""] else str(index)
        for index in range(number * devices, (number + 1) * devices)
    ]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(own)}
