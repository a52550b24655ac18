"""Warnings of the library: each is logged once."""

from __future__ import annotations

import functools
import logging


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning through the logger "collective_matmul", unless it was logged before."""
    logging.getLogger("collective_matmul").warning(message)
