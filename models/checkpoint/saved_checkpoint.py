"""One complete checkpoint on disk: the folder ``step_N``, read and verified.

Reading needs no lock and changes no file, so a checkpoint of a run that still trains can be read.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from flax import traverse_util

from models.checkpoint.checksums import checksums, json_checksum
from models.checkpoint.earlier_releases import trained_configuration
from models.checkpoint.layer_layout import move_layout, other_layout, same_layout
from models.paths import check_folder, expanded

PREFIX = "step"
JSON_ITEMS = ("data_position", "configuration")
CHECKSUMS = "checksums"
#: The field of a configuration that says how long texts may be.
CONTEXT_LENGTH = "model.context_length"
# A folder without any of these is not a checkpoint. If orbax was killed while it deleted a
# checkpoint, some of them are missing.
_ITEMS = ("state", *JSON_ITEMS, "_CHECKPOINT_METADATA")
_CONTENTS = {*_ITEMS, CHECKSUMS, "commit_success.txt"}
_SHOWN = 8


class Restored(NamedTuple):
    """The contents of a checkpoint."""

    step: int
    """Number of optimizer steps before it was saved."""
    state: Any
    """The train state: a pytree of global arrays, sharded as requested."""
    data_position: dict[str, Any]
    """The state of the data iterator, for its ``set_state``."""
    verified: bool
    """Whether checksums were compared. Earlier releases saved none."""


class SavedCheckpoint:
    """The checkpoint of one step, for reading."""

    #: `restore_params` reads all parameters.
    reads_parts = False

    def __init__(self, path: Path) -> None:
        """Opens nothing yet.

        Args:
            path: the folder ``step_N``.
        """
        report_errors_once()
        self.path = path
        self.step = int(path.name.removeprefix(f"{PREFIX}_"))

    def configuration(self) -> dict[str, Any]:
        """The configuration that was saved.

        Fields and values that an earlier release named otherwise have their current names.

        Raises:
            ValueError: it cannot be read, or differs from what was saved.
        """
        return trained_configuration(self._json_item("configuration"))

    def check_same_model(
        self,
        configuration: Mapping[str, Any],
        advice: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> None:
        """Compares the ``"model"`` part of a configuration with the saved one.

        Args:
            configuration: the configuration.
            advice: what to do, for the saved values of the fields that differ, by dotted name;
              default: that of a run that resumes.

        Raises:
            ValueError: they differ; the message lists the fields with both values.
        """
        saved = self.configuration().get("model", {})
        differing = differences({"model": saved}, {"model": configuration.get("model", {})})
        differing.pop(CONTEXT_LENGTH, None)  # It limits prompts, and no number depends on it.
        if differing:
            advised = "resume with the model it was saved with, or give another directory"
            if advice is not None:
                advised = advice({name: was for name, (was, _) in differing.items()})
            raise ValueError(
                f"{self.path}: a checkpoint from another model: {_listed(differing)}; {advised}"
            )

    def restore(self, abstract_state: Any) -> Restored:
        """Reads everything onto any mesh and into any layout of layers, bit for bit, and verifies
        it.

        Args:
            abstract_state: the pytree of ``jax.ShapeDtypeStruct`` to fill: global shapes and the
              requested shardings, which may differ from those of the run that saved.

        Raises:
            ValueError: its arrays differ in name, shape or dtype from ``abstract_state``, it cannot
              be read, or its contents differ from what was saved.
        """
        state = self._arrays(abstract_state, self._saved_signatures())
        return Restored(
            self.step, state, self._json_item("data_position"), self._saved_checksums() is not None
        )

    def restore_params(self, abstract_params: Any) -> Any:
        """Reads and verifies the parameters alone, onto any mesh.

        Args:
            abstract_params: the pytree of ``jax.ShapeDtypeStruct`` to fill, as it is in the state
              under "params": global shapes and the requested shardings.

        Raises:
            ValueError: as ``restore``, for the parameters.
        """
        return self._arrays({"params": abstract_params}, self._saved_params())["params"]

    def check_params(self, abstract_params: Any) -> None:
        """Compares names, shapes and dtypes of the parameters with those that are saved.

        Raises:
            ValueError: they differ, or cannot be read.
        """
        saved = self._saved_params()
        self._check_signatures(saved, _in_layout_of(saved, {"params": abstract_params}))

    def params_dtype(self) -> str:
        """The dtype of the saved parameters.

        Raises:
            ValueError: they cannot be read.
        """
        return next(iter(self._saved_params().values())).partition("[")[0]

    def _saved_params(self) -> dict[str, str]:
        signatures = self._saved_signatures().items()
        return {name: value for name, value in signatures if name.startswith("params.")}

    def _saved_signatures(self) -> dict[str, str]:
        path = self.path / "state"
        with self._reading(path), _reader() as reader:
            return _signatures(reader.metadata(path).tree)

    def _check_signatures(self, saved: Mapping[str, str], abstract: Any) -> None:
        differing = differences(saved, _signatures(abstract))
        if differing:
            raise ValueError(
                f"{self.path}: holds other arrays than this run's state: {_listed(differing)}; "
                "use the model and optimizer it was saved with"
            )

    def _arrays(self, requested: Any, saved_signatures: Mapping[str, str]) -> Any:
        """The arrays of a part of the state, verified."""
        abstract = _in_layout_of(saved_signatures, requested)
        self._check_signatures(saved_signatures, abstract)
        arguments = ocp.args.PyTreeRestore(
            item=abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )
        path = self.path / "state"
        with self._reading(path), _reader() as reader:
            arrays = reader.restore(path, args=arguments)
        saved = self._saved_checksums()
        if saved is not None:
            actual = named_checksums(arrays)
            damaged = [name for name in actual if actual[name] != saved["arrays"].get(name)]
            if damaged:
                raise self._damaged(
                    f"{', '.join(damaged[:_SHOWN])}{' ...' * (len(damaged) > _SHOWN)} in"
                    f" {path} {'is' if len(damaged) == 1 else 'are'} not what was"
                    " saved: the checksum differs"
                )
        return arrays if abstract is requested else move_layout(arrays, requested)

    def _json_item(self, name: str) -> dict[str, Any]:
        path = self.path / name / "metadata"
        with self._reading(path):
            value = json.loads(path.read_text(encoding="utf-8"))
        saved = self._saved_checksums()
        if saved is not None and json_checksum(value) != saved[name]:
            raise self._damaged(f"{path} is not what was saved: the checksum differs")
        return value

    def _saved_checksums(self) -> dict[str, Any] | None:
        """None for a checkpoint of an earlier release, which has no checksums."""
        path = self.path / CHECKSUMS / "metadata"
        if not path.parent.exists():
            return None
        with self._reading(path):
            saved = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(saved, dict) or not isinstance(saved.get("arrays"), dict):
                raise ValueError("it holds no checksums")
            return {"data_position": None, "configuration": None, **saved}

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        """Turns errors on damaged files into one sentence."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # Memory that does not suffice is no damage.
        except Exception as error:
            raise self._damaged(
                f"{path} cannot be read ({failure_reason(error) or type(error).__name__})"
            ) from error

    def _damaged(self, reason: str) -> ValueError:
        earlier = [step for step in whole_steps(self.path.parent) if step < self.step]
        advice = (
            f"use an earlier one, as in --resume-step {earlier[-1]}"
            if earlier
            else "there is no earlier one beside it"
        )
        return ValueError(f"{self.path}: this checkpoint is damaged: {reason}; {advice}")


