"""Renders chat templates, as a program of its own: ``python template_worker.py``.

Templates come with models that anybody may publish, and a template can compute without end. So
this process has little memory, no files and no processes, and a clock that ends it. It imports
jinja2 and no part of this repository. `template_process` starts it, and speaks to it over standard
input and output: messages of JSON, each after its length in eight bytes.

The first message has the limits and the module path. Every other one has a template, or means the
one before; what it is rendered with; and which beginnings of a conversation to render. The answer
has their texts, or the reason why there are none.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping
from typing import Any

_INPUT, _OUTPUT = 0, 1
_LENGTH_BYTES = 8
#: Seconds between two looks whether the parent is still alive. Another process may hold a copy of
#: its end of the pipe, which then does not close.
_PARENT_CHECK_SECONDS = 1.0
#: Seconds that each text adds to the limit, so that long conversations have enough.
_SECONDS_PER_TEXT = 0.02
MAX_CHARACTERS = 2**28
_MEMORY = "memory"
#: Exit codes: a message that does not fit into the memory, or is nested too deeply to be read.
_MEMORY_EXIT, _DEPTH_EXIT = 3, 4
#: Modules that jinja2 imports where it uses them, and codecs.
_IMPORTED_LATER = (
    "jinja2.constants", "jinja2.debug", "jinja2.ext", "pprint", "encodings.latin_1",
    "encodings.unicode_escape", "encodings.raw_unicode_escape", "encodings.utf_16",
    "encodings.utf_32",
)  # fmt: skip


class _Refusal(Exception):
    """An error with what is wrong, in words."""


def main() -> None:
    """Answers messages until the parent closes the pipe or is dead."""
    parent = os.getppid()
    first = _read_message(parent)
    if first is None:
        return
    try:
        sys.path[:] = first["sys_path"]
        environment = _make_environment()
    except ImportError as error:
        _write_message({"error": str(error)})
        return
    _limit(first["memory_bytes"])
    _write_message({})
    template = None
    while (message := _read_message(parent)) is not None:
        texts = message["texts"]
        signal.setitimer(signal.ITIMER_PROF, first["seconds"] + _SECONDS_PER_TEXT * len(texts))
        answer: dict[str, Any] = {}
        try:
            now = datetime.datetime.fromisoformat(message["now"])
            # A variable, as the same template may be asked on another day.
            message["variables"].setdefault("strftime_now", now.strftime)
            if message["template"] is not None:
                template = environment.from_string(message["template"])
            answer["texts"] = [_render(template, message, *text) for text in texts]
        except Exception as error:
            # Anything may be raised, as a template may compute anything.
            answer = {"error": _reason(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write_message(answer)
        if answer.get("error") == _MEMORY:
            # What is left of it may be in pieces.
            return


def _limit(memory_bytes: int) -> None:
    """Takes from this process what no template needs, and lets its clock end it."""
    # A parent may have ignored or blocked the signal, and this process has inherited that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        # No further file: standard input, output and errors are open.
        resource.RLIMIT_NOFILE: 3,
        resource.RLIMIT_NPROC: 0,
    }
    for which, wanted in limits.items():
        _, hard = resource.getrlimit(which)
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(which, (limit, limit))
        except (OSError, ValueError):
            # macOS has no limit of addresses.
            continue


def _render(template: Any, message: Mapping[str, Any], count: int, asks: bool) -> str:
    text = template.render(
        messages=message["messages"][:count],
        add_generation_prompt=asks,
        **message["variables"],
    )
    if len(text) > MAX_CHARACTERS:
        raise _Refusal(f"it writes {len(text):,} characters, more than {MAX_CHARACTERS:,}")
    return text


def _reason(error: Exception) -> str:
    """Why there is no text, as it continues a sentence."""
    from jinja2 import TemplateError, TemplateSyntaxError

    if isinstance(error, MemoryError):
        return _MEMORY
    if isinstance(error, RecursionError):
        return "it calls itself, or is nested, too deeply"
    if isinstance(error, OSError):
        return "it uses a module that templates do not have, or a file"
    words = str(error)[:2000]
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {words}"
    is_sentence = isinstance(error, (TemplateError, _Refusal)) and words
    return words if is_sentence else f"{type(error).__name__}: {words}"


# The environment of templates, as transformers makes it.


def _make_environment() -> Any:
    """The environment.

    Raises:
      ImportError: there is no jinja2.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # Once there are limits, no module can be read.
    for name in _IMPORTED_LATER:
        importlib.import_module(name)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_blocks()],
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "dict": _Dictionaries(),
        "namespace": _checked_namespace(),
    }
    return environment


def _generation_blocks() -> Any:
    """An extension for ``{% generation %}``, which marks answers.

    The marks change nothing but the scope of variables, which is that of a call.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationBlocks(Extension):
        tags = {"generation"}  # noqa: RUF012, as jinja2 wants it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = nodes.CallBlock(self.call_method("_call"), [], [], body)
            return call.set_lineno(line)

        def _call(self, caller: Any) -> str:
            return caller()

    return GenerationBlocks


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message))


class _Dictionaries:
    """``dict`` of a template: the two things to do with it, and not the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _checked_namespace() -> Any:
    """``namespace`` of a template, without names that begin with an underscore."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    def check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace takes no name that begins with _, such as {name!r}")

    class CheckedNamespace(Namespace):
        def __init__(*args: Any, **kwargs: Any):
            # A name may be "self".
            attributes = dict(*args[1:], **kwargs)
            for name in attributes:
                check(name)
            Namespace.__init__(args[0], attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            super().__setitem__(name, value)

    return CheckedNamespace


# Messages


def _read_message(parent: int) -> Any:
    """The next message, or None when nobody will send one."""
    while not select.select([_INPUT], [], [], _PARENT_CHECK_SECONDS)[0]:
        if os.getppid() != parent:
            return None
    header = _read(_LENGTH_BYTES)
    content = _read(int.from_bytes(header, "big"))
    return json.loads(content) if header and content else None


def _read(count: int) -> bytes:
    """Reads exactly this number of bytes, or none if the pipe is closed before."""
    content = bytearray()
    while len(content) < count:
        part = os.read(_INPUT, min(count - len(content), 2**20))
        if not part:
            return b""
        content += part
    return bytes(content)


def _write_message(value: Any) -> None:
    content = json.dumps(value).encode("ascii")
    view = memoryview(len(content).to_bytes(_LENGTH_BYTES, "big") + content)
    while view:
        view = view[os.write(_OUTPUT, view) :]


if __name__ == "__main__":
    try:
        main()
    except RecursionError:
        os._exit(_DEPTH_EXIT)
    except (BrokenPipeError, MemoryError):
        # The parent is dead, or sees that this process is.
        os._exit(_MEMORY_EXIT)
