"""The tokenizer of a run, as the files of a Hugging Face folder, so that an export has it.

A run on bytes has one too: byte b of UTF-8 is token b, and 255, a byte that no text has, ends a
text.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from models.hugging_face.files import find_file, read_json
from models.hugging_face.folder import CONFIG, GENERATION_CONFIG, TOKENIZER_FILES
from models.hugging_face.tokenizer import end_of_text, parse_tokenizer
from models.hugging_face.writing import ORIGIN, TOKENS, copy_files, write_json
from models.log import warn_once
from models.paths import expanded

#: The token that ends a text of bytes, and its name.
END_OF_BYTES, _END_NAME = 0xFF, "<|end_of_text|>"
_TOKENIZER = "tokenizer.json"


def keep_tokenizer(tokenizer: str | None, directory: str | Path) -> None:
    """Copies the tokenizer of a run into its directory of checkpoints, beside what the model came
    with, whose own tokenizer it replaces.

    Args:
      tokenizer: the path of a tokenizer.json; None: bytes.
      directory: the directory of checkpoints.
    """
    _write(tokenizer, expanded(directory) / ORIGIN)


@contextmanager
def origin_of_run(directory: Path, configuration: dict[str, Any]) -> Iterator[Path | None]:
    """A folder with what an export needs beside the weights, or None if there is nothing.

    It is the one that the run kept. To that of an earlier release, which kept no tokenizer, the
    tokenizer is added that the configuration names, in a temporary copy.

    Args:
      directory: the directory of checkpoints.
      configuration: of the checkpoint. One that was imported names no tokenizer.
    """
    kept = directory / ORIGIN
    has_tokenizer = (kept / _TOKENIZER).is_file()
    tokenizer = configuration.get("tokenizer")
    if tokenizer is not None and not has_tokenizer and not expanded(tokenizer).is_file():
        warn_once(
            f"{directory}: the run's tokenizer {tokenizer} is not there any more; copy it into the"
            f" exported folder as {_TOKENIZER}"
        )
    elif "tokenizer" in configuration and not has_tokenizer:
        with TemporaryDirectory() as made:
            folder = Path(made) / ORIGIN
            if kept.is_dir():
                shutil.copytree(kept, folder)
            _write(tokenizer, folder)
            yield folder
        return
    yield kept if kept.is_dir() else None


def _write(tokenizer: str | None, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    before = find_file(target, _TOKENIZER)
    old = None if before is None else before.read_bytes()
    for name in TOKENIZER_FILES:
        (target / name).unlink(missing_ok=True)
    if tokenizer is None:
        _write_bytes(target)
        end: int | None = END_OF_BYTES
    else:
        file = expanded(tokenizer)
        for name in TOKENIZER_FILES:
            try:
                copy_files(file.parent, target, [name])
            except ValueError as error:
                warn_once(f"{file.parent}: not kept for an export: {error}")
        shutil.copyfile(file, target / _TOKENIZER)
        end = end_of_text(parse_tokenizer(file.read_bytes(), file.parent), file.parent)
    if old != (target / _TOKENIZER).read_bytes():
        _name_tokens(target, end)


def _name_tokens(target: Path, end: int | None) -> None:
    """Writes which token ends a text, in place of the numbers that another tokenizer had."""
    values = read_json(target, GENERATION_CONFIG) or {}
    others = {name: value for name, value in values.items() if name not in TOKENS}
    write_json(target / GENERATION_CONFIG, others | {"eos_token_id": end})
    values = read_json(target, CONFIG)
    if values is not None:
        write_json(target / CONFIG, values | dict.fromkeys(TOKENS) | {"eos_token_id": end})


def _write_bytes(target: Path) -> None:
    """Writes a tokenizer whose tokens are bytes."""
    vocabulary = {_letter(byte): byte for byte in range(END_OF_BYTES)} | {_END_NAME: END_OF_BYTES}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    end = {"id": END_OF_BYTES, "content": _END_NAME, **dict.fromkeys(flags, False)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    values = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | {"special": True}],
        "normalizer": None,
        "pre_tokenizer": level | {"use_regex": False},
        "post_processor": None,
        "decoder": level | {"use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    write_json(target / _TOKENIZER, values)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END_NAME}
    settings |= {"clean_up_tokenization_spaces": False}
    write_json(target / "tokenizer_config.json", settings)


def _letter(byte: int) -> str:
    """The letter that stands for a byte in tokenizers of byte-level BPE, such as GPT-2's: its own
    where that is visible, and one beyond Latin-1 where it is not."""
    hidden = [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or b >= 174)]
    return chr(256 + hidden.index(byte)) if byte in hidden else chr(byte)
