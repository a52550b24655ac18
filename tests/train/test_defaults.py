"""Defaults that follow from what else a run is asked for."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from train.command_line import parse
from train.config import Config, MeshSizes
from train.state import ModelFunctions
from train.zero import describe_zero


def parsed(flags: str) -> Config:
    return parse(shlex.split(flags))


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("", 0),
        ("--mesh.data 2", 0),
        ("--mesh.fsdp 1", 0),
        ("--mesh.fsdp 4", 3),
        ("--mesh.fsdp=4 --zero 0", 0),
        ("--mesh.fsdp 4 --zero 1", 1),
        ("--mesh.fsdp 4 --lora.rank 4", 1),
        ("--mesh.fsdp 4 --resume --checkpoint-dir missing", 3),
    ],
)
def test_an_fsdp_axis_shards_by_default(flags: str, level: int):
    assert parsed(flags).zero == level


def test_a_configuration_file_may_name_the_level_or_leave_it_out(tmp_path: Path):
    file = tmp_path / "run.json"
    for values, level in (({}, 3), ({"zero": 0}, 0)):
        file.write_text(json.dumps({"mesh": {"fsdp": 4}, **values}))
        assert parsed(f"--config {file}").zero == level
        assert parsed(f"--config {file} --zero 2").zero == 2


def saved_run(directory: Path, config: Config, **changes: object) -> str:
    """Writes what a checkpoint says of its run, in the layout of an earlier release."""
    for name in ("state", "data_position", "configuration"):
        (directory / "step_2" / name).mkdir(parents=True)
    (directory / "step_2" / "_CHECKPOINT_METADATA").touch()
    values = config.to_json() | changes
    (directory / "step_2" / "configuration" / "metadata").write_text(json.dumps(values))
    return f"--resume --checkpoint-dir {directory}"


def test_a_resumed_run_keeps_its_level(tmp_path: Path):
    resume = saved_run(tmp_path, parsed("--mesh.fsdp 4 --zero 0"))
    assert parsed(f"{resume} --mesh.fsdp 4").zero == 0
    assert parsed(f"{resume} --mesh.fsdp 4 --zero 3").zero == 3


def test_what_is_replicated_over_fsdp_is_said_with_the_flag_that_shards_it():
    config, sizes = parsed("--mesh.fsdp 2 --zero 0"), MeshSizes(fsdp=2, tensor=2)
    (line,) = describe_zero(config, ModelFunctions(config, sizes), sizes)
    assert line.startswith("zero=0: each device of fsdp=2 has all parameters with their gradients")
    assert line.endswith("--zero 3 shards them")
    sharded = dataclasses.replace(config, zero=3)
    (line, *_) = describe_zero(sharded, ModelFunctions(sharded, sizes), sizes)
    assert line.startswith("zero=3: ") and "are sharded" in line
    alone = MeshSizes(tensor=2)
    assert describe_zero(config, ModelFunctions(config, alone), alone) == []
