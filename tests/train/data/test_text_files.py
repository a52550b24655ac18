"""Files of documents: Parquet, compressed JSON lines, and binary files, which are refused."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import lzma
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.hugging_face.folders import DATA
from train.data import text_files
from train.data.chat import read_chats
from train.data.dataset import TextData, open_dataset
from train.data.text_files import read_documents

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

SHARDS = ["first", "zwei ü", ""], ["three\n" * 3000, "four"]


def open_text(data: Path | str, sequence_length: int = 7, text_column: str = "text") -> TextData:
    return open_dataset(
        str(data),
        None,
        sequence_length=sequence_length,
        batch_size=4,
        seed=0,
        text_column=text_column,
    )


def write_shards(folder: Path, column: str = "text") -> str:
    """Writes two shards as the Hugging Face hub names them, and returns their glob."""
    for i, texts in enumerate(SHARDS):
        table = pyarrow.table({"id": list(range(len(texts))), column: texts})
        parquet.write_table(table, folder / f"train-0000{i}-of-00002.parquet", row_group_size=2)
    return str(folder / "train-*-of-00002.parquet")


# Reading


def test_shards_of_parquet_give_the_documents_of_json_lines(tmp_path: Path):
    texts = list(itertools.chain(*SHARDS))
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    expected, text = open_text(lines), open_text(write_shards(tmp_path))
    np.testing.assert_array_equal(text.tokens, expected.tokens)
    np.testing.assert_array_equal(text.document_ends, expected.document_ends)
    assert text.sha256 == expected.sha256 == hashlib.sha256("".join(texts).encode()).hexdigest()
    assert "files: 2" in text.description


def test_the_order_of_parquet_is_seeded_and_resumes_exactly(tmp_path: Path):
    pattern = write_shards(tmp_path)
    iterator = open_text(pattern).iterator()
    for _ in range(5):
        next(iterator)
    saved = json.dumps(iterator.get_state())
    resumed = open_text(pattern).iterator()
    resumed.set_state(json.loads(saved))
    for actual, expected in zip(
        itertools.islice(resumed, 40), itertools.islice(iterator, 40), strict=True
    ):
        np.testing.assert_array_equal(actual["inputs"], expected["inputs"])
        np.testing.assert_array_equal(actual["targets"], expected["targets"])


@pytest.mark.parametrize(
    "kind", ["large_string", "string_view", "dictionary<values=string, indices=int32>"]
)
def test_every_type_of_text_column_is_read(tmp_path: Path, kind: str):
    types = {
        "large_string": pyarrow.large_string(),
        "string_view": pyarrow.string_view(),
    }
    array = pyarrow.array(["eins ü", "zwei", "eins ü"])
    array = array.dictionary_encode() if kind.startswith("dict") else array.cast(types[kind])
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": array}), path)
    assert list(read_documents(str(path), "text")) == [
        "eins ü".encode(),
        b"zwei",
        "eins ü".encode(),
    ]


def test_the_column_of_text_has_a_name(tmp_path: Path):
    expected = open_text(write_shards(tmp_path)).sha256
    assert open_text(write_shards(tmp_path, "body"), text_column="body").sha256 == expected
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"body": "first zweite", "text": 3}')
    assert open_text(lines, text_column="body").tokens.tobytes() == b"first zweite\xff"


def test_compressed_files_are_read(tmp_path: Path):
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'{"text": "first"}\n{"text": "second"}\n'))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"third", mtime=0))
    assert open_text(tmp_path / "*.gz").tokens.tobytes() == b"first\xffsecond\xffthird\xff"


def test_tokens_are_in_a_file_and_not_in_memory(tmp_path: Path):
    assert isinstance(open_text(write_shards(tmp_path)).tokens, np.memmap)


def test_parquet_is_read_in_parts(tmp_path: Path):
    """The first documents of a file come without the last ones, here from a damaged end."""
    path = tmp_path / "a.parquet"
    texts = [f"{i} " + "x" * 100 for i in range(5000)]
    parquet.write_table(
        pyarrow.table({"text": texts}),
        path,
        row_group_size=1000,
        compression="none",
        use_dictionary=False,
    )
    content = bytearray(path.read_bytes())
    place = content.rindex(b"4990 xxx") - 2000
    content[place : place + 1500] = b"\xff" * 1500
    path.write_bytes(content)
    documents = read_documents(str(path), "text")
    assert [next(documents) for _ in range(4000)] == [text.encode() for text in texts[:4000]]
    with pytest.raises(ValueError, match=r"a.parquet'"):
        list(documents)


# Refusals


@pytest.mark.parametrize("name", ["file.txt", "file.jsonl", "file.json"])
@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"text and a \0 byte", "a NUL byte at offset 11; "),
        (b"PAR1\x15\x04\x15\xff", "at offset 0 it begins like a Parquet file: .*parquet"),
        (gzip.compress(b"x", mtime=0), "at offset 0 it begins like gzip data: .*gz"),
        (lzma.compress(b"x"), "at offset 0 it begins like xz data"),
        ("text".encode("utf-16"), "at offset 0 it begins like UTF-16: convert it to UTF-8"),
        (b"%PDF-1.4 in ASCII", "at offset 0 it begins like a PDF"),
    ],
    ids=lambda value: value[:8] if isinstance(value, bytes) else "",
)
def test_binary_files_are_refused(tmp_path: Path, name: str, content: bytes, found: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"data='.*{name}': a binary file, not text: {found}"):
        open_text(path)


def test_binary_lines_after_text_are_refused_with_their_offset(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\0\0\n')
    with pytest.raises(ValueError, match=r"a.jsonl': a binary file, .* a NUL byte at offset 16; "):
        open_text(path)
    (tmp_path / "b.jsonl").write_bytes(
        b'{"text": "one"}\n{"text": "' + gzip.compress(b"x", mtime=0)
    )
    with pytest.raises(ValueError, match=r"b.jsonl': a binary file, .* a NUL byte at offset"):
        open_text(tmp_path / "b.jsonl")


def test_parquet_without_the_column_is_refused_with_those_it_has(tmp_path: Path):
    pattern = write_shards(tmp_path, "body")
    found = "text_column='text' is not a column of text; its columns of text are body; name one"
    with pytest.raises(ValueError, match=rf"data='.*train-00000-of-00002.parquet': {found}"):
        open_text(pattern)
    with pytest.raises(ValueError, match=r"text_column='id' is not a column of text"):
        open_text(pattern, text_column="id")
    parquet.write_table(pyarrow.table({"n": [1]}), tmp_path / "n.parquet")
    with pytest.raises(ValueError, match=r"it has no text"):
        open_text(tmp_path / "n.parquet")


@pytest.mark.parametrize(
    ("value", "found"), [(None, "is null; correct"), (b"na\xefve", "is not UTF-8; correct")]
)
def test_rows_without_text_are_refused(tmp_path: Path, value: bytes | None, found: str):
    path = tmp_path / "a.parquet"
    column = pyarrow.array([b"good", value]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), path)
    with pytest.raises(ValueError, match=rf"data='.*a.parquet': row 1 of 'text' {found}"):
        open_text(path)


@pytest.mark.parametrize("kept", [0, 10, 300])
def test_damaged_parquet_is_refused(tmp_path: Path, kept: int):
    shard = sorted(tmp_path.glob(Path(write_shards(tmp_path)).name))[0]
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"00000-of-00002.parquet': cannot be read as Parquet \("):
        open_text(shard)


def test_parquet_with_names_that_are_not_utf8_is_refused(tmp_path: Path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a"], "a long name": [1]}), path)
    path.write_bytes(path.read_bytes().replace(b"a long name", b"\xfd long name"))
    with pytest.raises(ValueError, match=r"a.parquet': cannot be read as Parquet \(.*0xfd"):
        open_text(path)


def test_damaged_gzip_is_refused(tmp_path: Path):
    whole = gzip.compress(b"text " * 1000)
    for i, content in enumerate((whole[:-12], b"text", whole[:20] + b"\xff" * 10 + whole[30:])):
        path = tmp_path / f"{i}.txt.gz"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{i}.txt.gz': not a whole gzip file \("):
            open_text(path)


def test_a_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pattern = write_shards(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[parquet\]'"):
        open_text(pattern)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """/dev/full fails like a full disk."""

    def full_disk(prefix: str) -> IO[bytes]:
        return open("/dev/full", "wb")

    monkeypatch.setattr(tempfile, "TemporaryFile", full_disk)
    path = tmp_path / "a.txt"
    path.write_text("text " * 10_000)
    with pytest.raises(ValueError, match=r"TMPDIR='.*': .* \(No space left on device\); free"):
        open_text(path)


def test_text_that_begins_like_a_binary_file_is_read(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("GIF89 is the name of a format")
    assert open_text(path).token_count == 30


# JSON lines as they occur


def test_a_byte_order_mark_and_line_ends_of_windows_are_no_text(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}\r\n')
    assert list(read_documents(str(path), "text")) == [b"one", b"two"]
    # Alone at the beginning: within a file it is a character.
    path.write_bytes(b'{"text": "one"}\n\xef\xbb\xbf{"text": "two"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl': line 2: expected JSON"):
        list(read_documents(str(path), "text"))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"text": "a", "n": ' + "1" * 5000 + "}", b"a"),
        ('{"text": "a", "n": [NaN, -Infinity, 1e999]}', b"a"),
        ('{"text": "a", "text": "b"}', b"b"),
        (r'{"text": "\ud83d\ude00 \u0000"}', "😀 \0".encode()),
        ('{"text": ""}', b""),
    ],
)
def test_what_does_not_concern_the_text_does_not_matter(tmp_path: Path, line: str, text: bytes):
    (tmp_path / "a.jsonl").write_text(line)
    assert list(read_documents(str(tmp_path / "a.jsonl"), "text")) == [text]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"text": "a", "n": ' + "[" * 10**5, r"nested too deeply"),
        ('{"text": "a", "n": ' + '{"a":' * 10**5, r"nested too deeply"),
        ('{"text": "a"', r"Expecting ',' delimiter at character 12"),
        ('{"text": "a"} {"text": "b"}', r"Extra data at character 14"),
        ('{"text": "a\tb"}', r"Invalid control character at at character 11"),
    ],
)
def test_a_line_that_json_cannot_be_read_from_says_why(tmp_path: Path, line: str, found: str):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + line)
    sentence = rf"a.jsonl': line 2: expected JSON, an object in each line, found .* \({found}\); "
    with pytest.raises(ValueError, match=sentence):
        list(read_documents(str(tmp_path / "a.jsonl"), "text"))


def test_a_number_in_place_of_the_text_is_refused(tmp_path: Path):
    for value in ("1" * 5000, "1", "NaN", "true", "null", "[]"):
        (tmp_path / "a.jsonl").write_text(f'{{"text": {value}}}')
        with pytest.raises(ValueError, match=r"line 1: expected a JSON object with a \"text\" str"):
            list(read_documents(str(tmp_path / "a.jsonl"), "text"))


def test_a_file_without_lines_does_not_fill_the_memory(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(text_files, "_MAX_LINE_BYTES", 100)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' + b" " * 10**6))
    with pytest.raises(
        ValueError, match=r"a.jsonl.gz': line 2: longer than 100 bytes; give a file"
    ):
        list(read_documents(str(path), "text"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "a.json.gz"])
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a socket"])
def test_what_can_be_read_only_once_or_without_end_is_refused(tmp_path: Path, name: str, kind: str):
    path = tmp_path / name
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.relpath(path))
    reason = "No such device" if kind == "a socket" else f"it is {kind}, not a regular file"
    with pytest.raises(ValueError, match=rf"data='.*{name}': cannot be read \({reason}"):
        open_text(path)


LINES = [
    b'{"text": "one"}', b'{"messages": [{"role": "assistant", "content": "x"}]}', b'{"text": 1}',
    b'{"text": "a", "n": ' + b"1" * 5000 + b"}", b"[" * 10**5, b'{"a":' * 10**5, b'"\\ud800"',
    b'{"text": "\\ud83d\\ude00\\ud800"}', b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"", b" ", b"null",
    b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
    b'{"messages": [{"role": "assistant", "content": "x", "tool_calls": [[[]]]}], "tools": [{}]}',
    b'{"messages": [{"role": "assistant", "content": "x"}], "tools": [' + b"[" * 900 + b"]" * 900,
]  # fmt: skip


@st.composite
def files_of_lines(draw: st.DrawFn) -> bytes:
    content = draw(st.sampled_from([b"\n", b"\r\n", b"\r"])).join(
        draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=3))
    )
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(content)))
        new = draw(st.binary(max_size=2) | st.sampled_from([b"{", b"}", b'"', b"\\u", b"[", b"]"]))
        content = content[:place] + new + content[place + draw(st.integers(0, 3)) :]
    return content


@given(files_of_lines(), st.sampled_from(["a.jsonl", "a.json.gz", "a.txt"]), st.booleans())
def test_changed_lines_end_in_documents_or_in_a_sentence(content: bytes, name: str, cut: bool):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, name)
        if name.endswith(".gz"):
            content = gzip.compress(content, mtime=0)[: -9 if cut else None]
        Path(path).write_bytes(content)
        readers = (
            lambda: [document.decode() for document in read_documents(path, "text")],
            lambda: read_chats([path], str(DATA / "llama3" / "tokenizer.json"), 16),
        )
        for read in readers:
            try:
                read()
            except ValueError as error:
                sentence = str(error)
                assert sentence.startswith(f"data={path!r}: ") and len(sentence) < 900
                assert "\n" not in sentence
