"""The parent of a training process that is one of several.

A process that dies takes the others with it: JAX's coordination service ends them within the
heartbeat timeout, from a thread of C++, so that they cannot say why. Their parents can. A parent
imports nothing but the standard library, passes signals on, and says how its child ended.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

from train.processes.launchers import find_placement
from train.processes.shutdown import FORWARDED, SIGNALS

# The beginning of the last message of a process that JAX ends.
_FATAL = b"Terminating process because the JAX distributed service detected fatal errors"
RESUME = (
    "checkpoints that are complete are kept; start all processes again, with --resume if there"
    " are any"
)


def is_one_of_several(arguments: Sequence[str]) -> bool:
    """Whether flags or a launcher say that this process is one of several, and it has no parent."""
    if FORWARDED in os.environ:
        return False
    flags = any(argument.startswith("--distributed.") for argument in arguments)
    return flags or find_placement() is not None


def supervise(arguments: Sequence[str]) -> int:
    """Runs ``python -m train`` with these arguments in a child. Returns the exit status.

    The child gets signals through a pipe, each once: a terminal or a launcher may send them to the
    parent alone, or to both.
    """
    reading, writing = os.pipe()
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

    def ignore() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    previous = {
        number: signal.signal(number, lambda received, _: os.write(writing, bytes([received])))
        for number in heeded
    }
    # The same flags of the interpreter.
    own = len(sys.orig_argv) - len(sys.argv) + 1
    child = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:own], *arguments],
        env=os.environ | {FORWARDED: str(reading)},
        pass_fds=[reading],
        preexec_fn=ignore,
        stderr=subprocess.PIPE,
    )
    os.close(reading)
    try:
        last_words = _forward_errors(child)
        status = child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(writing)
    sentence = describe_end(status, last_words)
    if sentence is not None:
        os.write(2, f"error: {sentence}\n".encode())
    return 128 - status if status < 0 else status


def describe_end(status: int, last_words: str) -> str | None:
    """Why a child ended that could not say it itself, and how to go on; None if it could.

    Args:
      status: its exit status; negative for a signal.
      last_words: what JAX printed when it ended the process; "" if it did not.
    """
    if "RegisterTask" in last_words:
        return (
            "the processes did not find each other in time; check that all of them are started,"
            " with one coordinator address and number of processes, and that they can reach it"
        )
    if last_words:
        # "The following tasks are unhealthy (stopped sending heartbeats):\n1, 3\n"
        named = re.search(r"unhealthy[^:]*:\s*(\d[\d, ]*)", last_words)
        if named is None:
            who = "process 0 has died" if "leader task" in last_words else "another one has died"
        else:
            one = named[1].strip().isdigit()
            who = f"process {named[1]} has died" if one else f"processes {named[1]} have died"
        return f"{who}, so this process was ended too; {RESUME}"
    if status >= 0:
        return None
    name = signal.Signals(-status).name
    hint = ", as by the kernel when memory runs out" if -status == signal.SIGKILL else ""
    return f"this process was ended by {name}{hint}; the others will end too; {RESUME}"


def _forward_errors(child: subprocess.Popen[bytes]) -> str:
    """Passes on what the child prints on stderr until it ends. Returns the message of JAX about
    other processes, which is held back with the trace that follows."""
    assert child.stderr is not None
    pipe, ended = child.stderr.fileno(), os.pidfd_open(child.pid)
    os.set_blocking(pipe, False)
    line = held_back = b""
    try:
        running = True
        while running:
            # Processes that the child has started may keep the pipe open after its end.
            running = ended not in select.select([pipe, ended], [], [])[0]
            while chunk := _read(pipe):
                if held_back:
                    held_back += chunk
                    continue
                line += chunk
                at = line.find(_FATAL)
                if at >= 0:
                    start = line.rfind(b"\n", 0, at) + 1
                    _write(line[:start])
                    held_back, line = line[start:], b""
                else:
                    # A line that may become the message waits for its end.
                    whole = line.rfind(b"\n") + 1
                    begun = line[whole:]
                    if not re.match(rb"F\d", begun):
                        whole = len(line)
                    _write(line[:whole])
                    line = line[whole:]
            if chunk == b"" and running:
                child.wait()  # It has closed stderr.
                running = False
    finally:
        os.close(ended)
        child.stderr.close()
    _write(line)
    return held_back.decode(errors="replace")


def _read(pipe: int) -> bytes | None:
    """Reads what there is; b"" at the end, None if there is nothing yet."""
    try:
        return os.read(pipe, 1 << 16)
    except BlockingIOError:
        return None


def _write(text: bytes) -> None:
    while text:
        text = text[os.write(2, text) :]
