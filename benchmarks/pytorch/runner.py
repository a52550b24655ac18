"""Starts PyTorch's processes, one per GPU, beside this one, and reads what they wrote."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.measuring.report import Report, Result
from benchmarks.measuring.settings import Settings
from benchmarks.pytorch import MULTICAST_OFF, NAMES

#: To start PyTorch and NCCL, and to end a case that has begun.
_GRACE_SECONDS = 60.0
#: What PyTorch gets at most, where the benchmark has no limit.
LIMIT_SECONDS = 600.0


class PytorchCase(Protocol):
    """A case that PyTorch may be able to run."""

    @property
    def name(self) -> str: ...

    def for_pytorch(self) -> dict[str, Any] | None:
        """The case as `time_pytorch` takes it, without its name; None if PyTorch cannot run it."""
        ...


def add_times(report: Report, settings: Settings, cases: Sequence[PytorchCase]) -> None:
    """Adds PyTorch's times to the cases of a report that PyTorch can run."""
    measured = {case["name"]: case["devices"] for case in report.content["cases"]}
    if not measured or report.out_of_time():
        return
    known = [case for case in cases if case.name in measured]
    found = results_of(settings, known, max(measured.values()), report.seconds_left)
    for (case, name), result in found.items():
        report.add_result(case, name, result)


def results_of(
    settings: Settings, cases: Sequence[PytorchCase], devices: int, limit_seconds: float
) -> dict[tuple[str, str], Result]:
    """PyTorch's results of the cases that it can run, by the names of case and candidate."""
    described = [
        {"name": case.name, **description} for case in cases if (description := case.for_pytorch())
    ]
    if not described:
        return {}
    results, reason = time_pytorch(
        described,
        devices=devices,
        platform=settings.platform,
        dtype=settings.dtype,
        groups=settings.groups,
        group_seconds=settings.group_seconds,
        limit_seconds=min(limit_seconds, LIMIT_SECONDS),
    )
    fields = {field.name for field in dataclasses.fields(Result)}
    found = {
        (result["name"], result["candidate"]): Result(
            **{name: value for name, value in result.items() if name in fields}
        )
        for result in results
    }
    missing = Result(failure=reason or "the time was over before its turn")
    names = [(case["name"], name) for case in described for name in case.get("candidates", NAMES)]
    return {key: found.get(key, missing) for key in names}


def time_pytorch(
    cases: Sequence[dict[str, Any]], **settings: Any
) -> tuple[list[dict[str, Any]], str | None]:
    """Times stacks of layers, single ops, training steps or decoding, in a process per device.

    The GPUs are shared with this process, which must not use them meanwhile and must have left
    PyTorch some 40 GB of their memory.

    Args:
      cases: each with name; rows, features and hidden_features, global, which the devices divide;
        layers, their number; and op, or direction for whole layers; or what `Train` describes, or
        what `torch_generation.TorchGeneration` takes.
      settings: the fields of `torch_worker.Job` below.
      devices: processes, each with its own GPU, or CPU cores.
      platform: cpu shows that it runs; its times mean nothing, and async TP cannot run there.
      dtype: of all arrays.
      groups: timed groups; in each, `NAMES` take turns, but training steps do not.
      group_seconds: how long each is timed in a group, after half as long untimed.
      limit_seconds: no further case begins after this many seconds.

    Returns:
      Results; and why that is not everything, if so. Each result has the case's description, and
      candidate, devices; options (the variant that was fastest), tried (seconds
      per call of each in a short trial), samples (seconds per call, one for each group) and
      relative_error (of results and gradients, the largest over arrays and devices); or failure.
    """
    if importlib.util.find_spec("torch") is None:
        return [], "PyTorch is not installed"
    with tempfile.TemporaryDirectory() as folder:
        job, output = Path(folder, "job.json"), Path(folder, "results.json")
        job.write_text(json.dumps({"cases": list(cases), "output": str(output), **settings}))
        command = [sys.executable, "-m", "benchmarks.pytorch.torch_worker", str(job)]
        reason = _run(command, settings["limit_seconds"] + _GRACE_SECONDS)
        return json.loads(output.read_text()) if output.exists() else [], reason


def _run(command: list[str], timeout: float) -> str | None:
    """Runs a command with all the processes that it starts; why it failed, or None."""
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **MULTICAST_OFF},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            _, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return f"PyTorch was stopped after {timeout:g} seconds"
        finally:
            # A device's process would wait forever for one that has died.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == 0:
        return None
    print(errors, file=sys.stderr, flush=True)
    lines = errors.strip().splitlines() or ["it wrote nothing"]
    # Below an error of CUDA stands how to debug it.
    last = next((line for line in reversed(lines) if "Error: " in line), lines[-1])
    return f"PyTorch failed with exit status {process.returncode}: {last}"
