"""Kills the trainer at random steps and checks that resumed runs compute the same.

``python -m tests.train.kills 20`` kills it twenty times; the test suite does so less often.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from train.log_file import read_log

STEPS = 150
LONGEST_LIFE = 12  # Maximum number of steps of a run before it is killed.
SAVE_INTERVAL = 3
ARGUMENTS = (
    "--preset debug --model.num-layers 1 --mesh.data 2 --mesh.tensor 2 --overlap ring"
    " --batch-size 4 --sequence-length 32 --cpu-devices 4"
    f" --save-interval {SAVE_INTERVAL} --log-interval 1"
).split()


@dataclasses.dataclass(frozen=True)
class Kill:
    """One kill, and the resume after it."""

    last_step: int
    """The last step logged before the kill."""
    saved: list[int]
    """Steps of the complete checkpoints right after the kill."""
    resumed_from: int | None
    """Step that the next run resumed from; None if it started anew."""


def start(directory: Path, name: str, *, resume: bool) -> subprocess.Popen[str]:
    """Starts the trainer in a process of its own, with its output in a pipe."""
    files = [
        "--checkpoint-dir",
        str(directory / name),
        "--log-file",
        str(log_path(directory, name)),
    ]
    command = [
        sys.executable,
        "-m",
        "train",
        *ARGUMENTS,
        "--steps",
        str(STEPS),
        *files,
        *(["--resume"] if resume else []),
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"},
    )


def log_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.jsonl"


def curve(directory: Path, name: str) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; the later line of a step that is logged twice."""
    records = (e for e in read_log(log_path(directory, name)) if e["event"] == "step")
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in records}


def saved_steps(directory: Path, name: str) -> list[int]:
    found = (re.fullmatch(r"step_(\d+)", entry.name) for entry in (directory / name).iterdir())
    return sorted(int(match[1]) for match in found if match)


def uninterrupted(directory: Path) -> dict[int, tuple[float, float]]:
    """The curve of a run that is not killed."""
    process = start(directory, "whole", resume=False)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return curve(directory, "whole")


def run_and_kill(directory: Path, kills: int, seed: int) -> list[Kill]:
    """Starts the trainer, kills it after a random number of steps and resumes, `kills` times.

    The last run finishes. A run killed before its first complete checkpoint leaves nothing to
    resume, and starts anew.
    """
    assert kills * LONGEST_LIFE < 2 * STEPS, "the run would end before the last kill"
    rng = random.Random(seed)
    history: list[Kill] = []
    resume = False
    for _ in range(kills):
        process = start(directory, "killed", resume=resume)
        resumed_from, last_step = kill_after(process, rng.randint(1, LONGEST_LIFE))
        if history:
            history[-1] = dataclasses.replace(history[-1], resumed_from=resumed_from)
        saved = saved_steps(directory, "killed")
        history.append(Kill(last_step, saved, None))
        resume = bool(saved)
        if not resume:
            log_path(directory, "killed").unlink(missing_ok=True)
    process = start(directory, "killed", resume=resume)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    history[-1] = dataclasses.replace(history[-1], resumed_from=_resumed_from(output))
    return history


def kill_after(process: subprocess.Popen[str], steps: int) -> tuple[int | None, int]:
    """Sends SIGKILL as soon as this number of steps is logged.

    Returns:
      The step that the run resumed from, and the last logged step.
    """
    output, logged = "", []
    assert process.stdout is not None
    for line in process.stdout:
        output += line
        if match := re.match(r" +(\d+) +\d+\.\d{4} ", line):
            logged.append(int(match[1]))
            if len(logged) == steps:
                break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert logged, output
    return _resumed_from(output), logged[-1]


def _resumed_from(output: str) -> int | None:
    match = re.search(r"resumed from the checkpoint of step (\d+)", output)
    return int(match[1]) if match else None


def check(whole: dict[int, tuple[float, float]], directory: Path, history: list[Kill]) -> None:
    """Checks that kills lost only steps after the last save, and changed no number.

    Raises:
      AssertionError: if one did otherwise.
    """
    for kill in history:
        newest = kill.saved[-1] if kill.saved else None
        assert kill.resumed_from == newest, kill
        # A step is logged before it is saved, and a save overlaps with later steps until the next
        # save. So at most the newest save that was started is incomplete.
        begun = (kill.last_step - 1) // SAVE_INTERVAL * SAVE_INTERVAL
        assert (newest or 0) >= begun - SAVE_INTERVAL, kill
    assert curve(directory, "killed") == whole


def main(kills: int) -> None:
    seed = random.randrange(2**32)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        whole = uninterrupted(directory)
        history = run_and_kill(directory, kills, seed)
        check(whole, directory, history)
    for kill in history:
        newest = kill.saved[-1] if kill.saved else "none"
        print(f"killed after step {kill.last_step}, newest checkpoint {newest}")
    print(
        f"seed {seed}: {kills} kills; {len(whole)} steps, bit for bit those of an uninterrupted run"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
