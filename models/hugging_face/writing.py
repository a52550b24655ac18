"""Folders that Hugging Face's library loads, from parameters on a mesh."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from models.config import LlamaConfig
from models.families import read_config, write_config
from models.hugging_face.files import find_file, read_json, real_path
from models.hugging_face.folder import CONFIG, GENERATION_CONFIG, TOKENIZER_FILES, ModelFolder
from models.hugging_face.tensor_files import INDEX, WEIGHTS
from models.hugging_face.tensor_names import Tensor, tensors
from models.paths import expanded

#: The folder, beside checkpoints, with what a model came with apart from its weights.
ORIGIN = "hugging_face"
_DTYPES = "dtypes.json"
#: The keys of config.json and generation_config.json that name tokens by their numbers.
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_COPIED = (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES)


def keep_origin(source: str | Path, directory: str | Path) -> None:
    """Copies what a model came with, apart from its weights, into a directory of checkpoints.

    Args:
      source: the model's folder, or a directory of checkpoints that has such a copy.
      directory: where the copy goes; one that is there already is replaced.
    """
    source, target = real_path(source), expanded(directory) / ORIGIN
    if ModelFolder.is_one(source):
        model = ModelFolder(source)
        tied_head, dtypes = model.config.tied_head, json.dumps(model.dtypes)
        origin = source
    else:
        # A directory of checkpoints, or one of them.
        copies = [folder / ORIGIN for folder in (source, source.parent)]
        copies = [copy for copy in copies if (copy / CONFIG).is_file()]
        if not copies:
            return
        tied_head, dtypes = None, (copies[0] / _DTYPES).read_text()
        origin = copies[0]
    target.mkdir(parents=True, exist_ok=True)
    copy_files(origin, target, _COPIED)
    (target / _DTYPES).write_text(dtypes)
    values = read_json(target, CONFIG) or {}
    if tied_head is not None and values.get("tie_word_embeddings", False) != tied_head:
        # The head that is stored differs from the embedding.
        values["tie_word_embeddings"] = tied_head
        write_json(target / CONFIG, values)


def write(
    directory: str | Path,
    config: LlamaConfig,
    params: Mapping[str, jax.Array],
    *,
    origin: str | Path | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 2 * 10**9,
) -> None:
    """Writes a model as Hugging Face's library does.

    All processes call it, and the first writes. The host holds one file at a time. The folder gets
    its name when it is whole.

    Args:
      directory: the folder to make. There may be an empty one.
      config: shape of the model.
      params: global arrays by name, of each layer.
      origin: the folder that `keep_origin` made, or None.
      dtype: dtype of all tensors; None: of each that which it came in, or else float32.
      max_shard_bytes: size of a file from which on there is another one.

    Raises:
      ValueError: the folder has something in it, or the model is of no family.
    """
    target = real_path(directory)
    check_empty(target)
    unpadded = dataclasses.replace(config, padded_vocabulary_size=None)
    saved = None if origin is None else Path(origin)
    dtypes = {} if saved is None else read_json(saved, _DTYPES) or {}
    default = dtype or dtypes.get("", "float32")
    partial = target.with_name(f".{target.name}.partial")
    first = jax.process_index() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if saved is not None:
            copy_files(saved, partial, _COPIED)
        _write_config(partial / CONFIG, unpadded, default)
    of_tensor = {
        tensor.name: dtype or dtypes.get(tensor.name, default) for _, tensor in tensors(unpadded)
    }
    groups = _files(unpadded, of_tensor, max_shard_bytes)
    names: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = WEIGHTS
        if len(groups) > 1:
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        contents = {
            name: _joined(
                [_contents(params[path], tensor, of_tensor[name], first) for path, tensor in parts]
            )
            for name, parts in _by_tensor(group)
        }
        names |= dict.fromkeys(contents, file)
        if first:
            save_tensors(contents, partial / file)
    if first:
        if len(groups) > 1:
            _write_index(partial / INDEX, unpadded, of_tensor, names)
        if target.is_dir():
            target.rmdir()
        os.replace(partial, target)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("the folder is whole")


def check_empty(directory: Path) -> None:
    """Raises ValueError if there is something at a path other than an empty folder."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory}: is not empty; name a folder that is not there yet")


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copies those files of a folder that it has.

    Raises:
      ValueError: for a name or a link that leads out of the folder, or to no file.
    """
    for name in names:
        file = find_file(source, name)
        if file is not None and file != real_path(target / name):
            shutil.copyfile(file, target / name)


def save_tensors(contents: dict[str, np.ndarray], file: Path) -> None:
    """Writes a file of safetensors with the mode that other new files have."""
    from safetensors.numpy import save_file

    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    # The library of Hugging Face wants to know what kind of tensors these were.
    save_file(contents, file, metadata={"format": "pt"})
    file.chmod(mode)  # The library replaces the file by one that only its owner reads.


def _write_config(file: Path, config: LlamaConfig, dtype: str) -> None:
    """Leaves the config.json that a model came with if it describes this model, or replaces it.

    The dtypes that it names become that of the tensors: Hugging Face's library rounds to it.
    """
    given = read_json(file.parent, CONFIG)
    if given is not None and given.pop("quantization_config", None) is not None:
        write_json(file, given)  # What is written is not quantized.
    if given is None:
        values = write_config(config) | {"torch_dtype": dtype}
    elif _describes(given, config):
        values = _with_dtype(given, dtype)
    else:
        tokens = {name: given[name] for name in TOKENS if name in given}
        values = write_config(config) | tokens | {"torch_dtype": dtype}
    if values != given:
        write_json(file, values)


def _describes(values: dict[str, Any], config: LlamaConfig) -> bool:
    try:
        return read_config(values) == config
    except ValueError:
        return False


def _with_dtype(value: Any, dtype: str) -> Any:
    """JSON with the values of the keys of a dtype, at any depth, replaced."""
    if isinstance(value, dict):
        return {
            name: dtype
            if name in ("dtype", "torch_dtype") and isinstance(item, str)
            else _with_dtype(item, dtype)
            for name, item in value.items()
        }
    return [_with_dtype(item, dtype) for item in value] if isinstance(value, list) else value


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Writes an object as a file of a folder."""
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _files(
    config: LlamaConfig, dtypes: Mapping[str, str], limit: int
) -> list[list[tuple[str, Tensor]]]:
    """The parameters of each file."""
    files: list[list[tuple[str, Tensor]]] = [[]]
    size = 0
    for name, parts in _by_tensor(tensors(config)):
        nbytes = _bytes(parts[0][1], dtypes[name])
        if files[-1] and size + nbytes > limit:
            files.append([])
            size = 0
        files[-1] += parts
        size += nbytes
    return files


