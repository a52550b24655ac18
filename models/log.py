"""Warnings of the models: each is logged once."""

from __future__ import annotations

import functools
import logging


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning through the logger "models", unless it was logged before."""
    logging.getLogger("models").warning(message)
