"""Strikes the trainer with random faults and checks that nothing is lost and no number changes.

``python -m tests.train.faults 100`` strikes 100 times: SIGKILL, SIGTERM, SIGINT, full disks and
disks that become read-only, while it starts, trains or saves, and other data behind ``--data`` when
it resumes. ``--flags`` are more flags of the trainer, by default those of `SHARDED`. The test suite
does so less often. Faults of disks need ``unshare``, which gives the script a small file system of
its own without root.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from models.checkpoint.saved_checkpoint import CHECKSUMS, SavedCheckpoint, step_folders, whole_steps

#: Faults of disks, and what the trainer says of them.
DISK_FAULTS = {
    "full disk": "No space left on device",
    "read-only disk": "Read-only file system",
}
CHANGED_DATA = "changed data"
KINDS = ("SIGKILL", "SIGTERM", "SIGINT", *DISK_FAULTS, CHANGED_DATA)
LONGEST_WAIT = 5  # Maximum number of steps of a run before it is struck.
LONGEST_LIFE = 30  # Steps of a run that are enough for the wait, and for what the fault allows.
LONGEST_START = 5.0  # Maximum number of seconds before a fault that strikes a run that starts.
SAVE_INTERVAL = 3
FILE_SYSTEM_BYTES = 24 << 20
ARGUMENTS = (
    "--preset debug --model.num-layers 1 --model.features 32 --model.hidden-features 64"
    " --mesh.data 1 --mesh.tensor 2 --overlap ring --batch-size 2 --sequence-length 16"
    " --cpu-devices 2 --log-interval 1"
)
#: Stacked layers, and weights and Muon's state that are shards.
SHARDED = (
    "--mesh.fsdp 2 --mesh.tensor 1 --zero 3 --model.num-layers 2 --scan-layers 1 --overlap auto"
    " --optimizer.kind muon"
)
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}


@dataclasses.dataclass
class Life:
    """One run: how it began, what struck it, and what it left."""

    kind: str
    when: str
    """ "after STEP", "start" or "resume"."""
    resumed_from: int | None = None
    """None if it started anew."""
    last_step: int | None = None
    """The last step that it logged."""
    exit_status: int | None = None
    output: list[str] = dataclasses.field(default_factory=list)
    """The lines that it printed."""
    whole: list[int] = dataclasses.field(default_factory=list)
    """The steps of the complete checkpoints afterwards."""

    def __str__(self) -> str:
        began = "new" if self.resumed_from is None else f"from {self.resumed_from}"
        newest = self.whole[-1] if self.whole else "none"
        return (
            f"{self.kind:14}  {self.when:8}  {began:9}  last step {self.last_step!s:5} "
            f" exit {self.exit_status!s:4}  newest checkpoint {newest}"
        )

    def description(self) -> str:
        """The line, and all that the run printed."""
        return "\n".join([str(self), *self.output])


class Run:
    """The trainer in a process of its own. A thread reads what it prints."""

    def __init__(
        self, directory: Path, log_file: Path, steps: int, *flags: str, fill_cache: bool = False
    ) -> None:
        self.output: list[str] = []
        self.logged: list[int] = []
        self.progress = threading.Condition()
        command = [sys.executable, "-m", "train", *ARGUMENTS.split(), "--steps", str(steps)]
        # Only the first run, which no fault strikes, fills the cache of compiled programs.
        compile_seconds = 0 if fill_cache else 10**6
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(log_file.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(compile_seconds),
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        command += ["--checkpoint-dir", str(directory), "--log-file", str(log_file), *flags]
        self.process = subprocess.Popen(
            # A shell's background job ignores SIGINT, and its children with it.
            ["env", "--default-signal=INT", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | ENVIRONMENT | cache,
        )
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.progress:
                self.output.append(line.rstrip())
                if match := re.match(r" +(\d+) +\d+\.\d{4} ", line):
                    self.logged.append(int(match[1]))
                self.progress.notify_all()

    def wait_for_steps(self, count: int) -> None:
        with self.progress:
            self.progress.wait_for(
                lambda: len(self.logged) >= count or self.process.poll() is not None, timeout=300
            )

    def finish(self) -> int:
        """Waits for the end of the process and returns its exit status."""
        try:
            status = self.process.wait(timeout=1200)
        finally:
            self.process.kill()
            self.reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    @property
    def resumed_from(self) -> int | None:
        found = (re.match(r"resumed from the checkpoint of step (\d+)", o) for o in self.output)
        return next((int(match[1]) for match in found if match), None)


def uninterrupted(
    folder: Path, steps: int, more: Sequence[str]
) -> tuple[dict[int, Any], dict[int, Any]]:
    """A run without faults: loss and gradient norm by step, and checksums by saved step."""
    flags = ["--save-interval", str(SAVE_INTERVAL), "--max-to-keep", str(steps), *more]
    run = Run(folder / "whole", folder / "whole.jsonl", steps, *flags, fill_cache=True)
    assert run.finish() == 0, "\n".join(run.output)
    sums = {step: saved_checksums(path) for step, path in step_folders(folder / "whole").items()}
    assert len(sums) == steps // SAVE_INTERVAL
    return curve(folder / "whole.jsonl"), sums


def saved_checksums(path: Path) -> dict[str, Any]:
    """The checksums of the state and of the position in the data."""
    saved = json.loads((path / CHECKSUMS / "metadata").read_text())
    return {"arrays": saved["arrays"], "data_position": saved["data_position"]}


def curve(log_file: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; the later line of a step that is logged twice."""
    text = log_file.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()  # The last line may be incomplete.
    records = [record for line in lines if "grad_norm" in (record := json.loads(line))]
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in records}


