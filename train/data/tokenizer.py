"""Tokenizers: bytes, and tokenizer.json files of Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.hugging_face.run_tokenizer import END_OF_BYTES
from models.hugging_face.tokenizer import (
    END_NAMES,
    TokenizerError,
    end_of_text,
    parse_tokenizer,
    reported,
)
from models.paths import expanded
from train.data.text_files import opened

TOKENIZATION_GROUP_BYTES = 2**24


class EncodingError(ValueError):
    """A tokenizer failed for a document.

    Attributes:
      number: the document's, counted from 1 without empty ones.
    """

    def __init__(self, number: int, reason: str):
        self.number = number
        super().__init__(reason)


@dataclass(frozen=True)
class Tokenizer:
    """Maps documents in UTF-8 to their tokens, in the same order."""

    encode: Callable[[Iterable[bytes]], Iterable[Sequence[int] | np.ndarray]]
    vocabulary_size: int
    end_of_document: int


# UTF-8 text has no byte 0xff, so it can mark the end of a document. The vocabulary stays a power
# of two, which the usual numbers of devices divide.
BYTES = Tokenizer(
    encode=lambda documents: (np.frombuffer(document, np.uint8) for document in documents),
    vocabulary_size=256,
    end_of_document=END_OF_BYTES,
)


def read_tokenizer(path: str) -> Any:
    """A Hugging Face tokenizer.json as an object of the package tokenizers.

    Raises:
      ValueError: the file or one beside it cannot be read.
      ImportError: the package tokenizers is not installed.
    """
    # A pipe would block, and a device may never end.
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"tokenizer={path!r}: cannot be read (not a regular file)")
    with opened("tokenizer", path) as file:
        content = file.read()
    try:
        return parse_tokenizer(content, _folder(path))
    except TokenizerError as error:
        raise ValueError(
            f"tokenizer={path!r}: not a Hugging Face tokenizer ({error}); give a tokenizer.json"
        ) from error
    except ValueError as error:
        raise ValueError(f"tokenizer={path!r}: {error}") from error
    except ImportError as error:
        raise ImportError(
            f"tokenizer={path!r}: reading it needs the package tokenizers; "
            "pip install '.[hf]' in the repository, or leave tokenizer out to train on bytes"
        ) from error


def load_tokenizer(path: str) -> Tokenizer:
    """Reads a Hugging Face tokenizer.json.

    The token that ends a document is the one that `end_of_text` finds.

    Raises:
      ValueError: the file or one beside it cannot be read, or there is no end-of-document token.
      ImportError: the package tokenizers is not installed.
    """
    model = read_tokenizer(path)

    def encode(documents: Iterable[bytes]) -> Iterator[list[int]]:
        number = 1
        for group in _grouped(documents, TOKENIZATION_GROUP_BYTES):
            texts = [document.decode() for document in group]
            yield from _encoded(model, texts, number)
            number += len(texts)

    vocabulary = model.get_vocab()
    return Tokenizer(encode, max(vocabulary.values()) + 1, _end_of_document(model, path))


def _encoded(model: Any, texts: list[str], number: int) -> Iterator[list[int]]:
    """The tokens of documents, of which the first has this number.

    Raises:
      EncodingError: the tokenizer fails, for the first document for which it does.
    """
    try:
        with reported(texts[0]):
            encodings = model.encode_batch_fast(texts, add_special_tokens=False)
    except TokenizerError as error:
        if len(texts) == 1:
            raise EncodingError(number, str(error)) from error
        for i, text in enumerate(texts):
            yield from _encoded(model, [text], number + i)
    else:
        yield from (encoding.ids for encoding in encodings)


def _end_of_document(model: Any, path: str) -> int:
    try:
        end = end_of_text(model, _folder(path))
    except ValueError as error:
        raise ValueError(f"tokenizer={path!r}: {error}") from error
    if end is None:
        raise ValueError(
            f"tokenizer={path!r}: has no end-of-document token; name one as eos_token in a"
            f" tokenizer_config.json beside it, or add one of {', '.join(END_NAMES)} to its special"
            " tokens"
        )
    return end


def _folder(path: str) -> Path:
    return expanded(path).parent


def _grouped(documents: Iterable[bytes], limit: int) -> Iterator[list[bytes]]:
    """Lists of about ``limit`` bytes each. The tokenizer encodes the documents of a list in
    parallel."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document)
        if size >= limit:
            yield group
            group, size = [], 0
    if group:
        yield group
