"""Files of other people's folders, opened so that none of them can block or fill the memory."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import IO, Any

from models.hugging_face.files import is_of, real_path


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
        raise OSError(f"it is {_kind(mode)}, not a regular file")
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


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "no file")
