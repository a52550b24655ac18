"""Tokenizers' files with changes: an answer or a sentence, soon, and no file outside the folder."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.generation.answer_text import AnswerText
from models.hugging_face.declared_tokens import DeclaredTokens
from models.hugging_face.tokenizer import encode_prompt, encode_rendered
from tests.models.hugging_face.changed_files import KINDS, changed, replace_by
from tests.models.hugging_face.test_tokenizers import DATA, NAMES
from train.data.tokenizer import EncodingError, load_tokenizer, read_tokenizer

pytest.importorskip("tokenizers")
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json",
         "generation_config.json")  # fmt: skip
TEXTS = ["", "Hello world", "<s>a</s> Größe\n環 ", "a" * 30, "\u2581 \U0001f642" * 20]
SECONDS = 5
_opened: list[str] = []
_watched: list[Path] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched and event == "open" and isinstance(arguments[0], (str, bytes, Path)):
        _opened.append(str(arguments[0]))


sys.addaudithook(_watch)


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Fails if a file outside of a folder is opened."""
    _opened.clear()
    _watched.append(folder)
    try:
        yield
    finally:
        _watched.clear()
    assert all(Path(path).is_relative_to(folder) for path in _opened), _opened


def use(folder: Path) -> None:
    """Reads the tokenizer for training and for answers, and uses it; ValueError is as good."""
    path = str(folder / "tokenizer.json")
    with contextlib.suppress(ValueError):
        trained = load_tokenizer(path)
        assert 0 <= trained.end_of_document < trained.vocabulary_size
        with contextlib.suppress(EncodingError):
            list(trained.encode(text.encode() for text in TEXTS))
    with contextlib.suppress(ValueError):
        model = read_tokenizer(path)
        for text in TEXTS:
            with contextlib.suppress(ValueError):
                tokens = encode_prompt(model, text)
                encode_rendered(model, [text])
                answer = AnswerText(model, tokens[:3])
                parts = [answer.add(token) for token in [*tokens, 5, 2**31]]
                assert answer.text == "".join(parts)
                answer.finish()
        DeclaredTokens(folder).end(model.get_vocab())


def check(folder: Path) -> None:
    start = time.monotonic()
    with watched(folder):
        use(folder)
    assert time.monotonic() - start < SECONDS


def copied(name: str, folder: Path) -> None:
    for file in FILES:
        if (DATA / name / file).is_file():
            (folder / file).write_bytes((DATA / name / file).read_bytes())


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Imports what the first use imports."""
    use(DATA / "words")


def search(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copied(name, folder)
        files = [file for file in FILES if (folder / file).is_file()]
        for file in data.draw(st.sets(st.sampled_from(files), min_size=1, max_size=2)):
            path = folder / file
            path.write_bytes(data.draw(changed(path.read_bytes())))
        check(folder)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_changed_files_are_taken_or_refused(data):
    search(data)


@pytest.mark.exhaustive
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_many_changed_files_are_taken_or_refused(data):
    search(data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_file_is_refused_or_left_out(tmp_path, file, kind):
    copied("llama3", tmp_path)
    replace_by(tmp_path / file, kind)
    check(tmp_path)
