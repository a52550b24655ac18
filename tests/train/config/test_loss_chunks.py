"""Logits in chunks of tokens: when they are chosen, what is printed, and the curves of runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from models.families import PRESETS
from tests.train.test_step import SHORT, Trainer, curve_of_one_device
from train.config.checks import check
from train.config.config import Config, MeshSizes
from train.config.loss_chunks import MOST_OF_CHUNK, MOST_WHOLE, describe_loss_chunks, loss_chunk
from train.memory.device_memory import GPUS
from train.memory.step_memory import memory_of
from train.parallel.mesh import make_abstract_mesh

STEPS = 4


@pytest.fixture
def one_device() -> dict[str, np.ndarray]:
    return {name: values[:STEPS] for name, values in curve_of_one_device().items()}


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        (
            (1, 2, 2),
            {"zero": 3, "weight_gather": "matmuls", "loss_chunk": 24, "overlap": "ring"},
        ),
        (
            (2, 2, 2),
            {"zero": 3, "weight_gather": "blocks", "scan_layers": 1, "loss_chunk": 16}
            | {"gradient_accumulation_steps": 2, "overlap": "xla"},
        ),
        pytest.param(
            (1, 1, 4), {"overlap": "rewrite", "loss_chunk": 32}, marks=pytest.mark.exhaustive
        ),
        pytest.param(
            (2, 2, 1), {"zero": 1, "loss_chunk": 1, "overlap": "xla"}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=str,
)
def test_a_run_in_chunks_has_the_curve_of_one_device(one_device, sizes, changes):
    curve = Trainer(dataclasses.replace(SHORT, **changes), MeshSizes(*sizes)).run(STEPS)
    # As in tests/train/test_step.py: everything is float32, and the order of sums differs.
    np.testing.assert_allclose(curve["loss"], one_device["loss"], rtol=5e-6)
    np.testing.assert_allclose(curve["grad_norm"], one_device["grad_norm"], rtol=1e-4)


def test_fp8_weights_of_the_head_are_quantized_before_the_chunks():
    """With accumulation, ZeRO's weights are `Quantized` already."""
    changes = {"fp8": "rowwise", "fp8_layers": "head", "zero": 3, "overlap": "xla"}
    changes |= {"gradient_accumulation_steps": 2}
    sizes = MeshSizes(1, 2, 2)
    model = dataclasses.replace(SHORT.model, num_layers=1)
    config = dataclasses.replace(SHORT, model=model, **changes)
    whole = Trainer(config, sizes).run(3)
    chunked = Trainer(dataclasses.replace(config, loss_chunk=16), sizes).run(3)
    # Each row has its own scale in both, so that only the order of sums differs; a difference of
    # rounding may move a value of 8 bits to the next, which is 6 % of it, in one of many terms.
    np.testing.assert_allclose(chunked["loss"], whole["loss"], rtol=1e-4)


def of(preset: str, **changes) -> Config:
    return Config(model=PRESETS[preset](), preset=preset, **changes)


def test_short_sequences_have_all_logits_at_one_time():
    for tensor in (1, 8):
        config = of("llama3-8b", batch_size=1, sequence_length=8192)
        assert loss_chunk(config, MeshSizes(tensor=tensor)) is None
        assert describe_loss_chunks(config, MeshSizes(tensor=tensor)) == []


def test_long_sequences_have_as_many_as_take_a_gibibyte():
    config = of("llama3-8b", batch_size=2, sequence_length=131_072)
    sizes = MeshSizes(data=1, tensor=8)
    of_token = 2 * 128_256 // 8 * 2
    assert of_token * 131_072 > MOST_WHOLE
    assert loss_chunk(config, sizes) == MOST_OF_CHUNK // of_token
    (line,) = describe_loss_chunks(config, sizes)
    assert line.startswith(
        "head and loss: 8 chunks of 16,384 tokens of each sequence, whose logits"
    )
    assert f"take {of_token * 16_384:,} bytes" in line
    assert f"would take {of_token * 131_072:,}" in line
    assert loss_chunk(dataclasses.replace(config, loss_chunk=0), sizes) is None
    assert loss_chunk(dataclasses.replace(config, loss_chunk=4096), sizes) == 4096
    assert loss_chunk(dataclasses.replace(config, overlap="rewrite-jit"), sizes) is None


def test_a_dry_run_counts_the_logits_of_one_chunk():
    """The forward keeps none, and the backward has those of one chunk and their gradients."""
    config = of("llama3.2-1b", batch_size=1, sequence_length=65_536, loss_chunk=0, remat="full")
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, num_layers=1), scan_layers=1
    )
    mesh = make_abstract_mesh(MeshSizes(tensor=4), GPUS["H200"].device)
    whole = memory_of(config, mesh).activations
    chunked = memory_of(dataclasses.replace(config, loss_chunk=4096), mesh).activations
    logits = 65_536 * 128_256 // 4 * 2
    assert whole > logits
    assert chunked < whole - logits // 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"loss_chunk": -1}, "loss_chunk=-1: expected at least 0"),
        ({"loss_chunk": 2}, "loss_chunk=2: expected at least mesh.tensor=4, a token for each"),
        ({"loss_chunk": 8, "overlap": "rewrite-jit"}, "loss_chunk=8: with overlap='rewrite-jit'"),
    ],
    ids=str,
)
def test_a_chunk_that_does_not_fit_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(dataclasses.replace(SHORT, **changes), MeshSizes(data=2, tensor=4))
