"""Checkpoints are exact on any mesh, complete or absent, and never overwritten."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from models.checkpoint.earlier_releases import NEW_FIELDS, NEW_MODEL_FIELDS
from models.checkpoint.saved_checkpoint import differences
from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.run_lock import LOCK_FILE

MODEL = {**NEW_MODEL_FIELDS, "layers": 2, "rope": {"theta": 10000.0}}
CONFIGURATION = {**NEW_FIELDS, "model": MODEL, "seed": 0}
POSITION = {"next_index": 3}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3)))


def make_mesh(data: int, tensor: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: data * tensor]
    return jax.make_mesh(
        (data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )


def shardings(state: Any, mesh: jax.sharding.Mesh) -> Any:
    """Matrices are sharded over the tensor axis, everything else is replicated."""
    return jax.tree.map(
        lambda x: NamedSharding(mesh, PartitionSpec(*(["tensor"] if x.ndim == 2 else []))), state
    )


def make_state(seed: int = 0, mesh: jax.sharding.Mesh | None = None, width: int = 16) -> Any:
    """A train state after one optimizer step, so that no moment is zero."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "layers": {i: {"w": jax.random.normal(keys[i], (8, width), jnp.float32)} for i in range(2)},
        "embedding": jax.random.normal(keys[2], (width, 8)).astype(jnp.bfloat16),
        "norm": jnp.full(width, 1 / 3, jnp.float32),
    }
    _, opt_state = OPTIMIZER.update(params, OPTIMIZER.init(params), params)
    state = {"params": params, "opt_state": opt_state, "step": jnp.int32(seed)}
    return jax.device_put(state, shardings(state, mesh or make_mesh(1, 1)))


def abstract(state: Any, mesh: jax.sharding.Mesh | None = None) -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        shardings(state, mesh or make_mesh(1, 1)),
    )


def assert_same_bits(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


def save_steps(directory: Path, *steps: int, **options: Any) -> None:
    with Checkpoints(directory, **options) as checkpoints:
        for step in steps:
            assert checkpoints.save(step, make_state(step), POSITION, CONFIGURATION)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != LOCK_FILE)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("restored_on", [(2, 4), (8, 1), (1, 8), (1, 1)])
def test_restores_bit_for_bit_on_any_mesh(tmp_path: Path, restored_on: tuple[int, int]) -> None:
    state = make_state(5, make_mesh(2, 4))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, POSITION, CONFIGURATION)
    target = abstract(state, make_mesh(*restored_on))
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        restored = checkpoints.restore(target)
    assert (restored.step, restored.data_position) == (5, POSITION)
    assert_same_bits(restored.state, state)
    assert jax.tree.map(lambda x: x.sharding, restored.state) == jax.tree.map(
        lambda x: x.sharding, target
    )


def test_the_optimizer_continues_as_if_uninterrupted(tmp_path: Path) -> None:
    state = make_state(1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, POSITION, CONFIGURATION)
        restored = checkpoints.restore(abstract(state)).state
    update = jax.jit(lambda s: OPTIMIZER.update(s["params"], s["opt_state"], s["params"]))
    assert_same_bits(update(restored), update(state))


def test_the_state_may_be_donated_while_the_save_is_pending(tmp_path: Path) -> None:
    """The state is so large that the save is pending when the donating step needs the memory.

    Whether the step gets the memory at once differs between versions of JAX and orbax; the
    checkpoint must not.
    """
    state = make_state(1, make_mesh(2, 4), width=1 << 16)
    expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
    target = abstract(state)
    overwrite = jax.jit(
        lambda s: jax.tree.map(lambda x: x + 1, s),
        donate_argnums=0,
        out_shardings=jax.tree.map(lambda x: x.sharding, state),
    )
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, POSITION, CONFIGURATION)
        jax.block_until_ready(overwrite(state))
        assert_same_bits(checkpoints.restore(target).state, expected)


def test_the_data_continues_at_its_position(tmp_path: Path) -> None:
    source = grain.MapDataset.source(list(range(64))).shuffle(seed=1).repeat().batch(4)
    batches = iter(source.to_iter_dataset())
    next(batches)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(), batches.get_state(), CONFIGURATION)
        expected = [next(batches) for _ in range(3)]
        position = checkpoints.restore(abstract(make_state())).data_position
    resumed = iter(source.to_iter_dataset())
    resumed.set_state(position)
    np.testing.assert_array_equal([next(resumed) for _ in range(3)], expected)


