"""Names of earlier releases still work: flags, values of flags, and saved configurations."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from rich.console import Console

from models.checkpoint.earlier_releases import current_configuration, trained_configuration
from models.checkpoint.saved_checkpoint import differences
from train.checkpoint.checkpoint import Checkpoints
from train.config.config import MeshSizes
from train.config.renamed import current_arguments
from train.run.command_line import main, parse
from train.run.dry_run import dry_run
from train.run.initial_state import changed_settings

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


def test_a_saved_configuration_is_read_with_current_names() -> None:
    saved = {"steps": 6, "keep": 3, "accumulate": 2, "overlap": "bulk", "mesh": {"data": 1}}
    assert current_configuration(saved) == {
        "steps": 6,
        "max_to_keep": 3,
        "gradient_accumulation_steps": 2,
        "overlap": "xla",
        "mesh": {"data": 1},
    }


EARLIER_NAMES = {"max_to_keep": "keep", "gradient_accumulation_steps": "accumulate"}


def as_in_an_earlier_release(configuration: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run with the xla backend, with the names of an earlier release."""
    renamed = {EARLIER_NAMES.get(name, name): value for name, value in configuration.items()}
    optimizer = {k: v for k, v in configuration["optimizer"].items() if k != "decay_steps"}
    return renamed | {"overlap": "bulk", "optimizer": optimizer}


def test_a_configuration_in_an_old_checkpoint_equals_the_current_one(
    tmp_path: Path,
) -> None:
    # The schedule was as long as the run, with at least a step after the warm-up of 10.
    today = parse([*TINY, "--overlap", "xla", "--optimizer.decay-steps", "11"]).to_json()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros(2)}, {}, as_in_an_earlier_release(today))
        assert differences(checkpoints.configuration(), today) == {}


#: What the first release saved for TINY.
FIRST_RELEASE: dict[str, Any] = {
    "model": {
        "vocabulary_size": 256, "num_layers": 1, "features": 128, "hidden_features": 384,
        "num_heads": 16, "num_key_value_heads": 8, "head_dim": 8, "rotary_base": 10000.0,
        "rotary_scaling": {
            "factor": 1.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0,
            "original_context": 8192,
        },
        "norm_epsilon": 1e-05, "tied_head": False,
    },
    "preset": "debug", "mesh": {"data": 2, "tensor": 2},
    "optimizer": {
        "learning_rate": 0.004, "final_learning_rate_fraction": 0.1, "warmup_steps": 10,
        "weight_decay": 0.1, "b1": 0.9, "b2": 0.95, "clip_norm": 1.0,
    },
    "steps": 2, "batch_size": 4, "sequence_length": 16, "gradient_accumulation_steps": 1,
    "overlap": "auto", "remat": "none", "compute_dtype": "bfloat16", "seed": 0, "data": None,
    "tokenizer": None, "checkpoint_dir": None, "save_interval": 100, "max_to_keep": 3,
    "resume": False, "log_interval": 20, "log_file": None, "profile": None,
    "profile_dir": "profile", "cpu_devices": 8, "print_config": False, "dry_run": False,
}  # fmt: skip


def test_new_fields_mean_what_the_first_release_did() -> None:
    """A resumed run lists no setting that nobody changed."""
    today = parse([*TINY, "--optimizer.decay-steps", "11"]).to_json()
    assert changed_settings(trained_configuration(FIRST_RELEASE), today) == ""
    assert changed_settings(
        trained_configuration(FIRST_RELEASE | {"steps": 30, "seed": 1}), today
    ) == ("optimizer.decay_steps was 30, is 11, steps was 30, is 2, seed was 1, is 0")


@pytest.mark.exhaustive
def test_a_checkpoint_of_an_earlier_release_resumes_without_a_difference(
    capsys, tmp_path: Path
) -> None:
    saved = ["--checkpoint-dir", str(tmp_path), "--overlap", "xla"]
    main([*TINY, *saved])
    (path,) = (tmp_path / "step_2" / "configuration").glob("metadata")
    path.write_text(json.dumps(as_in_an_earlier_release(json.loads(path.read_text()))))
    shutil.rmtree(tmp_path / "step_2" / "checksums")  # It saved none.
    capsys.readouterr()
    main([*TINY, *saved, "--resume", "--steps", "3"])
    output = capsys.readouterr().out
    assert "resumed from the checkpoint of step 2" in output
    assert "changed since: steps was 2, is 3\n" in output


def test_several_backends_may_be_named_for_the_first_that_can() -> None:
    config = parse([*TINY, "--overlap", "ring,xla"])
    assert config.overlap == "ring,xla"
    dry_run(config, MeshSizes(2, 1, 2), Console(quiet=True))
