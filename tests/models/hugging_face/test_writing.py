"""What is imported and exported is what it was, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from models.command_line import main
from models.generation import Generator
from models.generation.generator import make_mesh
from models.hugging_face import ModelFolder, load, write
from models.hugging_face.tensor_names import tensors
from tests.models.hugging_face.folders import DATA, NAMES


def contents(folder: ModelFolder) -> dict[str, np.ndarray]:
    """All tensors as they are in the files."""
    return {
        tensor.name: folder.read(tensor.name, [slice(None)] * len(tensor.shape))
        for _, tensor in tensors(folder.config)
    }


def assert_same(written: ModelFolder, original: ModelFolder) -> None:
    assert written.config == original.config
    expected = contents(original)
    for name, tensor in contents(written).items():
        assert tensor.dtype == expected[name].dtype
        assert tensor.tobytes() == expected[name].tobytes(), name


@pytest.fixture
def commands(monkeypatch):
    """`python -m models` in this process, whose devices are there already."""
    monkeypatch.setattr("models.command_line._simulate", lambda devices: None)
    return main


@pytest.mark.parametrize("name", NAMES)
def test_in_and_out_is_bit_for_bit_the_same(commands, tmp_path, name):
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    commands(["import", str(DATA / name), str(checkpoint)])
    commands(["export", str(checkpoint), str(out), "--max-shard-gigabytes", "3e-5"])
    assert_same(ModelFolder(out), ModelFolder(DATA / name))
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (out / file).read_text() == (DATA / name / file).read_text()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    total = sum(tensor.nbytes for tensor in contents(ModelFolder(out)).values())
    assert index["metadata"]["total_size"] == total
    assert len(set(index["weight_map"].values())) > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "out"]


def test_a_padded_model_is_written_without_padding_and_in_another_dtype(tmp_path):
    folder = ModelFolder(DATA / "llama3.2")
    made = Generator(folder.config, mesh=make_mesh(1), dtype="float32")
    params = load(folder, made.abstract_params)
    params["embedding"] = jnp.pad(params["embedding"], ((0, 96), (0, 0)), constant_values=7)
    padded = dataclasses.replace(made.config, padded_vocabulary_size=384)
    write(tmp_path / "out", padded, params, dtype="float32")
    written = ModelFolder(tmp_path / "out")
    assert written.config == folder.config
    expected = contents(folder)
    for name, tensor in contents(written).items():
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, expected[name].astype(np.float32), err_msg=name)


def test_a_folder_that_has_something_is_not_overwritten(commands, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("kept")
    for command in ("import", "export"):
        with pytest.raises(SystemExit):
            commands([command, str(DATA / "qwen2"), str(tmp_path / "full")])
        assert "is not empty; name a folder that is not there yet" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_a_copy_without_its_folder_is_exported_in_float32(commands, tmp_path):
    commands(["import", str(DATA / "qwen3"), str(tmp_path / "in")])
    shutil.rmtree(tmp_path / "in" / "hugging_face")
    commands(["export", str(tmp_path / "in"), str(tmp_path / "out")])
    assert_same(ModelFolder(tmp_path / "out"), ModelFolder(DATA / "qwen3"))
    assert not (tmp_path / "out" / "tokenizer.json").exists()