def strike(
    folder: Path, kind: str, rng: random.Random, steps: int, resume: bool, more: Sequence[str]
) -> Life:
    """Starts the trainer, strikes it at a random moment, and waits for its end."""
    disk, life = folder / "disk", Life(kind, "start")
    flags = ["--save-interval", str(SAVE_INTERVAL), "--max-to-keep", "2"]
    flags += [*["--resume"] * resume, *more]
    if kind == CHANGED_DATA:
        (folder / "other.txt").write_text("Other text than before. " * 1000)
        flags += ["--data", str(folder / "other.txt")]
    run = Run(disk / "struck", folder / "struck.jsonl", steps, *flags)
    if kind == CHANGED_DATA:
        life.when = "resume"
    elif rng.random() < 0.25:
        time.sleep(rng.uniform(0, LONGEST_START))
    else:
        count = rng.randint(1, LONGEST_WAIT)
        run.wait_for_steps(count)
        life.when = f"after {count}"
        time.sleep(rng.uniform(0, 0.02))
    if kind == "full disk":
        # The files of a checkpoint have 1 to 400 KiB, so any of them may be the first without room.
        fill(disk, leave=int(2 ** rng.uniform(0, 18)))
    elif kind == "read-only disk":
        # The same files seen through another mount, since the trainer has its lock file open.
        mount("--bind", str(disk), str(disk))
        mount("-o", "remount,bind,ro", str(disk))
    elif kind != CHANGED_DATA and run.process.poll() is None:
        run.process.send_signal(getattr(signal, kind))
    life.exit_status = run.finish()
    if kind == "read-only disk":
        subprocess.run(["umount", str(disk)], check=True)
    (disk / "filler").unlink(missing_ok=True)
    life.resumed_from, life.output = run.resumed_from, run.output
    life.last_step = run.logged[-1] if run.logged else None
    life.whole = whole_steps(disk / "struck")
    return life


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def fill(disk: Path, leave: int) -> None:
    """Writes a file that leaves this number of bytes, rounded down to pages."""
    with (disk / "filler").open("wb", buffering=0) as file:
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        file.write(b"\0" * max(free - leave, 0))


def check(life: Life, before: Sequence[int], disk: Path, sums: dict[int, Any]) -> None:
    """Checks that a fault cost no complete checkpoint, and that every one is right.

    Raises:
      AssertionError: if it did otherwise.
    """
    assert not any("Traceback" in line for line in life.output), life.description()
    if life.exit_status == 0:  # The run ended before the fault came.
        return
    newest, expected = (max(life.whole, default=0), max(before, default=0))
    reached = life.last_step or expected
    if life.last_step is not None:
        assert (life.resumed_from or 0) == expected, life.description()
    assert newest >= expected, life.description()
    if life.kind in ("SIGTERM", "SIGINT"):
        number = getattr(signal, life.kind)
        # Python has no handlers while it starts.
        statuses = (128 + number, *[-number] * (life.last_step is None))
        assert life.exit_status in statuses, life.description()
        assert newest == reached, life.description()
    elif life.kind == "SIGKILL":
        assert life.exit_status == -signal.SIGKILL, life.description()
        # A step is logged before it is saved, and a save overlaps with later steps until the next
        # save. So at most the newest save that was started is incomplete.
        begun = (reached - 1) // SAVE_INTERVAL * SAVE_INTERVAL
        assert newest >= begun - SAVE_INTERVAL, life.description()
    elif life.kind == CHANGED_DATA:
        assert life.exit_status == 2, life.description()
        assert life.whole == list(before), life.description()
        refusal = "the checkpoint was trained on other data: data was the Python manual, is '"
        assert any(refusal in line for line in life.output), life.description()
    else:
        assert life.exit_status in (1, 2), life.description()
        message = next(line for line in life.output if line.startswith("error:"))
        assert DISK_FAULTS[life.kind] in message, life.description()
        named = re.search(r"the earlier ones are whole \((.*?)\)", message)
        steps = [int(step) for step in named[1].split(", ")] if named else []
        assert life.exit_status == 2 or steps == life.whole, life.description()
    for step in life.whole:
        path = disk / "struck" / f"step_{step}"
        reread(path)
        if step in sums:
            assert saved_checksums(path) == sums[step], f"{life.description()}: step {step}"


