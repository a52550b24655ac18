"""Random changes of chat templates and of the files around them.

Each ends in a text or in a sentence that names the folder, within a limit of computation, and no
file outside the folder is opened.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.hugging_face.chat.template import ChatTemplate
from tests.models.hugging_face.chat.chat_folders import (
    CONVERSATIONS,
    DATA,
    HOSTILE,
    NAMES,
    low_limits,
)

_SETTINGS = "tokenizer_config.json"


def _templates() -> list[str]:
    texts = list(HOSTILE.values())
    for name in NAMES:
        texts += [file.read_text("utf-8") for file in (DATA / name).glob("**/*.jinja")]
        if (DATA / name / _SETTINGS).exists():
            found = json.loads((DATA / name / _SETTINGS).read_text("utf-8")).get("chat_template")
            texts += [found] if isinstance(found, str) else []
    return sorted(texts)


TEMPLATES = _templates()
FRAGMENTS = [
    "{%", "%}", "{{", "}}", "{#", "#}", "{% endfor %}", "{% endif %}", "{% else %}", "{% raw %}",
    "{% for m in messages %}", "{% if m %}", "{% set m = messages %}", "{% macro f() %}{{ f() }}",
    "{% generation %}", "{% endgeneration %}", "{% break %}", "{% continue %}", "{% block b %}",
    "{% include m %}", "{% call f() %}", "{% filter upper %}", "{% set ns = namespace() %}",
    " | tojson", " | tojson(indent=9 ** 9)", " | indent(9 ** 9)", " * 9 ** 9", " ** 9 ** 9",
    "['__class__']", ".__class__", ".mro()", "[::-1]", "[0]", "[-9:9]", "(", ")", "[", "]", "'",
    '"', "\\", "\\ud800", "\0", "\r\n", "\ufeff", "😀", "{{ 1 / 0 }}", "{{ range(99999) | list }}",
    "{{ self }}", "{{ 'a'.encode('utf-7') }}", "{{ messages.append(1) }}",
    "{{ raise_exception() }}",
    "{{ strftime_now('%' ~ messages) }}", "{{ '%s%s' % messages }}", "{{ '{0.a}'.format(1) }}",
    "{% for i in range(9999) %}", "{% for i in [1] recursive %}{{ loop([1]) }}", "- ", "-", " ~ ",
]  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(FRAGMENTS)
    | st.sampled_from(TEMPLATES) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["name", "template", "content", "default", "x"]), inner),
    max_leaves=6,
)  # fmt: skip
KEYS = st.sampled_from(
    [
        "chat_template", "bos_token", "eos_token", "pad_token", "image_token", "tokenizer_class",
        "extra_special_tokens", "added_tokens_decoder", "x",
    ]
)  # fmt: skip
FILES = st.sampled_from(
    [
        "chat_template.jinja", _SETTINGS, "special_tokens_map.json", "chat_template.json",
        "additional_chat_templates/default.jinja", "additional_chat_templates/tool_use.jinja",
    ]
)  # fmt: skip


@st.composite
def templates(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(TEMPLATES))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        stop = draw(st.integers(start, min(len(text), start + 40)))
        other = draw(st.sampled_from(TEMPLATES))
        first = draw(st.integers(0, len(other)))
        new = draw(
            st.sampled_from(FRAGMENTS)
            | st.just(text[start:stop] * 2)
            | st.just(other[first : first + 60])
            | st.just("")
        )
        text = text[:start] + new + text[stop:]
    return text


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """The content of a file: a template, settings, or either with some bytes changed."""
    settings = st.dictionaries(KEYS, VALUES | templates(), max_size=4).map(json.dumps)
    text = draw(templates() | settings)
    content = text.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 3)) == 0:
        place = draw(st.integers(0, len(content)))
        new = draw(st.binary(max_size=3) | st.sampled_from([b"[" * 10**5, b"1" * 5000, b"\xff"]))
        content = content[:place] + new + content[place + draw(st.integers(0, 9)) :]
    return content


OPENED: list[str] = []


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and WATCHED and isinstance(arguments[0], (str, bytes, os.PathLike)):
        OPENED.append(os.fsdecode(arguments[0]))


WATCHED: list[bool] = []


@pytest.fixture(scope="module")
def watched():
    """Low limits, and a record of the files that this process opens. A hook cannot be removed."""
    sys.addaudithook(_record)
    with low_limits():
        yield


def seconds_of_computation() -> float:
    """The computation of this process and of those that it has ended.

    A busy machine does not change it.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


@pytest.mark.usefixtures("watched")
@given(
    st.dictionaries(FILES, contents(), max_size=4),
    st.sampled_from(CONVERSATIONS),
    st.booleans(),
)
def test_changed_files_end_in_a_text_or_in_a_sentence(files, conversation, asks):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "additional_chat_templates").mkdir()
        for file, content in files.items():
            (folder / file).write_bytes(content)
        OPENED.clear()
        WATCHED.append(True)
        start = seconds_of_computation()
        try:
            given_too = {key: conversation.get(key) for key in ("tools", "documents", "variables")}
            text = ChatTemplate(folder).render(conversation["messages"], asks=asks, **given_too)
            assert isinstance(text.encode(), bytes)
        except ValueError as error:
            sentence = str(error)
            assert sentence.startswith(str(folder)) and "\n" not in sentence
            assert len(sentence) < 700 and "does not answer" not in sentence
        finally:
            WATCHED.clear()
        assert seconds_of_computation() - start < 5
        outside = {path for path in OPENED if not path.startswith(name)}
        assert outside <= {os.devnull}, outside
