"""Settings that are possible and seldom meant: each is questioned by one line, wherever it is."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil

import pytest

from models.checkpoint.saved_checkpoint import CONTEXT_LENGTH
from models.config import RotaryScaling
from tests.models.hugging_face.folders import DATA
from tests.train.config.test_defaults import parsed, saved_run
from train.checkpoint.checkpoint import Checkpoints
from train.config.checks import warnings_of
from train.config.config import Config
from train.config.model_folder import with_model_of
from train.config.presets import PRESETS
from train.run.command_line import main
from train.run.initial_state import changed_settings

FOLDER = shlex.split(f"--init-from {shlex.quote(str(DATA / 'llama3'))} --sequence-length 256")
TOO_LONG = "warning: sequence_length=256 is more than the 128 tokens that the model was made for"
RANDOM = "warning: lora.rank=4 without --init-from trains adapters beside random weights"


def lines_of(output: str, start: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(start)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*FOLDER, "--plan", "--devices", "1", "--device", "H100"], TOO_LONG),
        ([*FOLDER, "--dry-run", "--mesh.data", "1", "--mesh.tensor", "1"], TOO_LONG),
        (["--lora.rank", "4", "--dry-run", "--mesh.data", "1"], RANDOM),
    ],
)
def test_a_plan_and_a_dry_run_question_it(arguments, sentence, capsys):
    main([*arguments, "--batch-size", "8"])
    assert len(lines_of(capsys.readouterr().out, sentence)) == 1


@pytest.mark.parametrize("mode", ["--plan --devices 1 --device H100", "--dry-run --mesh.data 1"])
def test_a_folder_without_weights_is_planned_with_the_way_to_train_its_model(
    mode, capsys, tmp_path
):
    shutil.copy(DATA / "llama3" / "config.json", tmp_path)
    main([*mode.split(), "--init-from", str(tmp_path), "--batch-size", "8"])
    (line,) = lines_of(capsys.readouterr().out, f"warning: init_from='{tmp_path}'")
    assert "has no safetensors files, with which a run begins" in line
    given = ["--config", str(tmp_path / "config.json")]
    assert f"give {shlex.join(given)} in place of --init-from" in line
    main([*mode.split(), *given, "--batch-size", "8"])
    output = capsys.readouterr().out
    assert "warning: init_from" not in output and f"{tmp_path.name}" in output.splitlines()[0]


def test_a_run_questions_it_too(capsys):
    small = "--mesh.data 1 --mesh.tensor 1 --batch-size 1 --steps 1 --overlap xla --lora.rank 4"
    main([*FOLDER, *small.split()])
    output = capsys.readouterr().out
    assert len(lines_of(output, TOO_LONG)) == 1
    assert RANDOM not in output
    main(shlex.split(f"--model.num-layers 1 --sequence-length 16 {small}"))
    output = capsys.readouterr().out
    assert len(lines_of(output, RANDOM)) == 1


@pytest.mark.parametrize(
    ("setting", "user"),
    [
        ("--eval-interval 1", "--eval-data x"),
        ("--eval-batches 2", "--eval-data x"),
        ("--save-interval 5", "--checkpoint-dir x"),
        ("--max-to-keep 1", "--checkpoint-dir x"),
    ],
)
def test_a_setting_that_nothing_uses_is_questioned(setting: str, user: str):
    (line,) = warnings_of(parsed(setting))
    name, value = setting.removeprefix("--").replace("-", "_").split()
    assert line.startswith(f"warning: {name}={value}: has no effect without {user.split()[0]};")
    for flags in ("", user, f"{setting} {user}", f"{setting} --eval-only"):
        assert warnings_of(parsed(flags)) == []


def of_length(config: Config, tokens: int, **changes: object) -> list[str]:
    model = dataclasses.replace(config.model, **changes)
    return warnings_of(dataclasses.replace(config, model=model, sequence_length=tokens))


def test_the_longest_context_is_that_of_the_model_or_of_its_scaled_frequencies():
    for name in PRESETS.keys() - {"debug"}:
        context = PRESETS[name]().model.context_length
        assert context is not None and context >= 8192, name
    qwen = PRESETS["qwen2.5-7b"]()
    assert of_length(qwen, 32_768) == []
    assert re.search("the 32768 tokens", of_length(qwen, 32_769)[0])
    long = RotaryScaling(kind="yarn", factor=4.0, original_context=32_768)
    assert of_length(qwen, 131_072, rotary_scaling=long) == []
    assert of_length(qwen, 131_073, rotary_scaling=long) != []
    # Llama 3.1's scaling does not name the length that it was trained for.
    assert of_length(PRESETS["llama3-8b"](), 131_072) == []
    assert of_length(qwen, 10**6, context_length=None) == []
    assert warnings_of(with_model_of(parsed(f"--init-from {DATA / 'llama3'}"))) == []


def test_a_checkpoint_without_the_context_of_its_preset_is_of_the_same_model(tmp_path):
    """Presets of earlier releases had none."""
    now = parsed("--preset llama3-8b").to_json()
    before = {**now, "model": {**now["model"], "context_length": None}}
    assert CONTEXT_LENGTH == "model.context_length"
    assert changed_settings(before, now) == ""
    resume = saved_run(tmp_path, parsed("--preset llama3-8b"), model=before["model"])
    assert resume.startswith("--resume")
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        checkpoints.newest().check_same_model(now)
        with pytest.raises(ValueError, match=r"model\.features was 4096, is 8"):
            checkpoints.newest().check_same_model({"model": {**now["model"], "features": 8}})


def test_a_size_that_the_run_chooses_is_no_change() -> None:
    saved, chosen = {"mesh": {"data": 2, "tensor": 2}}, {"mesh": {"data": 1, "tensor": 0}}
    assert changed_settings(saved, chosen) == "mesh.data was 2, is 1"
