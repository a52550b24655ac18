"""The circumstances of long traces: few collections of garbage, and a word to who waits."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator

#: New objects between collections. A trace makes millions that stay, among few cycles: with
#: Python's 700 or 2000, collections take a third of the time of a dry run of 80 unrolled layers,
#: and free next to nothing.
_NEW_OBJECTS = 100_000
#: What takes less is not announced.
_SECONDS = 5.0


@contextlib.contextmanager
def tracing(what: str | None = None) -> Iterator[None]:
    """Collects garbage rarely, and if it lasts for seconds says once to stderr what is traced.

    Args:
      what: says what is traced, and what for; None: nothing is said.
    """
    line = f"tracing {what} ..."
    timer = threading.Timer(_SECONDS, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    first, *older = gc.get_threshold()
    if first:  # Else nothing is collected anyway.
        gc.set_threshold(max(first, _NEW_OBJECTS), *older)
    if what is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        gc.set_threshold(first, *older)
