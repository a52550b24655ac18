"""A lock file that keeps a second run out of a checkpoint directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import warnings
from pathlib import Path

LOCK_FILE = "run.lock"

# What flock reports on a file system without locks, or whose lock service cannot be reached.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class RunLock:
    """An exclusive lock of a directory. The kernel releases it when this process ends.

    It is advisory: only other instances of this class heed it. Reading does not need it. The file
    stays when the lock is released; deleting it would race with a run that is about to lock it.
    """

    def __init__(self, directory: Path) -> None:
        """Locks the directory.

        Raises:
          ValueError: another run holds the lock.
          OSError: the lock file cannot be made.
        """
        self._file = (directory / LOCK_FILE).open("ab+", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = self._owner()
            self._file.close()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ValueError(
                    f"checkpoint_dir={str(directory)!r}: in use by another run ({owner}); wait for"
                    " it, stop it, or give another directory"
                ) from None
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"checkpoint_dir={str(directory)!r}: its file system has no file locks"
                f" ({error.strerror}), so nothing keeps a second run out of it",
                stacklevel=2,
            )
            return
        # The owner is for the message alone; on a full disk it stays unknown.
        with contextlib.suppress(OSError):
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        """Lets another run in. Does nothing the second time."""
        self._file.close()

    def _owner(self) -> str:
        self._file.seek(0)
        return self._file.read(200).decode(errors="replace").strip() or "of unknown process"


def lock_owner(directory: Path) -> str | None:
    """Reads what the lock file of a directory says of the last run; None if there is no file."""
    path = directory / LOCK_FILE
    return path.read_text(errors="replace") if path.exists() else None
