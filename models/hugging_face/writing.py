"""Folders that Hugging Face's library loads, from parameters on a mesh."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from models.config import LlamaConfig
from models.families import read_config, write_config
from models.hugging_face.folder import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    TOKENIZER_FILES,
    WEIGHTS,
    ModelFolder,
)
from models.hugging_face.tensor_names import Tensor, tensors
from models.paths import expanded

#: The folder, beside checkpoints, with what a model came with apart from its weights.
ORIGIN = "hugging_face"
_DTYPES = "dtypes.json"
_COPIED = (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES)


def keep_origin(source: str | Path, directory: str | Path) -> None:
    """Copies what a model came with, apart from its weights, into a directory of checkpoints.

    Args:
      source: the model's folder, or a directory of checkpoints that has such a copy.
      directory: where the copy goes; one that is there already is replaced.
    """
    source, target = expanded(source).resolve(), expanded(directory) / ORIGIN
    if ModelFolder.is_one(source):
        files = {name: source / name for name in _COPIED}
        dtypes = json.dumps(ModelFolder(source).dtypes)
    else:
        # A directory of checkpoints, or one of them.
        copies = [folder / ORIGIN for folder in (source, source.parent)]
        copies = [copy for copy in copies if (copy / CONFIG).is_file()]
        if not copies:
            return
        files = {name: copies[0] / name for name in _COPIED}
        dtypes = (copies[0] / _DTYPES).read_text()
    target.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        if file.is_file() and file.resolve() != (target / name).resolve():
            shutil.copyfile(file, target / name)
    (target / _DTYPES).write_text(dtypes)


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
    target = expanded(directory).resolve()
    check_empty(target)
    unpadded = dataclasses.replace(config, padded_vocabulary_size=None)
    saved = {} if origin is None else _origin_of(Path(origin), unpadded)
    dtypes = saved.pop(_DTYPES, {})
    default = dtype or dtypes.get("", "float32")
    partial = target.with_name(f".{target.name}.partial")
    first = jax.process_index() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        values = write_config(unpadded) | {"torch_dtype": default}
        (partial / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
        for name, file in saved.items():
            shutil.copyfile(file, partial / name)
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
            tensor.name: _contents(params[path], tensor, of_tensor[tensor.name], first)
            for path, tensor in group
        }
        names |= dict.fromkeys(contents, file)
        if first:
            _save(contents, partial / file)
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


def _origin_of(origin: Path, config: LlamaConfig) -> dict:
    """The files to copy and the dtypes. config.json is copied if it describes this model."""
    files: dict = {name: origin / name for name in _COPIED if (origin / name).is_file()}
    if CONFIG in files and read_config(json.loads(files[CONFIG].read_text())) != config:
        del files[CONFIG]
    if (origin / _DTYPES).is_file():
        files[_DTYPES] = json.loads((origin / _DTYPES).read_text())
    return files


def _files(
    config: LlamaConfig, dtypes: Mapping[str, str], limit: int
) -> list[list[tuple[str, Tensor]]]:
    """The parameters of each file."""
    files: list[list[tuple[str, Tensor]]] = [[]]
    size = 0
    for path, tensor in tensors(config):
        nbytes = _bytes(tensor, dtypes[tensor.name])
        if files[-1] and size + nbytes > limit:
            files.append([])
            size = 0
        files[-1].append((path, tensor))
        size += nbytes
    return files


def _bytes(tensor: Tensor, dtype: str) -> int:
    return int(np.prod(tensor.shape)) * jax.numpy.dtype(dtype).itemsize


def _contents(array: jax.Array, tensor: Tensor, dtype: str, needed: bool) -> np.ndarray:
    """A parameter as the tensor of a file, on the host; of other processes nothing is needed."""
    array = array.astype(dtype)
    if jax.process_count() > 1:
        whole = multihost_utils.process_allgather(array, tiled=True)
    else:
        whole = np.asarray(array)
    if not needed:
        return np.zeros(0)
    whole = np.asarray(whole)[tuple(slice(size) for size in tensor.parameter_shape)]
    shape = tensor.shape[::-1] if tensor.transposed else tensor.shape
    whole = whole.reshape(shape)
    return np.ascontiguousarray(whole.T if tensor.transposed else whole)


def _save(contents: dict[str, np.ndarray], file: Path) -> None:
    from safetensors.numpy import save_file

    # The library of Hugging Face wants to know what kind of tensors these were.
    save_file(contents, file, metadata={"format": "pt"})


def _write_index(
    file: Path, config: LlamaConfig, dtypes: Mapping[str, str], names: Mapping[str, str]
) -> None:
    total = sum(_bytes(tensor, dtypes[tensor.name]) for _, tensor in tensors(config))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    file.write_text(json.dumps(index, indent=2) + "\n")
