"""Cases in a process of their own, which is killed where one of their steps hangs.

A kernel that waits for other devices can wait forever.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

#: What a step that took too long, or ended its process, has in place of a result.
HUNG = "HUNG or died"


class Said(NamedTuple):
    """What the other process says: that a step begins, where there is no result, or what came out.

    Attributes:
      case: that it belongs to.
      step: its name.
      result: not None.
    """

    case: Any
    step: Any
    result: Any = None


def run_apart(
    work: Callable[..., None],
    arguments: Callable[[], tuple[Any, ...] | None],
    step_seconds: float,
    note: Callable[[Said], None],
) -> None:
    """Has one process after another do what is left, until nothing is, or one changes nothing.

    Args:
      work: called in the other process, with its arguments and a `Connection` to send `Said` by.
        A function of a module.
      arguments: gives those of the next process: what is left; or None to end.
      step_seconds: a step, or a silence between steps, that takes longer hangs.
      note: called for every result, that of a step that hung included.
    """
    context = multiprocessing.get_context("spawn")
    before = None
    while (given := arguments()) not in (None, before):
        before = given
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(*given, sender), daemon=True)
        process.start()
        sender.close()
        listen(receiver, step_seconds, note)
        process.kill()
        process.join()


def listen(receiver: Connection, step_seconds: float, note: Callable[[Said], None]) -> None:
    """Notes what a process says, until it ends, or hangs."""
    doing = None
    while receiver.poll(step_seconds):
        try:
            said: Said = receiver.recv()
        except EOFError:
            break
        doing = said if said.result is None else None
        if said.result is not None:
            note(said)
    if doing is not None:
        note(doing._replace(result=HUNG))
