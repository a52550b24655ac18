"""Kills one process of a run of several, at random, and checks that nothing is lost but the steps
since the last save.

``python -m tests.train.process_faults 20 --processes 4`` kills one of four 20 times. ``--flags``
are more flags of the trainer, by default those of `faults.SHARDED`. The test suite does so less
often.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from models.checkpoint.saved_checkpoint import step_folders, whole_steps
from tests.train.faults import SHARDED, curve, reread, saved_checksums
from tests.train.trainers import Trainers, train

SAVE_INTERVAL = 3
DEVICES = 4
LONGEST_WAIT = 9  # Maximum number of steps of a run before it is struck; several are saved.
LONGEST_LIFE = 12  # Steps of a run that are enough for the wait and for those until it ends.
# Survivors end within a minute: the heartbeat timeout is 5 seconds here, on a busy machine.
LONGEST_END = 60.0


def arguments(folder: Path, steps: int, max_to_keep: int, more: Sequence[str]) -> list[str]:
    flags = f"--mesh.data 2 --mesh.tensor 2 --distributed.tensor-across-processes --steps {steps}"
    flags += f" --save-interval {SAVE_INTERVAL} --max-to-keep {max_to_keep}"
    files = ["--checkpoint-dir", str(folder), "--log-file", f"{folder}.jsonl"]
    return [*flags.split(), *files, *more]


def kill_once(
    folder: Path,
    rng: random.Random,
    steps: int,
    count: int,
    resume: bool,
    more: Sequence[str],
    *,
    devices: int = DEVICES,
    **options: Any,
) -> str:
    """Starts a run, kills one of its processes, and waits for the others. Returns a line about it.

    The run has `devices` in all; `options` are those of `Trainers`.

    Raises:
      AssertionError: a process does not end, or does not say why, or a checkpoint is lost.
    """
    before = max(whole_steps(folder), default=0)
    struck, wait = rng.randrange(count), rng.randint(1, LONGEST_WAIT)
    # The process itself, or its parent, with which it ends.
    parent = rng.random() < 0.25
    flags = [*arguments(folder, steps, 2, more), *["--resume"] * resume]
    with Trainers(flags, count=count, devices=devices // count, **options) as trainers:
        trainers.wait_for_steps(wait)
        time.sleep(rng.uniform(0, 0.05))
        whole = trainers.everything
        victim = trainers.processes[struck].pid if parent else trainers.child(struck)
        os.kill(victim, signal.SIGKILL)
        struck_at = time.perf_counter()
        statuses = trainers.finish()
        seconds = time.perf_counter() - struck_at
    assert seconds < LONGEST_END, whole()
    for number, (status, errors) in enumerate(zip(statuses, trainers.errors, strict=True)):
        if number == struck:
            assert status == (-9 if parent else 128 + 9), whole()
            assert parent or "this process was ended by SIGKILL" in errors[-1], whole()
        else:
            assert status not in (0, -9), whole()
            # JAX names the victim, or process 0, which ended because of it and has the coordination
            # service. Before JAX notices, a step or a save may have failed.
            named = re.search(r"process(?:es)? ([\d, ]+) ha(?:s|ve) died, so this", errors[-1])
            dead = set(map(int, named[1].split(","))) if named else set()
            failed = f"error: process {number}: " in errors[-1]
            assert failed or dead & {struck, 0} - {number}, whole()
            assert "--resume" in errors[-1] or "start anew" in errors[-1], whole()
            assert not any("Traceback" in line for line in errors), whole()
    newest = max(whole_steps(folder), default=0)
    reached = trainers.logged[-1] if trainers.logged else before
    # A step is logged before it is saved, and a save overlaps with later steps until the next save.
    begun = (reached - 1) // SAVE_INTERVAL * SAVE_INTERVAL
    assert newest >= max(before, begun - SAVE_INTERVAL), whole()
    if resume:
        assert f"resumed from the checkpoint of step {before}" in whole()
    what = f"{'parent' if parent else 'process'} {struck}"
    return (
        f"{what:10} of {count} after {wait} steps  from {before:4}  last step {reached:4}  newest"
        f" checkpoint {newest:4}  all ended in {seconds:.1f} s"
    )


def kill_often(
    folder: Path,
    kills: int,
    count: int,
    seed: int,
    more: Sequence[str] = (),
    verbose: bool = False,
) -> list[str]:
    """Kills runs one after the other. The last run ends undisturbed.

    All runs have the flags `more`.

    Raises:
      AssertionError: a checkpoint is lost, or a number differs from the uninterrupted run.
    """
    steps = (kills + 1) * LONGEST_LIFE // SAVE_INTERVAL * SAVE_INTERVAL
    train(arguments(folder / "whole", steps, steps, more), count=count, devices=DEVICES // count)
    expected = curve(folder / "whole.jsonl")
    sums = {step: saved_checksums(path) for step, path in step_folders(folder / "whole").items()}
    assert len(sums) == steps // SAVE_INTERVAL
    rng, lines = random.Random(seed), []
    struck, log = folder / "struck", folder / "struck.jsonl"
    for _ in range(kills):
        resume = bool(whole_steps(struck))
        if not resume:
            log.unlink(missing_ok=True)
        lines.append(kill_once(struck, rng, steps, count, resume, more))
        logged = curve(log)
        assert logged == {step: expected[step] for step in logged}, lines[-1]
        for step in whole_steps(struck):
            reread(struck / f"step_{step}")
            assert saved_checksums(struck / f"step_{step}") == sums[step], lines[-1]
        if verbose:
            print(lines[-1], flush=True)
    resume = bool(whole_steps(struck))
    if not resume:
        log.unlink(missing_ok=True)
    flags = [*arguments(struck, steps, 2, more), *["--resume"] * resume]
    train(flags, count=count, devices=DEVICES // count)
    assert curve(log) == expected
    assert saved_checksums(struck / f"step_{steps}") == sums[steps]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("kills", type=int)
    parser.add_argument("--processes", type=int, default=2, choices=(2, 4))
    parser.add_argument("--flags", default=SHARDED)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path, count = Path(folder), options.processes
        more = shlex.split(options.flags)
        lines = kill_often(path, options.kills, count, options.seed, more, verbose=True)
    print(
        f"seed {options.seed}: {len(lines)} kills of one of {options.processes} processes in"
        f" {time.perf_counter() - started:.0f} s; 0 checkpoints lost, every checkpoint and every"
        " loss bit for bit those of an uninterrupted run"
    )


if __name__ == "__main__":
    main()
