"""The text pipeline: reading, packing, order, resuming and refusals."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest

from train.data import dataset, text_files
from train.data.dataset import TextData, open_dataset

Batch = dict[str, np.ndarray]


def open_text(
    data: Path | str | None,
    *,
    sequence_length: int = 7,
    batch_size: int = 4,
    seed: int = 0,
) -> TextData:
    return open_dataset(
        None if data is None else str(data),
        None,
        sequence_length=sequence_length,
        batch_size=batch_size,
        seed=seed,
    )


def sequences(batches: Iterable[Batch]) -> list[tuple[int, ...]]:
    """Each sequence with its last target: the window that it was cut from."""
    return [
        (*inputs.tolist(), int(targets[-1]))
        for batch in batches
        for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True)
    ]


def epochs(text: TextData, count: int) -> list[list[tuple[int, ...]]]:
    size = text.sequences_per_epoch
    batches = itertools.islice(text.iterator(), -(-count * size // text.batch_size))
    flat = sequences(batches)
    return [flat[i * size : (i + 1) * size] for i in range(count)]


def assert_same(one: Iterable[Batch], other: Iterable[Batch]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a["inputs"], b["inputs"])
        np.testing.assert_array_equal(a["targets"], b["targets"])


@pytest.fixture
def counting_file(tmp_path: Path) -> Path:
    """A document of 128 distinct ASCII characters, so that every token tells its position."""
    path = tmp_path / "counting.jsonl"
    path.write_text(json.dumps({"text": bytes(range(128)).decode()}))
    return path


# Reading


def test_the_default_text_is_the_python_manual():
    text = open_text(None, sequence_length=128)
    documents = [topics[name].encode() for name in sorted(topics)]
    assert text.tokens.tobytes() == b"".join(document + b"\xff" for document in documents)
    assert text.sha256 == hashlib.sha256(b"".join(documents)).hexdigest()
    assert "pydoc_data.topics" in text.description
    assert text.vocabulary_size == 256
    assert text.token_count == sum(map(len, documents)) + len(documents)


def test_the_manual_is_read_in_sorted_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dataset, "topics", {"b": "zwei", "c": "drei", "a": "eins"})
    assert open_text(None).tokens.tobytes() == b"eins\xffzwei\xffdrei\xff"


def test_a_glob_reads_files_in_sorted_order_at_any_depth(tmp_path: Path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "deep" / "two.txt").write_text("zwei €\r\n", encoding="utf-8", newline="")
    (tmp_path / "a.txt").write_text("eins")
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "ignored.md").write_text("nichts")
    text = open_text(f"{tmp_path}/**/*.txt")
    assert text.tokens.tobytes() == b"eins\xff" + "zwei €\r\n".encode() + b"\xff"
    assert text.sha256 == hashlib.sha256("einszwei €\r\n".encode()).hexdigest()
    assert "files: 3" in text.description


def test_a_file_whose_name_looks_like_a_pattern_is_read(tmp_path: Path):
    path = tmp_path / "part[1].txt"
    path.write_text("literally this")
    assert open_text(path).tokens.tobytes() == b"literally this\xff"


@pytest.mark.parametrize("name", ["lines.jsonl", "lines.json", "LINES.JSONL"])
def test_json_lines_hold_one_document_each(tmp_path: Path, name: str):
    path = tmp_path / name
    records = [{"text": "first\nline"}, {"id": 3, "text": "zweite ü"}, {"text": ""}]
    path.write_text("\n\n".join(map(json.dumps, records)) + "\n")
    text = open_text(path)
    assert text.tokens.tobytes() == b"first\nline\xff" + "zweite ü".encode() + b"\xff"
    assert text.sha256 == hashlib.sha256("first\nlinezweite ü".encode()).hexdigest()


# Packing


@pytest.mark.parametrize("sequence_length", [1, 2, 7, 64, 127, 128])
def test_every_token_is_a_target_once_per_epoch(counting_file: Path, sequence_length: int):
    text = open_text(counting_file, sequence_length=sequence_length, batch_size=1)
    stream = [*range(128), 0xFF]
    assert text.token_count == len(stream)
    assert text.sequences_per_epoch == 128 // sequence_length
    (windows,) = epochs(text, 1)
    covered = text.sequences_per_epoch * sequence_length
    assert sorted(token for window in windows for token in window[1:]) == stream[1 : covered + 1]
    assert sorted(token for window in windows for token in window[:-1]) == stream[:covered]


def test_a_batch_holds_inputs_and_the_tokens_that_follow_them(counting_file: Path):
    batch = next(open_text(counting_file, sequence_length=7, batch_size=4).iterator())
    assert batch.keys() == {"inputs", "targets"}
    for array in batch.values():
        assert isinstance(array, np.ndarray)
        assert (array.shape, array.dtype) == ((4, 7), np.int32)
    inputs, targets = batch["inputs"], batch["targets"]
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    # The file counts upwards, except for the end-of-document token.
    np.testing.assert_array_equal(targets, np.where(inputs == 127, 0xFF, inputs + 1))


# Documents kept apart


def open_documents(path: Path, lengths: Iterable[int], sequence_length: int) -> TextData:
    """A text of documents of such lengths, kept apart; a document has one letter only."""
    texts = [chr(ord("a") + i % 26) * (length - 1) for i, length in enumerate(lengths)]
    lines = path / "documents.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return open_dataset(
        str(lines),
        None,
        sequence_length=sequence_length,
        batch_size=2,
        seed=0,
        separate_documents=True,
    )


@pytest.mark.parametrize("sequence_length", [1, 2, 5, 8, 13, 60])
def test_batches_say_where_documents_end(tmp_path: Path, sequence_length: int):
    text = open_documents(tmp_path, [3, 2, 9, 4, 4, 20, 2, 2, 2, 13], sequence_length)
    assert text.token_count == 61
    windows = list(itertools.islice(text.iterator(), -(-text.sequences_per_epoch // 2)))
    shapes = {name: array.shape for name, array in windows[0].items()}
    assert shapes == text.batch_shapes
    squares, tokens, largest = 0, 0, 0
    for inputs, lengths in zip(
        *(np.concatenate([w[n] for w in windows]) for n in ("inputs", "document_lengths")),
        strict=True,
    ):
        used = lengths[lengths > 0]
        assert not lengths[len(used) :].any() and lengths.sum() == sequence_length
        # As an input, the separator begins a document. The letters after it are all the same.
        begins = np.flatnonzero(inputs == 0xFF)
        np.testing.assert_array_equal(np.cumsum(used)[:-1], begins[begins > 0])
        for document in np.split(inputs, np.cumsum(used)[:-1]):
            assert len(set(document.tolist()) - {0xFF}) <= 1
        largest = max(largest, len(used))
        squares, tokens = squares + int(np.sum(used**2)), tokens + sequence_length
    assert text.batch_shapes["document_lengths"] == (2, largest)
    if text.sequences_per_epoch % 2 == 0:
        assert text.attention_length == round(squares / tokens)


def test_the_ends_of_documents_do_not_change_the_order(tmp_path: Path):
    apart = open_documents(tmp_path, [3, 2, 9, 4, 4, 20], 4)
    joined = dataclasses.replace(apart, separate_documents=False)
    assert joined.batch_shapes.keys() == {"inputs", "targets"}
    assert joined.attention_length == 4
    assert_same(itertools.islice(apart.iterator(), 9), itertools.islice(joined.iterator(), 9))


# Order


def test_each_epoch_holds_every_sequence_in_an_order_of_its_own(counting_file: Path):
    text = open_text(counting_file, sequence_length=7, batch_size=4)
    assert text.sequences_per_epoch % text.batch_size, "batches must straddle the epochs"
    first, second, third = epochs(text, 3)
    assert len(set(first)) == text.sequences_per_epoch
    assert sorted(first) == sorted(second) == sorted(third)
    assert len({tuple(first), tuple(second), tuple(third), tuple(sorted(first))}) == 4


def test_a_batch_larger_than_the_text_is_filled_from_the_next_epochs(counting_file: Path):
    text = open_text(counting_file, sequence_length=40, batch_size=8)
    assert text.sequences_per_epoch == 3
    windows = sequences([next(text.iterator())])
    assert set(windows[:3]) == set(windows[3:6])
    assert len(set(windows)) == 3


def test_the_seed_decides_the_order(counting_file: Path):
    first, again, other = (open_text(counting_file, seed=seed) for seed in (0, 0, 1))
    assert epochs(first, 3) == epochs(again, 3)
    # No epoch of one seed is an epoch of the other, shifted or not.
    assert not set(map(tuple, epochs(first, 5))) & set(map(tuple, epochs(other, 5)))


# Resume


@pytest.mark.parametrize("consumed", [0, 1, 3, 4, 5, 20])
def test_a_restored_iterator_continues_bit_for_bit(counting_file: Path, consumed: int):
    """18 sequences in batches of 4: batch 5 is in two epochs, batch 21 is in the fifth."""
    iterator = open_text(counting_file).iterator()
    for _ in range(consumed):
        next(iterator)
    saved = json.dumps(iterator.get_state())
    assert len(saved) < 100
    expected = list(itertools.islice(iterator, 12))

    restored = open_text(counting_file).iterator()
    restored.set_state(json.loads(saved))
    assert_same(itertools.islice(restored, 12), expected)

    # An iterator that already read elsewhere returns to the same place.
    iterator.set_state(json.loads(saved))
    assert_same(itertools.islice(iterator, 12), expected)


def test_another_batch_size_resumes_at_the_same_sequence(counting_file: Path):
    iterator = open_text(counting_file, batch_size=4).iterator()
    for _ in range(3):
        next(iterator)
    restored = open_text(counting_file, batch_size=6).iterator()
    restored.set_state(iterator.get_state())
    expected = sequences(itertools.islice(iterator, 3))
    assert sequences(itertools.islice(restored, 2)) == expected


def test_iterators_of_one_text_are_independent(counting_file: Path):
    text = open_text(counting_file)
    ahead, behind = text.iterator(), text.iterator()
    first = next(ahead)
    next(ahead)
    assert_same([next(behind)], [first])


# Refusals


@pytest.mark.parametrize("name", ["absent.txt", "*.txt", "**/*.txt"])
def test_a_pattern_without_matches_is_refused(tmp_path: Path, name: str):
    (tmp_path / "folder.txt").mkdir()
    pattern = tmp_path / name
    with pytest.raises(ValueError, match=r"data='.*': no file matches; give a file"):
        open_text(pattern)


def test_a_glob_counts_each_file_once_whatever_links_lead_to_it(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("once upon")
    (tmp_path / "folder" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "folder" / "another name.txt").symlink_to(tmp_path / "folder" / "a.txt")
    assert open_text(f"{tmp_path}/**/*.txt").tokens.tobytes() == b"once upon\xff"


def test_a_directory_is_refused_with_the_glob_that_reads_it(tmp_path: Path):
    with pytest.raises(ValueError, match=r"is a directory; give .* such as '.*/\*\*/\*\.txt'"):
        open_text(tmp_path)


@pytest.mark.parametrize(("name", "content"), [("empty.txt", b""), ("empty.jsonl", b"\n \n")])
def test_an_empty_file_is_refused(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"data='.*{name}': .* empty; give .* at least 8 tokens"):
        open_text(tmp_path / name, sequence_length=7)


def test_an_unreadable_file_is_refused(tmp_path: Path):
    path = tmp_path / "loop.txt"
    path.symlink_to(path)
    with pytest.raises(ValueError, match=r"data='.*loop.txt': cannot be read \(.*symbolic link"):
        open_text(path)


def test_a_file_without_permission_is_refused(counting_file: Path, monkeypatch: pytest.MonkeyPatch):
    """Permissions do not stop the superuser."""

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(text_files, "open_regular", refuse)
    with pytest.raises(ValueError, match=r"counting.jsonl': cannot be read \(Permission denied\)"):
        open_text(counting_file)


@pytest.mark.parametrize(
    ("name", "content", "offset"),
    [
        ("latin.txt", "naïve".encode("latin-1"), 2),
        ("latin.jsonl", b'{"text": "x"}\n' + '{"text": "naïve"}'.encode("latin-1"), 26),
    ],
)
def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path, name: str, content: bytes, offset: int):
    (tmp_path / name).write_bytes(content)
    assert content[offset] == 0xEF
    with pytest.raises(ValueError, match=f"{name}': not UTF-8: byte 0xef at offset {offset}; "):
        open_text(tmp_path / name)


@pytest.mark.parametrize(
    "line",
    ["[1, 2]", '{"txt": "x"}', '{"text": 5}', '{"text": "x"', "null", "words", "[" * 200_000],
)
def test_an_invalid_json_line_is_refused(tmp_path: Path, line: str):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"lines.jsonl': line 3: expected .*, found ") as caught:
        open_text(path)
    assert line[:80] in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_half_a_surrogate_pair_in_json_is_refused(tmp_path: Path):
    path = tmp_path / "lines.jsonl"
    path.write_text(r'{"text": "ab\ud800"}')
    with pytest.raises(ValueError, match=r"line 1: .*surrogate.*'\\ud800', at character 2"):
        open_text(path)


def test_a_text_shorter_than_one_sequence_is_refused(counting_file: Path):
    with pytest.raises(
        ValueError,
        match=r"sequence_length=129: .* 130 tokens .* has 129; .*--sequence-length .* at most 128",
    ):
        open_text(counting_file, sequence_length=129)


@pytest.mark.parametrize(
    ("argument", "value"), [("sequence_length", 0), ("batch_size", 0), ("seed", -1)]
)
def test_numbers_out_of_range_are_refused(counting_file: Path, argument: str, value: int):
    numbers: dict[str, Any] = {"sequence_length": 7, "batch_size": 4, "seed": 0}
    numbers[argument] = value
    with pytest.raises(ValueError, match=f"{argument}={value}: .* at least {value + 1}"):
        open_dataset(str(counting_file), None, **numbers)
