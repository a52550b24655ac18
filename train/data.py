"""Text to batches of tokens: read, tokenize, pack, shuffle, repeat.

All documents are joined into one stream of tokens, each followed by an end-of-document token. The
stream is cut into windows of ``sequence_length + 1`` tokens; each begins with the last token of the
previous one. The inputs are all tokens of a window but the last, the targets all but the first.
grain shuffles the windows anew in every epoch.

The batches are a pure function of the seed and of the number of sequences read so far. That number
is the whole state of an iterator, so a restored iterator continues bit for bit.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import IO

import grain
import numpy as np

END_OF_DOCUMENT_NAMES = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>")
TOKENIZATION_GROUP_BYTES = 2**24


@dataclass(frozen=True, eq=False)
class TextData:
    """A packed text and the order in which it is read."""

    description: str
    """The source of the text, for the log."""
    sha256: str
    """Hex digest of the concatenated documents in UTF-8; for text files, the output of
    ``cat FILES | sha256sum``."""
    vocabulary_size: int
    """Every token is in ``[0, vocabulary_size)``."""
    tokens: np.ndarray
    """The stream, [token_count], in the smallest unsigned type that holds the vocabulary."""
    sequence_length: int
    batch_size: int
    seed: int

    @property
    def token_count(self) -> int:
        """Number of tokens in the text, including end-of-document tokens."""
        return len(self.tokens)

    @property
    def sequences_per_epoch(self) -> int:
        """Number of sequences in the text.

        The last tokens of the text, fewer than ``sequence_length``, are dropped.
        """
        return (self.token_count - 1) // self.sequence_length

    def iterator(self) -> grain.DatasetIterator[dict[str, np.ndarray]]:
        """An endless iterator over batches, checkpointable with ``grain.checkpoint``.

        Each batch is ``{"inputs", "targets"}``, both int32 [batch_size, sequence_length]. Every
        sequence comes once per epoch; the last batch of an epoch is filled from the next epoch. The
        state counts sequences, not batches, so it stays valid with another batch size.
        """
        windows = PackedWindows(self.tokens, self.sequence_length)
        # The tokens are in memory: cutting windows costs less than passing them between threads.
        in_this_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        sequences = grain.MapDataset.source(windows).seed(self.seed).shuffle().repeat()
        return iter(sequences.to_iter_dataset(in_this_thread).batch(self.batch_size))


@dataclass(frozen=True, eq=False)
class PackedWindows(grain.sources.RandomAccessDataSource[dict[str, np.ndarray]]):
    """The windows of a stream of tokens, cut on access."""

    tokens: np.ndarray
    sequence_length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence_length

    def __getitem__(self, record_key: int) -> dict[str, np.ndarray]:
        """``{"inputs", "targets"}``, both int32 [sequence_length]."""
        start = record_key * self.sequence_length
        window = self.tokens[start : start + self.sequence_length + 1].astype(np.int32)
        return {"inputs": window[:-1], "targets": window[1:]}


def open_dataset(
    data: str | None,
    tokenizer: str | None,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
) -> TextData:
    """Reads and tokenizes a whole text.

    Args:
      data: a file or a glob, in which ``**`` matches any folders; None uses the manual of the
        running Python. Files are read in sorted order. A file that ends in .jsonl or .json has one
        JSON object per line, whose "text" is a document; any other file is one document in UTF-8.
      tokenizer: a Hugging Face tokenizer.json; None makes each byte of UTF-8 a token.
      sequence_length: tokens per sequence.
      batch_size: sequences per batch.
      seed: a non-negative number that determines the order of the sequences.

    Raises:
      ValueError: nothing matches ``data``; a file is empty, unreadable or not UTF-8; a line is not
        an object with a text; the text is shorter than one sequence; the tokenizer cannot be read
        or has no end-of-document token; a number is out of range.
      ImportError: a tokenizer is given and the package tokenizers is not installed.
    """
    for argument, value, least in (
        ("sequence_length", sequence_length, 1),
        ("batch_size", batch_size, 1),
        ("seed", seed, 0),
    ):
        if value < least:
            raise ValueError(f"{argument}={value}: give a whole number of at least {least}")
    if data is None:
        description = f"Python {platform.python_version()} manual (pydoc_data.topics)"
        documents = (topics[name].encode() for name in sorted(topics))
    else:
        paths = _find_files(data)
        description = data if paths == [data] else f"{data} (files: {len(paths)})"
        documents = (document for path in paths for document in _read_documents(path))
    encoder = BYTES if tokenizer is None else _load_tokenizer(tokenizer)
    tokens, sha256 = _pack(documents, encoder)
    source = "the Python manual" if data is None else f"data={data!r}"
    _check_length(len(tokens), sequence_length, source)
    return TextData(
        description, sha256, encoder.vocabulary_size, tokens, sequence_length, batch_size, seed
    )


def _check_length(token_count: int, sequence_length: int, source: str) -> None:
    needed = sequence_length + 1
    if token_count == 0:
        raise ValueError(f"{source}: the text is empty; give text of at least {needed} tokens")
    if token_count < needed:
        raise ValueError(
            f"sequence_length={sequence_length}: one sequence needs {needed} tokens and {source} "
            f"has {token_count}; give more text or set sequence_length to at most "
            f"{token_count - 1}"
        )


# Reading


def _find_files(data: str) -> list[str]:
    pattern = os.path.expanduser(data)
    if os.path.isdir(pattern):
        raise ValueError(
            f"data={data!r}: this is a directory; give the files in it, "
            f"such as {os.path.join(data, '**', '*.txt')!r}"
        )
    # A path that exists is not a pattern, even if its name has brackets.
    matches = [pattern] if os.path.lexists(pattern) else set(glob.glob(pattern, recursive=True))
    paths = sorted(path for path in matches if not os.path.isdir(path))
    if not paths:
        raise ValueError(
            f"data={data!r}: no file matches; give a file that exists, or a quoted glob such as "
            f"'texts/**/*.txt' (relative to {os.getcwd()})"
        )
    return paths


def _read_documents(path: str) -> Iterator[bytes]:
    """Yields the documents of one file, each as valid UTF-8."""
    with _opened("data", path) as file:
        if not path.lower().endswith((".jsonl", ".json")):
            document = file.read()
            _check_utf8(document, path, offset=0)
            yield document
            return
        offset = 0
        for number, line in enumerate(file, start=1):
            text = _check_utf8(line, path, offset)
            if text.strip():
                yield _json_document(text.strip(), f"data={path!r}: line {number}")
            offset += len(line)


@contextmanager
def _opened(argument: str, path: str) -> Iterator[IO[bytes]]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise ValueError(
            f"{argument}={path!r}: cannot be read ({error.strerror}); "
            "give a file that exists and that you may read"
        ) from error


def _check_utf8(content: bytes, path: str, offset: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data={path!r}: not UTF-8: byte 0x{content[error.start]:02x} at offset "
            f"{offset + error.start}; convert the file to UTF-8 or leave it out"
        ) from error


def _json_document(line: str, where: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(
            f'{where}: expected a JSON object with a "text" string, such as '
            f'{{"text": "..."}}, found {_shortened(line)}; correct or remove the line'
        )
    try:
        return record["text"].encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: the text has half a surrogate pair, "
            f"{record['text'][error.start]!r}, at character {error.start}, which no "
            "UTF-8 text can hold; correct or remove the line"
        ) from error


def _shortened(line: str, limit: int = 80) -> str:
    return repr(line if len(line) <= limit else line[:limit] + "…")


# Tokenizing


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


def _load_tokenizer(path: str) -> Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"tokenizer={path!r}: reading it needs the package tokenizers; "
            "pip install 'collective_matmul[hf]', or leave tokenizer out to train on bytes"
        ) from error
    with _opened("tokenizer", path) as file:
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


# Packing


def _pack(documents: Iterable[bytes], tokenizer: Tokenizer) -> tuple[np.ndarray, str]:
    """The stream of tokens, and the digest of the text. Empty documents are skipped."""
    dtype = np.min_scalar_type(tokenizer.vocabulary_size - 1)
    end = np.array(tokenizer.end_of_document, dtype).tobytes()
    digest = hashlib.sha256()

    def digested() -> Iterator[bytes]:
        for document in filter(None, documents):
            digest.update(document)
            yield document

    stream = bytearray()
    for tokens in tokenizer.encode(digested()):
        stream += np.asarray(tokens, dtype).tobytes()
        stream += end
    return np.frombuffer(stream, dtype), digest.hexdigest()
