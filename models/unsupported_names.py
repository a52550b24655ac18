"""Sentences about backends that were requested by name on a command line and are not possible."""

from __future__ import annotations

from collective_matmul import UnsupportedSiteError


def sentence_about(error: UnsupportedSiteError, argument: str, names: str, otherwise: str) -> str:
    """Says with a flag what the library says with an op's argument.

    Args:
      error: of the library.
      argument: the argument whose flag requested the names, such as "overlap".
      names: the value of the flag, separated by commas.
      otherwise: what to do to have a backend chosen, such as "--overlap auto".
    """
    flag = f"--{argument.replace('_', '-')}"
    return (
        f"{argument}={names!r}: {error.reason}; in {error.op}; give {flag} {names},xla to use the"
        f" first that can, or {otherwise}"
    )
