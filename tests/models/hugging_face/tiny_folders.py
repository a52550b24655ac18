"""Folders of a model so small that tests make them: whole ones, and ones with something wrong.

Needs NumPy and safetensors only, so that tests/data/hugging_face_configs/make_answers.py asks
Hugging Face's library about the same folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "torch_dtype": "float32",
    "vocab_size": 16,
}
_LAYER = {
    "input_layernorm": (8,),
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8),
    "post_attention_layernorm": (8,),
    "mlp.gate_proj": (12, 8),
    "mlp.up_proj": (12, 8),
    "mlp.down_proj": (8, 12),
}
Tensors = dict[str, np.ndarray]


def tensors_of(seed: int = 0) -> Tensors:
    """Tensors of the model that CONFIG describes, in float32."""
    draw = np.random.default_rng(seed)
    shapes = {EMBEDDING: (16, 8), NORM: (8,), HEAD: (16, 8)}
    shapes |= {f"model.layers.0.{name}.weight": shape for name, shape in _LAYER.items()}
    made = {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return {name: 1 + value / 4 if value.ndim == 1 else value for name, value in made.items()}


def write_folder(folder: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    """A folder with model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors_of() if tensors is None else tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def write_shards(
    folder: Path,
    files: Mapping[str, Tensors],
    weight_map: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """A folder with files and an index; by default the index names what is in the files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, tensors in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / name, {"format": "pt"})
    held = {tensor: name for name, tensors in files.items() for tensor in tensors}
    index = {
        "metadata": {"total_size": 1},
        "weight_map": held if weight_map is None else weight_map,
    }
    (folder / INDEX).write_text(json.dumps(index | more))
    return folder


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The first and the second half of some tensors."""
    names = sorted(tensors)
    first = {name: tensors[name] for name in names[: len(names) // 2]}
    return first, {name: tensors[name] for name in names if name not in first}


def _shards(folder: Path) -> None:
    first, second = halves(tensors_of())
    write_shards(folder, {FIRST: first, SECOND: second})


def _stale_index(folder: Path) -> None:
    """An index and files of an earlier model, beside the file of a newer one."""
    first, second = halves(tensors_of(1))
    write_shards(folder, {FIRST: first, SECOND: second})
    write_folder(folder)


def _stale_index_without_files(folder: Path) -> None:
    write_shards(folder, {}, {NORM: FIRST})
    write_folder(folder)


def _tensor_twice(folder: Path) -> None:
    """The index says that the norm is in the first file; the second has an older one."""
    first, second = halves(tensors_of())
    held = {**dict.fromkeys(second, SECOND), **dict.fromkeys(first, FIRST), NORM: FIRST}
    norm = {NORM: second[NORM]}
    write_shards(folder, {FIRST: first | norm, SECOND: second | {NORM: norm[NORM] + 1}}, held)


def _file_missing(folder: Path) -> None:
    _shards(folder)
    (folder / SECOND).unlink()


def _tensor_elsewhere(folder: Path) -> None:
    """The index says that the norm is in the first file, and the second has it."""
    first, second = halves(tensors_of())
    held = {**dict.fromkeys(second, SECOND), **dict.fromkeys(first, FIRST), NORM: FIRST}
    write_shards(folder, {FIRST: first, SECOND: second}, held)


def _tensor_nowhere(folder: Path) -> None:
    first, second = halves(tensors_of())
    del second[NORM]
    held = {**dict.fromkeys(second, SECOND), **dict.fromkeys(first, FIRST), NORM: SECOND}
    write_shards(folder, {FIRST: first, SECOND: second}, held)


def _tensor_not_in_index(folder: Path) -> None:
    first, second = halves(tensors_of())
    held = {**dict.fromkeys(second, SECOND), **dict.fromkeys(first, FIRST)}
    del held[NORM]
    write_shards(folder, {FIRST: first, SECOND: second}, held)


def _files_below(folder: Path) -> None:
    first, second = halves(tensors_of())
    write_shards(folder, {"weights/a.safetensors": first, "weights/b.safetensors": second})


def _no_metadata(folder: Path) -> None:
    _shards(folder)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"]}))


def _head(change: Callable[[Tensors], Any], **config: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = tensors_of()
        change(tensors)
        write_folder(folder, tensors, tie_word_embeddings=True, **config)

    return write


def _as_embedding(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].copy()


def _one_value_off(tensors: Tensors) -> None:
    _as_embedding(tensors)
    tensors[HEAD][-1, -1] += 0.5


def _changed(change: Callable[[Tensors], Any], **config: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = tensors_of()
        change(tensors)
        write_folder(folder, tensors, **config)

    return write


def _add(name: str, value: np.ndarray) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


def _half(tensors: Tensors) -> None:
    """Matrices in float16 and norms in float32."""
    tensors.update({n: v.astype(np.float16) for n, v in tensors.items() if v.ndim == 2})


def _cut_off(folder: Path) -> None:
    write_folder(folder)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-64])


LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
YARN = {"factor": 16.0, "original_max_position_embeddings": 32, "rope_type": "yarn"}
#: What writes each folder.
FOLDERS: dict[str, Callable[[Path], Any]] = {
    "whole": write_folder,
    "shards": _shards,
    "shards in a folder below": _files_below,
    "stale index": _stale_index,
    "stale index without files": _stale_index_without_files,
    "index without metadata": _no_metadata,
    "tensor in two files": _tensor_twice,
    "tensor in another file": _tensor_elsewhere,
    "tensor in no file": _tensor_nowhere,
    "tensor not in the index": _tensor_not_in_index,
    "file missing": _file_missing,
    "cut off": _cut_off,
    "tied, head differs": _head(lambda tensors: None),
    "tied, head differs in one value": _head(_one_value_off),
    "tied, head is the embedding": _head(_as_embedding),
    "tied, no head": _head(lambda tensors: tensors.pop(HEAD)),
    "tied, head alone": _head(lambda tensors: tensors.pop(EMBEDDING)),
    "tied, neither": _head(lambda tensors: [tensors.pop(EMBEDDING), tensors.pop(HEAD)]),
    "not tied, no head": _changed(lambda tensors: tensors.pop(HEAD)),
    "frequencies": _changed(
        _add("model.layers.0.self_attn.rotary_emb.inv_freq", np.ones(2, np.float32))
    ),
    "bias": _changed(_add("model.layers.0.self_attn.q_proj.bias", np.ones(8, np.float32))),
    "another shape": _changed(_add(NORM, np.ones(9, np.float32))),
    "two dtypes": _changed(_half, torch_dtype="float32"),
    "old and new rotary keys": _changed(
        lambda tensors: None, rope_scaling=LLAMA3, rope_parameters={"rope_theta": 7.0}
    ),
    "original context left out": _changed(
        lambda tensors: None,
        rope_scaling={n: v for n, v in LLAMA3.items() if not n.startswith("orig")},
    ),
    "yarn": _changed(lambda tensors: None, rope_scaling=YARN),
    "yarn with its own attention factor": _changed(
        lambda tensors: None,
        rope_scaling=YARN | {"attention_factor": 2.0, "beta_fast": 4.0, "truncate": False},
    ),
    "window left out": _changed(
        lambda tensors: None, model_type="mistral", architectures=["MistralForCausalLM"]
    ),
    "window": _changed(
        lambda tensors: None,
        model_type="mistral",
        architectures=["MistralForCausalLM"],
        sliding_window=2,
    ),
}
