"""Where the weights of a run begin: a checkpoint, or a folder of Hugging Face's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax

from models.checkpoint.saved_checkpoint import find_checkpoint
from models.hugging_face import ModelFolder, load
from train.config.model_folder import WEIGHTS


class InitialWeights(Protocol):
    """The parameters that a run may begin with. `SavedCheckpoint` is one."""

    path: Path
    #: Whether `restore_params` may be called for some of the parameters.
    reads_parts: bool

    def configuration(self) -> dict[str, Any]:
        """The configuration that they were trained with, as far as it is known."""
        ...

    def check_params(self, abstract_params: Mapping[str, Any]) -> None:
        """Raises ValueError unless there are parameters of these names and shapes."""
        ...

    def restore_params(self, abstract_params: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The parameters, on any mesh."""
        ...


class _FolderWeights:
    """The weights of a Hugging Face folder, whose headers are read and checked."""

    reads_parts = True

    def __init__(self, path: str):
        self._folder = ModelFolder(path)
        self.path = self._folder.path

    def configuration(self) -> dict[str, Any]:
        model = dataclasses.asdict(self._folder.config)
        return {"model": model, "tokenizer": str(self.path / "tokenizer.json")}

    def check_params(self, abstract_params: Mapping[str, Any]) -> None:
        """The model of the run was made from this folder's config.json: see `with_model_of`."""

    def restore_params(self, abstract_params: Mapping[str, Any]) -> dict[str, jax.Array]:
        return load(self._folder, abstract_params)


def find_weights(path: str) -> InitialWeights:
    """The weights that ``--init-from`` names.

    Raises:
      ValueError: there are none, or they are damaged.
    """
    return _FolderWeights(path) if ModelFolder.is_one(path) else find_checkpoint(path, WEIGHTS)