def find_checkpoint(
    path: str | Path, expected: str = "a directory of checkpoints, or one step_N in it"
) -> SavedCheckpoint:
    """The checkpoint that a path names: a folder ``step_N``, or the newest in a directory of them.

    Args:
        path: the path.
        expected: what may be given, for the error message.

    Raises:
        ValueError: there is none.
    """
    # `Path.resolve` raises RuntimeError for a circle of links.
    folder = Path(os.path.realpath(expanded(path)))
    steps = whole_steps(folder)
    if _step_of(folder.name) is not None:
        if _is_whole(folder):
            return SavedCheckpoint(folder)
        beside = whole_steps(folder.parent)
        if beside and not steps:
            raise ValueError(
                f"{str(path)!r}: is no checkpoint; {str(folder.parent)!r} has those of the steps"
                f" {', '.join(map(str, beside))}; give one of them, or the directory for the newest"
            )
    check_folder(path, expected)
    if not steps:
        raise ValueError(f"{str(path)!r}: holds no checkpoint; give {expected}")
    return SavedCheckpoint(folder / f"{PREFIX}_{steps[-1]}")


def step_folders(directory: Path) -> dict[int, Path]:
    """Step -> path of every file or folder that is named as a checkpoint, in order."""
    if not directory.is_dir():
        return {}
    found = ((_step_of(entry.name), entry) for entry in directory.iterdir())
    return dict(sorted((step, entry) for step, entry in found if step is not None))


