"""Backends that flags request and that cannot execute the step: said with those flags."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from collective_matmul import UnsupportedSiteError
from models.unsupported_names import sentence_about
from train.config.config import Config


@contextlib.contextmanager
def naming_flags(config: Config) -> Iterator[None]:
    """Names the flags of a configuration in errors about backends that they request.

    Raises:
      ValueError: for an `UnsupportedSiteError` inside.
    """
    try:
        yield
    except UnsupportedSiteError as error:
        raise ValueError(_sentence(error, config)) from error


def _sentence(error: UnsupportedSiteError, config: Config) -> str:
    if error.op == "dot_product_attention":
        return f"attention={config.attention!r}: {error.reason}; give --attention auto"
    of_context = error.op == "context_attention" and config.context_attention != "auto"
    argument = "context_attention" if of_context else "overlap"
    return sentence_about(
        error, argument, getattr(config, argument), f"--{argument.replace('_', '-')} auto"
    )
