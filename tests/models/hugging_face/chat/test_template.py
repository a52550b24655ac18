"""Chat templates: texts as Hugging Face's library writes them, and templates that attack."""

from __future__ import annotations

import datetime
import json
import os
import pickle
import re
import sys
from typing import Any

import pytest

from models.hugging_face.chat.template import ChatTemplate, read_variables
from tests.models.hugging_face.chat.chat_folders import (
    CONVERSATIONS,
    DATA,
    HOSTILE,
    NAMES,
    QUESTION,
    low_limits,
    with_template,
)


def written(template: ChatTemplate, conversation: dict[str, Any], asks: bool) -> str | None:
    given = {name: conversation.get(name) for name in ("tools", "documents", "variables")}
    try:
        return template.render(conversation["messages"], asks=asks, **given)
    except ValueError:
        return None


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_those_of_transformers(name):
    """And both refuse the same conversations."""
    expected = json.loads((DATA / name / "expected.json").read_text(encoding="utf-8"))
    template = ChatTemplate(DATA / name)
    texts = {
        conversation["name"]: [written(template, conversation, asks) for asks in (False, True)]
        for conversation in CONVERSATIONS
    }
    assert texts == expected["texts"]


def test_the_oldest_file_counts_if_there_is_no_other(tmp_path):
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    assert ChatTemplate(tmp_path).render(QUESTION) == "Hi"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "newer"}')
    assert ChatTemplate(tmp_path).render(QUESTION) == "newer"


def test_the_time_is_one_for_all_conversations_of_a_template(tmp_path):
    before = datetime.datetime.now()
    template = ChatTemplate(with_template(tmp_path, "{{ strftime_now('%Y-%m-%dT%H:%M:%S.%f') }}"))
    first = template.render(QUESTION)
    assert template.render(QUESTION) == first
    assert before <= datetime.datetime.fromisoformat(first) <= datetime.datetime.now()
    # Also in the worker of a data loader.
    assert pickle.loads(pickle.dumps(template)).render(QUESTION) == first
    assert ChatTemplate(tmp_path).render(QUESTION) > first


def test_variables_go_before_special_tokens_and_not_before_what_is_given(tmp_path):
    folder = with_template(tmp_path, "{{ bos_token }}{{ a }}{{ b }}", bos_token="B")
    template = ChatTemplate(folder, {"bos_token": "C", "a": 1})
    assert template.render(QUESTION) == "C1"
    assert template.render(QUESTION, variables={"a": 2, "b": 3}) == "C23"
    assert template.render(QUESTION) == "C1"
    with pytest.raises(ValueError, match="variable 'messages' of the chat template is not to be"):
        ChatTemplate(folder, {"messages": []})


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"tools": 1}', "[" * 10**5, '{"a": "\\ud800"}', "{'a': 1}"]
)
def test_a_flag_that_has_no_variables_is_refused(text):
    with pytest.raises(ValueError, match=r"chat_template_kwargs=.*expected a JSON object|'tools'"):
        read_variables(text)


# Templates that attack

TOO_MUCH = "(it computes for more than 0.2 seconds|it needs more than 0.5 GiB of memory)"
#: What the sentence says about each.
REASONS = {
    "block-of-itself": "it calls itself, or is nested, too deeply",
    "break-in-generation": "SyntaxError: 'break' outside loop",
    "break-outside": "SyntaxError: 'break' outside loop",
    "changes-messages": "access to attribute 'append' of 'list' object is unsafe",
    "codec": "LookupError: unknown encoding: no-such-codec",
    "codec-of-a-file": "it uses a module that templates do not have, or a file",
    "deep-conditions": "nested, too deeply|IndentationError",
    "deep-lists": "nested, too deeply|SyntaxError",
    "deep-loops": "SyntaxError: too many statically nested blocks",
    "deep-parentheses": "nested, too deeply",
    "division": "ZeroDivisionError: division by zero",
    "endless-constant": TOO_MUCH,
    "endless-loop": "it computes for more than 0.2 seconds",
    "extends": "no loader for this environment",
    "import": "no loader for this environment",
    "include": "no loader for this environment",
    "internals": "access to attribute '__class__' of 'str' object is unsafe",
    "internals-by-filter": "access to attribute '__class__' of 'list' object is unsafe",
    "internals-of-functions": "access to attribute '__globals__' of 'function' object is unsafe",
    "internals-of-namespace": "a namespace takes no name that begins with _",
    "large-power": TOO_MUCH,
    "long-refusal": r"x{300}…",
    "long-text": f"{TOO_MUCH}|it writes 536,870,914 characters, more than 268,435,456",
    "macro-of-itself": "it calls itself, or is nested, too deeply",
    "memory-of-doubling": TOO_MUCH,
    "memory-of-format": TOO_MUCH,
    "memory-of-indent": TOO_MUCH,
    "memory-of-json": TOO_MUCH,
    "memory-of-list": TOO_MUCH,
    "memory-of-product": TOO_MUCH,
    "refusal": r"\(no such \?\[31mrole \\ud800\)",
    "surrogate": r"half a surrogate pair, '\\ud800', at character 0",
    "time-format": "TypeError: .*must be str, not int",
    "undefined": "'nothing' is undefined",
    "unended-block": "line 1: Unexpected end of template",
    "unended-variable": "line 1: unexpected end of template",
    "unknown-filter": "line 1: No filter named 'no_such_filter'",
    "unknown-tag": "line 1: Encountered unknown tag 'load'",
    "wrong-types": "TypeError: can only concatenate list",
}
#: What the sandbox makes empty, without an error.
EMPTY = {"internals-by-format"}


