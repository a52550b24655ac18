"""The plan's memory beside the dry run's, for configurations drawn from those that plans list.

A newcomer who follows a row of a plan to its dry run sees both numbers.
"""

from __future__ import annotations

import dataclasses
import random
from typing import get_args

import pytest

from models.blocks.rematerialization import Remat
from train.config.config import Config, MeshConfig, MeshSizes
from train.config.presets import PRESETS
from train.memory.device_memory import GPUS
from train.memory.step_memory import memory_of
from train.parallel.mesh import make_abstract_mesh
from train.plan.candidates import check_sharded, meshes, shardings
from train.plan.memory_estimate import predict_memory

MODELS = ("llama3-8b", "llama3-70b", "llama3.2-1b", "mistral-7b-v0.1", "qwen2.5-7b", "qwen3-8b")


def draw(rng: random.Random) -> tuple[Config, MeshSizes]:
    """A configuration that a plan for up to 16 GPUs lists, with few layers."""
    while True:
        preset = PRESETS[rng.choice(MODELS)]()
        devices = rng.choice((2, 4, 8, 16))
        config = dataclasses.replace(
            preset,
            model=dataclasses.replace(preset.model, num_layers=rng.choice((3, 4, 6))),
            batch_size=devices * rng.choice((1, 2, 4)),
            sequence_length=rng.choice((2048, 4096, 8192)),
            gradient_accumulation_steps=rng.choice((1, 2, 4)),
            remat=rng.choice(get_args(Remat)),
            scan_layers=rng.choice((0, 1)),
        )
        sizes = rng.choice([*meshes(config, devices)])
        sharding = rng.choice([*shardings(config, sizes)])
        padded = config.model.padded_for(sizes.tensor)
        config = dataclasses.replace(config, model=padded, mesh=MeshConfig(*sizes), **sharding)
        try:
            check_sharded(config, sizes)
        except ValueError:
            continue
        return config, sizes


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_and_a_dry_run_predict_the_same_memory(seed: int) -> None:
    config, sizes = draw(random.Random(seed))
    traced = memory_of(config, make_abstract_mesh(sizes, GPUS["H100"].device), local_devices=8)
    estimate = predict_memory(config, sizes)
    assert estimate.state == pytest.approx(traced.state, rel=0.002)
    assert 0.95 <= estimate.total / traced.total <= 1.10
