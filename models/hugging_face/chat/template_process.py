"""The process that renders chat templates, seen from the process that needs their texts.

It is started once, with the first template, and serves all of them. It is a new Python that
imports jinja2 alone, so it does not matter which threads this process has. It ends with this
process, and when it has exceeded a limit; the next template then starts another one.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("template_worker.py")
_LENGTH_BYTES = 8
_MAX_ANSWER_BYTES = 2**31
#: Seconds without an answer after which the process is taken to hang, on top of its own limit,
#: which is of computation and does not pass while other programs are running.
_WAIT_SECONDS = 60.0
_BYTES_PER_SECOND = 10**6
_TOO_DEEP = "its messages or variables are nested too deeply"
#: Of the program.
_MEMORY_EXIT, _DEPTH_EXIT = 3, 4

#: Limits of a template, in seconds of computation and in bytes.
LIMIT_SECONDS = 2.0
LIMIT_MEMORY_BYTES = 2**31


class TemplateError(ValueError):
    """A template cannot be rendered: the reason, as it continues a sentence."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    texts: Sequence[tuple[int, bool]],
    variables: Mapping[str, Any],
    now: datetime.datetime,
) -> list[str]:
    """The texts that a template makes of the beginnings of a conversation.

    Args:
      template: the template.
      messages: the conversation.
      texts: of each text, the number of messages, and whether it ends where an answer begins.
        Without any, the template is compiled only.
      variables: what else the template is given, in types of JSON.
      now: the time, which the template may write.

    Raises:
      TemplateError: the template is none; it does not take these messages; it exceeds a limit.
      ImportError: the package jinja2 is not installed.
    """
    return _process().render(template, messages, texts, variables, now)


_current: _TemplateProcess | None = None


def _process() -> _TemplateProcess:
    """The process of this one. A fork has another, as both would read each other's answers."""
    global _current
    if _current is None or _current.owner != os.getpid():
        _current = _TemplateProcess()
    return _current


class _TemplateProcess:
    """Starts the program when there is something to render, and speaks to it.

    Attributes:
      owner: the process that may use it.
    """

    def __init__(self):
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._pipe: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._template: str | None = None
        self._limits = (0.0, 0)
        self._stop = weakref.finalize(self, lambda: None)

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        texts: Sequence[tuple[int, bool]],
        variables: Mapping[str, Any],
        now: datetime.datetime,
    ) -> list[str]:
        with self._lock:
            limits = (LIMIT_SECONDS, LIMIT_MEMORY_BYTES)
            if self._process is None or self._process.poll() is not None or limits != self._limits:
                self._start(*limits)
            request = {
                "template": None if template == self._template else template,
                "messages": messages,
                "texts": texts,
                "variables": variables,
                "now": now.isoformat(),
            }
            # Known again when the answer says that it compiled.
            self._template = None
            answer = self._ask(request, _WAIT_SECONDS + LIMIT_SECONDS + len(texts))
            if "error" not in answer:
                self._template = template
                return answer["texts"]
            if answer["error"] == "memory":
                # It ends by itself, but may not have yet.
                self._stop()
                raise TemplateError(_too_much_memory())
        raise TemplateError(_one_line(answer["error"]))

    def _start(self, seconds: float, memory_bytes: int) -> None:
        self._stop()
        if importlib.util.find_spec("jinja2") is None:
            raise ImportError("needs the package jinja2; pip install '.[hf]' in the repository")
        if not sys.executable:
            raise TemplateError("no Python is known (sys.executable) that could render it")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    # No settings of the user's. The module path comes in the first message.
                    [sys.executable, "-I", "-S", "-B", str(_PROGRAM)],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    # An interrupt from the terminal is for this process alone.
                    process_group=0,
                )
            except OSError as error:
                ours.close()
                reason = error.strerror or error
                raise TemplateError(f"no process can be started that renders it ({reason})") from (
                    error
                )
        self._process, self._pipe, self._template = process, ours, None
        self._limits = (seconds, memory_bytes)
        self._stop = weakref.finalize(self, _stop, process, ours, os.getpid())
        first = {
            "sys_path": [os.path.abspath(path) for path in sys.path],
            "seconds": seconds,
            "memory_bytes": memory_bytes,
        }
        answer = self._ask(first, _WAIT_SECONDS)
        if "error" in answer:
            self._stop()
            raise ImportError(f"needs the package jinja2 ({answer['error']})")

    def _ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a message, of which the process is ended if none comes."""
        assert self._pipe is not None and self._process is not None
        content = _encoded(message)
        try:
            self._pipe.settimeout(seconds + len(content) / _BYTES_PER_SECOND)
            self._pipe.sendall(len(content).to_bytes(_LENGTH_BYTES, "big") + content)
            length = int.from_bytes(self._receive(_LENGTH_BYTES), "big")
            if length > _MAX_ANSWER_BYTES:
                raise TemplateError(f"it writes more than {_MAX_ANSWER_BYTES:,} bytes")
            return json.loads(self._receive(length))
        except BaseException as error:
            # Interrupted, its next answer would be to this message.
            self._stop()
            if isinstance(error, TimeoutError):
                raise TemplateError("the process that renders it does not answer") from error
            if isinstance(error, (OSError, EOFError)):
                raise TemplateError(_cause_of_death(self._process.returncode)) from error
            raise

    def _receive(self, count: int) -> bytearray:
        assert self._pipe is not None
        content = bytearray(count)
        view = memoryview(content)
        while view:
            received = self._pipe.recv_into(view, min(len(view), 2**20))
            if not received:
                # What it died of is known when it is dead, and its own limits see to that.
                assert self._process is not None
                self._process.wait(_WAIT_SECONDS)
                raise EOFError
            view = view[received:]
        return content


def _stop(process: subprocess.Popen[bytes], pipe: socket.socket, owner: int) -> None:
    pipe.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()
    else:
        # A fork had a copy of the pipe. The process is not its child, so it waits for none.
        process.returncode = 0


def _encoded(message: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(message).encode("ascii")
    except RecursionError as error:
        raise TemplateError(_TOO_DEEP) from error


def _cause_of_death(code: int) -> str:
    """Why the process died, from its exit code."""
    if code == -signal.SIGPROF:
        return _too_long()
    if code == _MEMORY_EXIT:
        return _too_much_memory()
    if code == _DEPTH_EXIT:
        return _TOO_DEEP
    if code < 0:
        return f"the process that renders it died of {signal.Signals(-code).name}"
    return f"the process that renders it ended with {code}"


def _too_long() -> str:
    return f"it computes for more than {LIMIT_SECONDS:g} seconds"


def _too_much_memory() -> str:
    return f"it needs more than {LIMIT_MEMORY_BYTES / 2**30:g} GiB of memory"


def _one_line(text: str) -> str:
    """Words of a template, fit for a sentence."""
    words = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    printable = "".join(letter if letter.isprintable() else "?" for letter in words)
    return printable if len(printable) <= 300 else printable[:300] + "…"
