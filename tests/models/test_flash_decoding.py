"""The kernels of attention to the cache, by the interpreter, beside XLA's."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from models.generation import Generator, cache, flash_decoding, generator
from models.generation.cache import LayerCache
from models.generation.generator import make_mesh
from tests.models.test_families import MODELS


def random(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), dtype)


def poisoned(x: jax.Array, tokens: slice) -> jax.Array:
    return x.at[:, :, tokens].set(jnp.nan)


@pytest.mark.parametrize("programs", [264, 3])
@pytest.mark.parametrize("window", [None, 1, 70, 128])
@pytest.mark.parametrize(
    ("query_heads", "key_heads", "capacity", "positions"),
    [(8, 2, 640, [0, 63, 64, 639]), (20, 1, 192, [150]), (3, 3, 64, [5, 40])],
)
def test_attention_is_that_of_xla(
    query_heads: int,
    key_heads: int,
    capacity: int,
    positions: list[int],
    window: int | None,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts have one block or several, and scores whose exponentials are infinite."""
    monkeypatch.setattr(flash_decoding, "_PROGRAMS", programs)
    batch, places = len(positions), jnp.array(positions, jnp.int32)
    shape = batch, key_heads, capacity, 16
    tokens = LayerCache(random(*shape), 1 + random(*shape))
    query = 50 * random(batch, 1, query_heads, 16)
    attended = flash_decoding.attend(query, tokens, places, window)
    np.testing.assert_allclose(attended, cache.attend(query, tokens, places, window), atol=1e-4)


@pytest.mark.parametrize(("window", "first"), [(None, 0), (100, 128), (73, 192)])
def test_blocks_without_tokens_to_attend_to_are_not_read(window: int | None, first: int) -> None:
    """A block has 64 tokens, which XLA multiplies by zero; these are no numbers."""
    shape, position = (2, 2, 640, 16), jnp.full(2, 264, jnp.int32)
    tokens = LayerCache(random(*shape), random(*shape))
    query = random(2, 1, 4, 16)
    poison = slice(0, first), slice(320, None)
    key, value = (functools.reduce(poisoned, poison, x) for x in tokens)
    attended = flash_decoding.attend(query, LayerCache(key, value), position, window)
    np.testing.assert_array_equal(attended, flash_decoding.attend(query, tokens, position, window))


def test_half_precision_is_rounded_once() -> None:
    tokens = LayerCache(*[random(1, 2, 256, 32, dtype="bfloat16")] * 2)
    query = random(1, 1, 8, 32, dtype="bfloat16")
    position = jnp.array([200], jnp.int32)
    attended = flash_decoding.attend(query, tokens, position, None)
    wide: Any = jax.tree.map(lambda x: x.astype(jnp.float32), (query, tokens))
    exact = cache.attend(wide[0], wide[1], position, None)
    assert attended.dtype == jnp.bfloat16
    # Half a unit in the last place, and what weights of 8 bits differ by.
    np.testing.assert_allclose(attended.astype(jnp.float32), exact, rtol=2**-8, atol=2**-9)


def test_a_generator_decodes_by_the_attention_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def attend(*arguments: Any) -> jax.Array:
        calls.append(arguments[-1])
        return cache.attend(*arguments)

    monkeypatch.setitem(generator._ATTENTION, "flash_decoding", attend)
    model, answers = MODELS["window"], []
    for attention in ("xla", "flash_decoding"):
        made = Generator(model, mesh=make_mesh(2), dtype="float32", attention=attention)
        params = {
            name: jax.device_put(0.4 * random(*leaf.shape) + ("scale" in name), leaf.sharding)
            for name, leaf in made.abstract_params.items()
        }
        answers.append(made(params, [[1, 2, 3, 4, 5], [3] * 11], max_new_tokens=6))
        assert set(calls) == ({model.sliding_window} if attention != "xla" else set())
    assert answers[0] == answers[1]


def test_what_the_kernels_do_not_take_is_refused() -> None:
    wrong: Any = "flash"
    with pytest.raises(ValueError, match="attention='flash': expected one of xla, flash_decoding"):
        Generator(MODELS["window"], mesh=make_mesh(1), attention=wrong)

    def attended(capacity: int, size: int) -> jax.Array:
        tokens = LayerCache(*[random(1, 2, capacity, size)] * 2)
        return flash_decoding.attend(random(1, 1, 2, size), tokens, jnp.zeros(1, jnp.int32), None)

    for sizes in ((100, 16), (128, 24), (128, 8)):
        with pytest.raises(ValueError, match="{} tokens with heads of {}: exp".format(*sizes)):
            attended(*sizes)

    def locally(query: jax.Array) -> jax.Array:
        tokens = LayerCache(query, query)
        return flash_decoding.attend(query[:, :, :1], tokens, jnp.zeros(1, jnp.int32), None)

    spec = P(None, "tensor")
    mapped = jax.shard_map(locally, mesh=make_mesh(2), in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match="attention='flash_decoding' needs GPUs"):
        mapped(random(1, 2, 64, 16))
