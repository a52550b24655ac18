"""A folder that Hugging Face's library writes: config.json, safetensors files and a tokenizer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from models.config import LlamaConfig
from models.families import read_config
from models.families.config_keys import TOKENS, shown, shown_name
from models.hugging_face.files import find_file, open_regular, read_json, real_path
from models.hugging_face.tensor_files import INDEX, WEIGHTS, TensorFiles
from models.hugging_face.tensor_names import EMBEDDING, HEAD, tensors
from models.hugging_face.tokenizer import TokenizerError, parse_tokenizer
from models.log import warn_once
from models.paths import check_folder, expanded

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
#: What a tokenizer may consist of.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_SHOWN = 5


class ModelFolder:
    """The folder of a model, with its headers read and checked, and no tensor yet.

    Attributes:
      path: the folder.
      config: shape of the model, from config.json. The head is not tied where the files hold one
        that differs from the embedding, whatever config.json says: Hugging Face's library keeps
        such a head too.

    Args:
      path: the folder.

    Raises:
      ValueError: there is no such folder; config.json is missing or describes a model that is not
        supported; there is no safetensors file, or one is damaged; tensors are missing, not
        expected, of another shape or of a dtype that is not floating; a file is outside the folder.
      ImportError: the package safetensors is not installed.
    """

    def __init__(self, path: str | Path):
        check_folder(path, "a folder as Hugging Face's library saves it")
        self.path = real_path(path)
        described = _described(self.path)
        # Before anything is loaded, since they are copied at the end.
        for name in (GENERATION_CONFIG, *TOKENIZER_FILES):
            _located(self.path, lambda name=name: find_file(self.path, name))
        self._tensors = _located(self.path, lambda: TensorFiles(self.path))
        if described.family == "gpt_oss":
            _located(self.path, self._tensors.unpack_mxfp4)
        _located(self.path, lambda: self._check_tensors(described))
        self.config = self._with_stored_head(described)

    @staticmethod
    def is_one(path: str | Path) -> bool:
        """Whether a path is such a folder, rather than a checkpoint of the trainer."""
        return os.path.lexists(expanded(path) / CONFIG)

    @staticmethod
    def has_weights(path: str | Path) -> bool:
        """Whether such a folder has more than a description of its model."""
        return any(os.path.lexists(expanded(path) / name) for name in (WEIGHTS, INDEX))

    @staticmethod
    def config_of(path: Path) -> LlamaConfig:
        """The model of a folder, with weights or without.

        Raises:
          ValueError: config.json is missing, cannot be read, or describes a model that is not
            supported; or there are weights, and the folder cannot be used.
        """
        if ModelFolder.has_weights(path):
            return ModelFolder(path).config
        return _described(path)

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """A part of a tensor, read from the file.

        Args:
          name: its name.
          index: a slice of each dimension.
        """
        return self._tensors[name][tuple(index)]

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """The dtype of the first matrix by the name "", and of each tensor that has another."""
        found = {
            tensor.name: _DTYPES[self._tensors[tensor.name].get_dtype()]
            for _, tensor in tensors(self.config)
        }
        first = next(iter(found.values()))
        return {"": first} | {name: dtype for name, dtype in found.items() if dtype != first}

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end an answer: of generation_config.json, or else of config.json.

        Raises:
          ValueError: a file cannot be read, or names something other than tokens.
        """
        return _located(self.path, self._stop_tokens)

    def _stop_tokens(self) -> tuple[int, ...]:
        for file in (GENERATION_CONFIG, CONFIG):
            found = (read_json(self.path, file) or {}).get("eos_token_id")
            if found is None:
                continue
            if not TOKENS.contains(found):
                raise ValueError(
                    f"{file}: eos_token_id={shown(found)}: expected {TOKENS.words}, or null; give"
                    " the file that the model came with"
                )
            named = found if isinstance(found, list) else [found]
            known = tuple(token for token in named if 0 <= token < self.config.vocabulary_size)
            if len(known) < len(named):
                warn_once(
                    f"{self.path}: {file}: eos_token_id={shown(found)}: tokens that are not from 0"
                    f" to {self.config.vocabulary_size - 1} are never drawn, and end no answer"
                )
            return known
        return ()

    def tokenizer(self) -> Any:
        """The tokenizer, an object of the package tokenizers.

        Raises:
          ValueError: there is no tokenizer.json, or it cannot be read; or a file beside it.
          ImportError: the package is not installed.
        """
        file = _located(self.path, lambda: find_file(self.path, "tokenizer.json"))
        if file is None:
            raise ValueError(
                f"{self.path}: has no tokenizer.json; give the folder with the tokenizer that the"
                " model was trained with"
            )
        try:
            with open_regular(file) as opened:
                return parse_tokenizer(opened.read(), self.path)
        except OSError as error:
            raise ValueError(f"{file}: cannot be read ({error.strerror or error})") from error
        except TokenizerError as error:
            raise ValueError(f"{file}: not a tokenizer ({error})") from error
        except ImportError as error:
            raise ImportError(
                f"{self.path}: reading its tokenizer needs the package tokenizers;"
                " pip install '.[hf]' in the repository"
            ) from error

    def _with_stored_head(self, described: LlamaConfig) -> LlamaConfig:
        """The model with a head of its own if one is stored that is not the embedding."""
        if not (described.tied_head and EMBEDDING in self._tensors and HEAD in self._tensors):
            return described
        if self._tensors.equal(EMBEDDING, HEAD):
            return described
        warn_once(
            f"{self.path}: {CONFIG} says tie_word_embeddings=true, and {HEAD} is stored and differs"
            f" from {EMBEDDING}; the stored head is used, as Hugging Face's library does: set"
            " tie_word_embeddings to false to say so"
        )
        return dataclasses.replace(described, tied_head=False)

    def _check_tensors(self, described: LlamaConfig) -> None:
        found = self._tensors
        if described.tied_head and HEAD in found and EMBEDDING not in found:
            # Of tied tensors a file may hold either.
            found.rename(HEAD, EMBEDDING)
        expected = {tensor.name: tensor.shape for _, tensor in tensors(described)}
        stored_head = {HEAD: expected[EMBEDDING]} if HEAD in found else {}
        known = stored_head | expected
        # Older files hold the frequencies of the rotary embedding.
        extra = [n for n in found if n not in known and not n.endswith("rotary_emb.inv_freq")]
        here = {name: found[name] for name in known if name in found}
        misshapen = [
            f"{name} {shown(here[name].get_shape())}, not {list(known[name])}"
            for name in here
            if tuple(here[name].get_shape()) != known[name]
        ]
        others = [
            f"{name} ({here[name].get_dtype()})"
            for name in here
            if here[name].get_dtype() not in _DTYPES
        ]
        problems = {
            "missing": [name for name in expected if name not in found],
            "not expected": list(map(shown_name, extra)),
            "of another shape": misshapen,
            f"of another dtype than {', '.join(_DTYPES)}": others,
        }
        listed = "; ".join(f"{what}: {_listed(names)}" for what, names in problems.items() if names)
        if listed:
            raise ValueError(f"its tensors are not those that {CONFIG} describes: {listed}")


def _described(path: Path) -> LlamaConfig:
    """The model that the config.json of a folder describes."""
    return _located(path, lambda: read_config(_required_json(path, CONFIG)))


def _required_json(path: Path, name: str) -> dict[str, Any]:
    value = read_json(path, name)
    if value is None:
        raise ValueError(f"has no {name}; give a folder as Hugging Face's library saves it")
    return value


def _located(path: Path, step: Any) -> Any:
    """The result of a step, whose errors begin with the folder."""
    try:
        return step()
    except ValueError as error:
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path}: {error}") from error


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f", and {more} more" if more > 0 else "")
