"""A folder that cannot be used is met by a sentence, before anything is read or compiled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.hugging_face import ModelFolder
from tests.models.hugging_face.folders import DATA
from tests.models.hugging_face.tiny_folders import write_folder

WEIGHTS = "model.safetensors"


def change_config(**values) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def change_tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return changed


def truncate(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])


def pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def index_of(weight_map: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        # Files of an index are read where there is no single one.
        (folder / WEIGHTS).rename(folder / "model-1.safetensors")
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def several(tensors: dict) -> None:
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, ml_dtypes.bfloat16)
    tensors["model.embed_tokens.weight"] = np.zeros((288, 31), ml_dtypes.bfloat16)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((48, 32), np.int8)


BAD = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json; give a folder as"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "architecture": (
        change_config(architectures=["GPT2LMHeadModel"], model_type="gpt2"),
        "architectures='GPT2LMHeadModel' with model_type='gpt2' is not known",
    ),
    "truncated": (truncate, "model.safetensors is not a whole safetensors file"),
    "pickled": (pickle, "has pytorch_model.bin and no safetensors file; files of this kind are un"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), f"has neither {WEIGHTS} nor"),
    "lost file": (index_of({"model.norm.weight": "model-2.safetensors"}), "model-2.s.* is missing"),
    "empty index": (index_of({}), "has no weight_map"),
    "tensors": (
        change_tensors(several),
        "tensors are not those that config.json describes: missing: model.norm.weight,"
        " lm_head.weight; not expected: model.layers.0.self_attn.q_proj.bias; of another shape:"
        r" model.embed_tokens.weight \[288, 31\], not \[288, 32\]; of another dtype than BF16, F16,"
        r" F32: model.layers.1.mlp.up_proj.weight \(I8\)",
    ),
    "more layers": (
        change_config(num_hidden_layers=3),
        r"missing: model.layers.2.input_layernorm.weight, .*, and 4 more$",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_folder_is_refused_in_a_sentence(tmp_path, name):
    shutil.copytree(DATA / "llama3", tmp_path / "model")
    change, sentence = BAD[name]
    change(tmp_path / "model")
    with pytest.raises(ValueError, match=sentence) as error:
        ModelFolder(tmp_path / "model")
    assert str(error.value).startswith(str(tmp_path / "model"))


def test_a_missing_tokenizer_is_refused(tmp_path):
    shutil.copytree(DATA / "llama3", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.json; give the folder with the token"):
        ModelFolder(tmp_path / "model").tokenizer()


def test_frequencies_of_older_files_and_a_tied_head_are_ignored(tmp_path):
    shutil.copytree(DATA / "llama3.2", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / WEIGHTS)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model" / WEIGHTS)
    ModelFolder(tmp_path / "model")


@pytest.mark.parametrize(
    ("ids", "tokens"),
    [(2, (2,)), ([2, 3], (2, 3)), ([-1, 2, 2**40, 16], (2,)), (-1, ()), ([], ()), (None, ())],
    ids=str,
)
def test_tokens_that_are_not_in_the_vocabulary_end_nothing(tmp_path, ids, tokens):
    assert ModelFolder(write_folder(tmp_path / "model", eos_token_id=ids)).stop_tokens == tokens
