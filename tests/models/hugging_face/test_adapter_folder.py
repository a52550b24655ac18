"""Adapters that PEFT wrote are read, merged and written as PEFT itself does it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.checkpoint.orbax_manager import save_params
from models.config import LlamaConfig
from models.generation import Generator
from models.generation.adapter_params import adapters_in_common
from models.generation.generator import make_mesh
from models.generation.text import answer
from models.hugging_face import (
    AdapterFolder,
    MergedParams,
    ModelFolder,
    PeftConfig,
    load,
    write,
    write_adapter,
)
from models.hugging_face.peft_config import read_peft_config, write_peft_config
from models.hugging_face.tensor_names import tensors
from tests.models.hugging_face.folders import DATA
from tests.models.hugging_face.test_reading import loaded, logits_of
from tests.models.hugging_face.test_writing import assert_same
from tests.models.hugging_face.test_writing import commands as commands

ADAPTERS = DATA.parent / "peft_adapters"
FAMILIES = sorted(folder.name for folder in ADAPTERS.iterdir() if folder.is_dir())
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def adapter(name: str) -> AdapterFolder:
    return AdapterFolder(ADAPTERS / name, ModelFolder(DATA / name).config)


def expected_of(name: str) -> dict[str, np.ndarray]:
    """The tokens and the logits that PEFT computed."""
    with np.load(ADAPTERS / name / "expected.npz") as file:
        return dict(file)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_merged_logits_are_those_of_peft(name, devices):
    generator, params = loaded(name, devices)
    expected = expected_of(name)
    merged = dict(MergedParams(params, adapter(name)))
    assert all(merged[path].sharding == params[path].sharding for path in params)
    computed = logits_of(generator, merged, expected["tokens"])
    scale = np.max(np.abs(expected["logits"]))
    # Both are float32, of a few hundred terms. The adapter changes far more.
    assert np.max(np.abs(computed - expected["logits"])) < 1e-4 * scale
    base = logits_of(generator, params, expected["tokens"])
    assert np.max(np.abs(base - expected["logits"])) > 1e-2 * scale


@pytest.mark.parametrize(
    "name", [FAMILIES[0], *(pytest.param(n, marks=pytest.mark.exhaustive) for n in FAMILIES[1:])]
)
def test_logits_beside_the_weights_are_those_of_peft(name):
    folder, given, expected = ModelFolder(DATA / name), adapter(name), expected_of(name)
    lora = adapters_in_common([given])
    generator = Generator(folder.config, mesh=make_mesh(2), dtype="float32", lora=lora)
    params = load(folder, generator.base_params) | generator.adapter_params(given)
    computed = logits_of(generator, params, expected["tokens"])
    scale = np.max(np.abs(expected["logits"]))
    assert np.max(np.abs(computed - expected["logits"])) < 1e-4 * scale  # As above.


def test_the_generate_command_answers_with_each_adapter_by_name(commands, tmp_path, capsys):
    folder, first = ModelFolder(DATA / "llama3"), adapter("llama3")
    config = PeftConfig(rank=1, alpha=2.0, target_modules=("v_proj",))
    rng = np.random.default_rng(0)
    params = {
        f"layers.{n}.attention.projection.value.{end}": rng.normal(size=shape).astype("float32")
        for n in range(folder.config.num_layers)
        for end, shape in value_shapes(folder.config).items()
    }
    write_adapter(tmp_path / "second", folder.config, config, params)
    second = AdapterFolder(tmp_path / "second", folder.config)
    generator, base = loaded("llama3", 1)
    options: dict[str, Any] = {"max_new_tokens": 5}
    answers = [
        answer(generator, dict(MergedParams(base, each)), folder, ["Hello"], **options)[0]
        for each in (first, second)
    ]
    assert len(set(answers)) == 2
    arguments = ["--prompt", "Hello", "--dtype", "float32", "--max-new-tokens", "5"]
    folders = ["--adapter", f"one={first.path}", str(second.path)]
    commands(["generate", str(folder.path), *arguments, *folders])
    assert capsys.readouterr().out == f"one:\n{answers[0]}\nsecond:\n{answers[1]}\n"
    with pytest.raises(SystemExit):
        commands(["generate", str(folder.path), *arguments, "--adapter", *[str(second.path)] * 2])
    assert "another one is named 'second'" in " ".join(capsys.readouterr().err.split())


def value_shapes(model: LlamaConfig) -> dict[str, tuple[int, int]]:
    return {
        "lora_a": (model.features, 1),
        "lora_b": (1, model.num_key_value_heads * model.head_dim),
    }


@pytest.mark.parametrize("stacked", [False, True])
def test_the_export_command_writes_adapters_of_a_checkpoint(commands, tmp_path, stacked, capsys):
    model = ModelFolder(DATA / "llama3").config
    rng, count = np.random.default_rng(0), model.num_layers
    whole = {
        end: rng.normal(size=(count, *shape)).astype("float32")
        for end, shape in value_shapes(model).items()
    }
    path = "attention.projection.value"
    params: dict[str, Any] = {f"layers.{path}.{end}": jnp.asarray(a) for end, a in whole.items()}
    if not stacked:
        params = {
            f"layers.{n}.{path}.{end}": jnp.asarray(a[n])
            for end, a in whole.items()
            for n in range(count)
        }
    lora = {"rank": 1, "alpha": 3.0, "rslora": True, "targets": "v_proj", "dropout": 0.1}
    configuration = {"model": dataclasses.asdict(model), "lora": lora, "init_from": "base"}
    save_params(tmp_path / "run", params, configuration)
    out = str(tmp_path / "out")
    commands(["export", str(tmp_path / "run"), out])
    printed = capsys.readouterr().out
    assert f"python -m models generate BASE --adapter {out} --prompt TEXT\n" in printed
    assert "peft.PeftModel.from_pretrained(transformers.A" in printed
    file = tmp_path / "out" / "adapter_model.safetensors"
    assert file.stat().st_mode == (tmp_path / "out" / "adapter_config.json").stat().st_mode
    written = AdapterFolder(tmp_path / "out", model)
    expected = PeftConfig(
        rank=1, alpha=3.0, target_modules=("v_proj",), dropout=0.1, rslora=True, base_model="base"
    )
    assert written.config == expected
    for end, array in whole.items():
        for n in range(count):
            np.testing.assert_array_equal(written.params[f"layers.{n}.{path}.{end}"], array[n])
    lora["train"] = "layers.*norm.scale"
    save_params(tmp_path / "more", params, configuration)
    with pytest.raises(SystemExit):
        commands(["export", str(tmp_path / "more"), str(tmp_path / "other")])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", FAMILIES)
def test_in_and_out_is_bit_for_bit_the_same(tmp_path, name):
    model, given = ModelFolder(DATA / name).config, adapter(name)
    write_adapter(tmp_path / "out", model, given.config, given.params)
    ours, theirs = (load_file(folder / WEIGHTS) for folder in (tmp_path / "out", ADAPTERS / name))
    assert ours.keys() == theirs.keys()
    for key, values in theirs.items():
        assert ours[key].dtype == values.dtype
        assert ours[key].tobytes() == values.tobytes(), key
    again = AdapterFolder(tmp_path / "out", model)
    assert (again.config, again.scales) == (given.config, given.scales)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_merged_export_is_rounded_once(tmp_path, name):
    folder, given = ModelFolder(DATA / name), adapter(name)
    _, params = loaded(name, 2)
    write(tmp_path / "out", folder.config, MergedParams(params, given), dtype="bfloat16")
    written = ModelFolder(tmp_path / "out")
    for path, tensor in tensors(folder.config):
        whole = [slice(None)] * len(tensor.shape)
        stored, found = (each.read(tensor.name, whole) for each in (folder, written))
        if path not in given.scales:
            np.testing.assert_array_equal(found, stored.astype(found.dtype))
            continue
        base = stored.astype(np.float64)
        a, b = (given.params[path.replace("kernel", end)] for end in ("lora_a", "lora_b"))
        base += given.scales[path] * (a.astype(np.float64) @ b.astype(np.float64)).T
        error = np.abs(found.astype(np.float64) - base)
        # One rounding to 8 bits of mantissa; float32 before it adds 1e-6 where terms cancel.
        assert np.all(error <= 2.0**-8 * np.abs(base) + 1e-6), tensor.name


def test_the_export_command_merges(commands, tmp_path):
    checkpoint, out, expected = (tmp_path / name for name in ("checkpoint", "out", "expected"))
    commands(["import", str(DATA / "llama3"), str(checkpoint)])
    commands(["export", str(checkpoint), str(out), "--adapter", str(ADAPTERS / "llama3")])
    _, params = loaded("llama3", 1)
    folder = ModelFolder(DATA / "llama3")
    merged = MergedParams(params, adapter("llama3"))
    write(expected, folder.config, merged, dtype="bfloat16")
    assert_same(ModelFolder(out), ModelFolder(expected))


def test_models_with_experts_are_refused():
    with pytest.raises(ValueError, match="experts are not supported"):
        AdapterFolder(ADAPTERS / "qwen3", ModelFolder(DATA / "qwen3-moe").config)


def test_nothing_is_overwritten(tmp_path):
    model, given = ModelFolder(DATA / "qwen3").config, adapter("qwen3")
    (tmp_path / "notes.txt").write_text("kept")
    with pytest.raises(ValueError, match="is not empty"):
        write_adapter(tmp_path, model, given.config, given.params)
    assert (tmp_path / "notes.txt").read_text() == "kept"


VALUES = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "IA3"},
        {"task_type": "SEQ_CLS"},
        {"bias": "all"},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"layers_to_transform": 0},
        {"layers_to_transform": [1]},
        {"exclude_modules": ["k_proj"]},
        {"fan_in_fan_out": True},
        {"init_lora_weights": "pissa"},
        {"a_key_of_tomorrow": 1},
        {"r": 0},
        {"r": True},
        {"lora_alpha": -1},
        {"lora_dropout": 1.0},
        {"use_rslora": 1},
        {"target_modules": None},
        {"target_modules": "("},
        {"rank_pattern": {"q_proj": 0}},
        {"alpha_pattern": {"(": 1}},
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_its_key(change):
    (key,) = change
    with pytest.raises(ValueError, match=rf"^{key}="):
        read_peft_config(VALUES | change)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_configuration_is_written_as_it_is_read(name):
    config = read_peft_config(json.loads((ADAPTERS / name / CONFIG).read_text()))
    assert read_peft_config(json.loads(json.dumps(write_peft_config(config)))) == config


def test_of_overlapping_patterns_the_first_is_used_and_stays_first(tmp_path):
    model = ModelFolder(DATA / "qwen3").config
    patterns = {"q_proj": 2, "layers.1.self_attn.q_proj": 5}
    config = read_peft_config(VALUES | {"rank_pattern": patterns})
    query = model.num_heads * model.head_dim
    params = {}
    for layer in range(model.num_layers):
        path = f"layers.{layer}.attention.projection.query"
        params[f"{path}.lora_a"] = np.ones((model.features, 2), np.float32)
        params[f"{path}.lora_b"] = np.ones((2, query), np.float32)
    write_adapter(tmp_path / "out", model, config, params)
    assert list(AdapterFolder(tmp_path / "out", model).config.rank_pattern) == list(patterns)


def changed(folder: Path, change: Any) -> None:
    shutil.copytree(ADAPTERS / "qwen3", folder)
    values = load_file(folder / WEIGHTS)
    change(values)
    save_file(values, folder / WEIGHTS)


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop(KEY), "has no base_model"),
        (lambda values: values.update({KEY: np.zeros((2, 2), np.float32)}), "of shape"),
        (lambda values: values.update({EMBEDDING: np.zeros((3, 2), np.float32)}), "embedding"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, change, message):
    changed(tmp_path / "bad", change)
    with pytest.raises(ValueError, match=message):
        AdapterFolder(tmp_path / "bad", ModelFolder(DATA / "qwen3").config)


def test_a_parameter_that_is_not_described_is_not_dropped(tmp_path):
    model, given = ModelFolder(DATA / "qwen3").config, adapter("qwen3")
    more = given.params | {"head.lora_a": np.zeros((32, 3), np.float32)}
    with pytest.raises(ValueError, match=r"head\.lora_a"):
        write_adapter(tmp_path / "out", model, given.config, more)
    assert not (tmp_path / "out").exists()
