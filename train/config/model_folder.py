"""The Hugging Face folder that a run begins with, which says what its model and tokenizer are, or
the config.json that says what its model is."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models.checkpoint.saved_checkpoint import differences, find_checkpoint
from models.families import PRESETS
from models.hugging_face import ModelFolder
from models.hugging_face.folder import CONFIG
from models.hugging_face.writing import ORIGIN
from models.paths import expanded
from train.config.config import Config

#: The preset of a run that names none.
DEFAULT_PRESET = "debug"
#: What ``--init-from`` may name.
WEIGHTS = "a directory of checkpoints, one step_N in it, or a Hugging Face folder"


def with_model_of(config: Config) -> Config:
    """The configuration with the model and the tokenizer of the Hugging Face folder that the run
    begins with, or that the checkpoint came from that it begins with or goes on from.

    Raises:
      ValueError: the folder is damaged or missing, or flags ask for another model.
    """
    root, begins = model_folder(config), _begins(config)
    name = "checkpoint_dir" if config.resume else "init_from"
    with naming(name, begins):
        if begins is not None and not config.resume and not ModelFolder.is_one(begins):
            find_checkpoint(begins, WEIGHTS)
        if root is None:
            return config
        model = ModelFolder.config_of(root)
    asked = dataclasses.replace(config.model, padded_vocabulary_size=None)
    preset = PRESETS[config.preset]()
    if asked not in (model, preset):
        changed = dataclasses.asdict(asked)
        flags = differences(dataclasses.asdict(preset), changed)
        differing = differences(dataclasses.asdict(model), changed)
        listed = ", ".join(
            f"model.{field}={now}, not {was}"
            for field, (was, now) in differing.items()
            if field in flags
        )
        raise ValueError(
            f"{name}={begins!r}: its model is another one: {listed}; leave out --model flags, since"
            " config.json says what the model is"
        )
    padded = dataclasses.replace(model, padded_vocabulary_size=config.model.padded_vocabulary_size)
    # The file may be a link; what belongs to it is beside the link.
    tokenizer = root.resolve() / "tokenizer.json"
    if config.tokenizer is None and tokenizer.is_file():
        config = dataclasses.replace(config, tokenizer=str(tokenizer))
    return dataclasses.replace(config, model=padded)


@contextmanager
def naming(name: str, path: str | None) -> Iterator[None]:
    """Lets errors about a path begin with the field that has it."""
    try:
        yield
    except ValueError as error:
        sentence = str(error).removeprefix(f"{path!r}: ")
        raise ValueError(f"{name}={path!r}: {sentence}") from error


def model_folder(config: Config) -> Path | None:
    """The folder with the config.json that describes the weights that the run begins with or goes
    on from, if there is one."""
    begins = _begins(config)
    if begins is None:
        return None
    path = expanded(begins)
    roots = path, path / ORIGIN, path.parent / ORIGIN
    return next((root for root in roots if ModelFolder.is_one(root)), None)


def is_model_file(config: Config) -> bool:
    """Whether the configuration file of a run is a Hugging Face config.json, which has the model
    alone."""
    return config.config is not None and describes_model(read_object(config.config))


def describes_model(values: Mapping[str, Any]) -> bool:
    """Whether the object in a file is that of a Hugging Face config.json."""
    return bool({"model_type", "architectures"} & set(values))


def read_object(path: str) -> dict[str, Any]:
    """The JSON object in a configuration file.

    Raises:
      ValueError: the file cannot be read, or has none.
    """
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except OSError as error:
        raise ValueError(
            f"config={path!r}: cannot be read ({error.strerror}); give a file that"
            " --print-config wrote"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"config={path!r}: is not JSON ({error}); give a file that --print-config wrote"
        ) from None
    if not isinstance(values, dict):
        raise ValueError(
            f"config={path!r}: expected a JSON object with the names of flags, as --print-config"
            f" writes it, found {type(values).__name__}"
        )
    return values


def without_weights(config: Config) -> str | None:
    """The advice for a run that begins with a folder that describes a model and has no weights;
    None for any other run."""
    begins = config.init_from
    if begins is None or config.resume or not ModelFolder.is_one(begins):
        return None
    if ModelFolder.has_weights(begins):
        return None
    file = shlex.quote(str(expanded(begins) / CONFIG))
    return f"to train its model from random weights, give --config {file} in place of --init-from"


def model_name(config: Config) -> str:
    """The name of a run's model: that of the folder or the checkpoints that it comes from, or of
    the file that describes it, or else the preset's."""
    root = model_folder(config)
    if root is not None:
        return _name_of_folder(root.parent if root.name == ORIGIN else root)
    model = dataclasses.replace(config.model, padded_vocabulary_size=None)
    if config.config is None or model == PRESETS[config.preset]():
        return config.preset
    file = expanded(config.config)
    return _name_of_folder(file.parent) if file.name == CONFIG else file.stem


def _name_of_folder(folder: Path) -> str:
    folder = folder.absolute()
    # In Hugging Face's cache: models--OWNER--NAME/snapshots/COMMIT.
    in_cache = folder.parent.name == "snapshots"
    return folder.parent.parent.name.rpartition("--")[2] if in_cache else folder.name


def _begins(config: Config) -> str | None:
    return config.checkpoint_dir if config.resume else config.init_from
