"""Attention to the valid part of a cache: the kernel on a GPU computes what float64 does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.generation import Generator
from models.generation.generator import make_mesh
from models.generation.valid_attention import KeyBlocks, attend_to_valid, unsupported_reason
from tests.covering import pairwise
from tests.models.families.test_families import MODELS
from tests.models.generation.cache_cases import CacheCase

pytestmark = pytest.mark.gpu

POSITIONS = (0, 15, 16, 63, 64, 65, 511, 700, 999)


def skip_where_refused(case: CacheCase) -> None:
    reason = unsupported_reason(case.group, case.size, case.dtype, jax.devices()[0])
    if reason is not None:
        pytest.skip(reason)


@pairwise(
    group=[1, 4, 8, 20],
    size=[64, 80, 128, 256],
    dtype=["bfloat16", "float16", "float32"],
    window=[None, 1, 64, 300],
    sinks=[False, True],
    blocks=[None, KeyBlocks(16, 1), KeyBlocks(32, 7, stages=2)],
)
def test_values(
    group: int, size: int, dtype: str, window: int | None, sinks: bool, blocks: KeyBlocks | None
) -> None:
    """Keys and values outside of what is seen are NaN."""
    case = CacheCase(POSITIONS, 1001, 2, group, size, dtype, window, sinks, blocks)
    skip_where_refused(case)
    case.check()


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_repeats_bit_for_bit(batch: int) -> None:
    case = CacheCase((0,) * batch, 2560, heads=4, size=128)
    skip_where_refused(case)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (batch, 4, 4, 128), (batch, 4, 2560, 128), (batch, 4, 2560, 128)
    drawn = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]
    positions = jnp.linspace(2559, 0, batch, dtype=jnp.int32)
    run = jax.jit(lambda q, k, v: attend_to_valid(q, k, v, positions, None))
    first = np.asarray(run(*drawn))
    for _ in range(50):
        np.testing.assert_array_equal(np.asarray(run(*drawn)), first)


@pytest.mark.parametrize("name", ["window", "gpt-oss"])
def test_a_generator_answers_as_without_the_kernel(name: str) -> None:
    model, prompts = MODELS[name], [[1, 2, 3, 4, 5], [7, 8], [3] * 11]

    def answers(attention: str | None) -> Any:
        made = Generator(model, mesh=make_mesh(1), dtype="float32", cache_attention=attention)
        rng = np.random.default_rng(0)
        params = {
            path: jax.device_put(
                (rng.normal(size=leaf.shape) * 0.4 + ("scale" in path)).astype(np.float32),
                leaf.sharding,
            )
            for path, leaf in sorted(made.abstract_params.items())
        }
        return made(params, prompts, max_new_tokens=9, tokens_per_launch=4)

    with jax.default_matmul_precision("highest"):
        assert answers("triton") == answers("xla")
