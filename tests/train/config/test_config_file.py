"""Configuration files: what ``--print-config`` writes is read back, and flags override it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from models.hugging_face import ModelFolder
from tests.models.hugging_face.folders import DATA, NAMES
from tests.train.config.test_defaults import saved_run
from train.config import model_folder
from train.config.checks import warnings_of
from train.config.config_file import fields_of_file
from train.config.defaults import OF_MODEL, describe_taken, usual_learning_rate
from train.config.model_folder import model_name, with_model_of
from train.config.presets import PRESETS
from train.run.command_line import main, parse


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main([*arguments, "--print-config"])
    return capsys.readouterr().out


def written(path: Path, values: Any) -> list[str]:
    text = values if isinstance(values, str | bytes) else json.dumps(values)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return ["--config", str(path)]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--print-config"])
    assert stopped.value.code == 2
    return " ".join(capsys.readouterr().err.split())


CHANGES = (
    "--model.tied-head --optimizer.clip-norm inf --optimizer.decay-steps 9 --data -x --resume"
    " --model.rotary-scaling.factor 8 --optimizer.learning-rate 1e-05 --no-dry-run"
)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_printed_configuration_is_read_back(capsys, tmp_path, preset):
    changes = shlex.split(CHANGES.replace("--data -x", "--data=-x"))
    text = printed(capsys, "--preset", preset, *changes)
    assert json.loads(text)["optimizer"]["learning_rate"] == 1e-5
    file = written(tmp_path / "config.json", text)
    assert printed(capsys, *file) == text
    # The file does not ask to be printed.
    config = parse(file)
    assert not config.print_config
    assert (config.config, config.data, config.model.tied_head) == (file[1], "-x", True)


def test_flags_override_the_file_wherever_they_stand(tmp_path):
    file = written(
        tmp_path / "f", {"preset": "llama3-8b", "steps": 5, "resume": True, "seed": 3, "data": "x"}
    )
    for arguments in (
        [*file, "--steps", "7", "--no-resume", "--data", "None"],
        ["--steps", "7", "--no-resume", "--data", "None", *file],
    ):
        config = parse(arguments)
        assert (config.steps, config.resume, config.seed, config.data) == (7, False, 3, None)
        # The file leaves out the rest, which is that of its preset.
        assert config.model == PRESETS["llama3-8b"]().model


def test_a_file_without_a_preset_changes_the_one_that_is_asked_for(tmp_path):
    file = written(tmp_path / "f", {"optimizer": {"b1": 0.5}, "mesh": {}})
    assert parse(file).model == PRESETS["debug"]().model
    config = parse([*file, "--preset", "llama3-8b"])
    assert config.model == PRESETS["llama3-8b"]().model
    assert (config.optimizer.b1, config.optimizer.b2) == (0.5, 0.95)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_of_a_config_json_is_read_with_the_settings_of_a_preset(name, capsys, tmp_path):
    described = Path(shutil.copy(DATA / name / "config.json", tmp_path))
    file = ["--config", str(described)]
    config, usual = parse([*file, "--preset", "llama3-8b"]), PRESETS["llama3-8b"]()
    assert config.model == ModelFolder.config_of(tmp_path)
    assert dataclasses.replace(config, model=usual.model, config=None) == usual
    # It has no weights, so nothing is fine-tuned.
    assert with_model_of(config) == config
    assert model_name(config) == tmp_path.name
    again = parse(written(tmp_path / "my-run.json", printed(capsys, *file)))
    # Without a preset, the length and the rate follow from the model, in the printed file too.
    alone = parse(file)
    assert alone == dataclasses.replace(alone, **of_the_model(alone))
    assert dataclasses.replace(again, config=file[1]) == alone
    assert model_name(again) == "my-run"


def test_a_folder_stands_for_its_config_json(capsys, tmp_path):
    """Its weights are not read, and a line says so where they are there."""
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    message = refused(capsys, "--config", str(folder))
    assert f"config='{folder}': is a folder without config.json; give a file that" in message
    described = Path(shutil.copy(DATA / "qwen3" / "config.json", folder))
    of_folder, of_file = (parse(["--config", str(path)]) for path in (folder, described))
    assert dataclasses.replace(of_folder, config=of_file.config) == of_file
    assert model_name(of_folder) == model_name(of_file) == "Qwen3-0.6B"
    assert warnings_of(of_folder) == warnings_of(of_file) == []
    shutil.copy(DATA / "qwen3" / "model.safetensors", folder)
    (warning,) = warnings_of(of_folder)
    assert warning.endswith(f"give --init-from {folder} to begin with them")
    assert warnings_of(dataclasses.replace(of_folder, init_from="run")) == []
    described.write_text("{")
    assert f"config='{described}': is not JSON" in refused(capsys, "--config", str(folder))


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    assert parse(written(tmp_path / "f", b"\xef\xbb\xbf" + b'{"steps": 5}')).steps == 5


def of_the_model(config):
    optimizer = dataclasses.replace(
        config.optimizer,
        learning_rate=float(f"{usual_learning_rate(config):.0e}"),
        warmup_steps=config.steps // 20,
    )
    tokens = min(config.model.context_length or 2048, 4096)
    return {"sequence_length": 2 ** (tokens.bit_length() - 1), "optimizer": optimizer}


def test_flags_beside_a_config_json_override_what_follows_from_its_model(capsys, tmp_path):
    described = str(shutil.copy(DATA / "llama3" / "config.json", tmp_path))
    given = ["--config", described, "--sequence-length", "16", "--optimizer.learning-rate", "1e-3"]
    config = parse([*given, "--steps", "400"])
    assert (config.sequence_length, config.optimizer.learning_rate) == (16, 1e-3)
    assert config.optimizer.warmup_steps == 20
    assert describe_taken(config) == ["default for this model: --optimizer.warmup-steps 20"]


def test_a_plan_and_a_dry_run_of_a_config_json_take_the_length_of_its_run(capsys, tmp_path):
    values = json.loads((DATA / "qwen3" / "config.json").read_text())
    file = written(tmp_path / "config.json", values | {"max_position_embeddings": 1500})
    assert parse(file).sequence_length == 1024
    for mode in ("--plan --device H100 --devices 1", "--dry-run --mesh.data 1 --mesh.tensor 1"):
        main([*shlex.split(mode), *file])
        first, *others = capsys.readouterr().out.splitlines()
        assert "16 sequences of 1,024 tokens per step" in first
        assert "default for this model: --sequence-length 1024" in others


def test_a_model_is_named_after_the_file_that_describes_it(capsys, tmp_path):
    printed_text = printed(capsys, "--init-from", str(DATA / "qwen3"))
    file = written(tmp_path / "own_run.json", printed_text)
    assert model_name(parse(file)) == "qwen3"
    random = parse([*file, "--init-from", "None"])
    assert model_name(random) == "own_run"
    padded = dataclasses.replace(random, model=random.model.padded_for(8))
    assert model_name(padded) == "own_run"
    # A file that leaves the preset's model as it is does not rename it.
    assert model_name(parse(written(tmp_path / "steps.json", {"steps": 5}))) == "debug"


def test_a_config_json_that_cannot_be_read_is_refused(capsys, tmp_path):
    values = json.loads((DATA / "qwen3" / "config.json").read_text())
    del values["model_type"]
    file = written(tmp_path / "config.json", values)
    sentence = f"config='{file[1]}': config.json: model_type=None: expected 'qwen3'"
    assert sentence in refused(capsys, *file)


def test_a_file_of_an_earlier_release_is_read_with_current_names(tmp_path):
    file = written(tmp_path / "f", {"keep": 7, "overlap": "bulk", "print_config": True, "steps": 5})
    config = parse(file)
    assert (config.max_to_keep, config.overlap) == (7, "xla")
    # Its schedule is as long as the run, however long that is.
    assert parse([*file, "--steps", "9"]).optimizer.decay_steps is None


def test_a_preset_that_is_named_gives_the_rest_though_it_is_the_default() -> None:
    file, debug = ["--config", str(DATA / "qwen3" / "config.json")], PRESETS["debug"]()
    named, free = parse([*file, "--preset", "debug"]), parse(file)
    assert named.optimizer.learning_rate == debug.optimizer.learning_rate
    assert named.sequence_length == debug.sequence_length
    assert free.optimizer.learning_rate != debug.optimizer.learning_rate
    assert named.model == free.model


def test_a_run_goes_by_the_file_that_it_began_with(monkeypatch, tmp_path):
    """Which is read once, and may change or go while it trains."""
    opened, open_regular = [], model_folder.open_regular
    monkeypatch.setattr(
        model_folder, "open_regular", lambda path: opened.append(path) or open_regular(path)
    )
    path = Path(shutil.copy(DATA / "qwen3" / "config.json", tmp_path))
    config = parse(["--config", str(path)])
    path.unlink()
    assert describe_taken(config)[0].startswith("default for this model: ")
    assert fields_of_file(str(path)) == {*OF_MODEL}
    assert opened == [path]
    assert parse(written(path, {"steps": 5})).steps == 5


@pytest.mark.parametrize(
    "flags",
    [
        "--mesh.fsdp 8",
        "--optimizer.kind muon",
        f"--init-from {shlex.quote(str(DATA / 'qwen3'))} --steps 400",
        "--resume",
        "--resume --lora.alpha=8",
        "--mesh.fsdp 8 --zero 1 --batch-size 4 --sequence-length 16",
    ],
)
def test_a_printed_configuration_is_like_the_flags_that_it_came_from(capsys, tmp_path, flags):
    """A default follows from flags beside the file as it does from the flags alone."""
    began = parse(shlex.split("--lora.rank 8 --lora.alpha 64 --batch-size 4 --mesh.fsdp 2"))
    given = shlex.split(f"--checkpoint-dir {tmp_path}") + shlex.split(flags)
    saved_run(tmp_path, began)
    for before, beside in ([], given), (given, []), (given[:4], given[4:]):
        file = written(tmp_path / "f", printed(capsys, *before))
        read = dataclasses.replace(parse([*file, *beside]), config=None)
        assert with_model_of(read) == with_model_of(parse(given))


def test_what_is_not_set_is_null_and_shown_beside_the_file(capsys):
    main(shlex.split("--mesh.fsdp 8 --batch-size=32 --lora.rank 4 --lora.no-rslora --print-config"))
    output = capsys.readouterr()
    values = json.loads(output.out)
    assert (values["zero"], values["batch_size"], values["sequence_length"]) == (None, 32, None)
    lora = values["lora"]
    assert (lora["rank"], lora["rslora"], lora["alpha"]) == (4, False, None)
    shown = "--optimizer.learning-rate=0.004 --optimizer.warmup-steps=10 --sequence-length=128"
    assert output.err.endswith(f"follows from the rest, now: --steps=160 {shown} --zero=1\n")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"optimizer": {"learning_rat": 1}}, "unknown key 'optimizer.learning_rat'; did you mean"),
        ({"steps": 5, "zzz": 1}, "unknown key 'zzz'; see --print-config"),
        ({"zzz": 1}, "no name in it is that of a flag, found 'zzz'; give a file that --print-c"),
        ({"version": "1.0", "truncation": None, "model": {"type": "BPE", "vocab": {}}},
         "found 'version', 'truncation', 'model.type', ...; give a file that --print-config"),
        ({"steps": {"first": 1}}, "unknown key 'steps.first'"),
        ({"model": 5}, "model=5: expected an object with names such as 'vocabulary_size'"),
        ({"steps": [1]}, "steps=[1]: expected a whole number or null"),
        ({"steps": True}, "steps=true: expected a whole number or null"),
        ({"steps": 5.5}, "steps=5.5: expected a whole number or null"),
        ({"steps": "many"}, 'steps="many": expected a whole number or null'),
        ({"seed": None}, "seed=null: expected a whole number"),
        ({"optimizer": {"b1": "high"}}, 'optimizer.b1="high": expected a number'),
        ({"optimizer": {"b1": {}}}, "optimizer.b1={}: expected a number"),
        ({"model": {"rotary_scaling": {"kind": 5}}},
         'model.rotary_scaling.kind=5: expected one of "llama3", "yarn"'),
        ({"data": 1, "eval_data": []}, "eval_data=[]: expected a string or null"),
        ({"remat": "sometimes"}, 'remat="sometimes": expected one of "none", "dots", '),
        ({"fp8": "x"}, 'fp8="x": expected one of "tensorwise", "rowwise", "blockwise" or null'),
        ({"zero": 4}, "zero=4: expected one of 0, 1, 2, 3 or null"),
        ({"resume": "yes"}, 'resume="yes": expected true or false'),
        ({"preset": "llama"}, "preset='llama': expected one of debug"),
        ({"preset": []}, "preset=[]: expected one of debug"),
        ([1], "expected a JSON object with the names of flags"),
        ("{", "is not JSON (Expecting property name"),
        ("steps: 5", "is not JSON (Expecting value"),
        (" \n", "is empty; give a file that --print-config wrote, or a Hugging Face config.json"),
        (b"\x93NUMPY", "is a binary file, or not in UTF-8; give a file that --print-config"),
        ("[" * 100_000, "is not JSON"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_configuration_is_refused(capsys, tmp_path, values, sentence):
    message = refused(capsys, *written(tmp_path / "f", values))
    assert sentence in message
    assert f"error: config='{tmp_path / 'f'}': " in message


def test_values_of_a_file_may_be_text_as_in_flags(tmp_path):
    values = {"steps": "5", "zero": "3", "tune_table": "None", "optimizer": {"clip_norm": "inf"}}
    config = parse(written(tmp_path / "f", values))
    assert (config.steps, config.zero, config.tune_table) == (5, 3, None)
    assert config.optimizer.clip_norm == float("inf")


def test_a_file_that_cannot_be_read_is_refused(capsys, tmp_path):
    message = refused(capsys, "--config", str(tmp_path / "none"))
    assert re.search(r"config='.*/none': cannot be read \(No such file", message)
    os.mkfifo(tmp_path / "pipe")
    assert "cannot be read (it is a pipe" in refused(capsys, "--config", str(tmp_path / "pipe"))
    file = written(tmp_path / "f", {"preset": "debug"})
    message = refused(capsys, *file, "--steps", "5", f"--config={tmp_path / 'g'}")
    assert f"config: expected one file, got '{file[1]}' and '{tmp_path / 'g'}'; give one" in message
    assert "leave out --preset" in refused(capsys, *file, "--preset", "llama3-8b")
    assert parse([*file, "--preset", "debug"]).preset == "debug"
