"""The command line of the trainer: arguments, and messages before and after a run."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import tyro
from flax import traverse_util
from rich.console import Console

from models.choices import CHOICES
from models.config import LlamaConfig
from models.simulated_devices import simulate_devices
from train.checkpoint.checkpoint import SaveError
from train.config.checks import check_adapters, warnings_of
from train.config.config import SIMULATED_DEVICES, Config, MeshSizes
from train.config.config_file import as_argument, config_text, fields_of_file, read_config
from train.config.context import describe_context
from train.config.counts import counted
from train.config.defaults import (
    FOLLOWING,
    describe_defaults,
    implied,
    saved_configuration,
    with_values,
)
from train.config.experts import describe_experts
from train.config.loss_chunks import describe_loss_chunks
from train.config.model_folder import (
    check_asked_model,
    described_model,
    is_model_file,
    is_model_of_preset,
    model_name,
    read_object,
    with_model_of,
)
from train.config.presets import PRESETS
from train.config.renamed import current_arguments
from train.log.metrics import Record
from train.memory.device_memory import describe_memory, set_memory_fraction
from train.optimizer.muon import describe_muon
from train.optimizer.schedule import describe_schedule
from train.parallel.model import describe_trained
from train.parallel.zero import describe_zero
from train.plan.mesh_choice import describe_unpredicted, planned_mesh_sizes
from train.plan.rings import GPUS_OF_A_NODE
from train.plan.run import attention_kernel, describe_step_time, predict_run
from train.plan.step_time import unpredicted_reason
from train.plan.table import CHOSEN, print_plan
from train.processes.connection import (
    connected,
    describe_processes,
    is_first,
    is_told_elsewhere,
    own_name,
)
from train.processes.shutdown import Interrupted, Shutdown
from train.run.dry_run import device_kind_of, dry_run
from train.run.evaluate_only import evaluate_only
from train.run.evaluation import evaluated_sequences
from train.run.loop import NonFiniteError, train
from train.run.setup import Setup, prepare
from train.run.tuning import tune_step
from train.run.unsupported_flags import naming_flags

#: Flags that say where one run begins and ends, which a run after it does not repeat.
_OF_ONE_RUN = ("--resume", "--resume-step", "--steps", "--profile", "--profile-dir")
#: Fields that ask for something else than training, of which one can be done.
_IN_PLACE_OF_TRAINING = ("plan", "dry_run", "eval_only", "tune")


def main(arguments: Sequence[str], shutdown: Shutdown | None = None) -> None:
    """Runs ``python -m train`` with these arguments, until it ends or a signal asks it to."""
    with contextlib.ExitStack() as stack, refusing():
        arguments = current_arguments(arguments)
        config = parse(arguments)
        with naming_flags(config):
            _carry_out(config, arguments, stack, shutdown)


def _carry_out(
    config: Config,
    arguments: Sequence[str],
    stack: contextlib.ExitStack,
    shutdown: Shutdown | None,
) -> None:
    """Does what a configuration asks for; `stack` ends the connection of its processes."""
    if config.print_config:
        _print_config(config, arguments)
        return
    _check_one_task(config)
    set_memory_fraction()
    # JAX's attention and optax mix dtypes, which the environment may forbid.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    simulate_devices("cpu_devices", config.cpu_devices, SIMULATED_DEVICES)
    if config.plan:
        plain = _without(arguments, *CHOSEN)
        _exit_unless(print_plan(with_model_of(config), plain, Console()))
        return
    if config.dry_run:
        config = with_model_of(config)
        devices, kind = _any_number(config), device_kind_of(config)
        sizes = planned_mesh_sizes(config, devices, min(devices, GPUS_OF_A_NODE), kind)
        _exit_unless(dry_run(config, sizes, Console()))
        return
    stack.enter_context(connected(config.distributed))
    console = Console(quiet=not is_first())
    if config.eval_only:
        evaluate_only(config, console)
        return
    if config.tune:
        tune_step(config, console)
        return
    setup = prepare(config)
    if setup.is_done:
        _tell_done(setup, arguments, console)
        return
    announce(setup, console)
    conclude(setup, train(setup, console, shutdown=shutdown), arguments, console)


def parse(arguments: Sequence[str], program: str = "python -m train") -> Config:
    """The configuration that the arguments describe: a preset or a file, and changes to it.

    Some defaults follow from other settings (`train.config.defaults`), so arguments are read twice.

    Flags and values of earlier releases are accepted, with a warning on stderr.

    Raises:
      ValueError: for an unknown preset, a file that is not a configuration, another model than that
        of the folder to begin with, or settings of adapters without their rank.
      SystemExit: after printing help, or an error in the arguments.
    """
    arguments = current_arguments(arguments)
    first = argparse.ArgumentParser(program, add_help=False, allow_abbrev=False)
    first.add_argument("--preset")
    first.add_argument("--config", action="append", default=[])
    given = first.parse_known_args(arguments)[0]
    if len(given.config) > 1:
        raise ValueError(
            f"config: expected one file, got {' and '.join(map(repr, given.config))}; give one, and"
            " what differs as flags"
        )
    read_object.cache_clear()
    if given.preset not in (None, *PRESETS):
        raise ValueError(f"preset={given.preset!r}: expected one of {', '.join(PRESETS)}")

    def read(defaults: Mapping[str, Any], model: LlamaConfig | None = None) -> Config:
        if given.config:
            default = read_config(given.config[0], given.preset, program, defaults)
        else:
            default = with_values(PRESETS[given.preset or "debug"](), defaults)
        if model is not None and is_model_of_preset(default):
            default = dataclasses.replace(default, model=model)
        return tyro.cli(Config, default=default, args=arguments, prog=program, registry=CHOICES)

    config = asked = read({})
    model = described_model(asked)
    if model is not None:
        config = asked = read({}, model)
        check_asked_model(asked, model)
    asked = dataclasses.replace(asked, given=_given(asked, arguments))
    if defaults := implied(asked):
        config = read(defaults, model)
    config = dataclasses.replace(config, given=asked.given)
    if config.lora.rank is None:  # What else a checkpoint's adapters had is not asked for either.
        config = dataclasses.replace(config, lora=asked.lora)
    groups = (name.partition(".") for name in _fields_given(arguments))
    check_adapters(config.lora, {field for group, _, field in groups if group == "lora"})
    return config


def _check_one_task(config: Config) -> None:
    """Raises ValueError if several things are asked for in place of training."""
    asked = [name for name in _IN_PLACE_OF_TRAINING if getattr(config, name)]
    if len(asked) > 1:
        flags = (f"--{name.replace('_', '-')}" for name in asked)
        raise ValueError(
            f"{', '.join(f'{name}=True' for name in asked)}: expected one of them, since each is"
            f" done in place of training; leave out {' or '.join(flags)}"
        )


def _print_config(config: Config, arguments: Sequence[str]) -> None:
    """Prints the configuration as the text of a file, with null for what follows from other
    settings, and the values of that on stderr."""
    unset = _unset(config, arguments)
    shown = with_model_of(config)
    # A folder's tokenizer follows from the folder.
    print(config_text(dataclasses.replace(shown, tokenizer=config.tokenizer), unset))
    if unset:
        now = shlex.join(_values_of(unset, config))
        print(f"what is null is not set and follows from the rest, now: {now}", file=sys.stderr)


def _unset(config: Config, arguments: Sequence[str]) -> list[str]:
    """The fields of `FOLLOWING` that neither arguments nor a file set."""
    given = _fields_given(arguments)
    if config.config is not None:
        given |= fields_of_file(config.config)
    return [name for name in FOLLOWING if name not in given]


def _values_of(names: Sequence[str], config: Config) -> list[str]:
    """The arguments that set fields of `FOLLOWING`; of what is trained those that change it."""
    now, usual = (
        traverse_util.flatten_dict(each.to_json(), sep=".")
        for each in (config, PRESETS[config.preset]())
    )
    return [
        as_argument(name, now[name])
        for name in names
        if name.partition(".")[0] not in ("lora", "freeze") or now[name] != usual[name]
    ]


def _given(asked: Config, arguments: Sequence[str]) -> frozenset[str]:
    """The fields that somebody set, by dotted name: those of arguments, whatever their values; of a
    file those that change its preset, since --print-config writes all, or that do not follow from
    other settings; and what a resumed run keeps.

    Args:
      asked: what arguments and a file ask for, without the defaults that follow from that.
      arguments: those of the command line.
    """
    usual, now, saved = (
        traverse_util.flatten_dict(dict(values), sep=".")
        for values in (
            PRESETS[asked.preset]().to_json(),
            asked.to_json(),
            saved_configuration(asked),
        )
    )
    given = _fields_given(arguments) | {name for name in now if now[name] != usual.get(name)}
    if asked.config is not None and not is_model_file(asked):
        given |= fields_of_file(asked.config) & {*FOLLOWING}
    return frozenset(given | (saved.keys() & {*FOLLOWING}))


def _fields_given(arguments: Sequence[str]) -> set[str]:
    """The fields that arguments set, by dotted name; a switch by the name of its field."""
    flags = (each.partition("=")[0] for each in arguments if each.startswith("--"))
    parts = (flag.removeprefix("--").replace("-", "_").rpartition(".") for flag in flags)
    return {f"{group}{dot}{field.removeprefix('no_')}" for group, dot, field in parts}


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Reports invalid input in one sentence on stderr, and exits with status 2.

    The status is 1 if a run stops because its loss is not finite or a checkpoint cannot be saved,
    or if nothing fits of a plan or a dry run, and 130 or 143 if SIGINT or SIGTERM interrupts it.
    """
    try:
        yield
    except (ValueError, ImportError, NonFiniteError, SaveError) as error:
        message = f"error: {own_name(error)}{error}"
        console = Console(stderr=True, quiet=is_told_elsewhere(error))
        console.print(message, style="red", highlight=False, soft_wrap=True, markup=False)
        raise SystemExit(1 if isinstance(error, NonFiniteError | SaveError) else 2) from error
    except Interrupted as interruption:
        console = Console(stderr=True, quiet=is_told_elsewhere(interruption))
        console.print(str(interruption), highlight=False, soft_wrap=True, markup=False)
        raise SystemExit(interruption.exit_status) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; every checkpoint saved so far is kept")
        raise SystemExit(130) from None


