"""Tokens and texts are those of Hugging Face's library, for each kind of tokenizer.

The folders and what the library answers are made by make.py beside them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from models.generation.answer_text import AnswerText
from models.hugging_face.tokenizer import (
    decode,
    encode_prompt,
    encode_rendered,
    is_special,
    parse_tokenizer,
)
from train.data.tokenizer import load_tokenizer

pytest.importorskip("tokenizers")
DATA = Path(__file__).parents[2] / "data" / "hugging_face_tokenizers"
NAMES = sorted(file.parent.name for file in DATA.glob("*/expected.json"))


@cache
def expected(name: str) -> dict[str, Any]:
    """Answers of the library, by the file tokenizer.json as it is written."""
    found = json.loads((DATA / name / "expected.json").read_text())
    return found.get("as_written", found)


@cache
def tokenizer(name: str) -> Any:
    return parse_tokenizer((DATA / name / "tokenizer.json").read_bytes(), DATA / name)


@pytest.mark.parametrize("name", NAMES)
def test_texts_have_the_tokens_of_the_library(name):
    model = tokenizer(name)
    for case in expected(name)["texts"]:
        assert encode_rendered(model, [case["text"]])[0].ids == case["bare"], case["text"]
        tokens = encode_prompt(model, case["text"])
        begins_twice = case["tokens"][:1] == case["bare"][:1] and tokens != case["tokens"]
        if begins_twice:
            assert is_special(model, tokens[0])
        assert tokens == case["tokens"][int(begins_twice) :], case["text"]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_have_the_text_of_the_library_at_once_and_one_by_one(name):
    model = tokenizer(name)
    for case in expected(name)["decoded"]:
        assert decode(model, case["tokens"]) == case["text"]
        assert streamed(model, [], case["tokens"]) == case["text"]


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_goes_on_where_the_prompt_ends(name):
    model = tokenizer(name)
    for case in expected(name)["continued"]:
        before = encode_prompt(model, case["prompt"])
        assert streamed(model, before, case["tokens"]) == case["text"], case


def streamed(model: Any, before: list[int], tokens: list[int]) -> str:
    text = AnswerText(model, before)
    parts = [text.add(token) for token in tokens] + [text.finish()]
    assert "".join(parts) == text.text
    return text.text


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_a_document_is_the_token_that_the_library_ends_texts_with(name):
    found = load_tokenizer(str(DATA / name / "tokenizer.json"))
    config = json.loads((DATA / name / "config.json").read_text())
    # A folder without settings of the tokenizer ends texts as its model does.
    end = expected(name)["eos_token_id"]
    assert found.end_of_document == (config["eos_token_id"] if end is None else end)


@pytest.mark.parametrize("name", [name for name in NAMES if "chat" in expected(name)])
def test_a_rendered_conversation_gets_no_more_special_tokens(name):
    chat = expected(name)["chat"]
    assert encode_rendered(tokenizer(name), [chat["text"]])[0].ids == chat["tokens"]
