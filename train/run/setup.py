"""Preparation of a run: everything that can be refused before anything is compiled."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from models.checkpoint.saved_checkpoint import SavedCheckpoint, differences
from models.hugging_face.chat.template import read_variables
from models.hugging_face.run_tokenizer import keep_tokenizer
from models.hugging_face.writing import keep_origin
from models.parameters.adapters import TARGETS, LoraConfig, Training
from models.paths import expanded
from train.checkpoint.checkpoint import Checkpoints, check_intent
from train.checkpoint.initial_weights import InitialWeights, check_weights, find_weights
from train.config.checks import check, check_optimizer
from train.config.config import Config, MeshSizes
from train.config.counts import counted
from train.config.defaults import saved_configuration
from train.config.model_folder import (
    first_checkpoint,
    first_configuration,
    naming,
    with_model_of,
    without_weights,
)
from train.data.dataset import TextData, open_dataset
from train.data.tokenizer import BYTES, load_tokenizer
from train.log.log_file import check_log_file
from train.log.trackers import check_trackers, new_run_id
from train.optimizer.optimizer import make_optimizer
from train.parallel.mesh import make_mesh
from train.parallel.model import ModelFunctions
from train.plan.mesh_choice import SAVED_SIZES, planned_mesh_sizes
from train.processes.agreement import check_same, together
from train.processes.connection import check_mesh, is_first

#: Bytes of a text that a dry run reads.
_BEGINNING = 2**20
#: Fields that say what text is read, and how.
_OF_TEXT = ("data", "text_column", "tokenizer", "chat", "chat_template_kwargs")
#: What is read where such a field is not set.
_WITHOUT = {"data": "the Python manual", "tokenizer": "bytes"}


@dataclass(frozen=True)
class Setup:
    """A run that is ready to start.

    Attributes:
      config: its configuration.
      mesh: mesh with the axes "data", "fsdp" and "tensor", and "context" where it is needed.
      text: the data.
      held_out: the text to evaluate on, or None.
      began_with: the path of the weights that the run began with; None: random ones.
      init_from: the checkpoint with the initial weights; None for random ones, or if the run
        resumes.
      model: the model.
      optimizer: the optimizer.
      wandb_run_id: the identity of the run at Weights & Biases, or None.
      checkpoints: open checkpoints, to be closed by the owner; None if nothing is saved.
      is_done: whether the checkpoint that the run resumes from has all steps of the run.
    """

    config: Config
    mesh: Mesh
    text: TextData
    held_out: TextData | None
    init_from: InitialWeights | None
    began_with: str | None
    model: ModelFunctions
    optimizer: optax.GradientTransformation
    wandb_run_id: str | None
    checkpoints: Checkpoints | None
    is_done: bool

    @property
    def configuration(self) -> dict[str, Any]:
        """The configuration that is saved with the state."""
        configuration = _configuration(self.config, self.text)
        configuration[SAVED_SIZES] = MeshSizes(**self.mesh.shape)._asdict()
        configuration["init_from"] = self.began_with
        if self.held_out is not None:
            configuration["eval_text"] = _identity(self.held_out)
        if self.wandb_run_id is not None:
            configuration["wandb_run_id"] = self.wandb_run_id
        return configuration


def prepare(config: Config) -> Setup:
    """Opens everything that a run needs.

    Raises:
      ValueError: for settings that do not fit together, and files that cannot be read or would be
        overwritten.
    """
    with together():
        check_same_training(saved_configuration(config), config.to_json())
        config, sizes, mesh = complete(config)
        if is_first():
            check_log_file(config.log_file, config.resume)
            check_trackers(config)
        text = _open_text(config, config.data)
        held_out = open_held_out(config)
        model = ModelFunctions(config, sizes, jax.local_device_count())
        init_from = _open_initial_weights(config, model)
    identity = {**_configuration(config, text), "eval_text": held_out and _identity(held_out)}
    identity[SAVED_SIZES] = sizes._asdict()
    del identity["distributed"]
    check_same("run", identity, "give all of them the same flags and the same files")
    checkpoints = _open_checkpoints(config, text)
    try:
        with together():
            saved = _saved_configuration(config, checkpoints)
            begins = checkpoints is not None and not saved  # Else its folder is there already.
            if begins and is_first():
                _keep_for_exports(config, str(config.checkpoint_dir))
            config = _with_schedule(config, saved)
    except ValueError:
        if checkpoints is not None:
            checkpoints.close()
        raise
    return Setup(
        config=config,
        mesh=mesh,
        text=text,
        held_out=held_out,
        init_from=init_from,
        # A base model that is read again may lie elsewhere now.
        began_with=saved.get("init_from")
        if saved and not model.frozen_params
        else config.init_from,
        model=model,
        optimizer=make_optimizer(config.optimizer, config.steps, model.specs),
        wandb_run_id=(saved.get("wandb_run_id") or new_run_id()) if config.wandb else None,
        checkpoints=checkpoints,
        is_done=checkpoints is not None and checkpoints.latest_step() == config.steps,
    )


def _keep_for_exports(config: Config, directory: str) -> None:
    """Copies into a directory of checkpoints what an export needs beside the weights."""
    if config.init_from is not None:
        keep_origin(config.init_from, directory)
    keep_tokenizer(config.tokenizer, directory)


def complete(config: Config) -> tuple[Config, MeshSizes, Mesh]:
    """The configuration with all that it says of the model, and the mesh that it runs on.

    Raises:
      ValueError: if values do not fit together, or do not fit the devices.
    """
    config = with_model_of(config)
    devices = jax.device_count(), jax.local_device_count()
    sizes = planned_mesh_sizes(config, *devices, jax.devices()[0].device_kind)
    config = with_padding(config, sizes)
    check(config, sizes)
    mesh = make_mesh(sizes)
    check_mesh(mesh, config.distributed.tensor_across_processes)
    return config, sizes, mesh


def with_padding(config: Config, sizes: MeshSizes) -> Config:
    """The configuration with a vocabulary that is padded as in the checkpoint that the run begins
    with, or as the tensor axis needs."""
    model = config.model
    saved = first_configuration(config).get("model", {})
    if (
        model.padded_vocabulary_size is None
        and saved.get("vocabulary_size") == model.vocabulary_size
    ):
        model = dataclasses.replace(model, padded_vocabulary_size=saved["padded_vocabulary_size"])
    return dataclasses.replace(config, model=model.padded_for(sizes.tensor))


def check_inputs(config: Config, model: ModelFunctions) -> None:
    """Checks for a dry run what a run reads and is given by name, as the run does. Of text it reads
    the beginning, and of a folder without weights only what describes its model.

    Args:
      config: the configuration, with all that it says of the model.
      model: its model.

    Raises:
      ValueError: a run would refuse it.
      ImportError: a package that reads it is not installed.
    """
    if config.resume:
        directory = expanded(str(config.checkpoint_dir)).resolve()
        check_intent(directory, config.resume, config.resume_step)
        check_same_training(saved_configuration(config), config.to_json())
        _check_resumable(first_checkpoint(config), config.to_json())
    if config.data is not None:
        _open_text(config, config.data, _BEGINNING)
    else:
        tokenizer = BYTES if config.tokenizer is None else load_tokenizer(config.tokenizer)
        _check_vocabulary(config, tokenizer.vocabulary_size)
    open_held_out(config, _BEGINNING)
    if without_weights(config) is None:
        _open_initial_weights(config, model)


def _open_text(config: Config, data: str | None, most_bytes: int | None = None) -> TextData:
    text = open_dataset(
        data,
        config.tokenizer,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        seed=config.seed,
        text_column=config.text_column,
        separate_documents=config.separate_documents,
        chat=config.chat,
        chat_variables=read_variables(config.chat_template_kwargs),
        most_bytes=most_bytes,
    )
    _check_vocabulary(config, text.vocabulary_size)
    return text


def _check_vocabulary(config: Config, tokens: int) -> None:
    """Raises ValueError if a tokenizer has more tokens than the model."""
    if tokens <= config.model.vocabulary_size:
        return
    if config.tokenizer is None:
        needed = f"{tokens}, since without tokenizer each byte of the text is a token"
    else:
        needed = f"the {tokens} tokens of tokenizer={config.tokenizer!r}"
    if config.init_from is None and not config.resume:
        fix = f"--model.vocabulary-size {tokens} or more, or --tokenizer FILE with fewer tokens"
    else:
        fix = "--tokenizer FILE with the tokenizer of these weights"
    raise ValueError(
        f"model.vocabulary_size={config.model.vocabulary_size}: expected at least {needed};"
        f" give {fix}"
    )


def open_held_out(config: Config, most_bytes: int | None = None) -> TextData | None:
    """The text to evaluate on, or `most_bytes` of it, or None.

    Raises:
      ValueError: it cannot be read.
    """
    if config.eval_data is None:
        return None
    try:
        return _open_text(config, config.eval_data, most_bytes)
    except ValueError as error:
        raise ValueError(f"eval_data: {error}") from error


def _open_initial_weights(config: Config, model: ModelFunctions) -> InitialWeights | None:
    """The weights to begin with, or None for random ones and for a resumed run.

    Raises:
      ValueError: it is not a checkpoint, or its model has other shapes.
    """
    if config.init_from is None or (config.resume and not model.freezes):
        return None
    with naming("init_from", config.init_from):
        try:
            saved = find_weights(config.init_from)
        except ValueError as error:
            advice = without_weights(config)
            if advice is None:
                raise
            raise ValueError(f"{error}; {advice}") from error
        check_weights(saved, model.base_params, config)
    return saved


def _saved_configuration(config: Config, checkpoints: Checkpoints | None) -> dict[str, Any]:
    """The configuration of the checkpoint that the run resumes from; empty if it does not."""
    return {} if checkpoints is None or not config.resume else checkpoints.configuration()


def _with_schedule(config: Config, saved: Mapping[str, Any]) -> Config:
    """The configuration with a length of the schedule. A resumed run keeps that of its checkpoint
    unless it names one, so that more steps do not raise the learning rate again."""
    optimizer = config.optimizer
    if optimizer.decay_steps is None:
        decay_steps = saved.get("optimizer", {}).get("decay_steps")
        optimizer = dataclasses.replace(optimizer, decay_steps=decay_steps)
    optimizer = optimizer.with_schedule_of(config.steps)
    check_optimizer(optimizer)
    return dataclasses.replace(config, optimizer=optimizer)


def _configuration(config: Config, text: TextData) -> dict[str, Any]:
    return {**config.to_json(), "text": _identity(text)}


def _identity(text: TextData) -> dict[str, Any]:
    return {"sha256": text.sha256, "token_count": text.token_count}


def _open_checkpoints(config: Config, text: TextData) -> Checkpoints | None:
    if config.checkpoint_dir is None:
        return None
    checkpoints = Checkpoints(
        config.checkpoint_dir,
        resume=config.resume,
        resume_step=config.resume_step,
        max_to_keep=config.max_to_keep,
        save_interval=config.save_interval,
    )
    if config.resume:
        try:
            with together():
                _check_resumable(checkpoints.newest(), _configuration(config, text))
        except ValueError:
            checkpoints.close()
            raise
    return checkpoints


def check_same_optimizer(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares the kinds of optimizer of two configurations, the saved one and the run's.

    Raises:
      ValueError: they differ.
    """
    was, kind = (values.get("optimizer", {}).get("kind", "adamw") for values in (saved, now))
    if was != kind:
        raise ValueError(
            f"optimizer.kind={kind!r}: the checkpoint has the state of {was}, with which {kind}"
            f" cannot continue; resume with --optimizer.kind {was}, or begin a new run with the"
            " checkpoint's weights: --init-from CHECKPOINT in place of --resume"
        )


