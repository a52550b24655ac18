"""Generated tokens are those of an independent model, on every mesh and token by token."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.generation import Generator, Sampling
from models.generation.generator import make_mesh
from models.generation.sampling import choose
from tests.models import reference
from tests.models.families.test_families import MODELS

PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [3] * 11]
NEW = 9


@cache
def generator(name: str, devices: int, implementation: str = "ring") -> Generator:
    mesh = make_mesh(devices)
    return Generator(MODELS[name], mesh=mesh, implementation=implementation, dtype="float32")


@cache
def whole_params(name: str) -> dict[str, np.ndarray]:
    """Parameters of the model without padding, large enough for every part to matter."""
    model = dataclasses.replace(MODELS[name], padded_vocabulary_size=None)
    abstract = Generator(model, mesh=make_mesh(1), dtype="float32").abstract_params
    rng = np.random.default_rng(0)
    return {
        path: (rng.normal(size=leaf.shape) * 0.4 + ("scale" in path)).astype(np.float32)
        for path, leaf in sorted(abstract.items())
    }


def params_of(name: str, generator: Generator) -> dict[str, jax.Array]:
    """The parameters of `whole_params` on a mesh. Padding is poisoned: it must not be read."""
    params = {}
    for path, leaf in generator.abstract_params.items():
        array = whole_params(name)[path]
        widths = [(0, n - m) for n, m in zip(leaf.shape, array.shape, strict=True)]
        params[path] = jax.device_put(np.pad(array, widths, constant_values=99), leaf.sharding)
    return params


@cache
def expected(name: str) -> list[list[int]]:
    """The likeliest tokens by the independent model, which computes every sequence anew."""
    model = MODELS[name]
    params = {path: jnp.asarray(array) for path, array in whole_params(name).items()}
    logits = jax.jit(lambda tokens: reference.logits(model, params, tokens))
    sequences = [list(prompt) for prompt in PROMPTS]
    for sequence in sequences:
        for _ in range(NEW):
            padded = np.array([sequence + [0] * (24 - len(sequence))])
            sequence.append(int(jnp.argmax(logits(padded)[0, len(sequence) - 1])))
    return [s[len(p) :] for s, p in zip(sequences, PROMPTS, strict=True)]


# Models whose programs other tests of this file use, one whose heads of keys are on several
# devices, and the one with most peculiarities. test_reading.py, of files, decodes all families.
BY_DEFAULT = [("padded", 1), ("padded", 4), ("window", 2), ("few heads of keys", 4), ("gpt-oss", 4)]


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pytest.param(
            name,
            devices,
            marks=() if (name, devices) in BY_DEFAULT else pytest.mark.exhaustive,
        )
        for name in MODELS
        for devices in (1, 2, 4)
        # A model that is on four devices has what it has on fewer.
        if devices == 4 or (name, devices) in BY_DEFAULT
    ],
)
def test_likeliest_tokens_are_those_of_the_reference(name, devices):
    made = generator(name, devices)
    answers = made(params_of(name, made), PROMPTS, max_new_tokens=NEW, tokens_per_launch=4)
    assert answers == expected(name)


@pytest.mark.parametrize(
    ("name", "context", "tensor"),
    [
        ("window", 2, 2),
        pytest.param("padded", 3, 1, marks=pytest.mark.exhaustive),
        pytest.param("biases", 4, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_prompts_over_a_context_axis_have_the_same_answers(name, context, tensor, monkeypatch):
    # Prompts of several chunks, whose last tokens are on several devices.
    monkeypatch.setattr("models.generation.generator._SHORTEST", 1)
    mesh = make_mesh(tensor, context)
    made = Generator(MODELS[name], mesh=mesh, implementation="xla", dtype="float32")
    answers = made(params_of(name, made), PROMPTS, max_new_tokens=NEW, tokens_per_launch=4)
    assert answers == expected(name)


def test_a_mesh_of_other_axes_is_refused():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match=r"mesh: has axes \('model',\); expected 'tensor'"):
        Generator(MODELS["window"], mesh=mesh)


def test_other_backends_and_launches_of_one_token_give_the_same():
    made = generator("biases", 2, "xla")
    params = params_of("biases", made)
    assert made(params, PROMPTS, max_new_tokens=NEW, tokens_per_launch=1) == expected("biases")
    # A sequence does not depend on the others of its batch.
    assert made(params, PROMPTS[1:2], max_new_tokens=NEW) == expected("biases")[1:2]


def test_drawn_tokens_depend_on_the_seed_and_not_on_the_mesh():
    def draw(devices: int, seed: int) -> list[list[int]]:
        made = generator("padded", devices)
        sampling = Sampling(temperature=1.5, top_k=9, top_p=0.95, seed=seed)
        params = params_of("padded", made)
        return made(params, PROMPTS, max_new_tokens=NEW, sampling=sampling, tokens_per_launch=4)

    assert draw(1, seed=3) == draw(4, seed=3)
    assert draw(1, seed=3) != draw(1, seed=2**63 + 3)


def test_an_answer_ends_before_a_stop_token_and_tokens_are_passed_on_as_they_come():
    made, name = generator("window", 2), "window"
    first = expected(name)[0]
    stop = first[4]
    passed_on: list[list[int]] = [[] for _ in PROMPTS]
    answers = made(
        params_of(name, made),
        PROMPTS,
        max_new_tokens=NEW,
        stop_tokens=[stop],
        tokens_per_launch=2,
        on_token=lambda number, token: passed_on[number].append(token),
    )
    for answer, whole in zip(answers, expected(name), strict=True):
        assert answer == whole[: whole.index(stop) if stop in whole else NEW]
    assert passed_on == answers


def test_an_answer_ends_with_the_context_of_the_model():
    model = dataclasses.replace(MODELS["biases"], context_length=13)
    made = Generator(model, mesh=make_mesh(2), implementation="ring", dtype="float32")
    answers = made(params_of("biases", made), PROMPTS, max_new_tokens=NEW, tokens_per_launch=4)
    assert [len(answer) for answer in answers] == [8, 9, 2]
    assert answers == [
        whole[: len(a)] for whole, a in zip(expected("biases"), answers, strict=True)
    ]


def drawn(sampling: Sampling, logits: np.ndarray) -> np.ndarray:
    """How often each token is drawn, of logits [V] over two devices."""
    from jax.sharding import PartitionSpec as P

    count, size = 4000, len(logits)

    def local(logits, positions):
        return choose(logits, positions, sampling, vocabulary_size=size, axis_name="tensor")

    mapped = jax.shard_map(
        local, mesh=make_mesh(2), in_specs=(P(None, "tensor"), P()), out_specs=P()
    )
    tokens = jax.jit(mapped)(np.tile(logits, (count, 1)), np.arange(count))
    return np.bincount(tokens, minlength=size) / count


LOGITS = np.log(np.array([0.4, 0.05, 0.3, 0.02, 0.15, 0.08], np.float32))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0), [0, 1, 2, 3, 4, 5]),
        (Sampling(temperature=1.0, top_k=2), [0, 2]),
        # The first three add up to 0.85, the first two to 0.7.
        (Sampling(temperature=1.0, top_p=0.71), [0, 2, 4]),
        (Sampling(temperature=1.0, top_p=0.7), [0, 2]),
        # Of 0.4 and 0.3 alone, the first is 0.57.
        (Sampling(temperature=1.0, top_k=2, top_p=0.55), [0]),
        (Sampling(temperature=0.5), [0, 1, 2, 3, 4, 5]),
        (Sampling(), [0]),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_their_probability(sampling, kept):
    probabilities = np.zeros(6)
    weights = np.exp(LOGITS[kept] / (sampling.temperature or 1))
    probabilities[kept] = weights / weights.sum()
    # Four standard deviations of 4,000 draws are at most 0.032.
    np.testing.assert_allclose(drawn(sampling, LOGITS), probabilities, atol=0.032)


@pytest.mark.parametrize(
    ("sampling", "scale", "kept"),
    [
        # Divided by these, logits are infinite in float32, or the temperature is 0.
        (Sampling(temperature=2e-38), 50, [2]),
        (Sampling(temperature=1e-39), 1, [2]),
        (Sampling(temperature=1e-300, top_k=3, top_p=0.9), 1, [2]),
        (Sampling(temperature=1.0, top_p=1e-60), 1, [2]),
        (Sampling(temperature=1e300, top_k=10**30), 1, [0, 1, 2, 3, 4, 5]),
    ],
    ids=str,
)
def test_numbers_that_float32_does_not_hold_mean_what_they_say(sampling, scale, kept):
    """They are limits: the likeliest token, or all alike."""
    # The likeliest is not the first, and logits have both signs.
    logits = np.roll(LOGITS + 2, 2)
    probabilities = np.zeros(6)
    probabilities[kept] = 1 / len(kept)
    # As above.
    np.testing.assert_allclose(drawn(sampling, scale * logits), probabilities, atol=0.032)


def test_numbers_of_tokens_that_nobody_counts_to_change_nothing():
    model = dataclasses.replace(MODELS["biases"], context_length=13)
    made = Generator(model, mesh=make_mesh(1), implementation="xla", dtype="float32")
    params = params_of("biases", made)
    expected_answers = made(params, PROMPTS, max_new_tokens=13)
    more: dict[str, Any] = dict(
        max_new_tokens=10**30, tokens_per_launch=2**64, stop_tokens=[-1, 2**40]
    )
    assert made(params, PROMPTS, **more) == expected_answers
    unlimited = Generator(dataclasses.replace(model, context_length=None), mesh=make_mesh(1))
    with pytest.raises(ValueError, match=r"max_new_tokens=4294967296: expected less; the cache"):
        unlimited({}, PROMPTS, max_new_tokens=2**32)


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"),
    [
        ([], {}, "prompts: expected at least one"),
        ([[1], []], {}, "prompts: number 1 has no tokens"),
        ([[24]], {}, "number 0 has a token outside of the vocabulary of 24"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0: expected at least 1"),
        ([[1] * 13], {}, "number 0 has 13 tokens, and the model's context is of 13, answer incl"),
    ],
)
def test_bad_prompts_are_refused(prompts, options, sentence):
    model = dataclasses.replace(MODELS["biases"], context_length=13)
    made = Generator(model, mesh=make_mesh(2))
    with pytest.raises(ValueError, match=sentence):
        made({}, prompts, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: expected a number of at least 0"),
        ({"top_k": -1}, "top_k=-1: expected a whole number"),
        ({"top_p": 0.0}, "top_p=0.0: expected more than 0 and at most 1"),
        ({"top_p": math.nan}, "top_p=nan: expected more than 0 and at most 1"),
        ({"temperature": math.inf}, "temperature=inf: expected a number of at least 0"),
        ({"temperature": math.nan}, "temperature=nan: expected a number of at least 0"),
        ({"top_k": 1.5}, "top_k=1.5: expected a whole number"),
        ({"seed": -1}, "seed=-1: expected a whole number from 0 to"),
        ({"seed": 2**64}, r"seed=18446744073709551616: expected a whole number from 0 to"),
    ],
)
def test_bad_sampling_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Sampling(**options)
