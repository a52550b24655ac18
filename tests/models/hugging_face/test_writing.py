"""Imported and exported models are what they were, bit for bit."""

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
from tests.models.hugging_face.tiny_folders import EMBEDDING, FOLDERS, HEAD, write_folder


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
def commands():
    """`python -m models` in this process, whose devices are there already."""
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_config_json_names_the_dtype_that_is_exported(commands, tmp_path, dtype):
    commands(["import", str(DATA / "llama3"), str(tmp_path / "in")])
    commands(["export", str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", dtype])
    original = json.loads((DATA / "llama3" / "config.json").read_text())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert original["dtype"] == "bfloat16"
    assert written == original | {"dtype": dtype}
    assert ModelFolder(tmp_path / "out").dtypes == {"": dtype}


def test_every_key_of_a_dtype_is_changed_at_any_depth(tmp_path):
    nested = {
        "torch_dtype": "bfloat16",
        "dtype": "float16",
        "task_specific_params": {"text": [{"torch_dtype": "bfloat16", "top_k": 3}]},
        "id2label": {"0": "dtype"},
        "label2id": {"dtype": 0},
    }
    folder = ModelFolder(write_folder(tmp_path / "model", **nested))
    made = Generator(folder.config, mesh=make_mesh(1), dtype="float32")
    params = load(folder, made.abstract_params)
    write(tmp_path / "out", folder.config, params, origin=folder.path)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    changed = {"torch_dtype": "float32", "dtype": "float32"}
    assert {name: written[name] for name in changed} == changed
    assert written["task_specific_params"] == {"text": [{"torch_dtype": "float32", "top_k": 3}]}
    assert (written["id2label"], written["label2id"]) == ({"0": "dtype"}, {"dtype": 0})


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("tied, head differs", False),
        ("tied, head differs in one value", False),
        ("tied, head is the embedding", True),
        ("tied, head alone", True),
        ("tied, no head", True),
    ],
)
def test_a_stored_head_beside_a_tied_one_goes_in_and_out(commands, tmp_path, name, tied):
    FOLDERS[name](tmp_path / "model")
    original = ModelFolder(tmp_path / "model")
    assert original.config.tied_head == tied
    commands(["import", str(tmp_path / "model"), str(tmp_path / "in")])
    # What the trainer goes on from describes the same model.
    assert ModelFolder.config_of(tmp_path / "in" / "hugging_face") == original.config
    commands(["export", str(tmp_path / "in"), str(tmp_path / "out")])
    written = ModelFolder(tmp_path / "out")
    assert_same(written, original)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == tied
    everything = [slice(None), slice(None)]
    if not tied:
        assert np.any(written.read(HEAD, everything) != written.read(EMBEDDING, everything))


def test_a_config_that_describes_another_model_is_replaced_without_its_tokens(tmp_path):
    folder = ModelFolder(write_folder(tmp_path / "model", eos_token_id=[2, 3]))
    made = Generator(folder.config, mesh=make_mesh(1), dtype="float32")
    params = load(folder, made.abstract_params)
    other = dataclasses.replace(folder.config, rotary_base=7.0)
    write(tmp_path / "out", other, params, origin=folder.path)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["rope_theta"], values["eos_token_id"], values["bos_token_id"]) == (7, [2, 3], 1)
    write(tmp_path / "new", other, params)
    values = json.loads((tmp_path / "new" / "config.json").read_text())
    # A file without these keys means tokens 1 and 2.
    assert (values["eos_token_id"], values["bos_token_id"]) == (None, None)


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1"])
def test_a_file_of_no_size_is_refused(commands, tmp_path, capsys, size):
    with pytest.raises(SystemExit):
        commands(["export", "x", str(tmp_path / "out"), "--max-shard-gigabytes", size])
    assert "max_shard_gigabytes=" in capsys.readouterr().err


def test_a_link_out_of_the_folder_is_not_copied(commands, tmp_path, capsys):
    (tmp_path / "secret").write_text("{}")
    FOLDERS["whole"](tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(SystemExit):
        commands(["import", str(tmp_path / "model"), str(tmp_path / "in")])
    assert "tokenizer.json is a link to" in capsys.readouterr().err
    assert not (tmp_path / "in").exists()


def test_a_path_that_the_system_refuses_is_a_sentence(commands, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        commands(["import", str(DATA / "qwen2"), str(tmp_path / "file" / "in")])
    assert "give a path that can be read or written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["import", "LOOP", "OUT"], "config.json cannot be read (Too many levels of symbolic"),
        (["import", str(DATA / "qwen2"), "LOOP"], "LOOP: "),
        (["export", "LOOP", "OUT"], "LOOP': holds no checkpoint"),
        (["generate", "LOOP", "--prompt", "x"], "config.json cannot be read"),
    ],
    ids=str,
)
def test_a_circle_of_links_is_a_sentence(commands, tmp_path, capsys, arguments, sentence):
    (tmp_path / "LOOP").symlink_to("LOOP")
    with pytest.raises(SystemExit):
        commands([str(tmp_path / a) if a.isupper() else a for a in arguments])
    assert sentence in capsys.readouterr().err
