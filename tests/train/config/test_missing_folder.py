"""A folder to begin with that is not here, such as a model's name on the hub."""

from __future__ import annotations

import pytest

from train.config.model_folder import with_model_of
from train.run.command_line import main, parse


@pytest.mark.parametrize("mode", ["--dry-run", "--print-config", "--plan"])
def test_what_is_not_here_is_not_taken_for_the_debug_model(mode, capsys) -> None:
    with pytest.raises(SystemExit):
        main([mode, "--devices", "2", "--init-from", "Qwen/Qwen3-8B"])
    error = capsys.readouterr().err
    assert "init_from='Qwen/Qwen3-8B': does not exist" in error
    assert "hf download Qwen/Qwen3-8B" in error


def test_a_preset_says_what_the_model_of_a_missing_checkpoint_is() -> None:
    config = parse(["--preset", "llama3-8b", "--init-from", "elsewhere/run"])
    assert with_model_of(config) == config


@pytest.mark.parametrize("path", ["/models/llama", "./llama", "models/meta/llama", "llama"])
def test_a_path_is_not_taken_for_a_name_of_the_hub(path: str) -> None:
    with pytest.raises(ValueError, match=r"does not exist; .* a Hugging Face folder$"):
        with_model_of(parse(["--init-from", path]))