def _exit_unless(fits: bool) -> None:
    """Ends a plan or a dry run with status 1 if what it is about does not fit into memory."""
    if not fits:
        raise SystemExit(1)


def announce(setup: Setup, console: Console) -> None:
    """Prints what is trained: the model, the mesh and the data."""
    config, mesh, text = setup.config, setup.mesh, setup.text
    kind, unused = mesh.devices.flat[0].device_kind, jax.device_count() - mesh.size
    sizes = MeshSizes(**mesh.shape)
    rest = f"; {unused} more are not used" if unused else ""
    for line in (
        f"{model_name(config)}: {setup.model.parameter_count:,} parameters,"
        f" {counted(config.model.num_layers, 'layer')},"
        f" {config.compute_dtype}, overlap {config.overlap}, remat {config.remat}",
        f"mesh: {sizes} of {kind} devices{rest}",
        *describe_unpredicted(config, sizes, kind),
        *describe_memory(mesh.local_devices[0]),
        *describe_processes(),
        *describe_zero(config, setup.model, sizes),
        *describe_experts(config, sizes, setup.model.active_parameter_count),
        f"data: {text.description}, {text.token_count:,} tokens,"
        f" {counted(text.sequences_per_epoch, 'sequence')} per epoch, sha256 {text.sha256}",
        _describe_length(config, text.sequences_per_epoch),
        *describe_held_out(setup),
        *describe_context(config, sizes),
        *describe_loss_chunks(config, sizes),
        *describe_trained(setup.model),
        *describe_muon(config.optimizer, setup.model.abstract_params),
        describe_schedule(config.optimizer, config.steps),
        *describe_defaults(config),
        *warnings_of(config),
    ):
        console.print(line, highlight=False, soft_wrap=True)