@pytest.fixture(scope="module")
def limits():
    with low_limits():
        yield


@pytest.mark.parametrize("name", sorted(REASONS))
@pytest.mark.usefixtures("limits")
def test_a_template_that_attacks_ends_in_a_sentence_that_names_it(tmp_path, name):
    folder = with_template(tmp_path, HOSTILE[name])
    with pytest.raises(ValueError) as error:
        ChatTemplate(folder).render(QUESTION)
    sentence = str(error.value)
    assert sentence.startswith(f"{folder / 'chat_template.jinja'}: the chat template ")
    assert re.search(REASONS[name], sentence)
    assert sentence.isprintable() and len(sentence) < 500 + len(str(folder))


def test_every_hostile_template_is_tried(tmp_path):
    assert set(HOSTILE) == set(REASONS) | EMPTY
    for name in EMPTY:
        assert ChatTemplate(with_template(tmp_path, HOSTILE[name])).render(QUESTION) == ""


# Files that attack


def test_a_long_template_is_compiled_and_a_longer_one_refused(tmp_path):
    text = "x" * 2**20 + "{{ messages[0].content }}"
    assert ChatTemplate(with_template(tmp_path, text)).render(QUESTION) == "x" * 2**20 + "Hi"
    with pytest.raises(ValueError, match=r"chat_template.jinja: expected at most 4,194,304 bytes"):
        ChatTemplate(with_template(tmp_path, "x" * (2**22 + 1)))


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["a directory", "a pipe", "a link to /dev/zero", "not UTF-8"])
def test_what_is_no_file_of_text_is_refused(tmp_path, name, kind):
    with_template(tmp_path, "x")
    (tmp_path / name).unlink()
    make = {
        "a directory": lambda path: path.mkdir(),
        "a pipe": os.mkfifo,
        "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "not UTF-8": lambda path: path.write_bytes(b"ab\xff"),
    }
    make[kind](tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name}: .*{kind}"):
        ChatTemplate(tmp_path)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("[" * 10**5, r"tokenizer_config.json: not JSON that can be read \(nested too deeply\)"),
        ("{", r"tokenizer_config.json: not JSON that can be read \("),
        ('{"n": ' + "1" * 5000 + "}", r"tokenizer_config.json: not JSON that can be read \(Exc"),
        ("[]", "tokenizer_config.json: expected a JSON object, found list"),
        ('{"chat_template": 1}', "tokenizer_config.json: expected chat_template to be a string"),
        ('{"chat_template": []}', "tokenizer_config.json: expected chat_template to be a string"),
        ('{"chat_template": [{"name": "default"}]}', "expected chat_template to be a string"),
        ('{"chat_template": [{"name": 1, "template": ""}]}', "chat_template to be a string"),
        ('{"chat_template": [{"name": [], "template": ""}]}', "chat_template to be a string"),
        ('{"chat_template": [["default", ""]]}', "expected chat_template to be a string"),
        ('{"chat_template": {}}', "expected chat_template to be a string"),
        ('{"chat_template": {"default": 1}}', "expected chat_template to be a string"),
        ('{"chat_template": null}', "has no chat template, in chat_template.jinja or as"),
        ('{"chat_template": "", "bos_token": 1}', "bos_token=1: expected a string, or an object"),
        ('{"chat_template": "", "eos_token": {"content": []}}', r"eos_token=\{'content': \[\]\}:"),
        ('{"chat_template": "", "extra_special_tokens": {"a": 1}}', "a=1: expected a string"),
    ],
)
def test_settings_of_the_wrong_type_are_refused(tmp_path, settings, sentence):
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(ValueError, match=sentence) as error:
        ChatTemplate(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_byte_order_mark_before_settings_is_skipped(tmp_path):
    settings = '\ufeff{"chat_template": "{{ bos_token }}", "bos_token": "B"}'
    (tmp_path / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    assert ChatTemplate(tmp_path).render(QUESTION) == "B"


def test_messages_that_json_cannot_hold_are_refused(tmp_path):
    template = ChatTemplate(with_template(tmp_path, "{{ messages | length }}"))
    deep: Any = []
    for _ in range(10**5):
        deep = [deep]
    with pytest.raises(ValueError, match="messages or variables are nested too deeply"):
        template.render([{"role": "user", "content": deep}])


def test_a_missing_jinja2_names_the_extra(tmp_path, monkeypatch):
    with_template(tmp_path, "x")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr("models.hugging_face.chat.template_process._current", None)
    with pytest.raises(ImportError, match=r"jinja: its chat template needs .*\[hf\]'"):
        ChatTemplate(tmp_path)
