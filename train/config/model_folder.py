"""The Hugging Face folder that a run begins with, which says what its model and tokenizer are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from models.checkpoint.saved_checkpoint import differences
from models.families import PRESETS
from models.hugging_face import ModelFolder
from models.hugging_face.writing import ORIGIN
from models.paths import expanded
from train.config.config import Config

#: The preset of a run that names none.
DEFAULT_PRESET = "debug"


def with_model_of(config: Config) -> Config:
    """The configuration with the model and the tokenizer of the Hugging Face folder that the run
    begins with, or that the checkpoint came from that it begins with or goes on from.

    Raises:
      ValueError: the folder is damaged or missing, or flags ask for another model.
    """
    root = model_folder(config)
    begins = _begins(config)
    if root is None:
        _check_exists(config, begins)
        return config
    name = "checkpoint_dir" if config.resume else "init_from"
    try:
        model = ModelFolder.config_of(root)
    except ValueError as error:
        raise ValueError(f"{name}={begins!r}: {error}") from error
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


def _check_exists(config: Config, begins: str | None) -> None:
    """Refuses to begin with what is not here, unless a preset says what its model is."""
    if begins is None or config.resume or config.preset != DEFAULT_PRESET:
        return
    if not expanded(begins).exists():
        owner, _, name = begins.partition("/")
        is_of_hub = owner not in ("", ".", "..", "~") and name and "/" not in name
        hub = f"; a model of the hub: hf download {begins} --local-dir FOLDER" if is_of_hub else ""
        raise ValueError(
            f"init_from={begins!r}: does not exist; give a directory of checkpoints, or a Hugging"
            f" Face folder{hub}"
        )


def model_folder(config: Config) -> Path | None:
    """The folder with the config.json that describes the weights that the run begins with or goes
    on from, if there is one."""
    begins = _begins(config)
    if begins is None:
        return None
    path = expanded(begins)
    roots = path, path / ORIGIN, path.parent / ORIGIN
    return next((root for root in roots if ModelFolder.is_one(root)), None)


def model_name(config: Config) -> str:
    """The name of a run's model: that of the folder or the checkpoints that it comes from, or else
    the preset's."""
    root = model_folder(config)
    if root is None:
        return config.preset
    root = (root.parent if root.name == ORIGIN else root).absolute()
    # In Hugging Face's cache: models--OWNER--NAME/snapshots/COMMIT.
    in_cache = root.parent.name == "snapshots"
    return root.parent.parent.name.rpartition("--")[2] if in_cache else root.name


def _begins(config: Config) -> str | None:
    return config.checkpoint_dir if config.resume else config.init_from
