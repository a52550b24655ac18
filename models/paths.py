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


def check_folder(path: str | os.PathLike, expected: str) -> None:
    """Checks that there is something other than a file at the path that a user gives for a folder.

    Args:
      path: the path.
      expected: what the folder should be, for the error message.

    Raises:
      ValueError: nothing is there, or a file.
    """
    name, place = os.fspath(path), expanded(path)
    if not os.path.lexists(os.path.realpath(place)):
        hub = f"; a model of the hub: hf download {name} --local-dir FOLDER"
        raise ValueError(
            f"{name!r}: does not exist; give {expected}{hub if _may_be_of_hub(name) else ''}"
        )
    if os.path.isfile(place):
        raise ValueError(f"{name!r}: is a file; give its folder, {str(place.parent)!r}")


def _may_be_of_hub(path: str) -> bool:
    """Whether a path looks like OWNER/NAME, the name of a model on the hub."""
    owner, _, name = path.partition("/")
    return owner not in ("", ".", "..", "~") and name != "" and "/" not in name
