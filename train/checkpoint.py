"""Checkpoints of a run: train state, data position and configuration, saved by orbax.

A checkpoint is the folder ``step_N`` of the checkpoint directory, with one item for each of the
three. orbax writes it under a temporary name and renames it when it is complete. A run killed at
any time leaves earlier checkpoints unchanged. Only one run at a time may use a directory.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import orbax.checkpoint as ocp
from flax import traverse_util
from orbax.checkpoint import checkpoint_managers

from train.renamed import trained_configuration

_PREFIX = "step"
_ITEMS = {"state", "data_position", "configuration"}
# A folder without any of these is not a checkpoint. If orbax was killed while it deleted a
# checkpoint, some of them are missing.
_CONTENTS = _ITEMS | {"_CHECKPOINT_METADATA", "commit_success.txt"}
_DIFFERENCES_SHOWN = 8


class Restored(NamedTuple):
    """The contents of a checkpoint."""

    step: int
    """Number of optimizer steps before it was saved."""
    state: Any
    """The train state: a pytree of global arrays, sharded as requested."""
    data_position: dict[str, Any]
    """The state of the data iterator, for its ``set_state``."""


class Checkpoints:
    """The checkpoints of one run in one directory. A context manager.

    Saves are asynchronous; leaving the ``with`` block waits for the last one.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        resume: bool = False,
        max_to_keep: int = 3,
        save_interval: int = 50,
    ) -> None:
        """Opens the directory and creates it if it is missing. Compiles nothing.

        Args:
            directory: a folder on a file system. Other files in it are left alone.
            resume: whether to continue from the checkpoints in the directory. Otherwise there must
              be none.
            max_to_keep: number of checkpoints to keep; older ones are deleted once a newer one is
              complete.
            save_interval: ``should_save`` is True for multiples of this many steps.

        Raises:
            ValueError: a number is not positive; the directory cannot be written; it holds
              checkpoints and ``resume`` is False, or none and it is True; a ``step_N`` in it is not
              a checkpoint.
        """
        for name, value in (("max_to_keep", max_to_keep), ("save_interval", save_interval)):
            if value < 1:
                raise ValueError(f"{name}={value}: expected at least 1; give a positive number")
        self._directory = _open_directory(directory)
        _check_intent(self._directory, resume)
        handlers = ocp.handlers.create_default_handler_registry(
            state=ocp.StandardCheckpointHandler(),
            data_position=ocp.JsonCheckpointHandler(),
            configuration=ocp.JsonCheckpointHandler(),
        )
        options = ocp.CheckpointManagerOptions(
            step_prefix=_PREFIX,
            save_decision_policy=checkpoint_managers.FixedIntervalPolicy(save_interval),
            preservation_policy=checkpoint_managers.LatestN(max_to_keep),
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(
            self._directory, options=options, handler_registry=handlers
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Waits for a pending save, raises its error, if any, and releases the directory."""
        self._manager.close()

    def should_save(self, step: int) -> bool:
        """Whether ``step`` is a multiple of the interval and newer than every checkpoint."""
        return self._manager.should_save(step)

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
        """
        if step in self._manager.all_steps():
            return False
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data_position=ocp.args.JsonSave(_as_json(data_position)),
            configuration=ocp.args.JsonSave(_as_json(configuration)),
        )
        return self._manager.save(step, args=items, force=True)

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, after waiting for a pending save; or None."""
        self._manager.wait_until_finished()
        return self._manager.latest_step()

    def configuration(self, step: int | None = None) -> dict[str, Any]:
        """The configuration that was saved with ``step``, by default the newest.

        Fields and values that an earlier release named otherwise have their current names.

        Raises:
            ValueError: there is no such checkpoint, or it cannot be read.
        """
        step = self._saved_step(step)
        with self._reading(step):
            items = ocp.args.Composite(configuration=ocp.args.JsonRestore())
            saved = self._manager.restore(step, args=items)["configuration"]
        return trained_configuration(saved)

    def check_same_model(self, configuration: Mapping[str, Any], step: int | None = None) -> None:
        """Compares the ``"model"`` part of a configuration with the saved one.

        Raises:
            ValueError: they differ; the message lists the fields with both values.
        """
        step = self._saved_step(step)
        saved = self.configuration(step).get("model", {})
        differing = differences({"model": saved}, {"model": configuration.get("model", {})})
        if differing:
            raise ValueError(
                f"{self._path(step)}: a checkpoint from another model: {_listed(differing)}; "
                "resume with the model it was saved with, or give another directory"
            )

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored:
        """Reads a checkpoint onto any mesh, bit for bit.

        Args:
            abstract_state: the pytree of ``jax.ShapeDtypeStruct`` to fill: global shapes and the
              requested shardings, which may differ from those of the run that saved.
            step: the step of the checkpoint, by default the newest.

        Raises:
            ValueError: there is no such checkpoint, its arrays differ in name, shape or dtype from
              ``abstract_state``, or it cannot be read.
        """
        step = self._saved_step(step)
        with self._reading(step):
            saved = self._manager.item_metadata(step)["state"].tree
        differing = differences(_signatures(saved), _signatures(abstract_state))
        if differing:
            raise ValueError(
                f"{self._path(step)}: holds other arrays than this run's state: "
                f"{_listed(differing)}; resume with the model and optimizer it was saved with"
            )
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract_state),
            data_position=ocp.args.JsonRestore(),
        )
        with self._reading(step):
            restored = self._manager.restore(step, args=items)
        return Restored(step, restored["state"], restored["data_position"])

    def _path(self, step: int) -> Path:
        return self._directory / f"{_PREFIX}_{step}"

    def _saved_step(self, step: int | None) -> int:
        latest = self.latest_step()
        if latest is None:
            raise ValueError(
                f"checkpoint_dir={str(self._directory)!r}: holds no checkpoint; "
                "give the directory of the run to continue"
            )
        steps = self._manager.all_steps()
        if step is not None and step not in steps:
            raise ValueError(
                f"step={step}: not among the checkpoints of {str(self._directory)!r}; "
                f"there are {', '.join(map(str, steps))}"
            )
        return latest if step is None else step

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Turns errors of orbax on damaged files into one sentence."""
        try:
            yield
        except (ValueError, KeyError, OSError) as error:
            reason = textwrap.shorten(str(error), 300)
            raise ValueError(
                f"{self._path(step)}: this checkpoint cannot be read ({reason}); "
                "move it out of the directory to resume from the one before it"
            ) from error


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields of two JSON configurations that differ: dotted name -> (saved, current).

    A field that only one side has is "not set" on the other.
    """
    before = traverse_util.flatten_dict(_as_json(saved), sep=".")
    now = traverse_util.flatten_dict(_as_json(current), sep=".")
    names = list(dict.fromkeys([*before, *now]))
    pairs = {name: (before.get(name, "not set"), now.get(name, "not set")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _listed(differing: Mapping[str, tuple[Any, Any]]) -> str:
    lines = [f"{name} was {saved}, is {now}" for name, (saved, now) in differing.items()]
    more = len(lines) - _DIFFERENCES_SHOWN
    return ", ".join(lines[:_DIFFERENCES_SHOWN]) + (f", and {more} more" if more > 0 else "")


def _as_json(value: Mapping[str, Any]) -> Any:
    """A copy as JSON reads it back. The caller may change the original while orbax writes."""
    return json.loads(json.dumps(value))


def _signatures(tree: Any) -> dict[str, str]:
    """Name -> dtype and shape of each array; orbax names tuple and field entries by key."""
    return {
        ".".join(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in ocp.tree.to_flat_dict(tree).items()
    }


def _open_directory(directory: str | Path) -> Path:
    if not str(directory):
        raise ValueError("checkpoint_dir='': expected the name of a folder; leave it out for none")
    if "://" in str(directory):
        raise ValueError(
            f"checkpoint_dir={str(directory)!r}: expected a folder on a file system, not a URL; "
            "mount the bucket and give the mounted path"
        )
    path = Path(directory).expanduser().resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(path, os.W_OK) else "Permission denied"
    except OSError as error:
        reason = error.strerror
    if reason:
        raise ValueError(
            f"checkpoint_dir={str(directory)!r}: cannot be written ({reason}); "
            "give a directory that can"
        )
    return path


def _check_intent(directory: Path, resume: bool) -> None:
    """Refuses to overwrite files, and to resume without checkpoints."""
    entries = {
        int(match[1]): entry
        for entry in directory.iterdir()
        if (match := re.fullmatch(rf"{_PREFIX}_(0|[1-9]\d*)", entry.name))
    }
    argument = f"checkpoint_dir={str(directory)!r}"
    for entry in entries.values():
        if not _is_checkpoint(entry):
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


def _is_checkpoint(entry: Path) -> bool:
    if not entry.is_dir():
        return False
    contents = {child.name for child in entry.iterdir()}
    return not contents or bool(contents & _CONTENTS)
