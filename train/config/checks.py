"""Checks that the values of a configuration fit together, and fit a mesh."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import shlex
from collections.abc import Set
from pathlib import Path
from typing import get_args

import collective_matmul
import collective_matmul.layers
from models.families import parameters_of
from models.hugging_face.chat.template import read_variables
from models.parameters.adapters import LoraConfig, Training
from models.parameters.fp8_layers import DEFAULT_FP8_LAYERS, FP8_LAYERS
from models.random_keys import check_seed
from train.config.config import Config, MeshSizes, OptimizerConfig, WeightGather, Zero
from train.config.context import check_context
from train.config.counts import counted
from train.config.experts import check_experts, on_tensor_axis
from train.config.loss_chunks import check_loss_chunk
from train.config.model_folder import unread_weights, without_weights
from train.config.optimizers import OPTIMIZERS

#: Steps, tokens and their places are counted in int32.
_LARGEST = 2**31 - 1
#: Settings without effect, and the setting that would use each.
_USERS = {
    "eval_interval": "eval_data",
    "eval_batches": "eval_data",
    "save_interval": "checkpoint_dir",
    "max_to_keep": "checkpoint_dir",
}


def check(config: Config, sizes: MeshSizes) -> None:
    """Checks that the values of a configuration fit together, and fit a mesh.

    Raises:
      ValueError: if they do not.
    """
    _check_whole_numbers(config)
    for name, allowed in (("zero", Zero), ("weight_gather", WeightGather)):
        if getattr(config, name) not in get_args(allowed):
            *most, last = map(str, get_args(allowed))
            raise ValueError(
                f"{name}={getattr(config, name)}: expected {', '.join(most)} or {last}"
            )
    if read_variables(config.chat_template_kwargs) and not config.chat:
        raise ValueError(
            f"chat_template_kwargs={config.chat_template_kwargs!r}: expected chat too; add --chat,"
            " or leave this out"
        )
    if config.weight_gather == "matmuls" and config.overlap == "rewrite":
        raise ValueError(
            "weight_gather='matmuls': expected blocks with overlap='rewrite', whose layers do not"
            " gather weights; leave out --weight-gather, or choose another --overlap"
        )
    _check_overlap(config.overlap)
    if config.overlap == "rewrite-jit":
        _check_rewrite_jit(config)
    _check_fp8(config)
    _check_frozen(config, sizes)
    check_planned_machine(config)
    check_optimizer(config.optimizer)
    check_experts(config, sizes)
    on_tensor_axis(config).check_tensor_axis(sizes.tensor)
    check_context(config, sizes)
    if config.sequence_length % sizes.tensor:
        raise ValueError(
            f"sequence_length={config.sequence_length} is not divisible by"
            f" mesh.tensor={sizes.tensor}; nearest that works:"
            f" --sequence-length {-(-config.sequence_length // sizes.tensor) * sizes.tensor}"
        )
    unit = sizes.data * sizes.fsdp * config.gradient_accumulation_steps
    if config.batch_size % unit:
        raise ValueError(
            f"batch_size={config.batch_size} is not divisible by mesh.data={sizes.data} ×"
            f" mesh.fsdp={sizes.fsdp} ×"
            f" gradient_accumulation_steps={config.gradient_accumulation_steps}; nearest that"
            f" works: --batch-size {-(-config.batch_size // unit) * unit}"
        )
    check_loss_chunk(config, sizes)
    if config.resume and config.checkpoint_dir is None:
        raise ValueError("resume: expected checkpoint_dir too; add --checkpoint-dir DIR")
    if config.profile_steps is not None and config.profile_steps[1] > config.steps:
        raise ValueError(
            f"profile={config.profile!r}: the run has {counted(config.steps, 'step')}; name steps"
            " among them"
        )
    if Path(config.profile_dir).is_file():
        raise ValueError(f"profile_dir={config.profile_dir!r}: is a file; name a folder")


def warnings_of(config: Config) -> list[str]:
    """Warnings of settings that are possible and seldom meant, as lines to print."""
    lines, model = [], config.model
    most = model.longest_context
    if most is not None and config.sequence_length > most:
        lines.append(
            f"warning: sequence_length={config.sequence_length} is more than the {most} tokens that"
            " the model was made for, and it does not know later positions; give --sequence-length"
            f" {most} or less, unless the run is to teach it longer contexts"
        )
    advice = without_weights(config)
    if advice is not None:
        lines.append(
            f"warning: init_from={config.init_from!r} describes a model and has no safetensors"
            f" files, with which a run begins; {advice}"
        )
    unread = unread_weights(config)
    if unread is not None:
        lines.append(
            f"warning: config={config.config!r} says what the model is, and its weights are not"
            f" read: the run begins with random ones; give --init-from {shlex.quote(unread)} to"
            " begin with them"
        )
    if config.lora.rank is not None and config.init_from is None:
        lines.append(
            f"warning: lora.rank={config.lora.rank} without --init-from trains adapters beside"
            " random weights, which stay random; give --init-from with the weights to adapt"
        )
    for name, user in ({} if config.eval_only else _USERS).items():
        value = getattr(config, name)
        if value != getattr(Config, name) and getattr(config, user) is None:
            lines.append(
                f"warning: {name}={value}: has no effect without --{user.replace('_', '-')}; add"
                " that, or leave this out"
            )
    return lines


def _check_whole_numbers(config: Config) -> None:
    """Raises ValueError for a number below the least that means something, or beyond int32."""
    for name in (
        "steps", "batch_size", "sequence_length", "gradient_accumulation_steps", "save_interval",
        "max_to_keep", "log_interval", "eval_interval", "eval_batches", "scan_layers",
        "resume_step", "loss_chunk",
    ):  # fmt: skip
        from_zero = ("scan_layers", "resume_step", "loss_chunk")
        value, least = getattr(config, name), int(name not in from_zero)
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: expected at least {least}")
        if value is not None and value > _LARGEST:
            raise ValueError(f"{name}={value}: expected at most {_LARGEST}")
    if config.batch_size * config.sequence_length > _LARGEST:
        raise ValueError(
            f"batch_size={config.batch_size}, sequence_length={config.sequence_length}: expected at"
            f" most {_LARGEST} tokens in a batch; make one smaller"
        )
    check_seed(config.seed)


def check_planned_machine(config: Config) -> None:
    """Raises ValueError for a number of GPUs or a network that no machine has."""
    if config.devices is not None and not 1 <= config.devices <= _LARGEST:
        raise ValueError(f"devices={config.devices}: expected 1 to {_LARGEST} GPUs")
    if not 0 < config.plan_network < math.inf:
        raise ValueError(f"plan_network={config.plan_network}: expected a positive number of GB/s")


def _check_overlap(value: str) -> None:
    """Raises ValueError unless it is auto, rewrite or names of backends."""
    if value in ("auto", "rewrite", "rewrite-jit"):
        return
    try:
        collective_matmul.overlap(_check_overlap, implementation=value.split(","))
    except collective_matmul.UnknownBackendError as error:
        # The flag takes other values beside the names.
        raise ValueError(
            f"overlap={value!r}: expected auto, rewrite, rewrite-jit, or one or several of"
            f" {', '.join(error.known)}, separated by commas"
        ) from None


def _check_rewrite_jit(config: Config) -> None:
    """Raises ValueError for what the model over Explicit axes does not do."""
    if config.weight_gather != "auto":
        raise ValueError(
            f"weight_gather={config.weight_gather!r}: expected 'auto' with overlap='rewrite-jit',"
            " where overlap decides how each matmul gathers its weight; choose another --overlap,"
            " such as auto"
        )
    if config.gradient_dtype != "float32" and config.compute_dtype == "float32":
        raise ValueError(
            f"gradient_dtype={config.gradient_dtype!r}: with overlap='rewrite-jit' gradients travel"
            " in compute_dtype='float32'; leave out --gradient-dtype, or choose another"
            " --compute-dtype or --overlap"
        )


def _check_fp8(config: Config) -> None:
    """Raises ValueError for an unknown recipe, layers that do not exist, or other gradients."""
    collective_matmul.layers.Column(fp8=config.fp8)
    for pattern in config.fp8_layers.split(","):
        if not fnmatch.filter(FP8_LAYERS, pattern):
            raise ValueError(
                f"fp8_layers={config.fp8_layers!r}: {pattern!r} matches none of the layers"
                f" {', '.join(FP8_LAYERS)}"
            )
    default = ",".join(DEFAULT_FP8_LAYERS)
    if config.fp8 is None and config.fp8_layers != default:
        raise ValueError(
            f"fp8_layers={config.fp8_layers!r}: expected fp8 too; add --fp8, such as --fp8 rowwise"
        )
    if config.fp8 == "tensorwise" and config.overlap == "rewrite":
        raise ValueError(
            "fp8='tensorwise': with overlap='rewrite', gradients are part of the program that is"
            " rewritten, and would not be those of this recipe; choose rowwise or blockwise, or"
            " --overlap rewrite-jit or auto"
        )


def _check_blocks(config: Config, sizes: MeshSizes) -> None:
    """Raises ValueError unless blocks of 128 numbers divide the kernels of a device."""
    model = config.model
    for name, size in (
        ("features", model.features * sizes.tensor),
        ("hidden_features", model.hidden_features),
        ("num_heads", model.num_heads * model.head_dim),
        ("num_key_value_heads", model.num_key_value_heads * model.head_dim),
    ):
        if size % (128 * sizes.tensor):
            raise ValueError(
                f"lora.base_format='blockwise': model.{name} is not a multiple of 128 numbers on"
                f" each of mesh.tensor={sizes.tensor} devices; choose rowwise"
            )


def check_adapters(lora: LoraConfig, given: Set[str] = frozenset()) -> None:
    """Checks the values of adapters, and that there are adapters to use them.

    Args:
      lora: the values.
      given: fields that were set, even if to their defaults.

    Raises:
      ValueError: a value is none that adapters can have, or no adapters would use it.
    """
    if lora.rank is not None and lora.rank > _LARGEST:
        raise ValueError(f"lora.rank={lora.rank}: expected at most {_LARGEST}")
    checked = dataclasses.replace(lora, rank=1 if lora.rank is None else lora.rank)
    checked.adapter  # noqa: B018 - it checks the values
    checked.layers  # noqa: B018
    if lora.rank is not None:
        return
    for name, value in dataclasses.asdict(lora).items():
        if value != getattr(LoraConfig(), name) or name in given - {"rank"}:
            raise ValueError(
                f"lora.{name}={value!r}: expected lora.rank too; add --lora.rank, such as"
                " --lora.rank 8"
            )


def check_trained(config: Config) -> None:
    """Raises ValueError for names of parameters that the model has not, or if none is trained."""
    names = [parameter.path for parameter in parameters_of(config.model)]
    Training(config.lora, config.freeze).check(names)


def _check_frozen(config: Config, sizes: MeshSizes) -> None:
    """Raises ValueError for what a run that trains only some parameters cannot do."""
    check_adapters(config.lora)
    training, base = Training(config.lora, config.freeze), config.lora.base_format
    if base is not None and (config.lora.rank is None or config.fp8 not in (None, base)):
        raise ValueError(
            f"lora.base_format={base!r}: expected lora.rank too, and fp8 None or the same; kernels"
            " that are trained are not stored in 8 bits; add --lora.rank, or leave this out"
        )
    if base is not None and config.model.key_value_copies(sizes.tensor) > 1:
        raise ValueError(
            f"lora.base_format={base!r}: mesh.tensor={sizes.tensor} is more than"
            f" model.num_key_value_heads={config.model.num_key_value_heads}, whose kernels then are"
            " whole on every device and not in 8 bits; make --mesh.tensor smaller"
        )
    if base == "blockwise":
        _check_blocks(config, sizes)
    if not training.freezes:
        return
    which = f"lora.rank={config.lora.rank}" if config.lora.rank else f"freeze={config.freeze!r}"
    for refused, what, advice in (
        (config.lora.rank and config.freeze, f"freeze={config.freeze!r}",
         "adapters freeze all but themselves and --lora.train; leave out --freeze"),
        (config.overlap.startswith("rewrite"), f"overlap={config.overlap!r}",
         "the plain layers have no adapters and no frozen kernels; choose auto"),
        (config.model.num_experts, f"model.num_experts={config.model.num_experts}",
         "models with experts are trained whole"),
        (config.lora.rank and OPTIMIZERS[config.optimizer.kind].orthogonalizes,
         f"optimizer.kind={config.optimizer.kind!r}",
         "adapters are updated by adamw"),
    ):  # fmt: skip
        if refused:
            raise ValueError(f"{what}: not with {which}: {advice}")


def check_optimizer(config: OptimizerConfig) -> None:
    """Raises ValueError for a value that the optimizer, its schedule or clipping cannot use."""
    for name, fits, expected in (
        ("learning_rate", 0 < config.learning_rate < math.inf, "a positive number"),
        ("final_learning_rate_fraction", 0 <= config.final_learning_rate_fraction <= 1, "0 to 1"),
        ("warmup_steps", 0 <= config.warmup_steps < _LARGEST, f"0 to {_LARGEST - 1}"),
        (
            "decay_steps",
            config.decay_steps is None or config.warmup_steps < config.decay_steps <= _LARGEST,
            f"more than optimizer.warmup_steps={config.warmup_steps}, and at most {_LARGEST}",
        ),
        ("weight_decay", 0 <= config.weight_decay < math.inf, "at least 0"),
        ("b1", 0 <= config.b1 < 1, "at least 0 and less than 1"),
        ("b2", 0 <= config.b2 < 1, "at least 0 and less than 1"),
        ("clip_norm", config.clip_norm > 0, "a positive number; inf never clips"),
        ("kind", config.kind in OPTIMIZERS, " or ".join(OPTIMIZERS)),
        ("muon_momentum", 0 <= config.muon_momentum < 1, "at least 0 and less than 1"),
        (
            "muon_update_rms",
            config.muon_update_rms is None or 0 < config.muon_update_rms < math.inf,
            "a positive number, or None",
        ),
        ("muon_dtype", config.muon_dtype in ("bfloat16", "float32"), "bfloat16 or float32"),
    ):
        if not fits:
            raise ValueError(f"optimizer.{name}={getattr(config, name)}: expected {expected}")
