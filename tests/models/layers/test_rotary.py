"""Rotary frequencies and rotation."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import LlamaConfig, RotaryScaling, config_from_json
from models.families.llama3 import llama3_8b
from models.layers import rotary
from tests.models import reference


def test_llama_3_1_scaling_equals_the_reference():
    config = llama3_8b()
    expected = [reference.wave(config, i) for i in range(config.head_dim // 2)]
    np.testing.assert_allclose(rotary.frequencies(config), expected, rtol=1e-6)
    # The slowest wave is scaled by the whole factor, the fastest is not scaled.
    assert np.isclose(expected[0], 1.0)
    assert np.isclose(expected[-1], 500_000.0 ** (-126 / 128) / 8)


def yarn_model(**scaling) -> LlamaConfig:
    given = {"kind": "yarn", "factor": 4.0, "original_context": 32_768, **scaling}
    return dataclasses.replace(llama3_8b(), rotary_scaling=RotaryScaling(**given))


@pytest.mark.parametrize(
    "scaling",
    [{}, {"truncate": False}, {"beta_fast": 8.0, "beta_slow": 2.0}, {"original_context": 4}],
    ids=str,
)
def test_yarn_scaling_equals_the_reference(scaling):
    config = yarn_model(**scaling)
    expected = [reference.wave(config, i) for i in range(config.head_dim // 2)]
    np.testing.assert_allclose(rotary.frequencies(config), expected, rtol=1e-6)


def test_yarn_keeps_fast_waves_and_divides_slow_ones_by_the_factor():
    config = yarn_model()
    radians = config.rotary_base ** -(np.arange(0, 128, 2) / 128)
    turns = config.rotary_scaling.original_context * radians / (2 * np.pi)
    scaled = rotary.frequencies(config) / radians
    np.testing.assert_allclose(scaled[turns > 40], 1, rtol=1e-6)
    np.testing.assert_allclose(scaled[turns < 0.8], 0.25, rtol=1e-6)
    assert np.all(np.diff(scaled) < 1e-6)


def test_yarn_multiplies_rotated_features():
    """Section 3.4 of the paper: scores are multiplied by the square of 0.1 ln(factor) + 1."""
    assert rotary.attention_factor(llama3_8b()) == 1
    assert rotary.attention_factor(yarn_model(attention_factor=1.5)) == 1.5
    factor = rotary.attention_factor(yarn_model())
    assert np.isclose(factor, 0.1 * np.log(4) + 1)
    x = jax.random.normal(jax.random.key(0), (1, 8, 2, 128))
    frequencies = rotary.frequencies(yarn_model())
    alone = np.asarray(rotary.rotate(x, frequencies))
    np.testing.assert_allclose(
        rotary.rotate(x, frequencies, factor=factor), alone * factor, rtol=1e-5, atol=1e-6
    )


def test_scalings_pass_through_json():
    for config in (llama3_8b(), yarn_model(truncate=False)):
        assert config_from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"factor": 0.5}, "factor=0.5: expected at least 1"),
        ({"beta_slow": 32.0}, "beta_slow=32.0: expected less than beta_fast=32.0"),
        ({"attention_factor": 0.0}, "attention_factor=0.0: expected a positive number"),
        ({"original_context": 0}, "original_context=0: expected at least 1"),
        ({"kind": "linear"}, "kind='linear': expected llama3 or yarn"),
    ],
)
def test_a_wrong_scaling_is_a_sentence(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        yarn_model(**change)


def test_yarn_needs_waves_of_different_lengths():
    with pytest.raises(
        ValueError, match=r"rotary_base=1\.0: expected more than 1 with rotary_scaling"
    ):
        dataclasses.replace(yarn_model(), rotary_base=1.0)


def test_rotation_depends_on_distance_alone():
    """The inner product of two rotated vectors depends on their distance only."""
    rng = np.random.default_rng(0)
    frequencies = rotary.frequencies(llama3_8b())
    query, key = rng.normal(size=(2, 128)).astype(np.float32)
    positions = 32

    def everywhere(vector):
        stacked = jnp.broadcast_to(vector, (1, positions, 1, 128))
        return np.asarray(rotary.rotate(stacked, frequencies))[0, :, 0]

    products = everywhere(query) @ everywhere(key).T
    for distance in range(-5, 6):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-3, atol=1e-3)
    assert abs(products[0, 0] - products[0, 5]) > 0.1


def test_positions_of_tokens_may_be_given():
    frequencies = rotary.frequencies(llama3_8b())
    x = jax.random.normal(jax.random.key(0), (1, 8, 2, 128))
    positions = jnp.array([[0, 1, 2, 0, 1, 2, 3, 4]])
    alone = [rotary.rotate(part, frequencies) for part in (x[:, :3], x[:, 3:])]
    rotated = rotary.rotate(x, frequencies, positions)
    np.testing.assert_allclose(rotated, np.concatenate(alone, axis=1), rtol=1e-6, atol=1e-6)
