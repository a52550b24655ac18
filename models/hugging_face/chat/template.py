"""The chat template of a tokenizer: how its model writes a conversation as text.

Template and variables are those of Hugging Face's `apply_chat_template`.
"""

from __future__ import annotations

import datetime
import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.hugging_face.chat import template_process
from models.hugging_face.chat.template_process import TemplateError
from models.hugging_face.files import read_json_object, read_text
from models.paths import expanded

Messages = Sequence[Mapping[str, Any]]

_SETTINGS, _SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
_FILE, _MORE_FILES, _PROCESSOR_FILE = (
    "chat_template.jinja",
    "additional_chat_templates",
    "chat_template.json",
)
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_MAX_TEMPLATE_BYTES, _MAX_SETTINGS_BYTES = 2**22, 2**27
_MAX_TEMPLATES = 100

_TOKEN_NAMES = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
_SENTENCEPIECE_CLASS, _TOKENIZER = "LlamaTokenizer", "tokenizer.json"
#: Tokens that a folder need not name, as the class of its tokenizer has them.
_CLASS_TOKENS = {
    _SENTENCEPIECE_CLASS: {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
}
#: Names of what a model thinks before it answers, of which the first is the standard one.
_REASONING = ("reasoning_content", "thinking", "reasoning")
#: What a template is always given, and a caller's variables do not replace.
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")


class ChatTemplate:
    """The template beside a tokenizer.json.

    In this order: chat_template.jinja and additional_chat_templates/NAME.jinja; chat_template in
    tokenizer_config.json, one or several by name; chat_template.json. Of several, the one named
    "tool_use" writes conversations with tools, and "default" all others.

    Attributes:
      source: the file with the template.

    Args:
      folder: the folder.
      variables: what else the template is given, in types of JSON, such as
        ``{"enable_thinking": False}``. They go before special tokens of the same name.

    Raises:
      ValueError: there is no template, or it is not one; names the file.
      ImportError: the package jinja2 is not installed.
    """

    def __init__(self, folder: str | Path, variables: Mapping[str, Any] | None = None):
        # One time for all conversations: they are the same whenever a run comes to them.
        self._now = datetime.datetime.now()
        path = expanded(folder)
        settings = _object_or_nothing(path / _SETTINGS)
        self.source, self._templates = _find_templates(path, settings)
        self._variables = _special_tokens(path, settings)
        self._variables |= _checked_variables(variables or {})
        for name in {_DEFAULT, _WITH_TOOLS} & set(self._templates):
            template = self._templates[name]
            try:
                self._render(template, [], [], {})
            except TemplateError as error:
                raise ValueError(
                    f"{self.source}: the chat template cannot be used ({error}); correct it, or"
                    " take the file of the model's publisher"
                ) from error

    def render(
        self,
        messages: Messages,
        *,
        asks: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, its special tokens included.

        Args:
          messages: each has a "role" and its "content", and what else the template reads.
          asks: whether the text ends where an answer begins.
          tools: what the model may call, as JSON schemas.
          documents: what the model may read, each with a "title" and a "text".
          variables: more variables, which go before those of the constructor.

        Raises:
          ValueError: the template does not take these messages, or exceeds a limit.
        """
        (text,) = self.render_beginnings(
            messages,
            [(len(messages), asks)],
            tools=tools,
            documents=documents,
            variables=variables,
        )
        return text

    def render_beginnings(
        self,
        messages: Messages,
        beginnings: Sequence[tuple[int, bool]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """The texts of several beginnings of a conversation, each as `render` has it.

        Args:
          messages: the conversation.
          beginnings: of each, the number of messages and `asks`.
          tools: as for `render`.
          documents: as for `render`.
          variables: as for `render`.

        Raises:
          ValueError: as `render`.
        """
        template = self._template(with_tools=tools is not None)
        given = _checked_variables(variables or {}) | {"tools": tools, "documents": documents}
        try:
            texts = self._render(template, [_standard(m) for m in messages], beginnings, given)
            for text in texts:
                _check_unicode(text)
        except TemplateError as error:
            raise ValueError(
                f"{self.source}: the chat template does not take the conversation ({error}); change"
                " the one or the other"
            ) from error
        return texts

    def _template(self, *, with_tools: bool) -> str:
        name = _WITH_TOOLS if with_tools and _WITH_TOOLS in self._templates else _DEFAULT
        if name not in self._templates:
            raise ValueError(
                f"{self.source}: has the chat templates {', '.join(sorted(self._templates))} and"
                f" none that is named {_DEFAULT}; name one so"
            )
        return self._templates[name]

    def _render(
        self,
        template: str,
        messages: Messages,
        beginnings: Sequence[tuple[int, bool]],
        given: Mapping[str, Any],
    ) -> list[str]:
        try:
            return template_process.render(
                template, messages, beginnings, {**self._variables, **given}, self._now
            )
        except ImportError as error:
            raise ImportError(f"{self.source}: its chat template {error}") from error


def read_variables(text: str) -> dict[str, Any]:
    """The variables in the value of the flag ``--chat-template-kwargs``.

    Raises:
      ValueError: it is not a JSON object.
    """
    try:
        variables = json.loads(text)
        # Half a surrogate pair has no place in a template either.
        json.dumps(variables, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        raise ValueError(
            f"chat_template_kwargs={reprlib.repr(text)}: expected a JSON object, such as"
            " '{\"enable_thinking\": false}'"
        )
    return _checked_variables(variables)


# The template


def _find_templates(folder: Path, settings: Mapping[str, Any]) -> tuple[Path, dict[str, str]]:
    """The file to name in sentences, and the templates by name."""
    found = _template_files(folder)
    if found:
        return folder / (_FILE if _DEFAULT in found else _MORE_FILES), found
    processor = _object_or_nothing(folder / _PROCESSOR_FILE)
    for file, values in ((folder / _SETTINGS, settings), (folder / _PROCESSOR_FILE, processor)):
        if values.get("chat_template") is not None:
            return file, _named_templates(file, values["chat_template"])
    raise ValueError(
        f"{folder}: has no chat template, in {_FILE} or as chat_template in {_SETTINGS}; give"
        " the tokenizer of a model that was made for chat, or add a template"
    )


def _template_files(folder: Path) -> dict[str, str]:
    files = {}
    if (folder / _FILE).exists():
        files[_DEFAULT] = folder / _FILE
    more = sorted((folder / _MORE_FILES).glob("*.jinja"))
    if len(more) > _MAX_TEMPLATES:
        raise ValueError(f"{folder / _MORE_FILES}: expected at most {_MAX_TEMPLATES} templates")
    files |= {file.name.removesuffix(".jinja"): file for file in more}
    return {name: read_text(file, _MAX_TEMPLATE_BYTES) for name, file in files.items()}


def _named_templates(file: Path, value: Any) -> dict[str, str]:
    """The templates of the value of chat_template: a string, or names and strings."""
    pairs: list[tuple[Any, Any]] = [(_DEFAULT, value)]
    if isinstance(value, (dict, list)) and 0 < len(value) <= _MAX_TEMPLATES:
        pairs = list(value.items()) if isinstance(value, dict) else [_pair(each) for each in value]
    for name, template in pairs:
        if not isinstance(name, str) or not isinstance(template, str):
            raise ValueError(
                f"{file}: expected chat_template to be a string, or at most {_MAX_TEMPLATES}"
                ' objects such as {"name": "default", "template": "..."}, found'
                f" {reprlib.repr(value)}; take the file of the model's publisher"
            )
        if len(template) > _MAX_TEMPLATE_BYTES:
            raise ValueError(
                f"{file}: expected a chat_template of at most {_MAX_TEMPLATE_BYTES:,} characters,"
                f" found {len(template):,}"
            )
    return dict(pairs)


def _pair(entry: Any) -> tuple[Any, Any]:
    return (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)


# Its variables


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens by name, such as "bos_token"; of the model's own kinds too."""
    tokens: dict[str, Any] = _class_tokens(folder, settings)
    own: dict[str, Any] = settings.get("extra_special_tokens") or {}
    sources: list[tuple[Path, Mapping[str, Any]]] = [(folder / _SETTINGS, settings)]
    # Files with added_tokens_decoder repeat all tokens, and are newer than the other file.
    if "added_tokens_decoder" not in settings:
        others = _object_or_nothing(folder / _SPECIAL_TOKENS)
        sources.append((folder / _SPECIAL_TOKENS, others))
    if isinstance(own, dict):
        sources.append((folder / _SETTINGS, own))
    for file, values in sources:
        for name, value in values.items():
            if name in _TOKEN_NAMES:
                tokens[name] = None if value is None else _token(file, name, value)
            elif values is own or (name.endswith("_token") and _is_token(value)):
                tokens[name] = _token(file, name, value)
    return {name: token for name, token in tokens.items() if token is not None}


def _class_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens that the class of a tokenizer has where no file names them."""
    name = str(settings.get("tokenizer_class")).removesuffix("Fast")
    if name == _SENTENCEPIECE_CLASS:
        # Many byte-level tokenizers declare this class, which they are not.
        try:
            content = read_text(folder / _TOKENIZER, _MAX_SETTINGS_BYTES)
        except FileNotFoundError:
            return {}
        if '"ByteLevel"' in content:
            return {}
    return dict(_CLASS_TOKENS.get(name, {}))


def _is_token(value: Any) -> bool:
    return isinstance(value, (str, dict))


def _token(file: Path, name: str, value: Any) -> str:
    token = value.get("content") if isinstance(value, dict) else value
    if not isinstance(token, str):
        raise ValueError(
            f"{file}: {name}={reprlib.repr(value)}: expected a string, or an object with its"
            " content; take the file of the model's publisher"
        )
    return token


def _checked_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    for name in variables:
        if name in _GIVEN:
            raise ValueError(
                f"the variable {name!r} of the chat template is not to be set: each conversation"
                " sets it; leave it out"
            )
    return dict(variables)


def _standard(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without keys that are null, and with its reasoning by the names in use."""
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in _REASONING if key in found), None)
    if reasoning is None:
        return found
    return {"thinking": reasoning, **found, _REASONING[0]: reasoning}


# Files and text


def _object_or_nothing(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file, _MAX_SETTINGS_BYTES)
    except FileNotFoundError:
        return {}


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TemplateError(
            f"the text has half a surrogate pair, {text[error.start]!r}, at character {error.start}"
        ) from error
