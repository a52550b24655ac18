"""Names of earlier releases still work: flags, values of flags, and saved configurations."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from train.command_line import main, parse
from train.dry_run import dry_run
from train.renamed import current_arguments, current_configuration

TINY = shlex.split(
    "--model.num-layers 1 --mesh.data 2 --mesh.tensor 2 --batch-size 4 --sequence-length 16"
    " --steps 2 --log-interval 1"
)


@pytest.mark.parametrize(
    ("arguments", "expected", "warning"),
    [
        ("--keep 2", "--max-to-keep 2", "--keep is now called --max-to-keep"),
        ("--keep=2", "--max-to-keep=2", "--keep is now called --max-to-keep"),
        ("--accumulate 4", "--gradient-accumulation-steps 4", "--accumulate is now called"),
        ("--overlap bulk", "--overlap xla", "--overlap bulk is now called --overlap xla"),
        ("--overlap=bulk", "--overlap=xla", "--overlap bulk is now called --overlap xla"),
        ("--overlap ring --steps 3", "--overlap ring --steps 3", ""),
        ("--data bulk --resume keep", "--data bulk --resume keep", ""),
    ],
)
def test_old_flags_and_values_are_replaced_with_a_warning(capsys, arguments, expected, warning):
    assert current_arguments(arguments.split()) == expected.split()
    printed = capsys.readouterr().err
    assert warning in printed
    assert printed.count("warning: ") == bool(warning)


def test_the_command_line_accepts_old_flags_and_warns_once_for_each(capsys):
    old = shlex.split("--keep 7 --accumulate 2 --overlap bulk --print-config")
    main([*TINY, *old])
    printed = capsys.readouterr()
    config = json.loads(printed.out)
    assert (config["max_to_keep"], config["gradient_accumulation_steps"]) == (7, 2)
    assert config["overlap"] == "xla"
    assert printed.err.count("the old name will be removed") == 3


def test_a_saved_configuration_has_todays_names() -> None:
    saved = {"steps": 6, "keep": 3, "accumulate": 2, "overlap": "bulk", "mesh": {"data": 1}}
    assert current_configuration(saved) == {
        "steps": 6,
        "max_to_keep": 3,
        "gradient_accumulation_steps": 2,
        "overlap": "xla",
        "mesh": {"data": 1},
    }


def test_a_checkpoint_of_an_earlier_release_resumes_without_a_difference(
    capsys, tmp_path: Path
) -> None:
    saved = ["--checkpoint-dir", str(tmp_path), "--overlap", "xla"]
    main([*TINY, *saved])
    rename_to_earlier_release(tmp_path / "step_2")
    capsys.readouterr()
    main([*TINY, *saved, "--resume", "--steps", "3"])
    output = capsys.readouterr().out
    assert "resumed from the checkpoint of step 2" in output
    assert "changed since: steps was 2, is 3\n" in output


def rename_to_earlier_release(checkpoint: Path) -> None:
    """Rewrites the configuration in a checkpoint to the names of an earlier release."""
    (path,) = (checkpoint / "configuration").glob("metadata")
    configuration = json.loads(path.read_text())
    configuration["keep"] = configuration.pop("max_to_keep")
    configuration["accumulate"] = configuration.pop("gradient_accumulation_steps")
    configuration["overlap"] = "bulk"
    path.write_text(json.dumps(configuration))


def test_several_backends_may_be_named_for_the_first_that_can() -> None:
    assert parse(["--overlap", "fused,xla"]).overlap == "fused,xla"
    console = Console(quiet=True)
    dry_run(parse([*TINY, "--overlap", "fused,xla"]), 2, 2, console)
