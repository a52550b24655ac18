"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | os.PathLike) -> Path:
    """The path with a home directory in place of ``~``.

    Raises:
      ValueError: if there is no such home directory, as for users of containers without a name.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        home = Path(path).parts[0]
        raise ValueError(
            f"{str(path)!r}: this machine knows no home directory for {home!r}; write the path in"
            " full, or set HOME"
        ) from error
