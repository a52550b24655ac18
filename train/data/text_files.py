"""Documents from files: plain text, JSON lines and Parquet, each document as valid UTF-8.

One document, one line or one batch of rows is in memory at a time.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from models.hugging_face.files import open_regular

#: What common binary files begin with, and what to do about them.
_SIGNATURES = {
    b"PAR1": "a Parquet file: let its name end in .parquet",
    b"\x1f\x8b": "gzip data: let its name end in .gz",
    b"\x28\xb5\x2f\xfd": "Zstandard data: decompress it",
    b"BZh": "bzip2 data: decompress it",
    b"\xfd7zXZ\x00": "xz data: decompress it",
    b"PK\x03\x04": "a ZIP archive: extract its text",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive: extract its text",
    b"ARROW1": "an Arrow file: convert it to Parquet",
    b"\xff\xfe": "UTF-16: convert it to UTF-8",
    b"\xfe\xff": "UTF-16: convert it to UTF-8",
    b"%PDF-": "a PDF: extract its text",
    b"SQLite format 3\x00": "an SQLite database: extract its text",
    b"\x89HDF": "an HDF5 file: extract its text",
    b"\x89PNG": "a PNG image: leave it out",
    b"\xff\xd8\xff": "a JPEG image: leave it out",
    b"GIF8": "a GIF image: leave it out",
    b"\x7fELF": "a program: leave it out",
    b"\x93NUMPY": "a NumPy array: leave it out",
    b"GGUF": "a GGUF model: leave it out",
}
_PARQUET_ROWS = 1024
#: Of JSON lines, so that a file that has none does not fill the memory.
_MAX_LINE_BYTES = 2**30


def find_files(data: str) -> list[str]:
    """The files that a path or a glob names, sorted.

    Raises:
      ValueError: it names a directory, or nothing.
    """
    pattern = os.path.expanduser(data)
    if os.path.isdir(pattern):
        raise ValueError(
            f"data={data!r}: this is a directory; give the files in it, "
            f"such as {os.path.join(data, '**', '*.txt')!r}"
        )
    # A path that exists is not a pattern, even if its name has brackets.
    matches = [pattern] if os.path.lexists(pattern) else set(glob.glob(pattern, recursive=True))
    # Links may lead to a file on several paths, those in circles on forty. The shortest counts.
    files = {os.path.realpath(path): path for path in sorted(matches, key=_long_first)}
    paths = sorted(path for path in files.values() if not os.path.isdir(path))
    if not paths:
        raise ValueError(
            f"data={data!r}: no file matches; give a file that exists, or a quoted glob such as "
            f"'texts/**/*.txt' (relative to {os.getcwd()})"
        )
    return paths


def _long_first(path: str) -> tuple[int, str]:
    return -len(path), path


def read_documents(path: str, text_column: str, most_bytes: int | None = None) -> Iterator[bytes]:
    """Yields the documents of one file, by the end of its name.

    Args:
      path: ``.parquet`` has a document in each row; ``.jsonl`` or ``.json`` in each line; any other
        file is one document. All but Parquet may be compressed, with ``.gz`` at the end.
      text_column: the column of Parquet, and the key of JSON lines, that has the text. Of a key
        that a line has twice, the last counts.
      most_bytes: bytes to read of a file that is one document, and the rest of a line; default:
        all.

    Raises:
      ValueError: the file cannot be read, is a pipe or a device, is binary or not UTF-8, or a row
        or line has no text.
      ImportError: for Parquet without the package pyarrow.
    """
    name = path.lower()
    if name.endswith(".parquet"):
        yield from _parquet_documents(path, text_column)
        return
    with opened("data", path) as file:
        if name.removesuffix(".gz").endswith((".jsonl", ".json")):
            yield from _json_documents(file, path, text_column)
        else:
            document = file.read(most_bytes) + file.readline() if most_bytes else file.read()
            _check_text(document, path, offset=0)
            yield document


@contextmanager
def opened(argument: str, path: str) -> Iterator[IO[bytes]]:
    """Opens a file to read its bytes, decompressed if its name ends in .gz.

    Raises:
      ValueError: it cannot be opened or read, or is not a regular file, which alone can be read
        twice; names `argument`.
    """
    try:
        with open_regular(path) as file:
            if path.lower().endswith(".gz"):
                with gzip.open(file) as decompressed:
                    yield decompressed  # pyright: ignore[reportReturnType]
            else:
                yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{argument}={path!r}: not a whole gzip file ({error}); copy it again or decompress it"
        ) from error
    except OSError as error:
        raise ValueError(
            f"{argument}={path!r}: cannot be read ({error.strerror or error}); "
            "give a file that exists and that you may read"
        ) from error


def _check_text(content: bytes, path: str, offset: int) -> str:
    """Decodes a part of a file. `offset` is where it begins."""
    where, null = f"data={path!r}", content.find(b"\0")
    kind = _binary_kind(content) if offset == 0 else None
    text, invalid = "", None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        invalid = f"byte 0x{content[error.start]:02x} at offset {offset + error.start}"
    # Text may begin like a binary file by chance, and a PDF may be ASCII all through.
    if kind is not None and (invalid or null >= 0 or content.startswith(b"%PDF-")):
        raise ValueError(f"{where}: a binary file, not text: at offset 0 it begins like {kind}")
    if null >= 0:
        raise ValueError(
            f"{where}: a binary file, not text: a NUL byte at offset {offset + null}; "
            "leave it out or convert it to UTF-8"
        )
    if invalid:
        raise ValueError(
            f"{where}: not UTF-8: {invalid}; convert the file to UTF-8 or leave it out"
        )
    return text


def _binary_kind(content: bytes) -> str | None:
    kinds = (kind for start, kind in _SIGNATURES.items() if content.startswith(start))
    return next(kinds, None)


# JSON lines


def json_lines(file: IO[bytes], path: str) -> Iterator[tuple[str, bytes, str]]:
    """Yields the lines of a file.

    Yields:
      Where the line is, for sentences; its bytes; and its text, without white space around it and
      without the byte-order mark that a file may begin with. An empty text is no record.

    Raises:
      ValueError: the file is binary or not UTF-8, or has no lines.
    """
    offset, number = 0, 0
    while line := file.readline(_MAX_LINE_BYTES + 1):
        number += 1
        where = f"data={path!r}: line {number}"
        if len(line) > _MAX_LINE_BYTES:
            raise ValueError(
                f"{where}: longer than {_MAX_LINE_BYTES:,} bytes; give a file with a JSON object in"
                " each line"
            )
        text = _check_text(line, path, offset)
        yield where, line, (text.removeprefix("\ufeff") if number == 1 else text).strip()
        offset += len(line)


def read_json(text: str, where: str, parse_int: Callable[[str], Any] | None = None) -> Any:
    """The value of a line of JSON.

    Args:
      text: the line.
      where: where it is, for sentences.
      parse_int: makes a value of the digits of a whole number; default: an int.

    Raises:
      ValueError: it is not JSON, or has nesting or numbers beyond what Python reads.
    """
    try:
        return json.loads(text, parse_int=parse_int)
    except RecursionError as error:
        reason, cause = "nested too deeply", error
    except json.JSONDecodeError as error:
        reason, cause = f"{error.msg} at character {error.pos}", error
    except ValueError as error:
        # Python names one of its functions after a semicolon.
        reason, cause = str(error).split(";")[0], error
    raise ValueError(
        f"{where}: expected JSON, an object in each line, found {_shortened(text)} ({reason});"
        " correct or remove the line"
    ) from cause


def _json_documents(file: IO[bytes], path: str, text_column: str) -> Iterator[bytes]:
    for where, _, text in json_lines(file, path):
        if text:
            yield _json_document(text, text_column, where)


def _json_document(line: str, text_column: str, where: str) -> bytes:
    # No number is used; an int of many digits would be refused.
    record = read_json(line, where, parse_int=float)
    if not isinstance(record, dict) or not isinstance(record.get(text_column), str):
        raise ValueError(
            f"{where}: expected a JSON object with a {json.dumps(text_column)} string, such as "
            f'{{{json.dumps(text_column)}: "..."}}, found {_shortened(line)}; correct or remove '
            "the line, or name the key of the text by text_column"
        )
    return as_utf8(record[text_column], f"{where}: the text")


def as_utf8(text: str, what: str) -> bytes:
    """The bytes of a text.

    Raises:
      ValueError: it has half a surrogate pair, as an escape in JSON may.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has half a surrogate pair, {text[error.start]!r}, at character {error.start},"
            " which no UTF-8 text can hold; correct or remove the line"
        ) from error


