"""Defaults that follow from what else a run is asked for."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from models.hugging_face import ModelFolder
from models.hugging_face.writing import keep_origin
from tests.models.hugging_face.folders import DATA
from train.config.config import Config, MeshSizes
from train.config.defaults import (
    describe_defaults,
    describe_preset,
    of_model,
    usual_learning_rate,
)
from train.config.model_folder import model_name, with_model_of
from train.config.presets import PRESETS
from train.parallel.model import ModelFunctions
from train.parallel.zero import describe_zero
from train.run.command_line import main, parse


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


@pytest.mark.parametrize("flags", ["--mesh.fsdp 4", "--mesh.fsdp 4 --zero 2"])
def test_a_level_is_kept_where_the_mesh_is_kept(flags: str, tmp_path: Path):
    began = parsed(flags)
    resume = saved_run(tmp_path, began)
    assert began.zero > 0
    assert parsed(resume).zero == began.zero
    assert parsed(f"{resume} --zero 0").zero == 0


@pytest.mark.parametrize("way", ["--resume --checkpoint-dir {}", "--init-from {}"])
def test_the_model_of_a_checkpoint_of_the_same_preset_is_taken(way: str, tmp_path: Path):
    began = parsed("--preset llama3-8b --model.num-layers 3 --model.features 256")
    saved_run(tmp_path, began)
    flags = way.format(tmp_path)
    assert parsed(f"{flags} --preset llama3-8b").model == began.model
    changed = parsed(f"{flags} --preset llama3-8b --model.num-layers 4").model
    assert changed == dataclasses.replace(began.model, num_layers=4)
    assert parsed(flags).model == parsed("").model  # Of another preset; opening it is refused.


def test_weights_of_a_checkpoint_are_fine_tuned(tmp_path: Path):
    random = parsed("--sequence-length 64 --steps 40")
    saved_run(tmp_path, random)
    tuned = parsed(f"--init-from {tmp_path} --steps 40")
    usual = usual_learning_rate(random) / 30
    assert tuned.optimizer.learning_rate == pytest.approx(usual, rel=0.5)
    assert (tuned.optimizer.warmup_steps, tuned.sequence_length) == (2, 64)
    given = parsed(f"--init-from {tmp_path} --optimizer.learning-rate 1e-3 --sequence-length 32")
    assert (given.optimizer.learning_rate, given.sequence_length) == (1e-3, 32)
    lines = describe_defaults(tuned)
    assert f"default for fine-tuning: --sequence-length {64}" in lines


@pytest.mark.parametrize("name", ["batch_size", "steps"])
def test_a_resumed_run_keeps_its_steps_and_their_sequences(name: str, tmp_path: Path):
    flag = f"--{name.replace('_', '-')}"
    resume = saved_run(tmp_path, parsed(f"{flag} 4"))
    assert getattr(parsed(resume), name) == 4
    assert getattr(parsed(f"{resume} {flag} 32"), name) == 32
    file = tmp_path / "run.json"
    file.write_text(json.dumps({name: 8}))
    assert getattr(parsed(f"{resume} --config {file}"), name) == 8


def test_a_resumed_run_keeps_its_schedule_and_length(tmp_path: Path):
    flags = "--optimizer.learning-rate 2e-4 --optimizer.warmup-steps 3 --sequence-length 64"
    began = parsed(flags)
    resume = saved_run(tmp_path, began)
    assert parsed(resume).optimizer == began.optimizer
    assert parsed(resume).sequence_length == 64
    changed = parsed(f"{resume} --optimizer.warmup-steps 4").optimizer
    assert changed == dataclasses.replace(began.optimizer, warmup_steps=4)


ADAPTERS = (
    "--lora.rank 8 --lora.alpha 64 --lora.rslora --lora.dropout 0.1 --lora.targets q_proj,v_proj"
    " --lora.train layers.*norm.scale --lora.base-format rowwise"
)


@pytest.mark.parametrize("flags", [ADAPTERS, "--freeze embedding.*"])
def test_a_resumed_run_keeps_its_adapters_and_what_is_frozen(flags: str, tmp_path: Path):
    began = parsed(flags)
    resume = saved_run(tmp_path, began)
    assert (parsed(resume).lora, parsed(resume).freeze) == (began.lora, began.freeze)
    # As the run was resumed before, and as the sentence of a refusal may say.
    again = parsed(f"{resume} {' '.join(flags.split()[:2])}")
    assert (again.lora, again.freeze) == (began.lora, began.freeze)


def test_a_resume_may_change_one_setting_of_its_adapters(tmp_path: Path):
    began = parsed(ADAPTERS)
    resume = saved_run(tmp_path, began)
    changed = parsed(f"{resume} --lora.alpha 16 --lora.no-rslora").lora
    assert changed == dataclasses.replace(began.lora, alpha=16.0, rslora=False)
    with pytest.raises(ValueError, match=r"expected lora\.rank too"):
        parsed(f"{saved_run(tmp_path / 'whole', parsed(''))} --lora.alpha 16")


def test_replicas_over_fsdp_are_reported_with_the_flag_that_shards_them():
    config, sizes = parsed("--mesh.fsdp 2 --zero 0"), MeshSizes(fsdp=2, tensor=2)
    (line,) = describe_zero(config, ModelFunctions(config, sizes), sizes)
    assert line.startswith("zero=0: each device of fsdp=2 has all parameters with their gradients")
    assert line.endswith("--zero 3 shards them")
    sharded = dataclasses.replace(config, zero=3)
    (line, *_) = describe_zero(sharded, ModelFunctions(sharded, sizes), sizes)
    assert line.startswith("zero=3: ") and "are sharded" in line
    alone = MeshSizes(tensor=2)
    assert describe_zero(config, ModelFunctions(config, alone), alone) == []


def test_weights_of_a_folder_are_fine_tuned(tmp_path: Path):
    folder = shlex.quote(str(DATA / "qwen3"))
    config = parsed(f"--init-from {folder} --steps 400")
    model = ModelFolder(DATA / "qwen3").config
    # A tiny model: rates go with the inverse of the cube root of its size.
    rate = 1e-5 * (8e9 / model.matmul_parameters) ** (1 / 3)
    assert config.optimizer.learning_rate == pytest.approx(rate, rel=0.5)
    assert config.optimizer.warmup_steps == 20
    assert model.context_length is not None
    assert model.context_length / 2 < config.sequence_length <= model.context_length
    assert parsed(f"--init-from {folder} --optimizer.decay-steps 1").optimizer.warmup_steps == 0
    adapters = parsed(f"--init-from {folder} --lora.rank 4")
    assert adapters.optimizer.learning_rate == pytest.approx(10 * rate, rel=0.5)
    given = "--sequence-length 8 --optimizer.learning-rate 1e-3 --optimizer.warmup-steps 3"
    config = parsed(f"{given} --init-from {folder}")
    assert config.sequence_length == 8
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (1e-3, 3)
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"init_from": str(DATA / "qwen3"), "sequence_length": 8}))
    config = parsed(f"--config {file} --steps 400")
    assert (config.sequence_length, config.optimizer.warmup_steps) == (8, 20)


@pytest.mark.parametrize(
    ("context", "tokens"), [(None, 2048), (131_072, 4096), (3000, 2048), (64, 64), (1, 1)]
)
def test_sequences_fit_the_context_and_are_not_long(context: int | None, tokens: int):
    config = PRESETS["qwen3-8b"]()
    model = dataclasses.replace(config.model, context_length=context)
    config = dataclasses.replace(config, model=model, init_from=str(DATA / "qwen3"))
    assert of_model(config) == {
        "optimizer.learning_rate": 1e-5,
        "optimizer.warmup_steps": 50,
        "sequence_length": tokens,
    }


def test_a_resumed_run_keeps_the_rate_and_the_length_that_it_had(tmp_path: Path):
    began = dataclasses.replace(PRESETS["debug"](), init_from=str(DATA / "qwen3"))
    resume = saved_run(tmp_path, began)
    keep_origin(DATA / "qwen3", tmp_path)
    config = parsed(f"{resume} --steps 400")
    assert (config.optimizer, config.sequence_length) == (began.optimizer, began.sequence_length)
    assert describe_defaults(with_model_of(config))[:-1] == []
    assert parsed(f"{resume} --optimizer.learning-rate 1e-4").optimizer.learning_rate == 1e-4


@pytest.mark.parametrize("batch", ["", "--batch-size 4"])
def test_a_preset_beside_a_folder_says_what_it_gives(batch: str):
    folder = DATA / "qwen3"
    named = f"--init-from {shlex.quote(str(folder))}"
    config = with_model_of(parsed(f"{named} --preset llama3-8b {batch}"))
    given = "--steps 1000, " + "--batch-size 8, " * (not batch) + "--log-interval 10"
    sentence = f"the model is that of {folder}; --preset llama3-8b gives {given} and no model"
    assert describe_defaults(config)[0] == sentence
    for one in (named, "--preset llama3-8b"):
        assert describe_preset(with_model_of(parsed(one))) == []


def test_what_a_file_or_a_flag_sets_is_no_default(tmp_path: Path):
    """Whatever its value is."""
    folder, file = f"--init-from {shlex.quote(str(DATA / 'qwen3'))}", tmp_path / "run.json"
    length = parsed(folder).sequence_length
    taken = f"default for fine-tuning: --sequence-length {length}"
    for value, is_default in ((length, False), (None, True)):
        file.write_text(json.dumps({"sequence_length": value}))
        config = parsed(f"{folder} --config {file}")
        assert config.sequence_length == length
        assert (taken in describe_defaults(with_model_of(config))) == is_default
    asked = with_model_of(parsed(f"{folder} --preset llama3-8b --steps 1000"))
    assert "--preset llama3-8b gives --batch-size 8, " in describe_preset(asked)[0]


def test_fine_tuning_defaults_are_printed_and_a_high_rate_is_questioned():
    folder = f"--init-from {shlex.quote(str(DATA / 'qwen3'))}"
    config = with_model_of(parsed(f"{folder} --steps 400"))
    rate, warmup, length = describe_defaults(config)
    assert rate.startswith("default for fine-tuning: --optimizer.learning-rate 0.000")
    assert warmup == "default for fine-tuning: --optimizer.warmup-steps 20"
    assert length == f"default for fine-tuning: --sequence-length {config.sequence_length}"
    high = with_model_of(parsed(f"{folder} --steps 400 --optimizer.learning-rate 4e-2"))
    assert describe_defaults(high)[:2] == [warmup, length]
    (warning,) = describe_defaults(high)[2:]
    assert re.match(r"warning: optimizer.learning_rate=0.04 is \d+ times what is usual", warning)
    # A flag with the value of the default is no default.
    given = f"--sequence-length {config.sequence_length} --optimizer.warmup_steps=20"
    assert describe_defaults(with_model_of(parsed(f"{folder} --steps 400 {given}"))) == [rate]
    for name, make in PRESETS.items():
        assert describe_defaults(make()) == [], name
    high = parsed("--preset llama3-8b --optimizer.learning-rate 4e-3")
    (warning,) = describe_defaults(high)
    assert "is 13 times what is usual for 7,504,658,432 weights, about 0.0003;" in warning
    kind = "--optimizer.kind muon --optimizer.muon-update-rms None"
    assert (
        describe_defaults(parsed(f"--preset llama3-8b --optimizer.learning-rate 0.02 {kind}")) == []
    )


def test_the_printed_configuration_has_the_model_of_the_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    main(["--init-from", str(DATA / "qwen3"), "--print-config"])
    text = capsys.readouterr().out
    model = ModelFolder(DATA / "qwen3").config
    assert json.loads(text)["model"] == json.loads(json.dumps(dataclasses.asdict(model)))
    file = tmp_path / "run.json"
    file.write_text(text)
    main(["--config", str(file), "--print-config"])
    assert capsys.readouterr().out == text


def test_a_folder_without_a_tokenizer_is_read_as_bytes_and_says_so(tmp_path: Path):
    folder = shutil.copytree(DATA / "qwen3", tmp_path / "qwen3")
    (folder / "tokenizer.json").unlink()
    config = dataclasses.replace(PRESETS["debug"](), init_from=str(folder))
    sentence = f"warning: {folder} has no tokenizer.json, so text is read as bytes"
    lines = describe_defaults(with_model_of(config))
    assert any(line.startswith(sentence) for line in lines)
    given = dataclasses.replace(config, tokenizer=str(DATA / "qwen3" / "tokenizer.json"))
    assert not any("bytes" in line for line in describe_defaults(with_model_of(given)))


def test_a_model_is_named_after_its_folder(tmp_path: Path):
    def name(init_from: Path) -> str:
        return model_name(dataclasses.replace(PRESETS["debug"](), init_from=str(init_from)))

    assert name(DATA / "qwen3") == "qwen3"
    assert name(tmp_path / "missing") == "debug"
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "0123abcd"
    shutil.copytree(DATA / "qwen3", snapshot)
    assert name(snapshot) == "Qwen3-8B"
    run = tmp_path / "run"
    (run / "step_0").mkdir(parents=True)
    keep_origin(DATA / "qwen3", run)
    assert name(run) == name(run / "step_0") == "run"
