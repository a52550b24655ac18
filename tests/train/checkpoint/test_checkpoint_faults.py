"""A fault ends in a sentence, never in a hang, and never costs a checkpoint that was complete."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from models.checkpoint.saved_checkpoint import SavedCheckpoint, find_checkpoint, whole_steps
from tests.train.checkpoint.test_checkpoint import (
    CONFIGURATION,
    POSITION,
    abstract,
    assert_same_bits,
    contents,
    make_mesh,
    make_state,
    names,
    save_steps,
)
from train.checkpoint.checkpoint import Checkpoints, SaveError


def restore(directory: Path, **options) -> int:
    """Restores and returns the step, after a comparison with the state of that step."""
    with Checkpoints(directory, resume=True, **options) as checkpoints:
        restored = checkpoints.restore(abstract(make_state()))
    assert_same_bits(restored.state, make_state(restored.step))
    return restored.step


def test_a_checkpoint_whose_folder_cannot_be_made_ends_in_a_sentence(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    message = r"step 2: its checkpoint could not be saved .*\(.*Not a directory.*\); there is no"
    with pytest.raises(SaveError, match=message), Checkpoints(directory) as checkpoints:
        checkpoints.save(1, make_state(1), POSITION, CONFIGURATION)
        assert checkpoints.latest_step() == 1
        directory.rename(tmp_path / "moved")
        directory.write_text("in the way")
        checkpoints.save(2, make_state(2), POSITION, CONFIGURATION)
    assert restore(tmp_path / "moved") == 1


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_the_directory_is_refused(tmp_path: Path, resume: bool) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1), POSITION, CONFIGURATION)
        checkpoints.latest_step()
        before = contents(tmp_path)
        with pytest.raises(ValueError, match=r"in use by another run \(process \d+ on .*\); wait"):
            Checkpoints(tmp_path, resume=resume)
        assert contents(tmp_path) == before
    assert restore(tmp_path) == 1


def test_a_checkpoint_is_read_while_its_run_goes_on(tmp_path: Path) -> None:
    state = make_state(1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, POSITION, CONFIGURATION)
        checkpoints.latest_step()
        before = contents(tmp_path)
        for path in (tmp_path, tmp_path / "step_1"):
            target = abstract(state, make_mesh(2, 4))["params"]
            params = find_checkpoint(path).restore_params(target)
            assert_same_bits(params, state["params"])
        assert contents(tmp_path) == before


def test_no_checkpoint_to_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint; give a directory"):
        find_checkpoint(tmp_path)
    for path in (tmp_path / "absent", tmp_path / "step_3"):
        with pytest.raises(ValueError, match="does not exist; give a directory of checkpoints"):
            find_checkpoint(path)


def test_a_step_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    for step in (2, 10):
        saved(tmp_path, step)
    (tmp_path / "step_4").mkdir()
    for name in ("step_4", "step_5"):
        answer = f"'{tmp_path / name}': is no checkpoint; '{tmp_path}' has those of the steps 2, 10"
        with pytest.raises(ValueError, match=re.escape(answer)):
            find_checkpoint(tmp_path / name)
    assert find_checkpoint(tmp_path / "step_2").step == 2


@pytest.mark.parametrize("inside", ["other", "step_2", "step_2/other"])
def test_a_new_run_is_not_within_another_one(inside: str, tmp_path: Path) -> None:
    saved(tmp_path, 2)
    before = contents(tmp_path)
    for directory in (tmp_path / inside, f"{tmp_path}/{inside}/"):
        with pytest.raises(
            ValueError, match=r"is inside .*, the directory of another run \(newest"
        ):
            Checkpoints(directory)
    assert contents(tmp_path) == before
    # What an earlier release let begin there goes on.
    shutil.copytree(tmp_path / "step_2", tmp_path / "other" / "step_2")
    Checkpoints(tmp_path / "other", resume=True).close()


def saved(directory: Path, step: int) -> None:
    """Makes the files by which a checkpoint is told from other folders."""
    for name in ("state", "data_position", "configuration", "_CHECKPOINT_METADATA"):
        (directory / f"step_{step}" / name).mkdir(parents=True)


def test_parameters_of_another_model_are_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    target = abstract(make_state(width=24))["params"]
    with pytest.raises(ValueError, match=r"params.norm was float32\[16\], is float32\[24\]"):
        find_checkpoint(tmp_path).restore_params(target)


def damage_array_data(step: Path) -> None:
    """Changes a value in every array, and writes them as orbax would."""
    other = step.parent.with_name(f"{step.parent.name}_other")
    with Checkpoints(other) as checkpoints:
        state = jax.tree.map(lambda x: x + np.ones((), x.dtype), make_state(10))
        checkpoints.save(10, state, POSITION, CONFIGURATION)
    shutil.rmtree(step / "state")
    shutil.move(other / "step_10" / "state", step / "state")


def damage_position(step: Path) -> None:
    (step / "data_position" / "metadata").write_text('{"next_index": 7}')


def damage_checksums(step: Path) -> None:
    path = step / "checksums" / "metadata"
    path.write_text(path.read_text().replace('"params.norm": "', '"params.norm": "0'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_array_data, r"opt_state.* \.\.\. in .*/step_10/state are not what was saved"),
        (damage_position, r"/step_10/data_position/metadata is not what was saved"),
        (damage_checksums, r"params.norm in .*/step_10/state is not what was saved"),
    ],
)
def test_changed_contents_are_refused(tmp_path: Path, damage, message: str) -> None:
    """Files that are well-formed, so that orbax reads them without an error."""
    save_steps(tmp_path, 5, 10)
    damage(tmp_path / "step_10")
    message = f"step_10: this checkpoint is damaged: .*{message}.*, as in --resume-step 5$"
    with pytest.raises(ValueError, match=message):
        restore(tmp_path)
    assert restore(tmp_path, resume_step=5) == 5


def test_a_checkpoint_without_checksums_restores(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    shutil.rmtree(tmp_path / "step_1" / "checksums")
    restored = SavedCheckpoint(tmp_path / "step_1").restore(abstract(make_state()))
    assert not restored.verified
    assert_same_bits(restored.state, make_state(1))


def test_an_earlier_step_to_resume_from_sets_later_ones_aside(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    before = contents(tmp_path / "step_30")
    for repeat in ("", ".2"):
        with Checkpoints(tmp_path, resume=True, resume_step=10, save_interval=5) as checkpoints:
            assert checkpoints.latest_step() == 10
            assert checkpoints.should_save(15)
            assert names(tmp_path)[:3] == ["step_10", "step_20", "step_30"], "nothing is saved yet"
            assert checkpoints.save(20, make_state(20), POSITION, CONFIGURATION)
            assert not checkpoints.should_save(20)
        assert whole_steps(tmp_path) == [10, 20]
        aside = tmp_path / "superseded"
        assert (aside / f"step_20{repeat}").is_dir()
        with Checkpoints(tmp_path, resume=True) as checkpoints:
            checkpoints.save(30, make_state(30), POSITION, CONFIGURATION)
    assert {name.rsplit("/", 1)[-1] for name in before} == {
        name.rsplit("/", 1)[-1] for name in contents(aside / "step_30")
    }
    assert restore(tmp_path) == 30


def test_a_step_to_resume_from_must_exist(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    with pytest.raises(ValueError, match=r"resume_step=15: not among .*; there are 10, 20"):
        Checkpoints(tmp_path, resume=True, resume_step=15)


def flip(content: bytes, rng: random.Random) -> bytes:
    position = rng.randrange(len(content))
    flipped = content[position] ^ rng.randrange(1, 256)
    return content[:position] + bytes([flipped]) + content[position + 1 :]


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def overwrite_with_zeros(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    return content[:start] + bytes(len(content) - start)


# The coroutines of orbax that read the other arrays are not waited for.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("repeats", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("damage", [flip, truncate, overwrite_with_zeros])
def test_damage_to_any_file_is_refused_or_without_effect(
    tmp_path: Path, damage, repeats: int
) -> None:
    """Never a wrong state, never an error without a sentence."""
    save_steps(tmp_path, 10)
    step = tmp_path / "step_10"
    rng = random.Random(repeats)
    refused = set()
    for path in [path for path in sorted(step.rglob("*")) if path.is_file()] * repeats:
        content = path.read_bytes()
        path.write_bytes(damage(content, rng))
        checkpoint = SavedCheckpoint(step)
        try:
            restored = checkpoint.restore(abstract(make_state()))
            assert_same_bits(restored.state, make_state(10))
            assert (restored.data_position, checkpoint.configuration()) == (POSITION, CONFIGURATION)
        except ValueError as error:
            assert str(error).startswith(str(step)), error
            refused.add(str(path.relative_to(step)))
        path.write_bytes(content)
    assert {"checksums/metadata", "data_position/metadata", "state/_METADATA"} <= refused
    assert any(path.startswith("state/d/") for path in refused)
