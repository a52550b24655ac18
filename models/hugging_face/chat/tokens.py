"""Conversations as tokens, for answers and for training on them alike.

The tokens before an answer are `ChatTokens.prompt`, and training learns those that follow. So what
a model is trained on and what it is asked have the same tokens, also where a template writes a
message in another way when others follow it, and where the prompt ends in a space, which a
tokenizer would join with the first word of the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from models.hugging_face.chat.template import ChatTemplate, Messages
from models.hugging_face.tokenizer import encode_rendered

#: What a word may follow, to be encoded as it is where no word begins.
_BEFORE_A_WORD = ("", "\n", "a")
#: Tokens of an answer that may be encoded anew where it begins.
_MOST_ENCODED_ANEW = 16


class Example(NamedTuple):
    """A sequence to learn from."""

    tokens: list[int]
    answers: list[int]
    """1 for the tokens to learn, those of answers, else 0."""


class ChatTokens:
    """Writes conversations by a template and encodes them by a tokenizer.

    Args:
      folder: the folder of the template, as for `ChatTemplate`.
      tokenizer: an object of the package tokenizers. Its truncation and padding are turned off.
      variables: of the template, as for `ChatTemplate`.

    Raises:
      ValueError: as `ChatTemplate`.
      ImportError: as `ChatTemplate`.
    """

    def __init__(
        self, folder: str | Path, tokenizer: Any, variables: Mapping[str, Any] | None = None
    ):
        self._template = ChatTemplate(folder, variables)
        self._tokenizer = tokenizer
        # A file may configure both for single prompts; they would cut or pad conversations.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = {number for number, token in added if token.special}

    def prompt(self, messages: Messages, **given: Any) -> list[int]:
        """The tokens after which a model answers a conversation.

        Args:
          messages: the conversation.
          **given: tools, documents and variables, as `ChatTemplate.render` takes them.

        Raises:
          ValueError: the template or the tokenizer does not take it.
        """
        (encoded,) = self._encode(self._template.render(messages, asks=True, **given))
        return encoded.tokens

    def examples(self, messages: Messages, **given: Any) -> list[Example]:
        """The sequences from which the answers of a conversation are learnt.

        One, if the template writes an answer in the same way when others follow. Else an answer
        that it writes in another way is learnt from a sequence that ends with it.

        Args:
          messages: the conversation, with messages of the role "assistant".
          **given: as for `prompt`.

        Raises:
          ValueError: as `prompt`; or the template begins an answer in another way than a prompt
            for one ends.
        """
        places = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        beginnings = [pair for n in places for pair in ((n, True), (n + 1, False))]
        texts = self._template.render_beginnings(messages, beginnings, **given)
        turns = list(zip(places, texts[::2], texts[1::2], strict=True))
        for place, before, after in turns:
            if not after.startswith(before):
                raise ValueError(
                    f"{self._template.source}: the chat template ends the prompt for message"
                    f" {place} with {_end(before)!r} and does not begin the message so; give it"
                    " variables with which it does, or a template that writes both alike"
                )
        return list(self._learnt(turns))[::-1]

    def _learnt(self, turns: Sequence[tuple[int, str, str]]) -> Iterator[Example]:
        """The sequences, from the last to the first."""
        current, text, answers = None, "", []
        # In parallel, and with the text that often is the only sequence.
        *prompts, last = self._encode(*(before for _, before, _ in turns), turns[-1][2])
        for (_, before, after), prompt in zip(reversed(turns), reversed(prompts), strict=True):
            size = len(prompt.tokens)
            if (
                current is None
                or not text.startswith(after)
                or current.tokens[:size] != prompt.tokens
            ):
                if current is not None:
                    yield Example(current.tokens, answers)
                (whole,) = [last] if current is None else self._encode(after)
                current, text = self._continued(prompt, whole, before, after), after
                answers = [0] * len(current.tokens)
            for place in self._answer(current, size, text, len(after)):
                answers[place] = 1
        if current is not None:
            yield Example(current.tokens, answers)

    def _answer(self, encoded: _Encoded, first: int, text: str, end: int) -> range:
        """The places of the tokens of an answer, from the first one to the character `end`."""
        last = first
        while last < len(encoded.tokens) and encoded.ends[last] <= end:
            last += 1
        special = [n for n in range(first, last) if encoded.tokens[n] in self._special]
        # White space that a template writes after the token that ends an answer is not of it.
        if special and not text[encoded.ends[special[-1]] : end].strip():
            last = special[-1] + 1
        return range(first, last)

    def _continued(self, prompt: _Encoded, whole: _Encoded, before: str, after: str) -> _Encoded:
        """The tokens of a prompt, and after them those of its answer.

        Args:
          prompt: the tokens of the text `before`.
          whole: the tokens of the text `after`, which begins with `before`.
          before: the text of the prompt.
          after: the text with the answer.
        """
        if whole.tokens[: len(prompt.tokens)] == prompt.tokens:
            return whole
        # A token has the end of the prompt and the beginning of the answer in it. After the prompt
        # comes the rest of it, and then what follows in the whole.
        text = self._decode(whole.tokens)
        pairs = zip(prompt.tokens, whole.tokens, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(prompt.tokens))
        for place in range(same + 1, min(same + _MOST_ENCODED_ANEW, len(whole.tokens)) + 1):
            cut = whole.ends[place - 1]
            if cut <= len(before):
                continue
            for first in _BEFORE_A_WORD:
                rest = self._encoded_after(first, after[len(before) : cut], len(before))
                found = _joined(prompt, rest, whole.after(place))
                if self._decode(found.tokens) == text:
                    return found
        raise ValueError(
            f"{self._template.source}: the tokenizer joins the end of the prompt,"
            f" {_end(before)!r}, with the answer, and cannot encode its parts; use a chat template"
            " whose prompts end in a special token or a line break"
        )

    def _encoded_after(self, first: str, text: str, offset: int) -> _Encoded:
        """The tokens of a text behind `first`, without those of `first`."""
        (encoded,) = self._encode(first + text)
        start = sum(end <= len(first) for end in encoded.ends) if first else 0
        ends = [end - len(first) + offset for end in encoded.ends[start:]]
        return _Encoded(encoded.tokens[start:], ends)

    def _encode(self, *texts: str) -> list[_Encoded]:
        """The tokens of texts that a template wrote, which have the special tokens in them."""
        encodings = encode_rendered(self._tokenizer, texts)
        return [_Encoded(each.ids, [end for _, end in each.offsets]) for each in encodings]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


class _Encoded(NamedTuple):
    tokens: list[int]
    ends: list[int]
    """Where each token ends in the text, in characters."""

    def after(self, place: int) -> _Encoded:
        return _Encoded(self.tokens[place:], self.ends[place:])


def _joined(*parts: _Encoded) -> _Encoded:
    tokens = [token for part in parts for token in part.tokens]
    return _Encoded(tokens, [end for part in parts for end in part.ends])


def _end(text: str) -> str:
    return text[-30:]
