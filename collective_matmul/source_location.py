"""`SourceLocation`: the line of the user's program that calls an op."""

from __future__ import annotations

import functools
import inspect
import os
import traceback
import types
import warnings
from pathlib import Path
from typing import NamedTuple

import flax
import jax

_LIBRARIES = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parent, *jax.__path__, *flax.__path__)
)
_PYTHON = f"{Path(os.__file__).parent}{os.sep}"


class SourceLocation(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        path = Path(self.file)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{shown}:{self.line} in {self.function}"


def calling_location() -> SourceLocation | None:
    """The innermost line on the stack that belongs neither to this library, JAX, Flax nor Python.

    Returns None if only libraries are on the stack.
    """
    # Without a frame, where walk_stack starts depends on Python's version.
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        if not is_library(frame.f_code.co_filename):
            return SourceLocation(frame.f_code.co_filename, line, frame.f_code.co_qualname)
    return None


def warn_deprecated(message: str) -> None:
    """A DeprecationWarning at the user's line, as Python shows it by default for `__main__` only.

    The number of library frames above that line differs between ops, layers and `overlap`.
    """
    stack = traceback.walk_stack(inspect.currentframe())
    level = next((n for n, (frame, _) in enumerate(stack, 1) if _is_users(frame)), 1)
    warnings.warn(message, DeprecationWarning, stacklevel=level)


def _is_users(frame: types.FrameType) -> bool:
    """Whether a frame belongs to no library, or to the command that runs."""
    module = frame.f_globals.get("__name__", "")
    # The `__init__` of a dataclass has no file.
    ours = module.partition(".")[0] == __name__.partition(".")[0]
    return module == "__main__" or not (ours or is_library(frame.f_code.co_filename))


@functools.cache
def is_library(file: str) -> bool:
    """Whether a source file belongs to this library, JAX, Flax or Python."""
    # Other installed packages count as the user's program.
    in_python = file.startswith(_PYTHON) and "site-packages" not in file
    return in_python or file.startswith(("<frozen ", *_LIBRARIES))
