"""Every number on the trainer's command line means something, or is refused in a sentence."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

import jax
import pytest

from models.random_keys import random_key
from train.config.config import Config
from train.run.command_line import main

#: Numbers of processes are checked where those connect, which a dry run does not.
ELSEWHERE = ("distributed.",)
#: What no gradient's norm reaches, so that nothing is clipped.
MAY_BE_INFINITE = {"optimizer.clip_norm"}
#: `models.config` checks these, by another test.
OF_THE_MODEL = (
    "model.rotary_scaling.", "model.rotary_base", "model.norm_epsilon", "model.router_loss_weight",
)  # fmt: skip
TINY = [
    "--dry-run", "--steps", "1", "--sequence-length", "16", "--batch-size", "8",
    "--model.num-layers", "1", "--model.features", "32", "--model.hidden-features", "32",
    "--model.num-heads", "8", "--model.num-key-value-heads", "8", "--model.head-dim", "4",
]  # fmt: skip


def numbers(kind: type, of: type = Config, prefix: str = "") -> Iterator[str]:
    """The fields of a configuration that are numbers of a kind."""
    hints = typing.get_type_hints(of)
    for field in dataclasses.fields(of):
        name, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from numbers(kind, typing.cast(type, hint), f"{name}.")
        elif kind in (hint, *typing.get_args(hint)) and not name.startswith(
            ELSEWHERE + OF_THE_MODEL
        ):
            yield name


def refusal(capsys, name: str, value: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([*TINY, "--" + name.replace("_", "-"), value])
    assert exit_.value.code == 2
    # Values that a dataclass refuses are reported in a box.
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize("value", [2**63, 10**30, -1])
@pytest.mark.parametrize("name", list(numbers(int)))
def test_whole_numbers_beyond_all_sizes_are_refused(capsys, name, value):
    if (name, value) == ("seed", 2**63):
        value = 2**64
    sentence = refusal(capsys, name, str(value))
    assert name.rpartition(".")[2] in sentence
    assert str(value) in sentence or name == "resume_step", sentence


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("name", list(numbers(float)))
def test_fractions_that_are_no_numbers_are_refused(capsys, name, value):
    if value == "inf" and name in MAY_BE_INFINITE:
        return
    assert refusal(capsys, name, value).startswith(f"error: {name}={float(value)}: expected")


@pytest.mark.parametrize("kind", [int, float])
def test_the_flags_are_found(kind):
    found = set(numbers(kind))
    assert {int: {"seed", "mesh.tensor"}, float: {"optimizer.b1"}}[kind] < found


@pytest.mark.parametrize("seed", ["0.5", "1e3", "9" * 5000, "٣x", ""])
def test_a_seed_that_is_no_whole_number_is_refused(capsys, seed):
    assert "seed" in refusal(capsys, "seed", seed)


def test_each_seed_has_a_key_of_its_own():
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    keys = {tuple(jax.random.key_data(random_key(seed)).tolist()) for seed in seeds}
    assert len(keys) == len(seeds)
    # Those that fit into 32 bits keep their keys.
    for seed in seeds[:4]:
        assert (
            jax.random.key_data(random_key(seed)) == jax.random.key_data(jax.random.key(seed))
        ).all()
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=f"seed={seed}: expected a whole number from 0"):
            random_key(seed)
