"""The checkpoints that a run writes: train state, data position and configuration, by orbax.

A checkpoint is the folder ``step_N`` of the checkpoint directory, with one item for each of the
three, and one for their checksums. orbax writes it under a temporary name and renames it when it is
complete. A run killed at any time leaves earlier checkpoints unchanged. A lock keeps a second run
out of the directory.

Where several processes train together, all of them write the arrays, each what its devices hold,
into one directory that they share. Process 0 locks it, writes the other items and deletes.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from models.checkpoint.orbax_manager import contents, json_items, make_manager
from models.checkpoint.saved_checkpoint import (
    PREFIX,
    Restored,
    SavedCheckpoint,
    failure_reason,
    is_checkpoint,
    report_errors_once,
    step_folders,
    whole_steps,
)
from models.paths import expanded
from train.checkpoint.run_lock import RunLock, lock_owner
from train.processes.agreement import check_same, together
from train.processes.connection import is_first

_SUPERSEDED = "superseded"


class SaveError(RuntimeError):
    """A checkpoint could not be saved."""


class Checkpoints:
    """The checkpoints of one run in one directory. A context manager.

    Saves are asynchronous; leaving the ``with`` block waits for the last one.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        resume: bool = False,
        resume_step: int | None = None,
        max_to_keep: int = 3,
        save_interval: int = 50,
    ) -> None:
        """Opens and locks the directory, and creates it if it is missing. Compiles nothing.

        Args:
            directory: a folder on a file system. Other files in it are left alone.
            resume: whether to continue from the checkpoints in the directory. Otherwise there must
              be none.
            resume_step: the checkpoint to continue from, by default the newest. Later ones are
              moved into the folder "superseded" when the first new checkpoint is saved.
            max_to_keep: number of checkpoints to keep; older ones are deleted once a newer one is
              complete.
            save_interval: ``should_save`` is True for multiples of this many steps.

        Raises:
            ValueError: a number is not positive; the directory cannot be written, or another run
              uses it; it holds checkpoints, or is inside a directory that does, and ``resume`` is
              False, or it holds none and it is True; it does not hold ``resume_step``; a ``step_N``
              in it is not a checkpoint.
        """
        for name, value in (("max_to_keep", max_to_keep), ("save_interval", save_interval)):
            if value < 1:
                raise ValueError(f"{name}={value}: expected at least 1; give a positive number")
        self._lock: RunLock | None = None
        try:
            with together():
                if not resume:
                    _check_not_within(directory)
                self._directory, self._lock = _open_directory(directory)
            # Process 0 has locked it and written nothing else yet.
            found = {
                "checkpoints": list(step_folders(self._directory)),
                "lock": lock_owner(self._directory),
            }
            advice = f"checkpoint_dir={str(directory)!r}: give a folder that all nodes share"
            check_same("checkpoint directory", found, advice)
            with together():
                check_intent(self._directory, resume, resume_step)
            self._manager = make_manager(self._directory, max_to_keep)
        except BaseException:
            self._unlock()
            raise
        self._save_interval = save_interval
        report_errors_once()
        newest = float("inf") if resume_step is None else resume_step
        # Moved out of the way by the first save.
        self._superseded = {step for step in self._manager.all_steps() if step > newest}
        self._pending: int | None = None
        self._closed = self._failed = False

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for a pending save and unlocks the directory.

        Raises:
            SaveError: the pending save failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._wait()
        finally:
            # After a save that failed, orbax raises its other errors one after the other.
            with suppress(Exception) if self._failed else nullcontext():
                self._manager.close()
            self._unlock()

    def should_save(self, step: int) -> bool:
        """Whether ``step`` is a multiple of the interval and newer than every checkpoint."""
        return step % self._save_interval == 0 and step > max(self._steps(), default=-1)

    def save(
        self,
        step: int,
        state: Any,
        data_position: Mapping[str, Any],
        configuration: Mapping[str, Any],
    ) -> bool:
        """Starts a save. When it returns, the state is copied and may be donated.

        Waits for the previous save first. Does nothing if the step is already saved.

        Args:
            step: number of optimizer steps done, at least 0.
            state: a pytree of global arrays.
            data_position: the state of the data iterator after the last batch of ``step``; JSON.
            configuration: the run's configuration; JSON.

        Returns:
            Whether a save was started.

        Raises:
            TypeError: the data position or the configuration is not JSON.
            SaveError: the previous save failed, this one cannot start, or devices that should hold
              the same data do not.
        """
        if step in self._steps():
            return False
        self._wait()
        items = json_items(data_position, configuration)
        with self._saving(step):
            arguments = contents(state, items)
            self._set_superseded_aside()
            self._pending = step
            return self._manager.save(step, args=arguments, force=True)

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, after waiting for a pending save; or None.

        Raises:
            SaveError: the pending save failed.
        """
        self._wait()
        return max(self._steps(), default=None)

    def configuration(self, step: int | None = None) -> dict[str, Any]:
        """`SavedCheckpoint.configuration` of ``step``, by default the newest."""
        return self._saved(step).configuration()

    def newest(self) -> SavedCheckpoint:
        """The newest complete checkpoint, after waiting for a pending save.

        Raises:
            ValueError: there is none.
            SaveError: the pending save failed.
        """
        return self._saved(None)

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored:
        """`SavedCheckpoint.restore` of ``step``, by default the newest."""
        return self._saved(step).restore(abstract_state)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _steps(self) -> list[int]:
        """The steps of the checkpoints of this run, with a pending one."""
        return [step for step in self._manager.all_steps() if step not in self._superseded]

    def _saved(self, step: int | None) -> SavedCheckpoint:
        latest = self.latest_step()
        if latest is None:
            raise ValueError(
                f"checkpoint_dir={str(self._directory)!r}: holds no checkpoint; "
                "give the directory of the run to continue"
            )
        step = latest if step is None else step
        if step not in self._steps():
            raise _missing("step", step, self._directory, self._steps())
        return SavedCheckpoint(self._directory / f"{PREFIX}_{step}")

    def _wait(self) -> None:
        """Waits for a pending save."""
        if self._pending is not None:
            with self._saving(self._pending):
                self._manager.wait_until_finished()
            self._pending = None

    @contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """Turns errors into a SaveError."""
        try:
            yield
        except Exception as error:
            self._pending, self._failed = None, True
            whole = [n for n in whole_steps(self._directory) if n not in self._superseded]
            reason = failure_reason(error)
            advice = (
                "free some space" if re.search("No space|quota", reason) else "remove the cause"
            )
            kept = (
                f"the earlier ones are whole ({', '.join(map(str, whole))}); {advice} and give"
                " --resume"
                if whole
                else f"there is no earlier one; {advice} and start anew"
            )
            raise SaveError(
                f"step {step}: its checkpoint could not be saved in {self._directory} ({reason});"
                f" {kept}"
            ) from error

    def _set_superseded_aside(self) -> None:
        """Moves the checkpoints after the step to resume from out of the way."""
        if not self._superseded:
            return
        with together():
            if is_first():
                aside = self._directory / _SUPERSEDED
                aside.mkdir(exist_ok=True)
                for step in sorted(self._superseded):
                    path = self._directory / f"{PREFIX}_{step}"
                    names = [path.name, *(f"{path.name}.{count}" for count in range(2, 10_000))]
                    path.rename(next(aside / name for name in names if not (aside / name).exists()))
        self._superseded.clear()
        self._manager.reload()


def _open_directory(directory: str | Path) -> tuple[Path, RunLock | None]:
    """The directory, which exists then, and its lock on the first process."""
    if not str(directory):
        raise ValueError("checkpoint_dir='': expected the name of a folder; leave it out for none")
    if "://" in str(directory):
        raise ValueError(
            f"checkpoint_dir={str(directory)!r}: expected a folder on a file system, not a URL; "
            "mount the bucket and give the mounted path"
        )
    path = expanded(directory).resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            read_only = os.statvfs(path).f_flag & os.ST_RDONLY
            reason = errno.EROFS if read_only else errno.EACCES
            raise OSError(reason, os.strerror(reason))
        return path, RunLock(path) if is_first() else None
    except OSError as error:
        raise ValueError(
            f"checkpoint_dir={str(directory)!r}: cannot be written ({error.strerror}); "
            "give a directory that can"
        ) from None


def _check_not_within(directory: str | Path) -> None:
    """Raises ValueError if a new run would be inside a checkpoint, with which it would be deleted,
    or beside the checkpoints of a run, whose model would be taken for its own."""
    for outer in expanded(directory).resolve().parents[:2]:
        steps: list[int] = []
        with suppress(OSError):  # What cannot be read has no checkpoints that can be used.
            steps = whole_steps(outer)
        if steps:
            raise ValueError(
                f"checkpoint_dir={str(directory)!r}: is inside {str(outer)!r}, the directory of"
                f" another run (newest: step {steps[-1]}); give one outside it, or --resume with"
                " that directory to continue its run"
            )


def check_intent(directory: Path, resume: bool, resume_step: int | None) -> None:
    """Refuses to overwrite files, and to resume without checkpoints.

    Raises:
      ValueError: a run would do so in this directory.
    """
    entries = step_folders(directory)
    argument = f"checkpoint_dir={str(directory)!r}"
    for entry in entries.values():
        if not is_checkpoint(entry):
            raise ValueError(
                f"{argument}: {entry.name} in it is not a checkpoint and would be overwritten "
                "at that step; give another directory"
            )
    if entries and not resume:
        raise ValueError(
            f"{argument}: it holds the checkpoints of another run (newest: step {max(entries)}), "
            "which are never overwritten; give --resume to continue it, or another directory"
        )
    if resume and not entries:
        raise ValueError(
            f"resume=True: {argument} holds no checkpoint; leave out --resume to start anew, "
            "or give the directory of the earlier run"
        )
    if resume_step is not None and resume_step not in entries:
        raise _missing("resume_step", resume_step, directory, list(entries))


def _missing(argument: str, step: int, directory: Path, steps: Sequence[int]) -> ValueError:
    return ValueError(
        f"{argument}={step}: not among the checkpoints of {str(directory)!r}; "
        f"there are {', '.join(map(str, steps))}"
    )
