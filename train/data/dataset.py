"""Text to batches of tokens: read, tokenize, pack, shuffle, repeat.

All documents are joined into one stream of tokens, each followed by an end-of-document token. The
stream is cut into windows of ``sequence_length + 1`` tokens; each begins with the last token of the
previous one. The inputs are all tokens of a window but the last, the targets all but the first.
grain shuffles the windows anew in every epoch.

Where documents are kept apart, an end-of-document token belongs to the document that it ends as a
target, and to the next one as an input. So the first token of a document is predicted from the
separator alone, and every token of the stream remains a target. Documents are also cut at the ends
of windows.

The batches are a pure function of the seed and of the number of sequences read so far. That number
is the whole state of an iterator, so a restored iterator continues bit for bit.
"""

from __future__ import annotations

import hashlib
import platform
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import grain
import numpy as np

from train.data.chat import read_chats
from train.data.text_files import find_files, opened, read_documents
from train.data.tokenizer import BYTES, EncodingError, Tokenizer, load_tokenizer


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
    """The stream, [token_count], in the smallest unsigned type that holds the vocabulary. It is in
    a temporary file, mapped into memory."""
    document_ends: np.ndarray
    """Positions of the end-of-document tokens in the stream, ascending: int64 [documents]."""
    sequence_length: int
    batch_size: int
    seed: int
    separate_documents: bool
    answers: np.ndarray | None = None
    """1 for tokens that count for the loss, uint8 [token_count]; None: all count."""

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

    @property
    def batch_shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of the arrays of a batch, by name. All are int32."""
        record = self._windows[0]
        return {name: (self.batch_size, len(array)) for name, array in record.items()}

    @property
    def attention_length(self) -> int:
        """Number of tokens that attend to each other, averaged over the tokens of the text.

        Without the ends of documents, it is the sequence length.
        """
        if not self.separate_documents:
            return self.sequence_length
        starts = np.arange(0, self.sequences_per_epoch + 1) * self.sequence_length
        ends = self.document_ends[self.document_ends < starts[-1]]
        lengths = np.diff(np.union1d(starts, ends)).astype(np.float64)
        return round(np.sum(lengths**2) / np.sum(lengths))

    def sequences(self, numbers: Sequence[int]) -> dict[str, np.ndarray]:
        """A batch of these sequences, numbered from 0 in the order of the text."""
        records = [self._windows[number] for number in numbers]
        return {name: np.stack([record[name] for record in records]) for name in records[0]}

    @cached_property
    def _windows(self) -> PackedWindows:
        ends = self.document_ends if self.separate_documents else None
        return PackedWindows(self.tokens, self.sequence_length, ends, self.answers)

    def iterator(
        self, rows: np.ndarray | None = None
    ) -> grain.DatasetIterator[dict[str, np.ndarray]]:
        """An endless iterator over batches, checkpointable with ``grain.checkpoint``.

        Each batch is ``{"inputs", "targets"}``, both int32 [batch_size, sequence_length], and where
        documents are kept apart ``"document_lengths"``, int32 [batch_size, documents]: the lengths
        of the documents in each sequence, in order, and then zeros. Of conversations there is
        ``"answers"`` too, int32 [batch_size, sequence_length]: 1 for targets that count. Every
        sequence comes once per
        epoch; the last batch of an epoch is filled from the next epoch. The state counts sequences,
        not batches, so it stays valid with another batch size.

        Args:
          rows: the rows of each batch to read, ascending; default: all. The state does not depend
            on them.
        """
        rows = np.arange(self.batch_size) if rows is None else rows
        # Cutting windows of mapped memory costs less than passing them between threads.
        in_this_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        order = grain.MapDataset.range(self.sequences_per_epoch).seed(self.seed).shuffle().repeat()
        batches = order.to_iter_dataset(in_this_thread).batch(self.batch_size)
        return iter(batches.map(lambda numbers: self.sequences(numbers[rows].tolist())))


@dataclass(frozen=True, eq=False)
class PackedWindows(grain.sources.RandomAccessDataSource[dict[str, np.ndarray]]):
    """The windows of a stream of tokens, cut on access.

    With `document_ends`, the positions of end-of-document tokens, windows say which documents they
    hold.
    """

    tokens: np.ndarray
    sequence_length: int
    document_ends: np.ndarray | None = None
    answers: np.ndarray | None = None

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence_length

    def __getitem__(self, record_key: int) -> dict[str, np.ndarray]:
        """``{"inputs", "targets"}``, both int32 [sequence_length], and "answers" if there are.

        With the ends of documents, also ``"document_lengths"``, int32 [max_documents].
        """
        start = record_key * self.sequence_length
        window = self.tokens[start : start + self.sequence_length + 1].astype(np.int32)
        record = {"inputs": window[:-1], "targets": window[1:]}
        if self.document_ends is not None:
            record["document_lengths"] = self._document_lengths(self.document_ends, start)
        if self.answers is not None:
            counted = self.answers[start + 1 : start + self.sequence_length + 1]
            record["answers"] = counted.astype(np.int32)
        return record

    @cached_property
    def max_documents(self) -> int:
        """The largest number of documents in a window."""
        assert self.document_ends is not None
        # A separator that begins a window begins no document within it.
        within = self.document_ends[self.document_ends % self.sequence_length > 0]
        counts = np.bincount(within // self.sequence_length, minlength=len(self))[: len(self)]
        return int(counts.max()) + 1

    def _document_lengths(self, ends: np.ndarray, start: int) -> np.ndarray:
        stop = start + self.sequence_length
        first, last = np.searchsorted(ends, (start + 1, stop))
        lengths = np.zeros(self.max_documents, np.int32)
        lengths[: last - first + 1] = np.diff(ends[first:last], prepend=start, append=stop)
        return lengths


def open_dataset(
    data: str | None,
    tokenizer: str | None,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
    text_column: str = "text",
    separate_documents: bool = False,
    chat: bool = False,
    chat_variables: Mapping[str, Any] | None = None,
    most_bytes: int | None = None,
) -> TextData:
    """Reads and tokenizes a text, one group of documents at a time.

    Args:
      data: a file or a glob, in which ``**`` matches any folders; None uses the manual of the
        running Python. Files are read in sorted order, as `read_documents` says.
      tokenizer: a Hugging Face tokenizer.json; None makes each byte of UTF-8 a token.
      sequence_length: tokens per sequence.
      batch_size: sequences per batch.
      seed: a non-negative number that determines the order of the sequences.
      text_column: the column of Parquet, and the key of JSON lines, that has the text.
      separate_documents: whether batches say where documents end.
      chat: whether the text is of conversations, as `read_chats` takes them. They are documents
        that are kept apart.
      chat_variables: of the chat template, for conversations.
      most_bytes: bytes of the text to read, up to the end of a document or line, to see that it can
        be read; of the files after these it is seen that they can be opened. Default: all.

    Raises:
      ValueError: nothing matches ``data``; a file is empty, unreadable, binary or not UTF-8; a line
        or row has no text; the text is shorter than one sequence; the tokenizer cannot be read or
        has no end-of-document token; a number is out of range; the disk is full.
      ImportError: a tokenizer or Parquet is given and the package that reads it is not installed.
    """
    for argument, value, least in (
        ("sequence_length", sequence_length, 1),
        ("batch_size", batch_size, 1),
        ("seed", seed, 0),
    ):
        if value < least:
            raise ValueError(f"{argument}={value}: give a whole number of at least {least}")
    if chat:
        variables = chat_variables or {}
        return _open_chats(
            data, tokenizer, sequence_length, batch_size, seed, variables, most_bytes
        )
    paths: list[str] = []
    if data is None:
        description = f"Python {platform.python_version()} manual (pydoc_data.topics)"
        documents = (topics[name].encode() for name in sorted(topics))
    else:
        paths = _files_of(data, most_bytes)
        description = data if paths == [data] else f"{data} (files: {len(paths)})"
        documents = (
            document for path in paths for document in read_documents(path, text_column, most_bytes)
        )
    encoder = BYTES if tokenizer is None else load_tokenizer(tokenizer)
    try:
        stream = _pack(documents, encoder, most_bytes)
    except EncodingError as error:
        where = _place_of(error.number, paths, text_column)
        raise ValueError(
            f"tokenizer={tokenizer!r}, {where}: {error}; give a tokenizer with an unknown token or "
            "byte fallback, or remove the document"
        ) from error
    source = "the Python manual" if data is None else f"data={data!r}"
    if stream.is_whole:
        _check_length(len(stream.tokens), sequence_length, source)
    return TextData(
        description=description,
        sha256=stream.sha256,
        vocabulary_size=encoder.vocabulary_size,
        tokens=stream.tokens,
        document_ends=stream.document_ends,
        sequence_length=sequence_length,
        batch_size=batch_size,
        seed=seed,
        separate_documents=separate_documents,
    )


def _open_chats(
    data: str | None,
    tokenizer: str | None,
    sequence_length: int,
    batch_size: int,
    seed: int,
    variables: Mapping[str, Any],
    most_bytes: int | None,
) -> TextData:
    if data is None:
        raise ValueError("chat: expected data too; add --data FILE.jsonl, with conversations")
    paths = _files_of(data, most_bytes)
    stream = read_chats(paths, tokenizer, sequence_length, variables, most_bytes)
    if not len(stream.tokens):
        raise ValueError(f"data={data!r}: there is no conversation; give lines with messages")
    learnt = int(stream.answers.sum())
    description = f"{data}, {learnt:,} tokens of answers"
    if stream.cut:
        description += (
            f", {stream.cut:,} conversations cut to sequence_length={sequence_length} tokens"
        )
    if stream.divided:
        description += (
            f", {stream.divided:,} conversations divided, as the template rewrites earlier answers"
        )
    return TextData(
        description=description,
        sha256=stream.sha256,
        vocabulary_size=stream.vocabulary_size,
        tokens=stream.tokens,
        document_ends=stream.starts,
        sequence_length=sequence_length,
        batch_size=batch_size,
        seed=seed,
        separate_documents=True,
        answers=stream.answers,
    )


def _files_of(data: str, most_bytes: int | None) -> list[str]:
    """The files of a text. If a number of bytes is all that is read of them, all are opened, to see
    that they can be."""
    paths = find_files(data)
    if most_bytes is not None:
        for path in paths:
            with opened("data", path):
                pass
    return paths


def _check_length(token_count: int, sequence_length: int, source: str) -> None:
    needed = sequence_length + 1
    if token_count == 0:
        raise ValueError(f"{source}: the text is empty; give text of at least {needed} tokens")
    if token_count < needed:
        raise ValueError(
            f"sequence_length={sequence_length}: one sequence needs {needed} tokens and {source} "
            f"has {token_count}; give more text, or --sequence-length with at most "
            f"{token_count - 1}"
        )


# Packing


class _Stream(NamedTuple):
    tokens: np.ndarray
    document_ends: np.ndarray
    sha256: str
    is_whole: bool


def _pack(
    documents: Iterable[bytes], tokenizer: Tokenizer, most_bytes: int | None = None
) -> _Stream:
    """The stream of tokens, its ends of documents, the digest of the text, and whether it is whole:
    it ends after `most_bytes`. Empty documents are skipped.

    The tokens are in a temporary file, which is deleted with the last reference to them. The
    operating system reads and evicts its pages as it needs.
    """
    dtype = np.min_scalar_type(tokenizer.vocabulary_size - 1)
    end = np.array(tokenizer.end_of_document, dtype).tobytes()
    digest, size, is_whole = hashlib.sha256(), 0, True

    def digested() -> Iterator[bytes]:
        nonlocal size, is_whole
        for document in filter(None, documents):
            digest.update(document)
            yield document
            size += len(document)
            if most_bytes is not None and size >= most_bytes:
                is_whole = False
                return

    ends, count = array("q"), 0
    with _disk_space(), tempfile.TemporaryFile(prefix="tokens") as file:
        for document in tokenizer.encode(digested()):
            file.write(np.asarray(document, dtype).tobytes() + end)
            count += len(document) + 1
            ends.append(count - 1)
        file.flush()
        # An empty file cannot be mapped.
        tokens = np.memmap(file, dtype, mode="r") if count else np.empty(0, dtype)
    return _Stream(tokens, np.asarray(ends, np.int64), digest.hexdigest(), is_whole)


def _place_of(number: int, paths: Sequence[str], text_column: str) -> str:
    """The file and number in it of a document, by its number among all that are not empty."""
    for path in paths:
        count = sum(map(bool, read_documents(path, text_column)))
        if number <= count:
            return f"document {number} of {path!r}"
        number -= count
    return f"document {number}"


@contextmanager
def _disk_space() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"TMPDIR={tempfile.gettempdir()!r}: the tokens of the text cannot be written there "
            f"({error.strerror}); free some space, or set TMPDIR to a folder on a larger disk"
        ) from error