def _describe_length(config: Config, sequences_per_epoch: int) -> str:
    """How much of the data the run sees."""
    epochs = f"{config.steps * config.batch_size / sequences_per_epoch:.2g}"
    return (
        f"steps: {config.steps:,} of {counted(config.batch_size, 'sequence')} of"
        f" {counted(config.sequence_length, 'token')}, {epochs} epoch{'s' * (epochs != '1')}"
        " (--steps, --batch-size)"
    )


def describe_held_out(setup: Setup) -> list[str]:
    """Describes what is evaluated, and a warning if it is not held out."""
    config, text = setup.config, setup.held_out
    if text is None:
        return []
    tokens = evaluated_sequences(config, text) * text.sequence_length
    line = (
        f"held-out text: {text.description}, {tokens:,} of {text.token_count:,} tokens, every"
        f" {counted(config.eval_interval, 'step')}, sha256 {text.sha256}"
    )
    if text.sha256 == setup.text.sha256:
        return [line, "warning: the held-out text is the text that is trained on"]
    return [line]


def _tell_done(setup: Setup, arguments: Sequence[str], console: Console) -> None:
    """Says that a resumed run has no step left, and how to train on. Changes nothing."""
    config, checkpoints = setup.config, setup.checkpoints
    assert checkpoints is not None
    checkpoints.close()
    for line in (
        f"nothing to train: the checkpoint in {config.checkpoint_dir} has"
        f" {counted(config.steps, 'step')}, as many as the run (--steps); give a larger number to"
        " train on",
        _command_to_go_on(setup, arguments),
    ):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _command_to_go_on(setup: Setup, arguments: Sequence[str]) -> str:
    """The line with the command that trains twice as many steps as the run has."""
    config = setup.config
    begun = _without(arguments, *_OF_ONE_RUN, "--optimizer.decay-steps")
    if not setup.model.frozen_params:  # Weights that are not trained are read again.
        begun = _without(begun, "--init-from")
    command = [_interpreter(), "-m", "train", *begun]
    command += ["--optimizer.decay-steps", str(config.optimizer.decay_steps)]
    command += ["--steps", str(2 * config.steps), "--resume"]
    # A run that trained has set aside what was newer.
    if setup.is_done and config.resume_step is not None:
        command[-1:] = ["--resume-step", str(config.resume_step)]
    return f"to go on:   {shlex.join(command)}"


