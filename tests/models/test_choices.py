"""Flags of the command lines that take one of several names."""

from __future__ import annotations

import json

import pytest

from models import command_line
from train.config.config import Config
from train.run.command_line import parse


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """Text of the box on stderr, on one line."""
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--device H101", "'H101' is not one of A100, H100, H200; did you mean H100?"),
        ("--fp8=rowwis", "'rowwis' is not one of tensorwise, rowwise, blockwise; did you mean"),
        ("--remat ful", "not one of none, dots, projections, attention, full; did you mean full?"),
        ("--optimizer.kind nothing", "'nothing' is not one of adamw, muon "),
    ],
)
def test_a_wrong_name_is_answered_with_the_names_and_the_nearest(flags, sentence, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        parse(flags.split())
    assert sentence in printed(capsys)


def test_the_models_answer_alike(capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        command_line.main(["export", "run", "folder", "--dtype", "f32"])
    assert "'f32' is not one of bfloat16, float16, float32; did you mean" in printed(capsys)


def test_none_is_still_read(tmp_path):
    """Printed commands and configuration files have it."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"fp8": "rowwise", "device": "H100"}))
    config = parse(["--config", str(file), "--fp8", "None"])
    assert (config.fp8, config.device) == (None, "H100")
    assert isinstance(config, Config)
    file.write_text(json.dumps({"fp8": None}))
    assert parse(["--config", str(file)]).fp8 is None