def _shortened(line: str) -> str:
    return repr(line if len(line) <= 80 else line[:80] + "…")


# Parquet


def _parquet_documents(path: str, text_column: str) -> Iterator[bytes]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f"data={path!r}: reading Parquet needs the package pyarrow; "
            "pip install '.[parquet]' in the repository"
        ) from error
    row = 0
    with opened("data", path) as opened_file:
        try:
            file = pyarrow.parquet.ParquetFile(opened_file)
            _check_column(file.schema_arrow, text_column, path)
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[text_column]):
                # As bytes, which pyarrow does not decode before the check below.
                for value in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    yield _row_document(value, f"data={path!r}: row {row} of {text_column!r}")
                    row += 1
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"data={path!r}: cannot be read as Parquet ({reason}); copy the file again"
            ) from error


def _check_column(schema: Any, text_column: str, path: str) -> None:
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        if types.is_dictionary(kind):
            return is_text(kind.value_type)
        return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)

    texts = [field.name for field in schema if is_text(field.type)]
    if text_column not in texts:
        found = f"its columns of text are {', '.join(texts)}" if texts else "it has no text"
        raise ValueError(
            f"data={path!r}: text_column={text_column!r} is not a column of text; {found}; "
            "name one with --text-column"
        )


def _row_document(value: bytes | None, where: str) -> bytes:
    if value is None:
        raise ValueError(f"{where} is null; correct or remove the row")
    try:
        value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8; correct or remove the row") from error
    return value
