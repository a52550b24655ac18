"""Weights in the compute dtype, and largest magnitudes of weights in 8 bits, that the optimizer
writes for the next step."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rewrite.programs import counts
from tests.train import compiled_memory
from tests.train.test_step import SHORT, Trainer
from train.checkpoint.checkpoint import Checkpoints
from train.config.config import LoraConfig, MeshSizes
from train.memory.step_memory import memory_of
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import WEIGHTS, state_on_mesh, trained_part, with_weights
from train.parallel.batches import abstract_batch
from train.parallel.mesh import make_abstract_mesh
from train.parallel.model import ModelFunctions
from train.plan.shapes import Shapes
from train.step import sharded_step

MESH = MeshSizes(data=2, tensor=2)
HALF = dataclasses.replace(SHORT, overlap="xla", compute_dtype="bfloat16", remat="none")


def without_kept_weights() -> Any:
    return mock.patch("train.parallel.model.keeps_weights", lambda config, sizes: False)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    trainer = Trainer(HALF, MESH)
    trainer.first = trainer.run(3)  # type: ignore[attr-defined]
    return trainer


def test_a_step_computes_the_same_numbers_with_them(trainer: Trainer):
    with without_kept_weights():
        other = Trainer(HALF, MESH)
    assert WEIGHTS not in other.state
    found, expected = trainer.first, other.run(3)  # type: ignore[attr-defined]
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, trained_part(trainer.state), other.state)


def test_they_are_those_of_the_parameters_after_each_step(trainer: Trainer):
    weights, params = trainer.state[WEIGHTS], trainer.state["params"]
    assert weights.keys() == trainer.model.matrices - {"embedding"}
    for name, weight in weights.items():
        assert weight.dtype == jnp.bfloat16 and weight.sharding == params[name].sharding
        np.testing.assert_array_equal(weight, params[name].astype("bfloat16"), err_msg=name)


def test_a_checkpoint_has_none_and_a_run_that_resumes_makes_them(trainer: Trainer, tmp_path: Path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, trained_part(trainer.state), {}, {})
    abstract = state_on_mesh(trainer.model, trainer.optimizer, trainer.mesh)
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        restored = checkpoints.restore(trained_part(abstract)).state
    assert WEIGHTS not in restored
    resumed = with_weights(restored, abstract)
    jax.tree.map(np.testing.assert_array_equal, resumed, trainer.state)
    assert resumed[WEIGHTS]["head.kernel"].sharding == abstract[WEIGHTS]["head.kernel"].sharding


def without_kept_magnitudes() -> Any:
    return mock.patch("train.parallel.model.keeps_magnitudes", lambda config, sizes: False)


#: A mesh on which gradients are not summed over devices.
TENSOR = MeshSizes(tensor=2)


def magnitudes(sizes: MeshSizes = TENSOR, **changes: Any) -> set[str]:
    model = ModelFunctions(dataclasses.replace(HALF, **changes), sizes)
    return {*model.kept_magnitudes}


@pytest.mark.parametrize(
    "changes",
    [
        {"fp8": "tensorwise"},
        {"fp8": "rowwise", "scan_layers": 1, "remat": "full"},
        {"fp8": "tensorwise", "scan_layers": 1},
        {"fp8": "tensorwise", "fp8_layers": "*.feed_forward,head"},
    ],
)
def test_a_step_with_known_magnitudes_computes_the_same_numbers(changes: dict[str, Any]):
    """Bit for bit; and the magnitudes are those of the parameters after each step."""
    config = dataclasses.replace(HALF, **changes)
    trainer = Trainer(config, TENSOR)
    with without_kept_magnitudes():
        other = Trainer(config, TENSOR)
    found, expected = trainer.run(3), other.run(3)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, *map(trained_part, (trainer.state, other.state)))
    abstract = state_on_mesh(trainer.model, trainer.optimizer, trainer.mesh)
    again = with_weights(trained_part(trainer.state), abstract)
    jax.tree.map(np.testing.assert_array_equal, again, trainer.state)
    for leaf, wanted in zip(
        *map(jax.tree.leaves, (again[WEIGHTS], abstract[WEIGHTS])), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


def test_a_device_has_those_of_its_shards():
    state = Trainer(dataclasses.replace(HALF, fp8="tensorwise"), TENSOR).state
    for part, axis in (("gate", 1), ("down", 0)):
        name = f"layers.0.feed_forward.{part}.kernel"
        rounded = np.abs(state["params"][name].astype("bfloat16").astype("float32"))
        shards = np.split(rounded, TENSOR.tensor, axis)
        assert [*state[WEIGHTS][name].values.ravel()] == [*map(np.max, shards)]


def test_magnitudes_are_kept_of_what_layers_quantize_as_it_is():
    linears = {
        f"layers.{i}.feed_forward.{n}.kernel" for i in (0, 1) for n in ("gate", "up", "down")
    }
    everything = magnitudes(fp8="tensorwise")
    assert linears < everything and len(everything) == 14
    assert everything == magnitudes(fp8="rowwise", remat="full")
    assert magnitudes(fp8="tensorwise", fp8_layers="*.feed_forward") == linears
    assert magnitudes(fp8="rowwise", fp8_layers="head") == {"head.kernel"}
    # Several devices have the whole keys and values, and each multiplies by its own columns.
    few = dataclasses.replace(HALF.model, num_key_value_heads=2)
    own = magnitudes(MeshSizes(tensor=4), fp8="rowwise", model=few)
    assert everything - own == {n for n in everything if ".key." in n or ".value." in n}
    others: list[dict[str, Any]] = [
        {"fp8": None},
        {"fp8": "blockwise"},
        {"overlap": "rewrite"},
        {"overlap": "rewrite-jit"},
        {"lora": LoraConfig(rank=2)},
        {"freeze": "embedding"},
        {"compute_dtype": "float32"},
        {"gradient_accumulation_steps": 2},
        {"sizes": MESH},
        {"zero": 1, "sizes": MeshSizes(fsdp=2)},
        {"zero": 3, "sizes": MeshSizes(fsdp=2)},
    ]
    for changes in others:
        assert not magnitudes(**{"fp8": "tensorwise", **changes}), changes


def test_a_step_reads_each_weight_once_for_magnitudes():
    """In its optimizer. Forward and backward find none."""

    def reductions(fp8: str | None) -> int:
        config = dataclasses.replace(HALF, fp8=fp8)
        model, mesh = ModelFunctions(config, TENSOR), make_abstract_mesh(TENSOR)
        optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
        step = sharded_step(config, model, optimizer, mesh)
        state = state_on_mesh(model, optimizer, mesh)
        return counts(step, state, abstract_batch(config))["reduce"]

    assert reductions("tensorwise") - reductions(None) == len(magnitudes(fp8="tensorwise"))
    with without_kept_magnitudes():
        assert reductions("tensorwise") - reductions(None) >= 2 * 14


@pytest.mark.exhaustive
@compiled_memory.needs_cuda_build
@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
def test_one_kernel_updates_a_weight_and_finds_its_magnitudes(fp8: str):
    """The kernels of gate and up of Llama 3 8B, [4096, 7168] on each of two H200."""
    case = compiled_memory.case(TENSOR, 1, fp8=fp8, batch_size=1)
    with compiled_memory.gpus(2) as devices:
        mesh = compiled_memory.mesh_of(devices, TENSOR)
        program = compiled_memory.compiled_step(case.config, mesh).program
    entry = re.sub(r"\{[\d,]*\}", "", program[program.index("ENTRY") :])
    updated = re.findall(r"= (\(.*f32\[4096,7168\].*\)) fusion\(.*/optimizer/", entry)
    assert updated == 2 * ["(f32[4096], f32[4096,7168], f32[4096,7168], f32[4096,7168])"]


def kept(sizes: MeshSizes = MESH, **changes: Any) -> set[str]:
    model = ModelFunctions(dataclasses.replace(HALF, **changes), sizes)
    return {*model.kept_weights}


def test_only_where_they_cost_no_memory_and_are_read():
    everything = kept()
    assert "layers.0.feed_forward.down.kernel" in everything and "embedding" not in everything
    assert kept(fp8="tensorwise") == kept(fp8="rowwise", scan_layers=1) == {"head.kernel"}
    few = dataclasses.replace(HALF.model, num_key_value_heads=1)
    assert kept(fp8="rowwise", model=few) == {"head.kernel"}  # Which all devices have.
    tied = dataclasses.replace(HALF.model, tied_head=True)
    assert kept(fp8="rowwise", model=tied) == {"embedding"}
    assert not kept(fp8="rowwise", fp8_layers="*", model=tied)
    assert kept(zero=3) == everything  # Nothing is sharded on this mesh.
    others: list[dict[str, Any]] = [
        {"remat": "full"},
        {"compute_dtype": "float32"},
        {"overlap": "rewrite-jit"},
        {"overlap": "rewrite", "fp8": "rowwise"},
        {"lora": LoraConfig(rank=2)},
        {"freeze": "embedding"},
        {"zero": 1, "sizes": MeshSizes(fsdp=2)},
    ]
    for changes in others:
        assert not kept(**changes), changes


@pytest.mark.parametrize("changes", [{}, {"fp8": "rowwise"}, {"zero": 2}, {"remat": "dots"}])
def test_the_plan_counts_the_same(changes: dict[str, Any]):
    config, sizes = dataclasses.replace(HALF, **changes), MeshSizes(fsdp=2, tensor=2)
    numbers = sum(leaf.size for leaf in ModelFunctions(config, sizes).kept_weights.values())
    assert Shapes(config, sizes).kept_weights == numbers / sizes.tensor


def test_a_dry_run_counts_them():
    mesh = make_abstract_mesh(MESH)
    found = memory_of(HALF, mesh)
    with without_kept_weights():
        expected = memory_of(HALF, mesh)
    numbers = sum(leaf.size for leaf in ModelFunctions(HALF, MESH).kept_weights.values())
    kept = 2 * numbers // MESH.tensor
    assert found.weights >= kept
    # At other moments than the loss, a step that makes its weights has freed some of them.
    assert expected.total <= found.total <= expected.total + kept