def _by_tensor(
    parameters: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, list[tuple[str, Tensor]]]]:
    """The parameters of each tensor, which follow each other."""
    for name, parts in itertools.groupby(parameters, key=lambda pair: pair[1].name):
        yield name, list(parts)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """A tensor of parameters, whose columns take turns."""
    if len(parts) == 1:
        return parts[0]
    return np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)


def _bytes(tensor: Tensor, dtype: str) -> int:
    return int(np.prod(tensor.shape)) * jax.numpy.dtype(dtype).itemsize


def _contents(array: jax.Array, tensor: Tensor, dtype: str, needed: bool) -> np.ndarray:
    """A parameter, or an expert's part of it, as the tensor of a file, on the host.

    Of other processes nothing is needed."""
    if tensor.expert is not None:
        array = jax.lax.dynamic_index_in_dim(array, tensor.expert, keepdims=False)
    array = array.astype(dtype)
    if jax.process_count() > 1:
        whole = multihost_utils.process_allgather(array, tiled=True)
    else:
        whole = np.asarray(array)
    if not needed:
        return np.zeros(0)
    whole = np.asarray(whole)[tuple(slice(size) for size in tensor.parameter_shape)]
    sizes = [math.prod(group) for group in tensor.parameter_groups]
    whole = whole.reshape(sizes)
    return np.ascontiguousarray(whole.T if tensor.transposed else whole)


def _write_index(
    file: Path, config: LlamaConfig, dtypes: Mapping[str, str], names: Mapping[str, str]
) -> None:
    total = sum(
        _bytes(parts[0][1], dtypes[tensor]) for tensor, parts in _by_tensor(tensors(config))
    )
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    write_json(file, index)
