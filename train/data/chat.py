"""Conversations as tokens, with a mark on those that a model is to learn: the answers."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from models.hugging_face.chat.tokens import ChatTokens
from models.paths import expanded
from train.data.text_files import as_utf8, json_lines, opened, read_json
from train.data.tokenizer import read_tokenizer

_ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")
#: What a line may have beside its messages, for the template: name and Python's type.
_GIVEN: dict[str, type] = {"tools": list, "documents": list, "chat_template_kwargs": dict}


class ChatStream(NamedTuple):
    """Conversations one after the other, none of which crosses the end of a sequence."""

    tokens: np.ndarray
    """uint32 [tokens], those of a number of sequences and one more."""
    answers: np.ndarray
    """1 for tokens of answers, uint8 [tokens]."""
    starts: np.ndarray
    """Where conversations begin, and what fills up sequences: int64."""
    sha256: str
    """Hex digest of the files."""
    cut: int
    """Number of conversations that were longer than a sequence, and are cut."""
    divided: int
    """Number of conversations that became several, as the template writes an answer in another way
    when others follow."""
    vocabulary_size: int


def read_chats(
    paths: Sequence[str],
    tokenizer: str | None,
    sequence_length: int,
    variables: Mapping[str, Any] | None = None,
    most_bytes: int | None = None,
) -> ChatStream:
    """Reads conversations and packs them.

    Args:
      paths: JSON lines, each an object with "messages": a list of objects with "role" and
        "content". It may have "tools", "documents" and "chat_template_kwargs" for the template.
      tokenizer: a tokenizer.json, in a folder with a chat template.
      sequence_length: tokens of a sequence.
      variables: more variables of the template, such as ``{"enable_thinking": False}``.
      most_bytes: bytes to read, up to the end of a line; default: all.

    Raises:
      ValueError: without a tokenizer or a template; for a file that cannot be read, and a line that
        is no conversation, or has no answer to learn.
      ImportError: a package that reads them is not installed.
    """
    if tokenizer is None:
        raise ValueError(
            "chat: expected tokenizer too; add --tokenizer FOLDER/tokenizer.json, whose folder has"
            " a chat template"
        )
    model, digest, divided = read_tokenizer(tokenizer), hashlib.sha256(), 0
    chats = ChatTokens(expanded(tokenizer).parent, model, variables)
    packed, size = _Packed(sequence_length), 0
    for path in paths:
        if path.lower().endswith(".parquet"):
            raise ValueError(
                f"data={path!r}: conversations are read from JSON lines, not from Parquet; write"
                " each row as a line of JSON"
            )
        with opened("data", path) as file:
            for where, line, text in json_lines(file, path):
                if most_bytes is not None and size >= most_bytes:
                    break
                digest.update(line)
                size += len(line)
                if not text:
                    continue
                messages, given = _conversation(read_json(text, where), where)
                try:
                    examples = chats.examples(messages, **given)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from error
                divided += len(examples) > 1
                for example in examples:
                    packed.add(*example)
    tokens, answers, starts = packed.finish()
    size = max(model.get_vocab().values()) + 1
    return ChatStream(tokens, answers, starts, digest.hexdigest(), packed.cut, divided, size)


class _Packed:
    """Conversations, packed in memory."""

    def __init__(self, sequence_length: int):
        self._length = sequence_length
        self._tokens, self._answers, self._starts = array("I"), bytearray(), array("q")
        self.cut = 0

    def add(self, tokens: Sequence[int], answers: Sequence[int]) -> None:
        """Adds a conversation, in the next sequence if this one has no room for it."""
        # The last token of a sequence is predicted only.
        room = self._length + 1
        if len(tokens) > room:
            self.cut += 1
            tokens, answers = tokens[:room], answers[:room]
        used = len(self._tokens) % self._length
        if used and used + len(tokens) > room:
            self._fill(self._length - used)
        self._write(tokens, answers)

    def finish(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens, answers and starts, after filling up the last sequence."""
        if self._tokens:
            self._fill((1 - len(self._tokens)) % self._length)
        starts = np.unique(np.asarray(self._starts, np.int64))
        return np.asarray(self._tokens), np.frombuffer(self._answers, np.uint8), starts

    def _fill(self, count: int) -> None:
        """Adds tokens that mean nothing, and are not learnt."""
        if count:
            self._write([0] * count, [0] * count)

    def _write(self, tokens: Sequence[int], answers: Sequence[int]) -> None:
        self._starts.append(len(self._tokens))
        self._tokens.extend(tokens)
        self._answers.extend(answers)


def _conversation(record: Any, where: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages of a line, and what else it has for the template."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f'{where}: expected {{"messages": [{{"role": "user", "content": "..."}}, ...]}};'
            " correct or remove the line"
        )
    for place, message in enumerate(messages):
        _check_message(message, f"{where}: message {place}")
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers or not all(map(_has_words, answers)):
        raise ValueError(
            f"{where}: has {'an empty answer' if answers else 'no answer'}, a message of the role"
            " assistant; correct or remove the line"
        )
    given = {name: record[name] for name in _GIVEN if record.get(name) is not None}
    for name, value in given.items():
        kind = _GIVEN[name]
        entries = value if kind is list else []
        if not isinstance(value, kind) or not all(isinstance(entry, dict) for entry in entries):
            wanted = "a list of objects" if kind is list else "an object"
            raise ValueError(f"{where}: expected {name!r} to be {wanted}; correct it")
    if "chat_template_kwargs" in given:
        given["variables"] = given.pop("chat_template_kwargs")
    return messages, given


def _check_message(message: Any, which: str) -> None:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise ValueError(
            f"{which} has no role that is one of {', '.join(_ROLES)}; correct or remove the line"
        )
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        # Who calls a tool need not say anything.
        return
    if not isinstance(content, str):
        raise ValueError(f"{which} has no content that is text; correct it")
    as_utf8(content, which)


def _has_words(answer: Mapping[str, Any]) -> bool:
    return bool((answer.get("content") or "").strip() or answer.get("tool_calls"))
