"""Changed settings with which something fits of a plan where nothing does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from train.config.config import Config
from train.config.optimizers import OPTIMIZERS
from train.memory.device_memory import GPUS
from train.plan.candidates import Machine, is_free, planned_batch_size
from train.plan.traced_rows import fits

#: Fields that a plan chooses for the machine, where nobody set them.
_CHOSEN = ("zero", "remat", "scan_layers", "gradient_accumulation_steps", "expert_axes")
#: Shorter sequences than these are not advised.
_SHORTEST = 1024
#: Nor are more GPUs than this multiple.
_MOST_TIMES_THE_GPUS = 32


def ways_to_fit(config: Config, machine: Machine) -> tuple[list[str], list[str]]:
    """Flags, each of which alone makes something fit, those first that keep most of what was asked
    for; and the last that were tried of each kind that does not.

    Args:
      config: what was asked for, with the model that it says.
      machine: the GPUs, on which nothing fits.
    """
    ways = (
        *(_left_out(config, machine, name) for name in _CHOSEN if not is_free(config, name)),
        _narrower_gradients(config, machine),
        _fewer_moments(config, machine),
        _smaller_batches(config, machine),
        _shorter_sequences(config, machine),
        _adapters(config, machine),
        _more_devices(config, machine),
        _larger_devices(config, machine),
    )
    found, tried = [], []
    for way in ways:
        last = None
        for last, changed, gpus in way:
            if fits(changed, gpus, last):
                found.append(last)
                break
        else:
            tried += [] if last is None else [last]
    return found, tried


_Ways = Iterator[tuple[str, Config, Machine]]


def _left_out(config: Config, machine: Machine, name: str) -> _Ways:
    changed = dataclasses.replace(config, given=config.given - {name})
    yield f"--{name.replace('_', '-')} left out", changed, machine


def _narrower_gradients(config: Config, machine: Machine) -> _Ways:
    dtypes = config.compute_dtype, config.gradient_dtype
    if machine.devices > 1 and dtypes == ("bfloat16", "float32"):
        flags = "--gradient-dtype bfloat16, in which gradients are summed over devices"
        yield flags, dataclasses.replace(config, gradient_dtype="bfloat16"), machine


def _fewer_moments(config: Config, machine: Machine) -> _Ways:
    for kind, optimizer in OPTIMIZERS.items():
        if optimizer.orthogonalizes and kind != config.optimizer.kind:
            changed = dataclasses.replace(config.optimizer, kind=kind)
            flags = f"--optimizer.kind {kind}, which has fewer moments"
            yield flags, dataclasses.replace(config, optimizer=changed), machine


def _smaller_batches(config: Config, machine: Machine) -> _Ways:
    size = planned_batch_size(config, machine.devices) // 2
    while size:
        changed = dataclasses.replace(config, batch_size=size, given=config.given | {"batch_size"})
        yield f"--batch-size {size}", changed, machine
        size //= 2


def _shorter_sequences(config: Config, machine: Machine) -> _Ways:
    length = config.sequence_length // 2
    while length >= _SHORTEST:
        changed = dataclasses.replace(config, sequence_length=length)
        yield f"--sequence-length {length}", changed, machine
        length //= 2


def _adapters(config: Config, machine: Machine) -> _Ways:
    if config.lora.base_format is not None:
        return
    rank, asked = config.lora.rank, ""
    if rank is None:
        rank, asked = 16, "--lora.rank 16"
        lora = dataclasses.replace(config.lora, rank=rank)
        yield (
            f"{asked}, which trains adapters alone", dataclasses.replace(config, lora=lora), machine
        )  # fmt: skip
    lora = dataclasses.replace(config.lora, rank=rank, base_format="rowwise")
    flags = f"{asked} --lora.base-format rowwise, which keeps frozen weights in 8 bits".lstrip()
    yield flags, dataclasses.replace(config, lora=lora), machine


def _more_devices(config: Config, machine: Machine) -> _Ways:
    times = 2
    while times <= _MOST_TIMES_THE_GPUS:
        devices = times * machine.devices
        larger = dataclasses.replace(machine, devices=devices)
        yield f"--devices {devices}", config, larger
        times *= 2


def _larger_devices(config: Config, machine: Machine) -> _Ways:
    for name, gpu in sorted(GPUS.items(), key=lambda item: item[1].memory):
        if gpu.memory > machine.memory:
            kind = gpu.device.device_kind
            larger = dataclasses.replace(
                machine, device_kind=kind, memory=gpu.memory, abstract_device=gpu.device
            )
            yield f"--device {name}", config, larger
