"""What the library says of its own accord: each sentence once, through `logging`."""

from __future__ import annotations

import functools
import logging


@functools.cache
def warn_once(sentence: str) -> None:
    """Warns through the logger "collective_matmul", the first time that it is given `sentence`."""
    logging.getLogger("collective_matmul").warning(sentence)
