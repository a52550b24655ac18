"""Where the weights of a run begin: a checkpoint, or a folder of Hugging Face's."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
from flax import traverse_util

from models.checkpoint.saved_checkpoint import find_checkpoint
from models.hugging_face import ModelFolder, load
from train.config.config import Config
from train.config.config_file import as_argument
from train.config.model_folder import WEIGHTS
from train.config.presets import PRESETS


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

    def check_same_model(
        self,
        configuration: Mapping[str, Any],
        advice: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> None:
        """Raises ValueError, with advice, unless they are those of a configuration's model."""
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

    def check_same_model(
        self,
        configuration: Mapping[str, Any],
        advice: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> None:
        """Does nothing, for the reason of `check_params`."""

    def restore_params(self, abstract_params: Mapping[str, Any]) -> dict[str, jax.Array]:
        return load(self._folder, abstract_params)


def find_weights(path: str) -> InitialWeights:
    """The weights that ``--init-from`` names.

    Raises:
      ValueError: there are none, or they are damaged.
    """
    return _FolderWeights(path) if ModelFolder.is_one(path) else find_checkpoint(path, WEIGHTS)


def check_weights(
    saved: InitialWeights, abstract_params: Mapping[str, Any], config: Config
) -> None:
    """Checks that saved weights have the parameters that a run needs of them.

    Raises:
      ValueError: they have not. If the model is another one, the message lists its settings and the
        flags that ask for it.
    """

    def advice(settings: Mapping[str, Any]) -> str:
        flags = _flags_of(settings, saved.configuration(), config)
        return f"give the model that it was saved with, by {flags}, or weights of this run's model"

    try:
        saved.check_params(abstract_params)
    except ValueError:
        saved.check_same_model(config.to_json(), advice)
        raise


def _flags_of(settings: Mapping[str, Any], saved: Mapping[str, Any], config: Config) -> str:
    """The flags that make the model of a run the saved one: its preset, or single settings."""
    preset = saved.get("preset")
    own = dataclasses.replace(config.model, padded_vocabulary_size=None)
    # Neither flags nor a file have changed the model of the run's own preset.
    if preset in PRESETS and own == PRESETS[config.preset]().model:
        model = {"model": dataclasses.asdict(PRESETS[preset]().model)}
        if settings.items() <= traverse_util.flatten_dict(model, sep=".").items():
            return f"--preset {preset}"
    return shlex.join(as_argument(name, value) for name, value in settings.items())