def conclude(
    setup: Setup, records: list[Record], arguments: Sequence[str], console: Console
) -> None:
    """Prints the result, and the commands to continue and to compare."""
    config, last = setup.config, records[-1]
    lines = [f"done: {counted(last.step, 'step')}, loss {records[0].loss:.4f} → {last.loss:.4f}"]
    lines += _step_time(setup, records)
    plain = _without(arguments, *_OF_ONE_RUN)
    if config.checkpoint_dir is not None:
        lines[0] += f"; checkpoints in {config.checkpoint_dir}"
        lines.append(_command_to_go_on(setup, arguments))
    else:
        lines.append("to be able to continue a run, give it --checkpoint-dir DIR")
    # Comparing keeps no files.
    shared = _without(
        plain, "--overlap", "--checkpoint-dir", "--log-file", "--optimizer.decay-steps",
        "--tensorboard", "--wandb", "--eval-data", "--eval-interval", "--eval-batches",
        "--distributed.",
    )  # fmt: skip
    compare = [_interpreter(), "-m", "train.compare", *shared, "--steps", str(config.steps)]
    if config.resume and config.init_from is None and described_model(config) is not None:
        compare += ["--init-from", str(config.checkpoint_dir)]  # It says what the model is.
    if config.config is not None:  # The file may name some.
        compare += ["--checkpoint-dir", "None", "--log-file", "None", "--no-resume"]
        compare += ["--tensorboard", "None", "--no-wandb"]
    schedule = dataclasses.replace(config.optimizer, decay_steps=None)
    if config.optimizer != schedule.with_schedule_of(config.steps):
        compare += ["--optimizer.decay-steps", str(config.optimizer.decay_steps)]
    if config.resume:  # What it has kept is not among its flags.
        compare = _without(compare, "--mesh.") + _values_of(_unset(config, compare), config)
        compare += [f"--mesh.{axis}={size}" for axis, size in setup.mesh.shape.items()]
    lines.append(f"to compare: {shlex.join(compare)} --a overlap=xla --b overlap=ring")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _step_time(setup: Setup, records: list[Record]) -> list[str]:
    """The predicted step time beside the measured one; nothing where none is predicted."""
    config, sizes = setup.config, MeshSizes(**setup.mesh.shape)
    kind = setup.mesh.devices.flat[0].device_kind
    if unpredicted_reason(config, kind) is not None:
        return []
    kernel = attention_kernel(config, sizes, setup.mesh.abstract_mesh)
    return [describe_step_time(predict_run(config, sizes, kind, kernel), records)]


def _interpreter() -> str:
    """The running Python as a command: a relative path if it is below the working directory."""
    path = os.path.relpath(sys.executable)
    return sys.executable if path.startswith(os.pardir) else path


def _without(arguments: Sequence[str], *flags: str) -> list[str]:
    """The arguments without some flags and their values. A flag that ends in "." is a group."""
    kept: list[str] = []
    dropping = False
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.split("=")[0].replace("_", "-")
            dropping = name in flags or f"{name.partition('.')[0]}." in flags
        if not dropping:
            kept.append(argument)
    return kept


def _any_number(config: Config) -> int:
    """The number of devices of the requested mesh, or of the machine if that has more."""
    requested = math.prod(size or 1 for size in dataclasses.astuple(config.mesh))
    return max(jax.device_count(), requested)
