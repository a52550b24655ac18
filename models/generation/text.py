"""Prompts and answers as text, by the tokenizer of the model's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

import jax

from models.generation.answer_text import AnswerText
from models.generation.generator import Generator
from models.hugging_face.chat.tokens import ChatTokens
from models.hugging_face.folder import ModelFolder
from models.hugging_face.tokenizer import encode_prompt, end_of_text


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
    """The answers of a model to prompts, as texts that go on where the prompts end.

    An answer in a chat has no space before its first word.

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
        encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    # A message begins anew, and other answers go on with the prompt.
    written = [AnswerText(tokenizer, [] if chat else tokens) for tokens in encoded]
    streams = output is not None and len(prompts) == 1
    if streams:
        options["tokens_per_launch"] = 1

    def take(number: int, token: int) -> None:
        text = written[number].add(token)
        if streams and text:
            assert output is not None
            output.write(text)
            output.flush()

    generator(params, encoded, stop_tokens=_stop_tokens(folder), on_token=take, **options)
    rest = [each.finish() for each in written]
    texts = [each.text for each in written]
    if streams:
        assert output is not None
        output.write(rest[0] + "\n")
    elif output is not None:
        for prompt, text in zip(prompts, texts, strict=True):
            between = "\n" if chat else ""
            output.write(f"{prompt}{between}{text}\n\n")
    return texts


def _stop_tokens(folder: ModelFolder) -> tuple[int, ...]:
    """The tokens that end an answer: those of the model, or else that of its tokenizer."""
    if folder.stop_tokens:
        return folder.stop_tokens
    end = end_of_text(folder.tokenizer(), folder.path)
    return () if end is None else (end,)
