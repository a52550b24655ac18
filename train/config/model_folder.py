"""The Hugging Face folder that a run begins with, which says what its model and tokenizer are, or
the config.json that says what its model is."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from models.checkpoint.saved_checkpoint import SavedCheckpoint, differences, find_checkpoint
from models.config import LlamaConfig, config_from_json
from models.families import PRESETS
from models.hugging_face import ModelFolder
from models.hugging_face.files import open_regular
from models.hugging_face.folder import CONFIG
from models.hugging_face.writing import ORIGIN
from models.paths import expanded
from train.config.config import Config

#: The preset of a run that names none.
DEFAULT_PRESET = "debug"
#: What ``--config`` may name.
NAMED = (
    "a file that --print-config wrote, or a Hugging Face config.json with its model_type, or its"
    " folder"
)
#: What ``--init-from`` may name.
WEIGHTS = "a directory of checkpoints, one step_N in it, or a Hugging Face folder"


def with_model_of(config: Config) -> Config:
    """The configuration with the model and the tokenizer of the Hugging Face folder that the run
    begins with, or that the checkpoint came from that it begins with or goes on from.

    Raises:
      ValueError: the folder is damaged or missing, or flags ask for another model.
    """
    root, begins = model_folder(config), _begins(config)
    with _naming_begin(config):
        if begins is not None and not config.resume and not ModelFolder.is_one(begins):
            find_checkpoint(begins, WEIGHTS)
        if root is None:
            return config
        model = ModelFolder.config_of(root)
    # What is not from a command line has the preset's model where it asks for none.
    if not is_model_of_preset(config):
        check_asked_model(config, model)
    padded = dataclasses.replace(model, padded_vocabulary_size=config.model.padded_vocabulary_size)
    # The file may be a link; what belongs to it is beside the link.
    tokenizer = root.resolve() / "tokenizer.json"
    if config.tokenizer is None and tokenizer.is_file():
        config = dataclasses.replace(config, tokenizer=str(tokenizer))
    return dataclasses.replace(config, model=padded)


def described_model(config: Config) -> LlamaConfig | None:
    """The model of the Hugging Face folder, or of the checkpoint of the same preset, that a run
    begins with, goes on from or evaluates, if there is one that can be read."""
    config = _with_evaluated(config)
    root = model_folder(config)
    with suppress(ValueError, ImportError):  # The preparation of the run says what is wrong.
        if root is not None:
            return ModelFolder.config_of(root)
        saved = first_configuration(config)
        if saved.get("preset") == config.preset:
            return _unpadded(config_from_json(saved["model"]))
    return None


def first_checkpoint(config: Config) -> SavedCheckpoint:
    """The checkpoint that a run begins with or goes on from.

    Raises:
      ValueError: there is none.
    """
    step = f"/step_{config.resume_step}" if config.resume and config.resume_step is not None else ""
    return find_checkpoint(f"{_begins(config)}{step}")


def first_configuration(config: Config) -> Mapping[str, Any]:
    """The configuration of the checkpoint that a run begins with or goes on from; empty if there is
    none that can be read."""
    if _begins(config) is not None:
        with suppress(ValueError):  # The opening of the checkpoint says what is wrong with it.
            return first_checkpoint(config).configuration()
    return {}


def _with_evaluated(config: Config) -> Config:
    """The configuration, with the checkpoint that it evaluates as the one that it begins with."""
    if config.eval_only and config.init_from is None:
        return dataclasses.replace(config, init_from=config.checkpoint_dir)
    return config


def is_model_of_preset(config: Config) -> bool:
    """Whether neither a file nor flags have changed the model of the preset."""
    return _unpadded(config.model) == PRESETS[config.preset]()


def check_asked_model(config: Config, model: LlamaConfig) -> None:
    """Checks that a configuration, whose defaults are those of its folder's model, asks for it.

    Raises:
      ValueError: flags or a file ask for another model.
    """
    asked = _unpadded(config.model)
    if asked == model or model_folder(_with_evaluated(config)) is None:
        return  # The opening of a checkpoint compares its model.
    differing = differences(dataclasses.asdict(model), dataclasses.asdict(asked))
    listed = ", ".join(f"model.{field}={now}, not {was}" for field, (was, now) in differing.items())
    leave_out = "--model flags" if config.config is None else "--config, or --model flags"
    with _naming_begin(config):
        raise ValueError(
            f"its model is another one: {listed}; leave out {leave_out}, since its config.json says"
            " what the model is"
        )


def _unpadded(model: LlamaConfig) -> LlamaConfig:
    return dataclasses.replace(model, padded_vocabulary_size=None)


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


@functools.cache
def read_object(path: str) -> Mapping[str, Any]:
    """The JSON object that ``--config`` names, as it was when it was first read: a run goes by the
    file that it began with, whatever becomes of it. Parsing a command line reads it anew.

    Raises:
      ValueError: the file cannot be read, or has none.
    """
    file = described_file(path)
    if file != expanded(path):
        if not os.path.lexists(file):
            raise ValueError(
                f"config={path!r}: is a folder without {file.name}; give {NAMED}; a folder of"
                " checkpoints is for --init-from, or for --checkpoint-dir with --resume"
            )
        path = str(file)
    try:
        with open_regular(file) as opened:
            text = opened.read().decode("utf-8-sig")
        values = json.loads(text)
    except OSError as error:
        raise ValueError(
            f"config={path!r}: cannot be read ({error.strerror or error}); give {NAMED}"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(
            f"config={path!r}: is a binary file, or not in UTF-8; give {NAMED}"
        ) from None
    except (ValueError, RecursionError) as error:
        found = f"is not JSON ({error})" if text.strip() else "is empty"
        raise ValueError(f"config={path!r}: {found}; give {NAMED}") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"config={path!r}: expected a JSON object with the names of flags, as --print-config"
            f" writes it, found {type(values).__name__}; give {NAMED}"
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


def described_file(path: str) -> Path:
    """The file that ``--config`` names: of a folder its config.json."""
    place = expanded(path)
    return place / CONFIG if place.is_dir() else place


def unread_weights(config: Config) -> str | None:
    """The folder that has the weights of the model that ``--config`` describes, if the run begins
    with random ones in their place."""
    if config.config is None or _begins(config) is not None:
        return None
    file = described_file(config.config)
    is_described = file.name == CONFIG and ModelFolder.has_weights(file.parent)
    return str(file.parent) if is_described else None


def model_name(config: Config) -> str:
    """The name of a run's model: that of the folder or the checkpoints that it comes from, or of
    the file that describes it, or else the preset's."""
    root = model_folder(config)
    if root is not None:
        return _name_of_folder(root.parent if root.name == ORIGIN else root)
    if config.config is None or is_model_of_preset(config):
        return config.preset
    file = described_file(config.config)
    return _name_of_folder(file.parent) if file.name == CONFIG else file.stem


def _name_of_folder(folder: Path) -> str:
    folder = folder.absolute()
    # In Hugging Face's cache: models--OWNER--NAME/snapshots/COMMIT.
    in_cache = folder.parent.name == "snapshots"
    return folder.parent.parent.name.rpartition("--")[2] if in_cache else folder.name


def _naming_begin(config: Config) -> AbstractContextManager[None]:
    """Lets errors about the weights that a run begins with, or goes on from, name their field."""
    if config.resume or config.init_from is None:
        return naming("checkpoint_dir", config.checkpoint_dir)
    return naming("init_from", config.init_from)


def _begins(config: Config) -> str | None:
    return config.checkpoint_dir if config.resume else config.init_from
