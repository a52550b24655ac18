"""Kernels that convert stacks of matrices, interpreted, beside each matrix converted by itself."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.device import Target
from collective_matmul.operands.format import Format
from collective_matmul.operands.recipes.rowwise import ROWWISE
from collective_matmul.operands.scaled import stack_kernels
from collective_matmul.operands.scaled.scaled_matrix import ScaledMatrix
from tests.hopper import skip_without_hopper
from tests.kernel_bounds import rounds_as_triton, within_bounds

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
lowers_triton = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


def stack(seed: int, *shape: int) -> np.ndarray:
    """Columns and rows of very different sizes, some of zeros, two with what is not finite."""
    generator = np.random.default_rng(seed)
    groups, contracted, columns = shape
    w = generator.standard_normal(shape)
    w *= np.exp(3 * generator.standard_normal((groups, contracted, 1)))
    w *= np.exp(3 * generator.standard_normal((groups, 1, columns)))
    w[0, :, 1], w[-1, 2] = 0, 0
    w[0, 3, 2], w[-1, 1, 4] = np.inf, np.nan
    return w.astype(jnp.bfloat16)


def as_default(ws: Any, transposed: bool) -> Any:
    return jax.jit(lambda ws: Format.stacks(ROWWISE, ws, transposed=transposed))(ws)


def assert_same(found: ScaledMatrix, expected: ScaledMatrix) -> None:
    assert found.product_dtype == expected.product_dtype
    assert found.values.dtype == expected.values.dtype
    np.testing.assert_array_equal(found.scales, expected.scales)
    one, other = (np.asarray(each.values, np.float32) for each in (found, expected))
    np.testing.assert_array_equal(one, other)


def interpreted(ws: Any, transposed: bool) -> Any:
    """The stacks that a GPU would have, by the interpreter."""
    kernels: dict[str, Any] = {
        name: functools.partial(getattr(stack_kernels, name), interpret=True)
        for name in ("in_rows", "in_columns")
    }
    always = mock.patch.multiple(stack_kernels, can_convert=lambda ws: True, **kernels)
    with always, within_bounds(stack_kernels):
        return jax.jit(lambda ws: ROWWISE.stacks(ws, transposed=transposed))(ws)


#: Several programs of columns and steps along them; fewer of both than of one; odd sizes.
SHAPES = [(2, 520, 40), (3, 5, 7), (1, 1030, 33)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("transposed", "terms"), [(False, 1), (True, 1), (True, 2)])
def test_stacks_are_those_of_single_matrices(
    shape: tuple[int, ...], transposed: bool, terms: int
) -> None:
    ws = [stack(seed, *shape) for seed in range(terms)]
    found = interpreted(ws, transposed)
    for one, other in zip(found, as_default(ws, transposed), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_not_finite_is_nan_where_conversions_stop_at_the_largest_number(
    transposed: bool,
) -> None:
    w = stack(0, 2, 9, 6)
    (expected,) = as_default([w], transposed)
    assert np.isnan(np.asarray(expected.values, np.float32)).any()
    with rounds_as_triton(stack_kernels):
        (found,) = interpreted([w], transposed)
    assert_same(found, expected)


def test_stacks_of_layers() -> None:
    """Layers of a scan are quantized by `jax.vmap`."""
    w = np.stack([stack(seed, 2, 9, 6) for seed in range(3)])
    for transposed in (False, True):
        run = lambda w: interpreted([w], transposed)[0]  # noqa: E731, B023
        found = jax.vmap(run)(w)
        for layer, own in enumerate(w):
            (expected,) = as_default([own], transposed)
            assert_same(jax.tree.map(lambda leaf: leaf[layer], found), expected)  # noqa: B023


def test_stacks_of_layers_beside_one_that_all_share() -> None:
    w, shared = np.stack([stack(seed, 2, 9, 6) for seed in range(3)]), stack(3, 2, 9, 6)
    run = lambda w, shared: interpreted([w, shared], transposed=True)  # noqa: E731
    found = jax.vmap(run, in_axes=(0, None))(w, shared)
    for layer, own in enumerate(w):
        expected = as_default([own, shared], transposed=True)
        for one, other in zip(found, expected, strict=True):
            assert_same(jax.tree.map(lambda leaf: leaf[layer], one), other)  # noqa: B023


@lowers_triton
@pytest.mark.parametrize("transposed", [False, True])
def test_which_stacks_the_kernels_convert(
    transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper GPUs, inside of a `shard_map` over all axes."""
    mesh = AbstractMesh((2,), ("expert",), (AxisType.Auto,), abstract_device=H100)
    w = jax.ShapeDtypeStruct((4, 256, 128), jnp.bfloat16)

    def kernels(inside: bool, target: Any) -> int:
        monkeypatch.setattr(device, "target", lambda: target)
        run: Any = lambda w: ROWWISE.stacks([w], transposed=transposed)  # noqa: E731
        if inside:
            run = jax.shard_map(run, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = jax.jit(run).trace(w).lower(lowering_platforms=("cuda",))
        return lowered.as_text().count("__gpu$xla.gpu.triton")

    assert kernels(True, Target(132)) == 1
    assert kernels(True, None) == 0
    assert kernels(False, Target(132)) == 0


@pytest.mark.parametrize(
    ("shape", "can"),
    [((8, 4096, 16384), True), ((8, 16, 16512), False), ((32, 8192, 8192), False)],
)
def test_sizes_that_the_kernels_convert(
    shape: tuple[int, ...], can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has registers for a row, and offsets have 32 bits."""
    monkeypatch.setattr(device, "target", lambda: Target(132))
    monkeypatch.setattr(stack_kernels, "on_one_device", lambda: True)
    w: Any = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert stack_kernels.can_convert([w, w]) == can


@lowers_triton
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("layers", "kernels"), [(4, 1), (5, 0)])
def test_all_layers_of_a_scan_have_offsets_of_32_bits(
    layers: int, kernels: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of 2³¹ numbers and more, in up to 2³² bytes, have offsets of 32 bits in JAX."""
    monkeypatch.setattr(device, "target", lambda: Target(132))
    monkeypatch.setattr(stack_kernels, "on_one_device", lambda: True)
    w = jax.ShapeDtypeStruct((layers, 8, 4096, 14336), jnp.bfloat16)
    run = jax.jit(jax.vmap(lambda w: ROWWISE.stacks([w], transposed=transposed)))
    mesh = AbstractMesh((1,), ("expert",), (AxisType.Auto,), abstract_device=H100)
    with jax.sharding.use_abstract_mesh(mesh):
        text = run.trace(w).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == kernels


@pytest.mark.gpu
@pytest.mark.parametrize(("transposed", "terms"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("shape", [(4, 2048, 768), (1, 1024, 14336), (3, 520, 40)])
def test_on_a_gpu(shape: tuple[int, ...], transposed: bool, terms: int) -> None:
    """Its division may differ from XLA's in the last place of a scale's inverse."""
    skip_without_hopper()
    ws = [jnp.asarray(stack(seed, *shape)) for seed in range(terms)]
    monkeypatched = mock.patch.object(stack_kernels, "can_convert", lambda ws: True)
    with monkeypatched:
        found = jax.jit(lambda ws: ROWWISE.stacks(ws, transposed=transposed))(ws)
    for one, other in zip(found, as_default(ws, transposed), strict=True):
        np.testing.assert_array_equal(one.scales, other.scales)
        values, numbers = (np.asarray(each.values, np.float32) for each in (one, other))
        np.testing.assert_array_equal(np.isnan(values), np.isnan(numbers))
        assert (np.nan_to_num(values) != np.nan_to_num(numbers)).mean() < 1e-3
        np.testing.assert_allclose(values, numbers, rtol=0.26, atol=2.0**-8)
