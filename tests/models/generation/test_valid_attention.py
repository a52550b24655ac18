"""The kernel of attention to the valid part of a cache, interpreted, and how it is chosen."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from models.families import PRESETS
from models.generation import Generator
from models.generation.cache import LayerCache, attend, choose_attention
from models.generation.generator import make_mesh
from models.generation.valid_attention import KeyBlocks, attend_to_valid, blocks_of
from tests.covering import pairwise
from tests.models.families.test_families import MODELS
from tests.models.generation.cache_cases import TOLERANCES, CacheCase

#: The first token, borders of blocks of 16 keys and of their splits, and the last of a capacity
#: that blocks do not divide.
BORDERS = (0, 15, 16, 17, 47, 48, 89)
CAPACITY = 90


@pairwise(splits=[1, 3, 6], window=[None, 1, 16, 20], sinks=[False, True])
def test_values_at_borders_of_blocks(splits: int, window: int | None, sinks: bool) -> None:
    """Splits of short sequences are empty. Keys and values outside of what is seen are NaN."""
    blocks = KeyBlocks(16, splits)
    case = CacheCase(BORDERS, CAPACITY, window=window, sinks=sinks, dtype="float32", blocks=blocks)
    case.check(interpret=True)


@pytest.mark.parametrize(
    "case",
    [
        CacheCase((5,), 40, group=1, size=8),
        CacheCase((39,), 40, heads=1, group=3, size=80, dtype="float16"),
        CacheCase((300, 20), 500, group=20, size=128, dtype="bfloat16", sinks=True, window=200),
        CacheCase((7, 400), 401, group=8, size=24, dtype="float32"),
    ],
    ids=str,
)
def test_values_of_other_shapes(case: CacheCase) -> None:
    """With the blocks that are chosen: several splits, and heads that no tile fits."""
    case.check(interpret=True)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_scores_whose_exponentials_are_infinite(splits: int, sinks: bool) -> None:
    blocks = KeyBlocks(16, splits)
    case = CacheCase(BORDERS, CAPACITY, sinks=sinks, dtype="float32", blocks=blocks, scores=200.0)
    case.check(interpret=True)


def test_a_position_after_the_cache_is_its_last() -> None:
    case = CacheCase((CAPACITY + 30,), CAPACITY, dtype="float32", blocks=KeyBlocks(16, 3))
    case.check(interpret=True)


def test_xla_computes_the_same() -> None:
    """XLA's matmuls, which multiply what is not seen by zero: there is no NaN."""
    rng = np.random.default_rng(0)
    heads, group, size = 2, 4, 16
    shape = (3, heads, CAPACITY, size)
    cache = LayerCache(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)))
    query = jnp.asarray(rng.normal(size=(3, 1, heads * group, size)), jnp.float32)
    sinks = jnp.asarray(rng.normal(size=heads * group), jnp.float32)
    positions = jnp.array([0, 40, CAPACITY - 1], jnp.int32)
    expected = attend(query, cache, positions, 30, sinks)
    grouped, own = query.reshape(3, heads, group, size), sinks.reshape(heads, group)
    found = attend_to_valid(grouped, *cache, positions, 30, own, interpret=True)
    np.testing.assert_allclose(
        found.reshape(query.shape), expected, atol=TOLERANCES["float32"], rtol=0
    )


def described(batch: int, heads: int = 4, capacity: int = 2560, group: int = 4) -> list[Any]:
    shapes = (batch, heads, group, 128), (batch, heads, capacity, 128)
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


@pytest.mark.parametrize("batch", [1, 2, 8, 33, 48, 64, 300])
def test_all_multiprocessors_have_programs(batch: int) -> None:
    """The last turn of programs on 132 multiprocessors is at least two thirds full, or there is a
    block for each program."""
    blocks = blocks_of(*described(batch), window=None)
    turns = batch * 4 * blocks.splits / 264
    assert blocks.splits == 2560 // blocks.keys or turns / np.ceil(turns) > 2 / 3


def test_a_window_is_not_divided_as_a_long_cache_is() -> None:
    blocks = blocks_of(*described(1, capacity=2**17), window=512)
    assert blocks.splits <= 512 // blocks.keys


H100 = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
GPUS = AbstractMesh((2,), ("tensor",), (AxisType.Auto,), abstract_device=H100)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("batch", "kernels"), [(1, 2), (64, 1)])
def test_kernels_lower_for_cuda(check_vma: bool, batch: int, kernels: int) -> None:
    """Caches are not copied or transposed; with one split nothing is combined."""

    def local(query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array):
        return attend_to_valid(query, key, value, positions, None)

    heads = P(None, "tensor")
    mapped = jax.shard_map(
        local,
        mesh=GPUS,
        in_specs=(heads, heads, heads, P()),
        out_specs=heads,
        check_vma=check_vma,
    )
    query, cache = described(batch, heads=8)
    positions = jax.ShapeDtypeStruct((batch,), jnp.int32)
    with jax.sharding.use_abstract_mesh(GPUS):
        traced = jax.jit(mapped).trace(query, cache, cache, positions)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == kernels
    assert "stablehlo.transpose" not in text and "stablehlo.copy" not in text


def device(capability: str, platform: str = "gpu") -> Any:
    return SimpleNamespace(compute_capability=capability, platform=platform, device_kind="a GPU")


def chosen(
    capability: str = "9.0", dtype: str = "bfloat16", requested: str | None = None, **changes: int
) -> str:
    config = dataclasses.replace(PRESETS["llama3-8b"](), **changes)
    return choose_attention(config, dtype, device(capability), requested)


def test_the_kernel_is_chosen_where_it_was_measured_or_by_name() -> None:
    assert chosen() == chosen(dtype="float32") == "triton"
    assert chosen("8.0") == chosen("10.0") == "xla"
    assert chosen(requested="triton") == chosen("10.0", "float32", "triton") == "triton"
    assert chosen(requested="xla") == "xla"
    assert choose_attention(PRESETS["llama3-8b"](), "bfloat16", jax.devices()[0], None) == "xla"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"capability": "7.5"}, "its kernel runs on NVIDIA GPUs of compute capability 8.0"),
        ({"capability": "gfx942"}, "its kernel runs on NVIDIA GPUs of compute capability 8.0"),
        ({"dtype": "float64"}, "its kernel takes bfloat16, float16, float32, not float64"),
        (
            {"num_heads": 128, "num_key_value_heads": 1},
            "its kernel has no place for 128 query heads of 128 that share a key head",
        ),
    ],
    ids=str,
)
def test_a_gpu_without_the_kernel_says_why(request_: dict[str, Any], reason: str) -> None:
    assert chosen(**request_) == "xla"
    with pytest.raises(ValueError, match=f"cache_attention='triton': {reason}"):
        chosen(requested="triton", **request_)


def test_the_kernel_cannot_be_requested_elsewhere() -> None:
    def make(name: str) -> Generator:
        return Generator(MODELS["window"], mesh=make_mesh(1), cache_attention=name)

    with pytest.raises(ValueError, match="cache_attention='triton': its kernel runs on NVIDIA"):
        make("triton")
    with pytest.raises(ValueError, match="cache_attention='flash': expected None, 'triton' or"):
        make("flash")