def training_of(saved: Mapping[str, Any]) -> Training:
    """The adapters of a saved configuration, and what was frozen by name."""
    return Training(LoraConfig(**saved.get("lora", {})), saved.get("freeze", ""))


def check_same_training(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares what two configurations train, the saved one and the run's: what has adapters of
    which rank, what is frozen, and whether the weights are named beside which it trains.

    Args:
      saved: of the checkpoint that the run resumes from; empty if it does not.
      now: of the run.

    Raises:
      ValueError: they differ.
    """
    if not saved:
        return
    was, asked = (_trained(training_of(each)) for each in (saved, now))
    changed = {name: asked[name] for name in was if was[name] != asked[name]}
    is_missing = training_of(saved).freezes and now["init_from"] is None
    base = saved.get("init_from") if is_missing else None
    resume = [
        f"without --{name}" if not was[name] else f"with --{name} {shlex.quote(str(was[name]))}"
        for name in changed
    ]
    resume += [] if base is None else [f"with --init-from {shlex.quote(base)}"]
    if not resume:
        return
    flags = ", ".join(resume)
    if not changed:
        raise ValueError(
            "init_from: expected the weights that the run began with, since the checkpoint has only"
            f" what was trained beside them; resume {flags}, or where they are now"
        )
    listed = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    raise ValueError(
        f"{listed}: the checkpoint has the state of a run that trained other parameters; resume"
        f" {flags}, or begin a new run in another --checkpoint-dir"
    )


def _trained(training: Training) -> dict[str, Any]:
    """The settings that say which parameters are trained; those of adapters only with some."""
    lora, names = training.lora, ("lora.rank", "lora.targets", "lora.train", "freeze")
    if lora.rank is None:
        return dict(zip(names, (None, None, "", training.freeze), strict=True))
    targets = None if lora.layers == TARGETS else ",".join(lora.layers)
    return dict(zip(names, (lora.rank, targets, lora.train, ""), strict=True))


def _check_resumable(checkpoint: SavedCheckpoint, now: Mapping[str, Any]) -> None:
    """Checks that a checkpoint has the model, the kind of optimizer and the data of a
    configuration, which may lack the identity of the text, and not more steps.

    Raises:
      ValueError: if it has not.
    """
    checkpoint.check_same_model(now)
    saved = checkpoint.configuration()
    check_same_optimizer(saved, now)
    _check_same_data(saved, now)
    if checkpoint.step > now["steps"]:
        raise ValueError(
            f"steps={now['steps']}: the checkpoint already has {counted(checkpoint.step, 'step')};"
            " give --steps a larger number to continue"
        )


def _check_same_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares the sequences of two configurations, the saved one and the run's, which may lack the
    identity of the text: the position in them is a number, which is meaningless for others.

    Raises:
      ValueError: they differ.
    """
    text, other = saved["text"], now.get("text", saved["text"])
    names = (*(_OF_TEXT if text != other else ()), "sequence_length", "seed")
    changed = differences(*({name: each[name] for name in names} for each in (saved, now)))
    listed = [
        f"{name} was {_named(name, was)}, is {_named(name, new)}"
        for name, (was, new) in changed.items()
    ]
    if text != other and not listed:
        was, new = (
            f"{each['token_count']:,} tokens with sha256 {each['sha256'][:12]}"
            for each in (text, other)
        )
        listed = [f"data={_named('data', now['data'])} had {was}, and has {new}"]
    if listed:
        raise ValueError(
            f"resume: the checkpoint was trained on other data: {'; '.join(listed)}; give the data,"
            " tokenizer, sequence length and seed that it was trained with, or begin a new run with"
            " its weights: --init-from CHECKPOINT in place of --resume"
        )


def _named(name: str, value: Any) -> str:
    return _WITHOUT.get(name, "None") if value is None else repr(value)
