"""Configurations and plans that the tests of plans share."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from train.config.config import Config, MeshSizes
from train.config.presets import PRESETS
from train.memory.device_memory import GPUS
from train.plan.candidates import Machine, Plan, make_plan

ROOT = Path(__file__).parents[3]
H100, H200 = (GPUS[name].device.device_kind for name in ("H100", "H200"))
TENSOR, FSDP = MeshSizes(tensor=2), MeshSizes(fsdp=2)
EIGHT = shlex.split("--preset llama3-8b --model.num-layers 4 --device H100 --devices 8")


def config(preset: str = "llama3-8b", layers: int | None = None, **changes) -> Config:
    default = PRESETS[preset]()
    layers = layers or default.model.num_layers
    model = dataclasses.replace(default.model, num_layers=layers)
    return dataclasses.replace(default, model=model, given=frozenset(changes), **changes)


def plan_of(preset: str, devices: int, layers: int | None = None, **changes) -> Plan:
    machine = Machine(devices, H100, GPUS["H100"].memory)
    return make_plan(config(preset, layers, **changes), machine)


STACKED: dict[str, Any] = {"remat": "full", "scan_layers": 1}
LONG: dict[str, Any] = {"loss_chunk": 4096, **STACKED}
