"""Weights in the compute dtype that the optimizer writes for the next step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.test_step import SHORT, Trainer
from train.checkpoint.checkpoint import Checkpoints
from train.config.config import LoraConfig, MeshSizes
from train.memory.step_memory import memory_of
from train.optimizer.state import WEIGHTS, state_on_mesh, trained_part, with_weights
from train.parallel.mesh import make_abstract_mesh
from train.parallel.model import ModelFunctions
from train.plan.shapes import Shapes

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


def kept(sizes: MeshSizes = MESH, **changes: Any) -> set[str]:
    model = ModelFunctions(dataclasses.replace(HALF, **changes), sizes)
    return {*model.kept_weights}


def test_only_where_they_cost_no_memory_and_are_read():
    everything = kept()
    assert "layers.0.feed_forward.down.kernel" in everything and "embedding" not in everything
    assert kept(fp8="tensorwise") == kept(fp8="rowwise", scan_layers=1) == {"head.kernel"}
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
