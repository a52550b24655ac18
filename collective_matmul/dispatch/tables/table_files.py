"""The files of tables, and which of them are used for a kind of device."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import os
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from collective_matmul import data
from collective_matmul.dispatch.tables.table import MEASURES, Entry, Table
from collective_matmul.log import warn_once

CACHE_VARIABLE = "COLLECTIVE_MATMUL_CACHE_DIR"

#: Kinds of device of whose sites few or none were measured: the kind whose table is used for the
#: others, and why it can be.
DEVICE_ALIASES = {
    "NVIDIA H100 80GB HBM3": (
        "NVIDIA H200",
        "the same chip and links as H200, with slower memory",
    ),
}


def file_name(device_kind: str) -> str:
    """`"NVIDIA H200"` -> `"h200.jsonl"`."""
    return f"{data.folder_name(device_kind)}.jsonl"


def cache_path(device_kind: str) -> Path | None:
    """The file of the user's own table; None for a user without a home directory.

    It is stored in the directory that the environment variable COLLECTIVE_MATMUL_CACHE_DIR
    names, else in ``collective_matmul`` beneath XDG_CACHE_HOME or ``~/.cache``.
    """
    folder = os.environ.get(CACHE_VARIABLE)
    if not folder:
        try:
            caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        except RuntimeError:  # In containers, a user may have neither HOME nor a name.
            return None
        folder = Path(caches) / "collective_matmul"
    return Path(folder) / file_name(device_kind)


def writable_path(device_kind: str, path: str | os.PathLike | None = None) -> Path:
    """The file to save a table in, `path` or the user's own; makes its folder.

    Raises:
      ValueError: if it cannot be written.
    """
    chosen = cache_path(device_kind) if path is None else Path(path)
    advice = f"give another path, or set {CACHE_VARIABLE} to a folder that can be written"
    if chosen is None:
        raise ValueError(f"path=None: this user has no home directory for the table; {advice}")
    try:
        chosen.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=chosen.parent):
            return chosen
    except OSError as error:
        raise ValueError(
            f"path={str(chosen)!r}: the table cannot be written there ({error.strerror}); {advice}"
        ) from error


def known(device_kind: str) -> list[tuple[str, Table]]:
    """The tables used for a kind of device, each with its origin in words, best first."""
    path = cache_path(device_kind)
    tables = [] if path is None else [("your table", read_users(path))]
    tables.append((f"table of {device_kind}", _shipped(device_kind)))
    if device_kind in DEVICE_ALIASES:
        other, reason = DEVICE_ALIASES[device_kind]
        tables.append((f"table of {other}: {reason}", _shipped(other)))
    return [(origin, table) for origin, table in tables if table is not None and table.entries]


def read_users(path: Path) -> Table | None:
    """The table at `path`; None if there is no file, or, after a warning, a damaged one."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = textwrap.shorten(str(error), 300)
        warn_once(f"{path} is ignored, since it cannot be read as a table: {reason}")
        return None


@functools.lru_cache(maxsize=8)
def _read(path: Path, modified: int) -> Table:
    del modified  # Another time is another file.
    return dataclasses.replace(Table.from_text(path.read_text(encoding="utf-8")), path=path)


@functools.cache
def _shipped(device_kind: str) -> Table | None:
    found = data.shipped(device_kind, MEASURES)
    return None if found is None else Table.from_data(found)


def save(path: Path, device_kind: str, entries: Mapping[Any, Entry]) -> Table:
    """Adds entries to the table at `path`, new ones in place of old; returns the whole.

    Processes that save at the same time wait for each other. A file that cannot be read is kept
    next to the table under another name.

    Raises:
      ValueError: if the table there is of another kind of device.
      OSError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        present = read_users(path)
        if present is None and path.exists():
            path.rename(_free_name(path))
        if present is not None and present.device_kind != device_kind:
            raise ValueError(
                f"path={str(path)!r}: a table of {present.device_kind}, expected one of"
                f" {device_kind}; give another path"
            )
        before = present or Table(device_kind)
        table = Table(device_kind, {**before.entries, **entries}, path, before.unread)
        table.write(path)
    return table


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Waits until no other process is in such a block. A process that dies leaves it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())