def reread(path: Path) -> None:
    """Restores a checkpoint on one device, which verifies it."""
    handler: Any = ocp.PyTreeCheckpointHandler()
    tree = handler.metadata(path / "state").tree
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )
    assert SavedCheckpoint(path).restore(abstract).verified


def strike_often(
    folder: Path, kinds: Sequence[str], seed: int, more: Sequence[str] = (), verbose: bool = False
) -> list[Life]:
    """Strikes runs one after the other with these faults. The last run ends undisturbed.

    All runs have the flags `more`.

    A run that is struck before its first complete checkpoint leaves nothing to resume: the next one
    starts anew.

    Raises:
      AssertionError: if a checkpoint is lost, or a number differs from the uninterrupted run.
    """
    steps = (len(kinds) + 1) * LONGEST_LIFE // SAVE_INTERVAL * SAVE_INTERVAL
    (folder / "disk").mkdir(exist_ok=True)
    expected, sums = uninterrupted(folder, steps, more)
    rng = random.Random(seed)
    lives: list[Life] = []
    whole: list[int] = []
    for kind in kinds:
        if kind == CHANGED_DATA and not whole:
            continue  # There is nothing to resume.
        life = strike(folder, kind, rng, steps, resume=bool(whole), more=more)
        check(life, whole, folder / "disk", sums)
        if life.last_step is not None:
            logged = curve(folder / "struck.jsonl")
            assert logged == {step: expected[step] for step in logged}, life.description()
        whole = life.whole
        if not whole:
            (folder / "struck.jsonl").unlink(missing_ok=True)
        lives.append(life)
        if verbose:
            print(life, flush=True)
        if life.exit_status == 0:
            break
    if lives[-1].exit_status != 0:
        flags = [*["--resume"] * bool(whole), *more]
        run = Run(folder / "disk" / "struck", folder / "struck.jsonl", steps, *flags)
        assert run.finish() == 0, "\n".join(run.output)
    assert curve(folder / "struck.jsonl") == expected
    last = folder / "disk" / "struck" / f"step_{steps}"
    reread(last)
    assert saved_checksums(last) == sums[steps]
    return lives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("faults", type=int)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--flags", default=SHARDED)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    own_disk = not DISK_FAULTS.keys().isdisjoint(options.kinds)
    if own_disk and "FAULTS_OWN_MOUNTS" not in os.environ:
        # A new user and mount namespace, in which this user may mount.
        command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-m"]
        os.environ["FAULTS_OWN_MOUNTS"] = "1"
        os.execvp("unshare", [*command, "tests.train.faults", *sys.argv[1:]])
    jax.config.update("jax_platforms", "cpu")
    kinds = random.Random(options.seed).choices(options.kinds, k=options.faults)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if own_disk:
            (Path(folder) / "disk").mkdir()
            mount("-t", "tmpfs", "-o", f"size={FILE_SYSTEM_BYTES}", "tmpfs", f"{folder}/disk")
        try:
            lives = strike_often(
                Path(folder), kinds, options.seed, shlex.split(options.flags), True
            )
        finally:
            if own_disk:
                subprocess.run(["umount", f"{folder}/disk"], check=True)
    struck = Counter(life.kind for life in lives)
    counts = ", ".join(f"{count} {kind}" for kind, count in struck.items())
    resumed = sum(life.resumed_from is not None for life in lives)
    print(
        f"seed {options.seed}: {len(lives)} faults ({counts}) in"
        f" {time.perf_counter() - started:.0f} s; 0 checkpoints lost, {resumed} resumes, every"
        " checkpoint and every loss bit for bit those of an uninterrupted run"
    )


if __name__ == "__main__":
    main()
