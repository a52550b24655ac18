"""Where in the user's program an op is called."""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from pathlib import Path
from typing import NamedTuple

import flax
import jax

_LIBRARIES = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], *jax.__path__, *flax.__path__)
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
    """The innermost line on the stack that is neither this library's, JAX's, Flax's nor Python's.

    None if there is none, as when only libraries are on the stack.
    """
    # From this frame on: which one walk_stack begins with by itself depends on Python's version.
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        if not is_library(frame.f_code.co_filename):
            return SourceLocation(frame.f_code.co_filename, line, frame.f_code.co_qualname)
    return None


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file of code is this library's, JAX's, Flax's or Python's own."""
    # Packages installed beneath Python's own library are somebody's program.
    of_python = file.startswith(_PYTHON) and "site-packages" not in file
    return of_python or file.startswith(("<frozen ", *_LIBRARIES))
