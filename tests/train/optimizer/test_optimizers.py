"""Every entry of `OPTIMIZERS` is what it says, on any mesh."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.train.test_step import SHORT, Trainer
from train.config import presets
from train.config.config import ONE_DEVICE, MeshSizes
from train.config.optimizers import OPTIMIZERS, OptimizerConfig
from train.memory.step_memory import memory_of
from train.parallel.mesh import make_abstract_mesh
from train.plan.memory_estimate import predict_memory


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_its_state_has_the_size_that_plans_predict(kind):
    config = dataclasses.replace(presets.debug(), optimizer=OptimizerConfig(kind=kind))
    sizes = MeshSizes(tensor=2)
    traced = memory_of(config, make_abstract_mesh(sizes)).optimizer_state
    # Plans leave out counts, norms, and what a vocabulary is padded with.
    assert traced == pytest.approx(predict_memory(config, sizes).optimizer_state, rel=0.01)


# Muon's runs have tests of their own.
@pytest.mark.parametrize("kind", [k for k, each in OPTIMIZERS.items() if not each.orthogonalizes])
def test_a_mesh_with_zero_has_the_loss_curve_of_one_device(kind):
    optimizer = dataclasses.replace(SHORT.optimizer, kind=kind)
    config = dataclasses.replace(SHORT, optimizer=optimizer, overlap="xla")
    expected = Trainer(config, ONE_DEVICE).run(3)["loss"]
    sharded = Trainer(dataclasses.replace(config, zero=2), MeshSizes(1, 2, 2)).run(3)["loss"]
    # Meshes differ in the order of sums.
    np.testing.assert_allclose(sharded, expected, rtol=5e-6)
