"""Config.json files as they occur, and tiny folders, beside what Hugging Face's library answers.

tests/data/hugging_face_configs holds the files and the recorded answers.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from models.config import LlamaConfig
from models.families import read_config, write_config
from models.generation import Generator
from models.generation.generator import make_mesh
from models.hugging_face import ModelFolder, load
from models.hugging_face.files import read_json
from models.hugging_face.tensor_names import tensors
from models.layers.rotary import attention_factor, frequencies
from tests.models import reference
from tests.models.hugging_face.tiny_folders import FOLDERS

DATA = Path(__file__).parents[2] / "data" / "hugging_face_configs"
ANSWERS = json.loads((DATA / "answers.json").read_text())
TOKENS = np.array([ANSWERS["about"]["tokens"]], np.int32)

#: What the library computes and we have no code for, or what it passes over and we do not.
UNSUPPORTED = {
    "llama-biases": "attention_bias=True is not supported",
    "llama-classifier": "architectures='LlamaForSequenceClassification' with",
    "llama-dynamic": "rope_scaling of type 'dynamic' is not supported",
    "llama-linear": "rope_scaling of type 'linear' is not supported",
    "llama-gelu": "hidden_act='gelu' is not supported",
    "llama-4-bits": "quantization_config=.* is not known",
    "mixtral-jitter": "router_jitter_noise=0.01 is not supported; expected 0.0",
    "qwen3-moe-dense-layers": r"mlp_only_layers=\[0, 47\]: some layers have experts and others",
    "qwen3-moe-every-second": "decoder_sparse_step=2 and .*: some layers have experts and others",
    "qwen2.5-dual-chunk": "dual_chunk_attention_config=.* is not known",
    "qwen2-window": "layers differ in layer_types or by max_window_layers",
    "qwen3-mixed-layers": "layers differ in layer_types or by max_window_layers",
    "gpt-oss-another-limit": "swiglu_limit=5.0 is not supported; expected 7.0",
    "gpt-oss-another-format": "quantization_config=.*: expected a quant_method of 'mxfp4'",
    "gpt-oss-full-first": "layer_types=.*: expected layers of sliding_attention with a layer of",
    "text-not-a-number": "NaN is no number of JSON",
}


def described(name: str) -> LlamaConfig:
    values = read_json(DATA / "configs", f"{name}.json")
    assert values is not None
    return read_config(values)


@pytest.mark.parametrize("name", ANSWERS["configs"])
def test_a_config_is_read_as_the_library_reads_it_or_refused(name):
    answer = ANSWERS["configs"][name]
    if "error" in answer or name in UNSUPPORTED:
        with pytest.raises(ValueError, match=UNSUPPORTED.get(name)) as error:
            described(name)
        assert len(str(error.value)) < 400
        return
    config = described(name)
    shapes = {tensor.name: list(tensor.shape) for _, tensor in tensors(config)}
    lines = "\n".join(f"{tensor} {shape}" for tensor, shape in sorted(shapes.items()))
    assert hashlib.sha256(lines.encode()).hexdigest()[:16] == answer["tensors"]
    computed = frequencies(config)
    step = max(1, len(computed) // 8)
    np.testing.assert_allclose(computed[::step], answer["frequencies"], rtol=1e-6)
    np.testing.assert_allclose(attention_factor(config), answer["scaling"], rtol=1e-12)
    silu = config.expert_activation == "silu"
    assert answer["activation"] in (["SiLUActivation", "SiLU"] if silu else [[1.702, 7.0]])
    windows = {config.window_of(layer) for layer in range(config.num_layers)}
    assert sorted(windows, key=str) == answer["windows"]
    assert config.num_heads == answer["num_heads"]
    assert config.norm_epsilon == answer["norm_epsilon"]
    assert config.tied_head == answer["tied_head"]
    assert read_config(write_config(config)) == config


def test_every_file_has_an_answer():
    assert {file.stem for file in (DATA / "configs").glob("*.json")} == ANSWERS["configs"].keys()
    assert FOLDERS.keys() == ANSWERS["folders"].keys()


def logits_of(folder: ModelFolder) -> Any:
    made = Generator(folder.config, mesh=make_mesh(1), dtype="float32")
    params = load(folder, made.abstract_params)
    with jax.default_device(jax.devices()[0]):
        local = {name: np.asarray(value) for name, value in params.items()}
        return reference.logits(folder.config, local, TOKENS)[0]


#: Where the library takes what we refuse: it fills in random numbers or passes over tensors.
REFUSED = {
    "tensor in another file": "says that model.norm.weight is in .*00001.*, which has no such",
    "tensor in no file": "says that model.norm.weight is in .*00002.*, which has no such tensor",
    "tied, neither": "missing: model.embed_tokens.weight",
    "not tied, no head": "missing: lm_head.weight",
    "bias": "not expected: model.layers.0.self_attn.q_proj.bias",
    # It fails, and says which.
    "file missing": "model-00002-of-00002.safetensors is missing, which .*index.json names",
    "another shape": r"of another shape: model.norm.weight \[9\], not \[8\]",
    "cut off": "model.safetensors is not a whole safetensors file",
}
#: Where the library fails, or takes the last of two tensors, and we follow the index.
BY_INDEX = {"index without metadata": "whole", "tensor in two files": "whole"}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_the_model_that_the_library_reads_or_refused(tmp_path, name, caplog):
    folder = tmp_path / "model"
    FOLDERS[name](folder)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]) as error:
            ModelFolder(folder)
        assert str(error.value).startswith(str(folder))
        return
    answer = ANSWERS["folders"][BY_INDEX.get(name, name)]
    with caplog.at_level(logging.WARNING, "models"):
        read = ModelFolder(folder)
    warned = {
        "stale index": "has model.safetensors and model.safetensors.index.json; the first is read",
        "stale index without files": "the first is read, as Hugging Face's library does",
        "tied, head differs": "says tie_word_embeddings=true, and lm_head.weight is stored and",
        "tied, head differs in one value": "the stored head is used",
    }
    assert warned.get(name, "") in caplog.text
    assert bool(caplog.text) == (name in warned)
    expected = np.array(answer["logits"])
    # Both are float32. Other weights, frequencies or windows differ by a tenth and more.
    np.testing.assert_allclose(logits_of(read)[-2:], expected, rtol=1e-4, atol=1e-4)