def whole_steps(directory: Path) -> list[int]:
    """The steps of the checkpoints in a directory whose saves were completed, in order."""
    return [step for step, path in step_folders(directory).items() if _is_whole(path)]


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, or the remains of one that was being deleted."""
    if not path.is_dir():
        return False
    contents = {child.name for child in path.iterdir()}
    return not contents or bool(contents & _CONTENTS)


def named_checksums(tree: Any) -> dict[str, str]:
    """Name -> checksum of each array of a pytree. Names are those of `differences`."""
    return checksums({".".join(path): leaf for path, leaf in ocp.tree.to_flat_dict(tree).items()})


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields of two JSON configurations that differ: dotted name -> (saved, current).

    A field that only one side has is "not set" on the other.
    """
    before = traverse_util.flatten_dict(as_json(saved), sep=".")
    now = traverse_util.flatten_dict(as_json(current), sep=".")
    names = list(dict.fromkeys([*before, *now]))
    pairs = {name: (before.get(name, "not set"), now.get(name, "not set")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def as_json(value: Mapping[str, Any]) -> Any:
    """A copy as JSON reads it back. The caller may change the original while orbax writes."""
    return json.loads(json.dumps(value))


def _step_of(name: str) -> int | None:
    match = re.fullmatch(rf"{PREFIX}_(0|[1-9]\d*)", name)
    return int(match[1]) if match else None


def _is_whole(path: Path) -> bool:
    return all((path / name).exists() for name in _ITEMS)


def _listed(differing: Mapping[str, tuple[Any, Any]]) -> str:
    lines = [f"{name} was {saved}, is {now}" for name, (saved, now) in differing.items()]
    more = len(lines) - _SHOWN
    return ", ".join(lines[:_SHOWN]) + (f", and {more} more" if more > 0 else "")


def _in_layout_of(saved: Mapping[str, str], abstract: Any) -> Any:
    """A state in the layout of layers that saved arrays have, or itself."""
    return abstract if same_layout(saved, _signatures(abstract)) else other_layout(abstract)


def _signatures(tree: Any) -> dict[str, str]:
    """Name -> dtype and shape of each array; orbax names tuple and field entries by key."""
    return {
        ".".join(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in ocp.tree.to_flat_dict(tree).items()
    }


def failure_reason(error: BaseException) -> str:
    """Describes an error of the operating system, orbax or TensorStore, without source locations.

    The beginning of a long text names the file, and its end says what happened.
    """
    text = re.sub(r"\s*\[(source locations|tensorstore_spec)=.*", "", str(error), flags=re.DOTALL)
    text = " ".join(re.sub(r"\s*\[\w+='[^']*'\]", "", text).split())
    return text if len(text) <= 300 else f"{text[:150]} [...] {text[-145:]}"


@functools.cache
def report_errors_once() -> None:
    """Keeps orbax and TensorStore from printing the traces of errors that they also raise."""

    def is_news(record: logging.LogRecord) -> bool:
        return record.exc_info is None or "orbax" not in record.pathname + record.getMessage()

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_news)
    print_unraisable = sys.unraisablehook

    def print_news(unraisable: Any) -> None:
        # After the first write that fails, TensorStore reports the others to a loop that has ended.
        if str(unraisable.exc_value) != "Event loop is closed":
            print_unraisable(unraisable)

    sys.unraisablehook = print_news


@contextmanager
def _reader() -> Iterator[Any]:
    reader = ocp.PyTreeCheckpointHandler()
    try:
        yield reader
    finally:
        reader.close()
