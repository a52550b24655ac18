"""Rotary frequencies and rotation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from models import rotary
from models.families.llama3 import llama3_8b
from tests.models import reference


def test_llama_3_1_scaling_equals_the_reference():
    config = llama3_8b()
    expected = [reference.wave(config, i) for i in range(config.head_dim // 2)]
    np.testing.assert_allclose(rotary.frequencies(config), expected, rtol=1e-6)
    # The slowest wave is scaled by the whole factor, the fastest is not scaled.
    assert np.isclose(expected[0], 1.0)
    assert np.isclose(expected[-1], 500_000.0 ** (-126 / 128) / 8)


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
