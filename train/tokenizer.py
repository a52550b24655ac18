"""Tokenizers: bytes, and tokenizer.json files of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.text_files import opened

END_OF_DOCUMENT_NAMES = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>")
TOKENIZATION_GROUP_BYTES = 2**24


class EncodingError(ValueError):
    """A tokenizer failed for a document.

    Attributes:
      number: the document's, counted from 1 without empty ones.
    """

    def __init__(self, number: int, text: str, reason: str):
        self.number = number
        super().__init__(f"the tokenizer failed for the text {text[:60]!r}: {reason}")


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
    end_of_document=0xFF,
)


def read_tokenizer(path: str) -> Any:
    """A Hugging Face tokenizer.json as an object of the package tokenizers.

    Raises:
      ValueError: the file cannot be read.
      ImportError: the package tokenizers is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"tokenizer={path!r}: reading it needs the package tokenizers; "
            "pip install 'collective_matmul[hf]', or leave tokenizer out to train on bytes"
        ) from error
    with opened("tokenizer", path) as file:
        content = file.read()
    try:
        model = tokenizers.Tokenizer.from_buffer(content)
    except ValueError as error:
        raise ValueError(
            f"tokenizer={path!r}: not a Hugging Face tokenizer ({error}); give a tokenizer.json"
        ) from error
    # A file may configure both for single prompts; they would cut or pad documents.
    model.no_truncation()
    model.no_padding()
    return model


def load_tokenizer(path: str) -> Tokenizer:
    """Reads a Hugging Face tokenizer.json.

    Raises:
      ValueError: the file cannot be read, or has no end-of-document token.
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
    return Tokenizer(encode, max(vocabulary.values()) + 1, _end_of_document(vocabulary, path))


def _encoded(model: Any, texts: list[str], number: int) -> Iterator[list[int]]:
    """The tokens of documents, of which the first has this number.

    Raises:
      EncodingError: the tokenizer fails, for the first document for which it does.
    """
    try:
        encodings = model.encode_batch_fast(texts, add_special_tokens=False)
    except BaseException as error:
        # A failed assertion in the tokenizer's Rust code is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if len(texts) == 1:
            raise EncodingError(number, texts[0], str(error)) from error
        for i, text in enumerate(texts):
            yield from _encoded(model, [text], number + i)
    else:
        yield from (encoding.ids for encoding in encodings)


def _end_of_document(vocabulary: dict[str, int], path: str) -> int:
    for name in END_OF_DOCUMENT_NAMES:
        if name in vocabulary:
            return vocabulary[name]
    raise ValueError(
        f"tokenizer={path!r}: has no end-of-document token; "
        f"add one of {', '.join(END_OF_DOCUMENT_NAMES)} to its special tokens"
    )


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
