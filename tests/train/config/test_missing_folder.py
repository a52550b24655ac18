"""A path to begin with that is not here, such as a model's name on the hub, or that is no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.hugging_face.folders import DATA
from train.config.model_folder import with_model_of
from train.run.command_line import main, parse

MODES = pytest.mark.parametrize("mode", ["--dry-run", "--print-config", "--plan"])
PRESET = pytest.mark.parametrize("preset", [[], ["--preset", "llama3-8b"]], ids=["", "preset"])
ADAPTER = DATA.parent / "peft_adapters" / "llama3"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match=r"^2$"):
        main([*arguments, "--devices", "2"])
    return capsys.readouterr().err


@MODES
@PRESET
def test_what_is_not_here_is_not_taken_for_the_model_of_a_preset(mode, preset, capsys) -> None:
    error = refused(capsys, mode, *preset, "--init-from", "Qwen/Qwen3-8B")
    assert "init_from='Qwen/Qwen3-8B': does not exist" in error
    assert "hf download Qwen/Qwen3-8B" in error


@MODES
@PRESET
def test_what_is_no_model_is_not_taken_for_that_of_a_preset(mode, preset, capsys, tmp_path) -> None:
    for path in (tmp_path, ADAPTER):
        error = refused(capsys, mode, *preset, "--init-from", str(path))
        assert f"init_from='{path}': holds no checkpoint; give a directory of checkpoints" in error
        assert "or a Hugging Face folder" in error


@MODES
def test_a_file_is_answered_with_its_folder(mode, capsys) -> None:
    folder = DATA / "qwen3"
    error = refused(capsys, mode, "--init-from", str(folder / "config.json"))
    assert f"init_from='{folder / 'config.json'}': is a file; give its folder, '{folder}'" in error


def test_a_file_or_a_missing_step_beside_checkpoints_is_refused(tmp_path: Path) -> None:
    """The folder beside them, with what an export needs, says what the model is."""
    (tmp_path / "hugging_face").symlink_to(DATA / "qwen3")
    (tmp_path / "notes").touch()
    for name, sentence in (("notes", "is a file"), ("step_9", "does not exist")):
        with pytest.raises(ValueError, match=sentence):
            with_model_of(parse(["--init-from", str(tmp_path / name)]))


@pytest.mark.parametrize("path", ["/models/llama", "./llama", "models/meta/llama", "llama"])
def test_a_path_is_not_taken_for_a_name_of_the_hub(path: str) -> None:
    with pytest.raises(ValueError, match=r"does not exist; .* a Hugging Face folder$"):
        with_model_of(parse(["--init-from", path]))
