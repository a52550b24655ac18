"""A checkpoint of layers one by one restores into stacked layers, and the other way."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from models.checkpoint.layer_layout import move_layout, other_layout
from models.checkpoint.saved_checkpoint import find_checkpoint
from tests.train.parallel.test_zero import TINY
from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.new_state import init_state
from train.config.config import Config, MeshSizes, OptimizerConfig
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import state_on_mesh
from train.parallel.mesh import make_mesh
from train.parallel.model import ModelFunctions

CONFIG = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, num_layers=3))


def parts(config: Config, sizes: MeshSizes) -> tuple[Any, Any]:
    """The state's shapes and shardings, and the function that makes the state."""
    model, mesh = ModelFunctions(config, sizes), make_mesh(sizes)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)

    def make() -> Any:
        state = init_state(model, optimizer, mesh)
        # Moments that are not zero.
        return jax.tree.map(lambda leaf: leaf + leaf.shape[-1] % 7 if leaf.ndim else leaf, state)

    return state_on_mesh(model, optimizer, mesh), make


def assert_equal(state: Any, expected: Any) -> None:
    pairs = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected), strict=True)
    for (path, leaf), right in pairs:
        assert leaf.sharding == right.sharding, path
        np.testing.assert_array_equal(leaf, right, err_msg=str(path))


@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        pytest.param("adamw", 0, marks=pytest.mark.exhaustive),
        ("muon", 1),
    ],
)
def test_a_checkpoint_restores_into_the_other_layout_bit_for_bit(tmp_path: Path, kind, saved):
    optimizer = OptimizerConfig(kind=kind)
    unrolled = dataclasses.replace(CONFIG, optimizer=optimizer, zero=3)
    scanned = dataclasses.replace(unrolled, scan_layers=1, zero=1)
    _, make = parts([unrolled, scanned][saved], MeshSizes(fsdp=2, tensor=2))
    abstract, expected = parts([scanned, unrolled][saved], MeshSizes(fsdp=4, tensor=2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make(), {}, {})
    restored = find_checkpoint(tmp_path).restore(abstract)
    assert restored.verified
    # Both layouts are made of the same random keys.
    assert_equal(restored.state, expected())


def test_weights_alone_restore_into_the_other_layout(tmp_path: Path):
    scanned = dataclasses.replace(CONFIG, scan_layers=2)
    _, make = parts(CONFIG, MeshSizes(tensor=2))
    abstract, expected = parts(scanned, MeshSizes(tensor=2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make(), {}, {})
    saved = find_checkpoint(tmp_path)
    saved.check_params(ModelFunctions(scanned).abstract_params)
    assert_equal(saved.restore_params(abstract["params"]), expected()["params"])
    fewer = dataclasses.replace(scanned, model=dataclasses.replace(CONFIG.model, num_layers=2))
    with pytest.raises(ValueError, match=r"layers\.2\.attention\.output\.kernel was .* not set"):
        saved.check_params(ModelFunctions(fewer).abstract_params)


def test_the_layouts_are_each_others_inverse():
    abstract, make = parts(dataclasses.replace(CONFIG, zero=2), MeshSizes(fsdp=4, tensor=2))
    other = other_layout(abstract)
    assert "layers.feed_forward.up.kernel" in other["params"]
    assert other_layout(other) == abstract
    there = move_layout(make(), other)
    assert_equal(move_layout(there, abstract), make())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_norms_of_stacked_layers_do_not_decay(kind):
    """Without gradients, weights change by their decay alone."""
    names = ("layers.attention_norm.scale", "head.kernel")
    params = {name: jax.numpy.ones((3, 4)) for name in names}
    optimizer = make_optimizer(
        OptimizerConfig(kind=kind, warmup_steps=0), 2, {name: P() for name in names}
    )
    zeros = jax.tree.map(jax.numpy.zeros_like, params)
    updates: Any = optimizer.update(zeros, optimizer.init(params), params)[0]
    norm, matrix = (np.asarray(updates[name]) for name in names)
    assert np.all(norm == 0)
    assert np.all(matrix < 0)
