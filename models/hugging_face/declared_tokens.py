"""Special tokens that the files beside a tokenizer.json declare."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from models.hugging_face.files import read_json_object

TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
CONFIGS = "config.json", "generation_config.json"
_MAX_BYTES = 2**27
_NAMES = tuple(f"{name}_token" for name in ["bos", "eos", "unk", "sep", "pad", "cls", "mask"])
_LISTS = "additional_special_tokens", "extra_special_tokens"


class DeclaredTokens:
    """The special tokens that a folder declares.

    Args:
      folder: the folder. Each of its files may be missing.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def special(self) -> list[str]:
        """All special tokens that files of the tokenizer declare by name, each once.

        Raises:
          ValueError: a file cannot be read, or declares something else; names the file.
        """
        found: dict[str, None] = {}
        for file, values in self._tokenizer_files:
            for key, value in values.items():
                if key in _NAMES and value is not None:
                    found[_content(file, key, value)] = None
                elif key in _LISTS:
                    found |= dict.fromkeys(_listed(file, key, value))
            found |= dict.fromkeys(_special_added(file, values))
        found.pop("", None)
        return list(found)

    def end(self, vocabulary: Mapping[str, int]) -> int | None:
        """The token that ends a text, or None if no file declares one.

        The tokenizer's files go before those of the model, which may name several.

        Args:
          vocabulary: the number of each token.

        Raises:
          ValueError: a file cannot be read, or declares a token that the vocabulary lacks; names
            the file.
        """
        # Where files of the tokenizer differ, the last counts.
        for file, values in reversed(self._tokenizer_files):
            value = values.get("eos_token")
            if value is None:
                continue
            name = _content(file, "eos_token", value)
            if name in vocabulary:
                return vocabulary[name]
            if name:
                raise ValueError(
                    f"{file}: eos_token={name!r}: expected a token that tokenizer.json has; take"
                    " both files from the same model"
                )
        return self._end_of_model(set(vocabulary.values()))

    def _end_of_model(self, numbers: set[int]) -> int | None:
        for file in (self._folder / name for name in CONFIGS):
            value = _read(file).get("eos_token_id")
            if value is None or value == []:
                continue
            first = value[0] if isinstance(value, list) else value
            if type(first) is not int or first not in numbers:
                raise ValueError(
                    f"{file}: eos_token_id={reprlib.repr(value)}: expected the number of a token"
                    " that tokenizer.json has, or several; take both files from the same model"
                )
            return first
        return None

    @cached_property
    def _tokenizer_files(self) -> list[tuple[Path, dict[str, Any]]]:
        """The path and object of each file, tokenizer_config.json first; the last one counts."""
        settings = self._folder / TOKENIZER_CONFIG
        files = [(settings, _read(settings))]
        mapped = self._folder / SPECIAL_TOKENS_MAP
        # Beside a newer tokenizer_config.json, which repeats all, the other file may be stale.
        position = 0 if "added_tokens_decoder" in files[0][1] else 1
        files.insert(position, (mapped, _read(mapped)))
        return files


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file, _MAX_BYTES)
    except FileNotFoundError:
        return {}


def _content(file: Path, key: str, value: Any) -> str:
    """The text of a token, which is a string or an object such as {"content": "</s>"}."""
    token = value.get("content") if isinstance(value, dict) else value
    if not isinstance(token, str):
        raise ValueError(
            f"{file}: {key}={reprlib.repr(value)}: expected a string, or an object with the string"
            ' as its "content"; take the file of the model\'s publisher'
        )
    return token


def _listed(file: Path, key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):  # By names of the model's own.
        value = list(value.values())
    if value is not None and not isinstance(value, list):
        raise ValueError(
            f"{file}: {key}={reprlib.repr(value)}: expected a list of tokens; take the file of the"
            " model's publisher"
        )
    for token in value or ():
        yield _content(file, key, token)


def _special_added(file: Path, settings: Mapping[str, Any]) -> Iterator[str]:
    """The special ones of added_tokens_decoder, which has tokens by their numbers."""
    added = settings.get("added_tokens_decoder") or {}
    if not isinstance(added, dict):
        raise ValueError(
            f"{file}: added_tokens_decoder: expected an object, found {reprlib.repr(added)}; take"
            " the file of the model's publisher"
        )
    for number, token in added.items():
        if isinstance(token, dict) and token.get("special") is True:
            yield _content(file, f"added_tokens_decoder[{number!r}]", token)
