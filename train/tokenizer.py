"""Tokenizers: bytes, and tokenizer.json files of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from train.text_files import opened

END_OF_DOCUMENT_NAMES = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>")
TOKENIZATION_GROUP_BYTES = 2**24


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


def load_tokenizer(path: str) -> Tokenizer:
    """Reads a Hugging Face tokenizer.json.

    Raises:
      ValueError: the file cannot be read, or has no end-of-document token.
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

    def encode(documents: Iterable[bytes]) -> Iterator[list[int]]:
        for group in _grouped(documents, TOKENIZATION_GROUP_BYTES):
            texts = [document.decode() for document in group]
            for encoding in model.encode_batch_fast(texts, add_special_tokens=False):
                yield encoding.ids

    vocabulary = model.get_vocab()
    return Tokenizer(encode, max(vocabulary.values()) + 1, _end_of_document(vocabulary, path))


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
