"""The chat template of a tokenizer: how its model writes a conversation as text."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.paths import expanded

Messages = Sequence[Mapping[str, str]]

_FILE, _SETTINGS = "chat_template.jinja", "tokenizer_config.json"


class ChatTemplate:
    """A template beside a tokenizer.json.

    Args:
      folder: the folder with chat_template.jinja, or a tokenizer_config.json that has a template.

    Raises:
      ValueError: there is no template, or it is not one.
      ImportError: the package jinja2 is not installed.
    """

    def __init__(self, folder: str | Path):
        self._folder = expanded(folder)
        settings = _read_settings(self._folder / _SETTINGS)
        text = _template_of(self._folder, settings)
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        self._tokens = {name: _token(settings[name]) for name in names if settings.get(name)}
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise ImportError(
                f"{self._folder}: its chat template needs the package jinja2;"
                " pip install 'collective_matmul[hf]'"
            ) from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _generation_blocks()],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self._error = TemplateError
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ValueError(f"{self._folder}: its chat template is not one ({error})") from error

    def render(self, messages: Messages, *, asks: bool = False) -> str:
        """The text of a conversation, its special tokens included.

        Args:
          messages: each has a "role" and its "content".
          asks: whether the text ends where an answer begins.

        Raises:
          ValueError: the template does not take these messages.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=asks, **self._tokens
            )
        except (self._error, TypeError, ValueError) as error:
            raise ValueError(f"the chat template does not take it ({error})") from error


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from error
    return value if isinstance(value, dict) else {}


def _template_of(folder: Path, settings: Mapping[str, Any]) -> str:
    if (folder / _FILE).is_file():
        return (folder / _FILE).read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        # Several by name.
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    if not isinstance(found, str):
        raise ValueError(
            f"{folder}: has no chat template, in {_FILE} or as chat_template in {_SETTINGS}; give"
            " the tokenizer of a model that was made for chat, or add a template"
        )
    return found


def _token(value: Any) -> str:
    return value["content"] if isinstance(value, Mapping) else value


def _generation_blocks() -> Any:
    """An extension that ignores the marks ``{% generation %}`` around answers."""
    from jinja2.ext import Extension

    class GenerationBlocks(Extension):
        tags = {"generation"}  # noqa: RUF012, as jinja2 wants it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationBlocks


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