def test_the_data_position_is_the_one_at_the_time_of_the_save(tmp_path: Path) -> None:
    position = {"nested": {"next_index": 3}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(), position, CONFIGURATION)
        position["nested"]["next_index"] = 4
        restored = checkpoints.restore(abstract(make_state()))
    assert restored.data_position == {"nested": {"next_index": 3}}


def test_the_newest_checkpoints_are_kept_and_readable(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30, max_to_keep=2)
    with Checkpoints(tmp_path, resume=True, max_to_keep=2) as checkpoints:
        assert checkpoints.latest_step() == 30
        assert_same_bits(checkpoints.restore(abstract(make_state()), 20).state, make_state(20))
        with pytest.raises(ValueError, match=r"step=10: not among .* there are 20, 30"):
            checkpoints.restore(abstract(make_state()), 10)


def test_should_save_at_multiples_of_the_interval(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, save_interval=10) as checkpoints:
        assert [step for step in range(1, 31) if checkpoints.should_save(step)] == [10, 20, 30]
        checkpoints.save(20, make_state(), POSITION, CONFIGURATION)
        assert [step for step in range(1, 31) if checkpoints.should_save(step)] == [30]


def test_a_saved_step_is_not_saved_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    before = contents(tmp_path)
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        assert not checkpoints.save(10, make_state(3), POSITION, CONFIGURATION)
    assert contents(tmp_path) == before


KILLED_AT_THE_RENAME = """
    import os, signal, sys
    from tests.train.checkpoint.test_checkpoint import CONFIGURATION, POSITION, make_state
    from train.checkpoint.checkpoint import Checkpoints

    with Checkpoints(sys.argv[1]) as checkpoints:
        checkpoints.save(10, make_state(10), POSITION, CONFIGURATION)
        assert checkpoints.latest_step() == 10
        rename = os.rename
        def kill_instead(source, target, **options):
            if os.path.basename(target) == "step_20":
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target, **options)
        os.rename = os.replace = kill_instead
        checkpoints.save(20, make_state(20), POSITION, CONFIGURATION)
"""


def test_a_save_killed_before_its_rename_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED_AT_THE_RENAME), str(tmp_path)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert any(path.name != "step_10" for path in tmp_path.iterdir()), "nothing was half-written"
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        assert checkpoints.latest_step() == 10
        assert_same_bits(checkpoints.restore(abstract(make_state())).state, make_state(10))
        assert checkpoints.save(20, make_state(20), POSITION, CONFIGURATION)
        assert checkpoints.latest_step() == 20
        assert_same_bits(checkpoints.restore(abstract(make_state())).state, make_state(20))
    assert names(tmp_path) == ["step_10", "step_20"]


def test_the_remains_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    shutil.copytree(tmp_path / "step_10", tmp_path / "step_20.orbax-checkpoint-tmp")
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        assert checkpoints.latest_step() == 10
        checkpoints.save(30, make_state(30), POSITION, CONFIGURATION)
    assert names(tmp_path) == ["step_10", "step_30"]


