"""The parts of a checkpoint, as orbax writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from models.checkpoint.checksums import json_checksum
from models.checkpoint.saved_checkpoint import (
    CHECKSUMS,
    JSON_ITEMS,
    PREFIX,
    as_json,
    named_checksums,
)

# Orbax gives up after 20 minutes, in which a slow disk takes 1 TB at most.
_SAVE_TIMEOUT_SECONDS = 24 * 3600


def make_manager(directory: Path, max_to_keep: int) -> ocp.CheckpointManager:
    """Orbax's manager of the folders ``step_N`` in a directory."""
    handlers = ocp.handlers.create_default_handler_registry(
        state=ocp.StandardCheckpointHandler(),
        **{name: ocp.JsonCheckpointHandler() for name in (*JSON_ITEMS, CHECKSUMS)},
    )
    options = ocp.CheckpointManagerOptions(
        step_prefix=PREFIX,
        preservation_policy=checkpoint_managers.LatestN(max_to_keep),
        cleanup_tmp_directories=True,
        async_options=ocp.AsyncOptions(
            # Where a thread makes the folders, the threads that write wait for it for 20 minutes
            # if it fails.
            create_directories_asynchronously=False,
            timeout_secs=_SAVE_TIMEOUT_SECONDS,
        ),
    )
    return ocp.CheckpointManager(directory, options=options, handler_registry=handlers)


def json_items(
    data_position: Mapping[str, Any], configuration: Mapping[str, Any]
) -> dict[str, Any]:
    """The items of a checkpoint beside its arrays.

    Raises:
      TypeError: one of them is not JSON.
    """
    return {"data_position": as_json(data_position), "configuration": as_json(configuration)}


def contents(state: Any, items: Mapping[str, Any]) -> ocp.args.Composite:
    """A state and its JSON items with their checksums, as a manager saves them."""
    checksums = {
        "arrays": named_checksums(state),
        **{name: json_checksum(item) for name, item in items.items()},
    }
    texts = {**items, CHECKSUMS: checksums}
    saves = {name: ocp.args.JsonSave(text) for name, text in texts.items()}
    return ocp.args.Composite(state=ocp.args.StandardSave(state), **saves)


def save_params(
    directory: Path, params: Mapping[str, Any], configuration: Mapping[str, Any]
) -> None:
    """Writes ``step_0`` with parameters alone, for runs that begin with them.

    Args:
      directory: an empty folder, or none.
      params: global arrays by name.
      configuration: what a run would save, as far as it is known; JSON.
    """
    directory.mkdir(parents=True, exist_ok=True)
    manager = make_manager(directory, 1)
    try:
        manager.save(0, args=contents({"params": dict(params)}, json_items({}, configuration)))
        manager.wait_until_finished()
    finally:
        manager.close()
