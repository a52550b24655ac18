"""The learning rate: a schedule with a length of its own, kept by a resumed run."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from train.checkpoint.checkpoint import Checkpoints
from train.config.config import OptimizerConfig
from train.log.log_file import read_log
from train.optimizer.schedule import describe_schedule, make_schedule
from train.run.command_line import main, parse
from train.run.setup import prepare

RUN = shlex.split(
    "--model.num-layers 1 --mesh.data 1 --mesh.tensor 2 --batch-size 2 --sequence-length 16"
    " --log-interval 1 --overlap xla --optimizer.warmup-steps 1 --optimizer.learning-rate 0.01"
)
SCHEDULE = OptimizerConfig(learning_rate=0.01, warmup_steps=1)


def logged(log: Path) -> dict[int, float]:
    """The learning rate of each step in the log."""
    records = (event for event in read_log(log) if event["event"] == "step")
    return {record["step"]: record["learning_rate"] for record in records}


def scheduled(decay_steps: int, steps: int) -> dict[int, Any]:
    """The learning rates of a run. The first step is made before any other is done."""
    rates = np.asarray([make_schedule(SCHEDULE, decay_steps)(done) for done in range(steps)])
    return {done + 1: pytest.approx(float(rate)) for done, rate in enumerate(rates)}


def test_going_on_does_not_raise_the_learning_rate(capsys, tmp_path):
    """The command that a run prints to go on, with the log of both parts."""
    log = tmp_path / "log"
    saved = ["--checkpoint-dir", str(tmp_path / "saved"), "--log-file", str(log)]
    main([*RUN, *saved, "--steps", "4"])
    output = capsys.readouterr().out
    assert logged(log) == scheduled(4, 4)
    assert "learning rate: up to 0.01 in 1 step, down to 0.001 at step 4\n" in output
    command = re.search(r"to go on: +\S+ -m train (.*)", output)
    assert command is not None
    main(shlex.split(command[1]))
    output = capsys.readouterr().out
    assert "down to 0.001 at step 4, then constant (--optimizer.decay-steps)" in output
    assert "changed since: steps was 4, is 8\n" in output
    assert logged(log) == scheduled(4, 8)
    assert logged(log)[8] == pytest.approx(0.001)
    rates = re.findall(r"^ +[5-8] +\d\.\d{4} +\S+ +(\S+)", output, re.MULTILINE)
    assert rates == ["1.000e-03"] * 4
    # The variants of a comparison have the schedule of this run.
    assert re.search(r"to compare: .* --steps 8 .*--optimizer.decay-steps 4 .*--a", output)
    # A length that is given wins.
    assert decay_steps_of([*RUN, *saved, "--steps", "9", "--resume"]) == 4
    longer = ["--steps", "9", "--resume", "--optimizer.decay-steps", "20"]
    assert decay_steps_of([*RUN, *saved, *longer]) == 20


def decay_steps_of(arguments: list[str]) -> int | None:
    """The length of the schedule of a run that is ready to start."""
    setup = prepare(parse(arguments))
    assert setup.checkpoints is not None
    setup.checkpoints.close()
    return setup.config.optimizer.decay_steps


def test_a_warm_up_that_the_saved_schedule_has_no_room_for_is_refused(capsys, tmp_path):
    saved = ["--checkpoint-dir", str(tmp_path)]
    with Checkpoints(tmp_path) as checkpoints:
        config = prepare(parse([*RUN, "--steps", "4"])).configuration
        checkpoints.save(2, {"w": jnp.zeros(2)}, {}, config)
    with pytest.raises(SystemExit):
        main([*RUN, *saved, "--resume", "--steps", "9", "--optimizer.warmup-steps", "5"])
    sentence = "optimizer.decay_steps=4: expected more than optimizer.warmup_steps=5"
    assert sentence in " ".join(capsys.readouterr().err.split())
    # The directory is not locked any more.
    assert decay_steps_of([*RUN, *saved, "--resume", "--steps", "9"]) == 4


@pytest.mark.exhaustive
def test_a_run_interrupted_early_keeps_its_schedule_with_more_steps(capsys, tmp_path):
    log = tmp_path / "log"
    saved = ["--checkpoint-dir", str(tmp_path / "saved"), "--save-interval", "2"]
    main([*RUN, *saved, "--steps", "6"])
    for newer in ("step_4", "step_6"):
        (tmp_path / "saved" / newer).rename(tmp_path / newer)
    main([*RUN, *saved, "--steps", "8", "--resume", "--log-file", str(log)])
    assert logged(log) == {step: rate for step, rate in scheduled(6, 8).items() if step > 2}


def test_a_sentence_describes_the_schedule():
    assert describe_schedule(SCHEDULE, 4) == (
        "learning rate: up to 0.01 in 1 step, down to 0.001 at step 4"
    )
    to_nothing = dataclasses.replace(SCHEDULE, final_learning_rate_fraction=0.0, decay_steps=3)
    assert "down to 0 at step 3; later steps train nothing" in describe_schedule(to_nothing, 4)
    # A run that is shorter than its warm-up never decays.
    assert describe_schedule(OptimizerConfig(), 4).endswith("down to 3e-05 at step 101")
