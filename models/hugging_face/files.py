"""Files of a model's folder, which others wrote: none outside it is opened, none that blocks."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path, PurePosixPath
from typing import IO, Any

from models.families.config_keys import shown, shown_name
from models.paths import expanded

#: Bytes of JSON, as far more than the index of the largest model has. More would take seconds.
LARGEST_JSON = 16 * 2**20
_DEEPEST, _LONGEST_REASON = 100, 200


def real_path(path: str | Path) -> Path:
    """The path without links. `Path.resolve` raises RuntimeError for a circle of links."""
    return Path(os.path.realpath(expanded(path)))


def find_file(folder: Path, name: str) -> Path | None:
    """The path to open for a file of a folder, or None if there is no such file.

    A link may lead to another file of the folder, or to the blobs of Hugging Face's cache if the
    folder is a snapshot there. A folder from elsewhere could otherwise have any
    file of this machine read, and copied into what is exported.

    Args:
      folder: the folder.
      name: the name of the file, which may be in a folder below.

    Raises:
      ValueError: if the name or a link leads out of the folder, or to something other than a file,
        such as a pipe, which would never be read.
    """
    if not _is_inside(name):
        raise ValueError(
            f"{shown(name)} is no name of a file in the folder; download the folder again"
        )
    try:
        path = real_path(folder / name)
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        # A path that is too long, goes through a file, or may not be read, or a circle of links.
        raise ValueError(f"{shown_name(name)} cannot be read ({reason(error)})") from None
    if not is_of(folder, path):
        raise ValueError(
            f"{shown_name(name)} is a link to {path}, outside the folder; put the file itself in"
            " its place, or a hard link"
        )
    if not stat.S_ISREG(mode):
        raise ValueError(f"{shown_name(name)} is a {_kind(mode)}; expected a file")
    return path


def is_of(folder: Path, path: Path) -> bool:
    """Whether a path without links is below a folder, or among the blobs of its cache."""
    root = real_path(folder)
    return any(path.is_relative_to(place) for place in (root, *_blobs(root)))


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The object in a JSON file of a folder, or None if there is no such file.

    Raises:
      ValueError: if the file cannot be read, is no JSON object, is very large or deep, or has a
        key twice with two values; or as `find_file`.
    """
    path = find_file(folder, name)
    if path is None:
        return None
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON:
            raise ValueError(f"{size} bytes; expected at most {LARGEST_JSON}")
        value = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        raise ValueError(f"{name} cannot be read (nested too deeply); download it again") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be read ({reason(error)}); download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object; download it again")
    if _is_deep(value):
        raise ValueError(f"{name} cannot be read (nested too deeply); download it again")
    return value


def open_regular(path: str | Path) -> IO[bytes]:
    """Opens a file to read its bytes. A link is followed.

    Raises:
      OSError: it does not exist, may not be read, or is a directory, a pipe or a device, of which
        reading might never end.
    """
    # To open a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(f"it is a {_kind(mode)}, not a regular file")
    return os.fdopen(descriptor, "rb")


def read_text(path: str | Path, max_bytes: int) -> str:
    """The text of a file in UTF-8.

    Raises:
      ValueError: it is a link out of its folder, cannot be opened, is too long or is not UTF-8;
        names the file.
      FileNotFoundError: it does not exist.
    """
    real = real_path(path)
    if not is_of(Path(path).parent, real):
        raise ValueError(
            f"{path}: is a link to {real}, outside the folder; put the file itself in its place, or"
            " a hard link"
        )
    try:
        with open_regular(path) as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(content) > max_bytes:
        raise ValueError(f"{path}: expected at most {max_bytes:,} bytes; it has more")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 (byte 0x{content[error.start]:02x} at offset {error.start})"
        ) from error


def read_json_object(path: str | Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object of a file, which may begin with a byte-order mark.

    Raises:
      ValueError: as `read_text`, or it is not a JSON object; names the file.
      FileNotFoundError: it does not exist.
    """
    text = read_text(path, max_bytes)
    try:
        value = json.loads(text.removeprefix("\ufeff"))
    except RecursionError as error:
        raise ValueError(f"{path}: not JSON that can be read (nested too deeply)") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON that can be read ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def reason(error: BaseException) -> str:
    """Describes an error in one short line that can be printed, whatever a file put into it."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    text = " ".join(text.split())
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def _is_inside(name: str) -> bool:
    """Whether a name is a relative path without steps upwards that a file can have."""
    path = PurePosixPath(name)
    inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    return inside and name.isprintable()


def _blobs(root: Path) -> list[Path]:
    """Where the files are that a snapshot in Hugging Face's cache links to.

    The cache has ``models--NAME/snapshots/REVISION``, whose links lead to ``models--NAME/blobs``,
    and those of large files from there to ``blobs`` of the whole cache.
    """
    places = []
    for snapshot in (root, *root.parents):
        if snapshot.parent.name == "snapshots":
            repository = snapshot.parents[1]
            places.append(repository / "blobs")
            if repository.name.startswith("models--"):
                places.append(repository.parent / "blobs")
    return places


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "directory", stat.S_ISFIFO: "pipe", stat.S_ISSOCK: "socket"}
    return next((word for check, word in kinds.items() if check(mode)), "device")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, item in pairs:
        if name in value and value[name] != item:
            raise ValueError(f"key {shown(name)} is there twice, with two values")
        value[name] = item
    return value


def _is_deep(value: Any) -> bool:
    """Whether JSON is nested more deeply than what walks through it should recurse."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
