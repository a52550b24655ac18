"""Training with Muon: its checkpoints, its memory, and what is printed and refused."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from models.checkpoint.earlier_releases import trained_configuration
from models.checkpoint.saved_checkpoint import find_checkpoint
from tests.train.test_step import SHORT, Trainer
from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.new_state import init_state
from train.config import presets
from train.config.checks import check_optimizer
from train.config.config import MeshSizes, OptimizerConfig
from train.log.log_file import read_log
from train.memory.step_memory import memory_of
from train.optimizer.muon import matrix_dimensions
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import state_on_mesh
from train.parallel.mesh import make_abstract_mesh, make_mesh
from train.parallel.model import ModelFunctions
from train.run.command_line import main, parse
from train.run.setup import check_same_optimizer

RUN = shlex.split(
    "--model.num-layers 1 --batch-size 4 --sequence-length 16 --log-interval 1 --overlap xla"
    " --compute-dtype float32 --optimizer.muon-dtype float32 --optimizer.warmup-steps 1"
    " --steps 4 --save-interval 2"
)
MUON = [*RUN, "--optimizer.kind", "muon"]
STEPS = 10
OTHER_MESH = shlex.split("--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2 --zero 2")


def setting_of(arguments: list[str], sizes: MeshSizes) -> tuple[Any, Any]:
    """The model and the optimizer of a run."""
    config = parse(arguments)
    model = ModelFunctions(config, sizes)
    return model, make_optimizer(config.optimizer, config.steps, model.specs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory with a checkpoint of Muon, and its state, on two devices."""
    folder = tmp_path_factory.mktemp("saved")
    sizes = MeshSizes(tensor=2)
    state = init_state(*setting_of(MUON, sizes), make_mesh(sizes))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(0, state, {}, parse(MUON).to_json())
    return folder, state


def test_its_state_restores_onto_another_mesh(saved):
    sizes = MeshSizes(2, 2, 2)
    wanted = state_on_mesh(*setting_of([*MUON, *OTHER_MESH], sizes), make_mesh(sizes))
    restored = find_checkpoint(saved[0]).restore(wanted)
    for shape, found, array in zip(
        *map(jax.tree.leaves, (wanted, restored.state, saved[1])), strict=True
    ):
        assert found.sharding == shape.sharding
        np.testing.assert_array_equal(found, array)


def test_adamw_does_not_continue_from_its_checkpoint(saved, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*RUN, "--checkpoint-dir", str(saved[0]), "--resume"])
    assert stopped.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "optimizer.kind='adamw': the checkpoint has the state of muon" in error
    assert "resume with --optimizer.kind muon, or begin a new run" in error
    assert "--init-from" in error


@functools.cache
def losses(sizes: tuple[int, int, int], zero: Any, **changes: Any) -> np.ndarray:
    """The first losses of a run."""
    optimizer = dataclasses.replace(SHORT.optimizer, kind="muon", muon_dtype="float32")
    changes = {"optimizer": optimizer, "overlap": "xla"} | changes
    config = dataclasses.replace(SHORT, zero=zero, **changes)
    return Trainer(config, MeshSizes(*sizes)).run(STEPS)["loss"]


@pytest.mark.exhaustive
def test_stacked_layers_whose_weights_matmuls_gather_have_that_curve_too():
    changes = {"scan_layers": 1, "weight_gather": "matmuls", "overlap": "ring"}
    curve = losses((1, 2, 2), 3, **changes)
    # Measured: 2.4e-7.
    np.testing.assert_allclose(curve, losses((1, 1, 1), 0), rtol=5e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "zero"),
    [((2, 2, 2), 0), ((1, 8, 1), 1), ((1, 4, 2), 3)],
    ids=str,
)
def test_levels_have_the_loss_curve_of_one_device(sizes, zero):
    """All levels on all meshes are compared by their updates, in test_muon.py."""
    expected = losses((1, 1, 1), 0)
    assert expected[-1] < expected[0] - 1
    # Meshes differ in the order of sums: measured, by at most 5e-7.
    np.testing.assert_allclose(losses(sizes, zero), expected, rtol=5e-6)


@pytest.mark.exhaustive
def test_a_run_learns_and_goes_on_on_another_mesh(tmp_path, capsys):
    logs = [tmp_path / name for name in ("first", "second")]
    saved = ["--checkpoint-dir", str(tmp_path / "saved")]
    meshes = [shlex.split("--mesh.data 1 --mesh.tensor 2"), [*OTHER_MESH, "--resume-step", "2"]]
    losses = []
    for log, mesh in zip(logs, meshes, strict=True):
        main([*MUON, *mesh, *saved, "--log-file", str(log)])
        steps = (event for event in read_log(log) if event["event"] == "step")
        losses.append({event["step"]: event["loss"] for event in steps})
    output = capsys.readouterr().out
    assert "\noptimizer: muon for 7 matrices, in float32; adamw for all else\n" in output
    assert losses[0][4] < losses[0][1] - 0.1
    # Meshes differ in the order of sums.
    assert losses[1] == pytest.approx({step: losses[0][step] for step in (3, 4)}, rel=1e-5)


def test_a_checkpoint_of_an_earlier_release_is_one_of_adamw():
    now = presets.debug().to_json()
    fields = ("kind", "muon_momentum", "muon_update_rms", "muon_dtype", "decay_steps")
    optimizer = {name: value for name, value in now["optimizer"].items() if name not in fields}
    saved = trained_configuration({**now, "optimizer": optimizer})
    check_same_optimizer(saved, now)
    with pytest.raises(ValueError, match="kind='muon': the checkpoint has the state of adamw"):
        check_same_optimizer(saved, parse(MUON).to_json())


def test_its_state_has_one_moment_of_matrices():
    def memory(kind: Any) -> int:
        config = dataclasses.replace(presets.debug(), optimizer=OptimizerConfig(kind=kind))
        return memory_of(config, make_abstract_mesh(MeshSizes())).optimizer_state

    shapes = ModelFunctions(presets.debug()).abstract_params
    matrices = sum(
        math.prod(leaf.shape) for name, leaf in shapes.items() if matrix_dimensions(name)
    )
    # Muon has a count of steps, one for its schedule, and three coefficients.
    assert memory("adamw") - memory("muon") == 4 * matrices - 4 * (2 + 3)


@pytest.mark.parametrize("scan_layers", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_dry_run_names_the_optimizer(capsys, scan_layers):
    flags = "--dry-run --optimizer.kind muon --mesh.tensor 2 --overlap xla --scan-layers"
    main(shlex.split(f"{flags} {scan_layers}"))
    output = capsys.readouterr().out
    assert "optimizer: muon for 14 matrices, in bfloat16; adamw for all else" in output
    assert "optimizer state (muon)" in output


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kind": "sgd"}, "optimizer.kind=sgd: expected adamw or muon"),
        ({"muon_momentum": 1.0}, "optimizer.muon_momentum=1.0: expected at least 0 and less than"),
        ({"muon_update_rms": 0.0}, "optimizer.muon_update_rms=0.0: expected a positive number, or"),
        ({"muon_dtype": "int8"}, "optimizer.muon_dtype=int8: expected bfloat16 or float32"),
    ],
    ids=str,
)
def test_values_that_it_cannot_use_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_optimizer(OptimizerConfig(**{"kind": "muon", **changes}))
