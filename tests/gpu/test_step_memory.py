"""Memory that the dry run predicts is what XLA allocates for a step on these GPUs."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from tests.conftest import MeshFactory
from tests.train.compiled_memory import FSDP, TENSOR, Case, case, compiled_step, sharded
from train.config.config import Config

pytestmark = pytest.mark.gpu

CASES = [
    case(TENSOR, 4, remat="dots"),
    case(TENSOR, 4, remat="full"),
    case(FSDP, 4, zero=2, remat="full"),
    sharded(4, "matmuls"),
    sharded(4, "matmuls", fp8="rowwise"),
    case(TENSOR, 4, remat="full", fp8="rowwise", gradient_accumulation_steps=2),
]


def config_of(case: Case) -> Config:
    """The configuration, rehearsed with a small model."""
    if jax.default_backend() == "gpu":
        return case.config
    small = {"features": 64, "hidden_features": 128, "num_heads": 4, "num_key_value_heads": 2}
    model = dataclasses.replace(case.config.model, vocabulary_size=512, **small)
    return dataclasses.replace(case.config, model=model, sequence_length=128)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_takes_what_the_dry_run_says(make_mesh: MeshFactory, case: Case) -> None:
    step = compiled_step(config_of(case), make_mesh(case.sizes._asdict()))
    # XLA leaves gaps between arrays, up to 3 % in programs compiled for H200, and may postpone a
    # sum of gradients, the largest of which is the head's, 2.1 of 19 GB here. On CPUs, where this
    # is rehearsed, it stores far more results of elementwise operations.
    lower = 0.88 if jax.default_backend() == "gpu" else 0.2
    assert lower < step.ratio < 1.05, step
