"""The text of an answer, token by token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from models.hugging_face.tokenizer import decode

#: What a byte that is no whole letter decodes to.
_NO_LETTER = "\ufffd"
#: Tokens of single bytes, in vocabularies of SentencePiece. The decoder makes letters of a whole
#: run of them, so a run that goes on may change.
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class AnswerText:
    """Decodes an answer as its tokens come.

    Some letters consist of several tokens, and the space before a word depends on what precedes
    it. So the text of new tokens is the difference of two texts, which both begin with the tokens
    before them. Only the last tokens are decoded again.

    Attributes:
      text: the text so far.

    Args:
      tokenizer: the tokenizer.
      prompt: the tokens that the answer goes on from; empty: it begins a text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self.text = ""
        self._before, self._new = list(prompt), []
        self._text_before = decode(tokenizer, self._before)

    def add(self, token: int) -> str:
        """The text that this token completes; empty if the next one may change it."""
        self._new.append(token)
        name = self._tokenizer.id_to_token(token)
        # An unknown token has no text.
        if name is None or _BYTE.fullmatch(name):
            return ""
        text = self._text_of_new()
        return "" if text.endswith(_NO_LETTER) else self._completed(text)

    def finish(self) -> str:
        """The rest of the text, such as a letter without its last byte."""
        return self._completed(self._text_of_new())

    def _text_of_new(self) -> str:
        text = decode(self._tokenizer, self._before + self._new)
        if text.startswith(self._text_before):
            return text.removeprefix(self._text_before)
        # Bytes that continue those of the prompt, and make no letters with them.
        return decode(self._tokenizer, self._new)

    def _completed(self, text: str) -> str:
        if text:
            self._before, self._new = self._new, []
            self._text_before = decode(self._tokenizer, self._before)
        self.text += text
        return text
