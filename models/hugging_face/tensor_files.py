"""The safetensors files of a model's folder, and which of them holds each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Registers bfloat16 with NumPy, in which safetensors then returns slices.
import ml_dtypes  # noqa: F401
import numpy as np

from models.families.config_keys import shown, shown_name
from models.hugging_face.files import LARGEST_JSON, find_file, read_json, reason
from models.hugging_face.mxfp4 import BLOCKS, SCALES, Mxfp4Tensor
from models.log import warn_once

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_ROWS_BYTES = 2**24


class TensorFiles(Mapping[str, Any]):
    """The tensors of a folder by name, each as a slice of its open file that is not read yet.

    As Hugging Face's library does, model.safetensors is read if it is there, and the index and
    its files only if it is not. What is in the folder beside them is not looked at.

    Args:
      folder: the folder.

    Raises:
      ValueError: there is no such file; one is damaged, missing or outside the folder; or files and
        index contradict each other.
      ImportError: the package safetensors is not installed.
    """

    def __init__(self, folder: Path):
        if find_file(folder, WEIGHTS) is not None:
            if find_file(folder, INDEX) is not None:
                warn_once(
                    f"{folder}: has {WEIGHTS} and {INDEX}; the first is read, as Hugging Face's"
                    " library does: delete the one that is not meant"
                )
            self._files = _tensors_of(folder, WEIGHTS, given_by="the folder")
        else:
            self._files = _tensors_by_index(folder)
        self._names = {name: name for name in self._files}
        self._packed: dict[str, Mxfp4Tensor] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self._packed:
            return self._packed[name]
        stored = self._names[name]
        return self._files[stored].get_slice(stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def rename(self, old: str, new: str) -> None:
        """Lets a tensor be asked for by another name."""
        self._names[new] = self._names.pop(old)

    def unpack_mxfp4(self) -> None:
        """Puts a tensor in the place of each two that are its blocks and scales.

        Raises:
          ValueError: if some do not fit each other.
        """
        packed = [name.removesuffix(BLOCKS) for name in self if name.endswith(BLOCKS)]
        for name in packed:
            if name + SCALES in self and name not in self:
                parts = self[name + BLOCKS], self[name + SCALES]
                self._packed[name] = Mxfp4Tensor(name, *parts)
                del self._names[name + BLOCKS], self._names[name + SCALES]
                self._names[name] = name

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same shape and values, by reading them."""
        first, second = self[name], self[other]
        shape = first.get_shape()
        if shape != second.get_shape():
            return False
        if not shape:
            return bool(np.array_equal(_values(first, ()), _values(second, ())))
        rows = max(1, _ROWS_BYTES // max(1, 4 * int(np.prod(shape[1:]))))
        starts = range(0, shape[0], rows)
        parts = ((slice(start, min(start + rows, shape[0])),) for start in starts)
        return all(np.array_equal(_values(first, part), _values(second, part)) for part in parts)


def _values(tensor: Any, part: Sequence[slice]) -> np.ndarray:
    return np.asarray(tensor[tuple(part)], np.float32)


def _tensors_of(folder: Path, name: str, *, given_by: str) -> dict[str, Any]:
    """The open file of each tensor of a file, by the tensor's name."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            f"{folder}: reading it needs the package safetensors;"
            " pip install '.[hf]' in the repository"
        ) from error
    path = find_file(folder, name)
    if path is None:
        raise ValueError(
            f"{shown_name(name)} is missing, which {given_by} names; download it again"
        )
    try:
        with path.open("rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
        if header > LARGEST_JSON:
            raise ValueError(f"a header of {header} bytes; expected at most {LARGEST_JSON}")
        # Checks that the file is as long as its header says.
        file = safe_open(path, "numpy")
        return dict.fromkeys(file.keys(), file)
    except Exception as error:
        raise ValueError(
            f"{shown_name(name)} is not a whole safetensors file ({reason(error)}); download it"
            " again"
        ) from error


def _tensors_by_index(folder: Path) -> dict[str, Any]:
    by_tensor = _weight_map(folder)
    names = sorted(set(by_tensor.values()))
    # All are looked for before any is opened.
    for name in names:
        if find_file(folder, name) is None:
            raise ValueError(
                f"{shown_name(name)} is missing, which {INDEX} names; download it again"
            )
    held = {name: _tensors_of(folder, name, given_by=INDEX) for name in names}
    found: dict[str, Any] = {}
    for tensor, name in by_tensor.items():
        if tensor not in held[name]:
            raise ValueError(
                f"{INDEX} says that {shown_name(tensor)} is in {shown_name(name)}, which has no"
                " such tensor; its files are not of one model: download them again"
            )
        found[tensor] = held[name][tensor]
    # A file may hold tensors that the index leaves out.
    for name, tensors in held.items():
        for tensor in tensors:
            if tensor in by_tensor:
                continue
            if tensor in found:
                raise ValueError(
                    f"{shown_name(tensor)} is in {shown_name(name)} and in another file, and"
                    f" {INDEX} does not say which is meant; download the files again"
                )
            found[tensor] = tensors[tensor]
    return found


def _weight_map(folder: Path) -> dict[str, str]:
    """The name of the file of each tensor."""
    index = read_json(folder, INDEX)
    if index is None:
        raise ValueError(_without_weights(folder))
    by_tensor = index.get("weight_map")
    if not isinstance(by_tensor, dict) or not by_tensor:
        raise ValueError(f"{INDEX} has no weight_map; download it again")
    for tensor, name in by_tensor.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise ValueError(
                f"{INDEX}: the file of {shown_name(tensor)} is {shown(name)}; expected the name of"
                " a safetensors file in the folder: download it again"
            )
    return by_tensor


def _without_weights(folder: Path) -> str:
    pickled = sorted(file.name for kind in _PICKLED for file in folder.glob(kind))
    if pickled:
        return (
            f"has {pickled[0]} and no safetensors file; files of this kind are unpickled, which"
            " runs code that they contain: convert it with transformers'"
            " save_pretrained, or download the safetensors files"
        )
    return f"has neither {WEIGHTS} nor {INDEX}; download the weights"