def test_a_run_killed_while_it_deleted_a_checkpoint_resumes(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    for item in ("state", "configuration", "data_position"):
        shutil.rmtree(tmp_path / "step_10" / item)
    with Checkpoints(tmp_path, resume=True, max_to_keep=2) as checkpoints:
        assert checkpoints.restore(abstract(make_state())).step == 20
        checkpoints.save(30, make_state(30), POSITION, CONFIGURATION)
    assert names(tmp_path) == ["step_20", "step_30"]


def test_the_configuration_is_read_without_the_state(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    shutil.rmtree(tmp_path / "step_10" / "state")
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        assert checkpoints.configuration() == CONFIGURATION


def test_a_checkpoint_from_another_model_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    model = {"layers": 4, "rope": {"theta": 10000.0}, "heads": 8}
    other = {"model": {**NEW_MODEL_FIELDS, **model}, "seed": 1}
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        checkpoints.newest().check_same_model({**CONFIGURATION, "seed": 1})
        with pytest.raises(ValueError) as refusal:
            checkpoints.newest().check_same_model(other)
    for part in ("another model", "model.layers was 2, is 4", "model.heads was not set, is 8"):
        assert part in str(refusal.value)
    assert "theta" not in str(refusal.value)


def test_differences_compares_what_json_keeps() -> None:
    assert differences({"mesh": [1, 8]}, {"mesh": (1, 8)}) == {}
    assert differences({"mesh": [1, 8]}, {"mesh": (2, 4)}) == {"mesh": ([1, 8], [2, 4])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s["params"].update(norm=jnp.zeros(5, jnp.float32)),
            r"params.norm was float32\[16\], is ",
        ),
        (lambda s: s["params"].update(norm=jnp.zeros(16, jnp.bfloat16)), r"is bfloat16\[16\]"),
        (
            lambda s: s["params"].update(bias=jnp.zeros(5, jnp.float32)),
            r"params.bias was not set, is float32",
        ),
        (lambda s: s.pop("step"), r"step was int32\[\], is not set"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    save_steps(tmp_path, 10)
    state = make_state()
    change(state)
    with (
        Checkpoints(tmp_path, resume=True) as checkpoints,
        pytest.raises(ValueError, match=message),
    ):
        checkpoints.restore(abstract(state))


@pytest.mark.parametrize("damaged", ["state/d/*", "state/_METADATA", "data_position/metadata"])
def test_damaged_files_are_named(tmp_path: Path, damaged: str) -> None:
    state = {"w": jnp.arange(8.0)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(10, state, POSITION, CONFIGURATION)
    for path in (tmp_path / "step_10").glob(damaged):
        path.write_bytes(path.read_bytes()[:10])
    message = rf"step_10: this checkpoint is damaged: {tmp_path}/.* cannot be read \(.{{9,310}}\); "
    with (
        Checkpoints(tmp_path, resume=True) as checkpoints,
        pytest.raises(ValueError, match=message),
    ):
        checkpoints.restore(abstract(state))


def test_checkpoints_of_another_run_are_never_overwritten(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"newest: step 10.* give --resume .* another directory"):
        Checkpoints(tmp_path)
    assert contents(tmp_path) == before


def test_the_users_files_are_left_alone(tmp_path: Path) -> None:
    kept = {"notes.txt": b"a", "7": b"b", "step_size": b"c", "step_007": b"d"}
    for name, text in kept.items():
        (tmp_path / name).write_bytes(text)
    save_steps(tmp_path, 1, 2, 3, max_to_keep=1)
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["step_20", "step_20/photo.jpg"])
def test_a_users_file_in_the_way_of_a_step_is_refused(
    tmp_path: Path, name: str, resume: bool
) -> None:
    if resume:
        save_steps(tmp_path, 10)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(ValueError, match="step_20 in it is not a checkpoint"):
        Checkpoints(tmp_path, resume=resume)
    assert (tmp_path / name).read_bytes() == b"mine"


def test_resume_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume=True: .* holds no checkpoint; leave out"):
        Checkpoints(tmp_path, resume=True)


def test_an_empty_run_has_no_latest_step(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "made" / "here") as checkpoints:
        assert checkpoints.latest_step() is None
        with pytest.raises(ValueError, match="holds no checkpoint"):
            checkpoints.configuration()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"checkpoint_dir=.*cannot be written"):
            Checkpoints(directory)
    with pytest.raises(ValueError, match="not a URL"):
        Checkpoints("gs://bucket/run")


@pytest.mark.parametrize(
    ("flags", "reason"), [(0, "Permission denied"), (os.ST_RDONLY, "Read-only file system")]
)
def test_a_read_only_file_system_is_named(tmp_path, monkeypatch, flags, reason) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags))
    with pytest.raises(ValueError, match=rf"cannot be written \({reason}\); give"):
        Checkpoints(tmp_path)


@pytest.mark.parametrize("option", ["max_to_keep", "save_interval"])
def test_numbers_must_be_positive(tmp_path: Path, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=0: expected at least 1"):
        Checkpoints(tmp_path, **{option: 0})  # type: ignore[arg-type]


def test_a_position_that_is_not_json_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(TypeError, match="JSON"):
            checkpoints.save(1, make_state(), {"position": b"bytes"}, CONFIGURATION)
        assert checkpoints.latest_step() is None
