"""A folder that Hugging Face's library writes: config.json, safetensors files and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

# Registers bfloat16 with NumPy, in which safetensors then returns slices.
import ml_dtypes  # noqa: F401
import numpy as np

from models.config import LlamaConfig
from models.families import read_config
from models.hugging_face.tensor_names import tensors
from models.paths import expanded

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: What a tokenizer may consist of.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_SHOWN = 5


class ModelFolder:
    """The folder of a model, with its headers read and checked, and no tensor yet.

    Attributes:
      path: the folder.
      config: shape of the model, from config.json.

    Args:
      path: the folder.

    Raises:
      ValueError: config.json is missing or describes a model that is not supported; there is no
        safetensors file, or one is damaged; tensors are missing, not expected, of another shape or
        of a dtype that is not floating.
      ImportError: the package safetensors is not installed.
    """

    def __init__(self, path: str | Path):
        self.path = expanded(path).resolve()
        self.config = self.config_of(self.path)
        self._files = self._checked(self._open)
        self._checked(self._check_tensors)

    @staticmethod
    def is_one(path: str | Path) -> bool:
        """Whether a path is such a folder, rather than a checkpoint of the trainer."""
        return (expanded(path) / CONFIG).is_file()

    @staticmethod
    def config_of(path: Path) -> LlamaConfig:
        """The model that the config.json of a folder describes, with weights or without.

        Raises:
          ValueError: it is missing, cannot be read, or describes a model that is not supported.
        """
        try:
            return read_config(_read_json(path / CONFIG))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """A part of a tensor, read from the file.

        Args:
          name: its name.
          index: a slice of each dimension.
        """
        return self._files[name].get_slice(name)[tuple(index)]

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """The dtype of the first matrix by the name "", and of each tensor that has another."""
        found = {
            tensor.name: _DTYPES[self._files[tensor.name].get_slice(tensor.name).get_dtype()]
            for _, tensor in tensors(self.config)
        }
        first = next(iter(found.values()))
        return {"": first} | {name: dtype for name, dtype in found.items() if dtype != first}

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end an answer: of generation_config.json, or else of config.json."""
        for file in (GENERATION_CONFIG, CONFIG):
            if (self.path / file).is_file():
                found = _read_json(self.path / file).get("eos_token_id")
                if found is not None:
                    return tuple(found) if isinstance(found, list) else (found,)
        return ()

    def tokenizer(self) -> Any:
        """The tokenizer, an object of the package tokenizers.

        Raises:
          ValueError: there is no tokenizer.json, or it cannot be read.
          ImportError: the package is not installed.
        """
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                f"{self.path}: reading its tokenizer needs the package tokenizers;"
                " pip install 'collective_matmul[hf]'"
            ) from error
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"{self.path}: has no tokenizer.json; give the folder with the tokenizer that the"
                " model was trained with"
            )
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise ValueError(f"{file}: not a tokenizer ({error})") from error

    def _checked(self, step: Any) -> Any:
        try:
            return step()
        except ValueError as error:
            if str(error).startswith(str(self.path)):
                raise
            raise ValueError(f"{self.path}: {error}") from error

    def _open(self) -> dict[str, Any]:
        """The open file of each tensor, by its name."""
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError(
                f"{self.path}: reading it needs the package safetensors;"
                " pip install 'collective_matmul[hf]'"
            ) from error
        opened: dict[str, Any] = {}
        for name in self._file_names():
            try:
                # Checks that the file is as long as its header says.
                file = safe_open(self.path / name, "numpy")
            except FileNotFoundError:
                raise ValueError(
                    f"{name} is missing, which {INDEX} names; download it again"
                ) from None
            except Exception as error:
                raise ValueError(
                    f"{name} is not a whole safetensors file ({error}); download it again"
                ) from error
            opened |= dict.fromkeys(file.keys(), file)
        return opened

    def _file_names(self) -> list[str]:
        if (self.path / INDEX).is_file():
            by_tensor = _read_json(self.path / INDEX).get("weight_map")
            if not isinstance(by_tensor, dict) or not by_tensor:
                raise ValueError(f"{INDEX} has no weight_map; download it again")
            return sorted(set(by_tensor.values()))
        if (self.path / WEIGHTS).is_file():
            return [WEIGHTS]
        pickled = sorted(file.name for kind in _PICKLED for file in self.path.glob(kind))
        if pickled:
            raise ValueError(
                f"has {pickled[0]} and no safetensors file; files of this kind are unpickled, which"
                " runs code that they contain: convert it with transformers'"
                " save_pretrained, or download the safetensors files"
            )
        raise ValueError(f"has neither {WEIGHTS} nor {INDEX}; download the weights")

    def _check_tensors(self) -> None:
        expected = {tensor.name: tensor.shape for _, tensor in tensors(self.config)}
        found = {name: file.get_slice(name) for name, file in self._files.items()}
        ignored = {"lm_head.weight"} if self.config.tied_head else set()
        extra = [
            name
            for name in found
            if name not in expected | dict.fromkeys(ignored)
            # Older files hold the frequencies of the rotary embedding.
            and not name.endswith("rotary_emb.inv_freq")
        ]
        here = [name for name in expected if name in found]
        misshapen = [
            f"{name} {found[name].get_shape()}, not {list(expected[name])}"
            for name in here
            if tuple(found[name].get_shape()) != expected[name]
        ]
        others = [
            f"{name} ({found[name].get_dtype()})"
            for name in here
            if found[name].get_dtype() not in _DTYPES
        ]
        problems = {
            "missing": [name for name in expected if name not in found],
            "not expected": extra,
            "of another shape": misshapen,
            f"of another dtype than {', '.join(_DTYPES)}": others,
        }
        listed = "; ".join(f"{what}: {_listed(names)}" for what, names in problems.items() if names)
        if listed:
            raise ValueError(f"its tensors are not those that {CONFIG} describes: {listed}")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"has no {file.name}; give a folder as Hugging Face's library saves it"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file.name} cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return value


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f", and {more} more" if more > 0 else "")
