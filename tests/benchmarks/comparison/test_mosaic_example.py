"""JAX's Mosaic example as a candidate: which shapes it takes, that it lowers, that it is right."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.comparison.mosaic_example import (
    all_gather_matmul,
    tuning_config,
    unsupported_reason,
)
from tests.conftest import MeshFactory
from tests.hopper import skip_without_hopper


def sharded(make_mesh: MeshFactory):
    mesh = make_mesh({"tensor": jax.device_count()})
    return jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, "tensor"),
        mesh=mesh,
        in_specs=(P("tensor"), P(None, "tensor")),
        out_specs=P(None, "tensor"),
    )


def arguments(rows: int, contracted: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Sizes of one device."""
    draw, devices = np.random.default_rng(0).standard_normal, jax.device_count()
    x, w = draw((devices * rows, contracted)), draw((contracted, devices * columns))
    return x.astype(jnp.bfloat16), (w / np.sqrt(contracted)).astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ((2048, 8192, 7168), (128, 128, "N")),
        ((256, 64, 128), (128, 128, "M")),
        ((128, 64, 128), (128, 64, "N")),
        ((256, 64, 64), (128, 64, "M")),
        ((128, 64, 64), None),
        ((64, 64, 256), None),
        ((128, 96, 256), None),
    ],
)
def test_tiles_divide_the_sizes(sizes: tuple[int, int, int], tile: tuple | None) -> None:
    found = tuning_config(*sizes)
    assert tile == (found and (found.tile_m, found.tile_n, found.wg_dimension.name))
    reason = unsupported_reason(*sizes, jnp.bfloat16, jax.device_count())
    assert (reason is None) == (tile is not None)


def test_reasons_name_what_is_not_supported() -> None:
    devices = jax.device_count()
    assert "float32" in (unsupported_reason(128, 64, 128, jnp.float32, devices) or "")
    assert f"all {devices}" in (unsupported_reason(128, 64, 128, jnp.bfloat16, devices - 1) or "")
    assert "m=100" in (unsupported_reason(100, 64, 128, jnp.bfloat16, devices) or "")


def test_a_shape_it_does_not_take_is_refused(make_mesh: MeshFactory) -> None:
    with pytest.raises(ValueError, match="JAX's Mosaic example: local sizes m=64, k=64"):
        jax.eval_shape(sharded(make_mesh), *arguments(64, 64, 128))


def test_it_lowers_for_gpus_without_multicast(
    make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = jax.jit(sharded(make_mesh)).trace
    # It asks the default device for its multiprocessors.
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(core_count=132)])
    text = traced(*arguments(256, 64, 256)).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "multimem" not in text


@pytest.mark.gpu
def test_it_computes_the_product_of_the_gathered(make_mesh: MeshFactory) -> None:
    skip_without_hopper()
    x, w = arguments(256, 512, 256)
    expected = x.astype(np.float32) @ w.astype(np.float32)
    y = np.asarray(jax.jit(sharded(make_mesh))(x, w)).astype(np.float32)
    # One rounding to bfloat16, of 8 bits.
    np.testing.assert_allclose(y, expected, rtol=2**-8, atol=2**-8)
