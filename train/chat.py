"""Conversations as tokens, with a mark on those that a model is to learn: the answers."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from models.hugging_face.chat_template import ChatTemplate, Messages
from models.paths import expanded
from train.text_files import opened
from train.tokenizer import read_tokenizer

_ROLES = ("system", "user", "assistant", "tool")


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
    vocabulary_size: int


def read_chats(paths: Sequence[str], tokenizer: str | None, sequence_length: int) -> ChatStream:
    """Reads conversations and packs them.

    Args:
      paths: JSON lines, each an object with "messages": a list of objects with "role" and
        "content".
      tokenizer: a tokenizer.json, in a folder with a chat template.
      sequence_length: tokens of a sequence.

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
    model, digest = read_tokenizer(tokenizer), hashlib.sha256()
    template = ChatTemplate(expanded(tokenizer).parent)
    packed = _Packed(sequence_length)
    for path in paths:
        with opened("data", path) as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                if not line.strip():
                    continue
                where = f"data={path!r}: line {number}"
                packed.add(*_encoded(_messages(line, where), template, model, where))
    tokens, answers, starts = packed.finish()
    size = max(model.get_vocab().values()) + 1
    return ChatStream(tokens, answers, starts, digest.hexdigest(), packed.cut, size)


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


def _messages(line: bytes, where: str) -> Messages:
    """The messages of a line of a file."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); correct or remove the line") from error
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f'{where}: expected {{"messages": [{{"role": "user", "content": "..."}}, ...]}};'
            " correct or remove the line"
        )
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ValueError(
                f"{where}: message {place} has no role that is one of {', '.join(_ROLES)}; correct"
                " or remove the line"
            )
        if not isinstance(message.get("content"), str):
            raise ValueError(f"{where}: message {place} has no content that is text; correct it")
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if not answers or not all(answer.strip() for answer in answers):
        raise ValueError(
            f"{where}: has {'an empty answer' if answers else 'no answer'}, a message of the role"
            " assistant; correct or remove the line"
        )
    return messages


def _encoded(
    messages: Messages, template: ChatTemplate, model: Any, where: str
) -> tuple[list[int], list[int]]:
    """The tokens of a conversation, and 1 for those of its answers."""
    try:
        text = template.render(messages)
        spans = list(_answer_spans(messages, template, text))
    except ValueError as error:
        raise ValueError(f"{where}: {error}; correct or remove the line") from error
    # The template writes the special tokens.
    encoding = model.encode(text, add_special_tokens=False)
    special = {n for n, token in model.get_added_tokens_decoder().items() if token.special}
    tokens, answers = encoding.ids, [0] * len(encoding.ids)
    for start, stop in spans:
        inside = [
            place
            for place, (first, last) in enumerate(encoding.offsets)
            if start <= first and last <= stop and first < last
        ]
        ends = [place for place in inside if tokens[place] in special]
        for place in inside:
            # What a template writes after the token that ends an answer is not of the answer.
            answers[place] = int(not ends or place <= ends[-1])
    return tokens, answers


def _answer_spans(
    messages: Messages, template: ChatTemplate, text: str
) -> Iterator[tuple[int, int]]:
    """Where each answer begins and ends in the text of a conversation."""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.render(messages[:number], asks=True)
        after = template.render(messages[: number + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"the chat template writes message {number} in another way when others follow it,"
                " so it is not known where the answer is; give each answer a line of its own, with"
                " what precedes it"
            )
        yield len(before), len(after)
