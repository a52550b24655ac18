"""Prompts and answers as text, by the tokenizer of the model's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

import jax

from models.generation.generator import Generator
from models.hugging_face.chat_tokens import ChatTokens
from models.hugging_face.folder import ModelFolder


def answer(
    generator: Generator,
    params: Mapping[str, jax.Array],
    folder: ModelFolder,
    prompts: Sequence[str],
    output: IO[str] | None = None,
    *,
    chat: bool = False,
    chat_variables: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """The answers of a model to prompts.

    Args:
      generator: the generator of the folder's model.
      params: its parameters.
      folder: the folder; its tokenizer encodes, and it says which tokens end an answer.
      prompts: the prompts.
      output: where answers are written: the one to a single prompt as it comes, several when all
        are there. None: nowhere.
      chat: whether each prompt is a user's message, to be written by the chat template.
      chat_variables: variables of the chat template, such as ``{"enable_thinking": False}``.
      **options: of the generator's call; tokens_per_launch is 1 where an answer is written as it
        comes.

    Raises:
      ValueError: for a folder without a tokenizer or, for chat, without a template; or prompts that
        do not fit the model.
    """
    tokenizer = folder.tokenizer()
    if chat:
        chats = ChatTokens(folder.path, tokenizer, chat_variables)
        encoded = [chats.prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
    else:
        encoded = [encode(tokenizer, prompt) for prompt in prompts]
    stream = None
    if output is not None and len(prompts) == 1:
        stream = _Stream(tokenizer, output)
        options["tokens_per_launch"] = 1
    answers = generator(
        params,
        encoded,
        stop_tokens=folder.stop_tokens,
        on_token=stream,
        **options,
    )
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]
    if output is not None and stream is None:
        for prompt, text in zip(prompts, texts, strict=True):
            between = "\n" if chat else ""
            output.write(f"{prompt}{between}{text}\n\n")
    elif output is not None and stream is not None:
        # What is no whole letter at the end.
        output.write(texts[0].removeprefix(stream.written) + "\n")
    return texts


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """The tokens of a prompt. A beginning-of-text token that it has already is not doubled."""
    tokens = tokenizer.encode(prompt).ids
    bare = tokenizer.encode(prompt, add_special_tokens=False).ids
    begins_twice = len(tokens) > len(bare) > 0 and tokens[:1] == bare[:1]
    is_special = bool(bare) and _is_special(tokenizer, bare[0])
    return bare if begins_twice and is_special else tokens


def _is_special(tokenizer: Any, token: int) -> bool:
    added = tokenizer.get_added_tokens_decoder().get(token)
    return added is not None and added.special


class _Stream:
    """Writes text as soon as its tokens are there. Some letters consist of several tokens."""

    def __init__(self, tokenizer: Any, output: IO[str]):
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._output = tokenizer, output
        self._stream = DecodeStream(skip_special_tokens=True)
        self.written = ""

    def __call__(self, number: int, token: int) -> None:
        del number
        text = self._stream.step(self._tokenizer, token)
        if text:
            self.written += text
            self._output.write(text)
            self._output.flush()
