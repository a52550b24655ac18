"""Text to tokens and back, as Hugging Face's library does it with the same tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models.hugging_face.declared_tokens import DeclaredTokens

#: Names of special tokens that end a text, where no file declares one.
END_NAMES = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>")
_SHOWN = 60


class TokenizerError(ValueError):
    """A tokenizer failed for a text or for tokens."""


def parse_tokenizer(content: bytes, folder: Path) -> Any:
    """A tokenizer, an object of the package tokenizers. It takes texts whole.

    Special tokens that other files of the folder declare are special in it too.

    Args:
      content: the content of a tokenizer.json.
      folder: the folder of the file.

    Raises:
      TokenizerError: the content is not a tokenizer.
      ValueError: another file of the folder cannot be read, or declares something else than tokens;
        names the file.
      ImportError: the package is not installed.
    """
    import tokenizers

    with reported(""):
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
        # A file may configure both for single prompts; they would cut or pad other texts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    names = DeclaredTokens(folder).special()
    with reported(""):
        tokenizer.add_special_tokens(_made_special(tokenizer, names))
    return tokenizer


def _made_special(tokenizer: Any, names: list[str]) -> list[Any]:
    """Named tokens that are not special yet, as special ones.

    Tokens that the vocabulary lacks would get numbers that the model may not have.
    """
    from tokenizers import AddedToken

    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    made = []
    for name in names:
        if name in added and not added[name].special:
            added[name].special = True
            made.append(added[name])
        elif name not in added and tokenizer.token_to_id(name) is not None:
            made.append(AddedToken(name, special=True, normalized=False))
    return made


def end_of_text(tokenizer: Any, folder: Path) -> int | None:
    """The token that ends a text: the one that a file of the folder declares, as
    `DeclaredTokens.end` says, or else a special one of a usual name; None if there is none.

    Raises:
      ValueError: a file of the folder cannot be read, or declares something else.
    """
    declared = DeclaredTokens(folder).end(tokenizer.get_vocab())
    if declared is not None:
        return declared
    added = tokenizer.get_added_tokens_decoder().items()
    # Ordinary text may have these names too, and would end where it has them.
    special = {token.content: number for number, token in added if token.special}
    return next((special[name] for name in END_NAMES if name in special), None)


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that a user wrote, with those that the tokenizer adds to a text.

    A beginning-of-text token that the text has already is not doubled.

    Raises:
      TokenizerError: the tokenizer fails, such as for a word without a token.
    """
    with reported(text):
        tokens = tokenizer.encode(text).ids
        bare = tokenizer.encode(text, add_special_tokens=False).ids
    doubled = len(bare) > 0 and tokens[: len(bare) + 1] == [bare[0], *bare]
    return tokens[1:] if doubled and is_special(tokenizer, bare[0]) else tokens


def encode_rendered(tokenizer: Any, texts: Sequence[str]) -> list[Any]:
    """Encodings of texts that a chat template wrote, with the special tokens that they need.

    Each has the tokens as `ids`, and their places in the text as `offsets`.

    Raises:
      TokenizerError: the tokenizer fails, such as for a word without a token.
    """
    with reported(texts[-1]):
        return tokenizer.encode_batch(list(texts), add_special_tokens=False)


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """The text of tokens, without special ones.

    Raises:
      TokenizerError: the tokenizer fails.
    """
    with reported(f"tokens {tokens[:8]}"):
        return tokenizer.decode(tokens, skip_special_tokens=True)


def is_special(tokenizer: Any, token: int) -> bool:
    """Whether a token is a special one, such as the beginning of text."""
    added = tokenizer.get_added_tokens_decoder().get(token)
    return added is not None and added.special


@contextmanager
def reported(text: str) -> Iterator[None]:
    """Raises failures of the package tokenizers as `TokenizerError`, for a text if there is one."""
    try:
        yield
    except BaseException as error:
        # A failed assertion in the tokenizer's Rust code is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        where = f"the tokenizer failed for the text {text[:_SHOWN]!r}: " if text else ""
        raise TokenizerError(f"{where}{reason}") from error
