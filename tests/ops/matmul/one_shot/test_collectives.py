"""Collectives along any dimension, built from one-shot ones; XLA's collectives simulate these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul._compat import tracks_varying_axes
from collective_matmul.ops.matmul.one_shot import backend, exchange_kernel
from collective_matmul.ops.matmul.one_shot.backend import OneShot
from collective_matmul.ops.matmul.xla import Xla
from tests.conftest import MeshFactory
from tests.reference import AXIS

both_vma = pytest.mark.parametrize("check_vma", [False, True])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Replaces the one-shot collectives by XLA's, and counts their calls."""
    counted: Counter[str] = Counter()

    def all_gather(x: jax.Array, axis_name: str, *, replicated: bool = False) -> jax.Array:
        counted["all_gather"] += 1
        gathered = lax.all_gather(x, axis_name)
        if replicated and tracks_varying_axes(axis_name):
            # All are the same, and so any of them is the largest.
            return lax.pmax(gathered, axis_name)
        return gathered

    def reduce_scatter(x: jax.Array, axis_name: str) -> jax.Array:
        counted["reduce_scatter"] += 1
        return lax.psum_scatter(x, axis_name)

    def all_reduce(x: jax.Array, axis_name: str) -> jax.Array:
        counted["all_reduce"] += 1
        return lax.psum(x, axis_name)

    for function in (all_gather, reduce_scatter, all_reduce):
        monkeypatch.setattr(exchange_kernel, function.__name__, function)
    yield counted


def on_devices(
    fun: Callable[..., Any], mesh: Any, out: P, x: np.ndarray, check_vma: bool
) -> np.ndarray:
    """Runs it on global arrays; their first dimension is sharded over the devices."""
    sharded = jax.shard_map(
        lambda x: fun(x[0]) if out == P() else fun(x[0])[None],
        mesh=mesh,
        in_specs=P(AXIS),
        out_specs=out,
        check_vma=check_vma,
    )
    return np.asarray(jax.jit(sharded)(x))


def numbers(*shape: int) -> np.ndarray:
    """Returns random integers as floats: their sums are exact."""
    return np.random.default_rng(0).integers(-100, 100, shape).astype(np.float32)


@both_vma
@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_along_any_dimension(
    name: str, dimension: int, check_vma: bool, make_mesh: MeshFactory, calls: Counter[str]
) -> None:
    mesh, x = make_mesh({AXIS: 3}), numbers(3, 6, 3, 9)
    ours, expected = (
        on_devices(
            lambda x, by=by: getattr(by, name)(x, AXIS, dimension), mesh, P(AXIS), x, check_vma
        )
        for by in (OneShot(), Xla())
    )
    np.testing.assert_array_equal(ours, expected)
    assert calls == {name: 1}


@both_vma
@pytest.mark.parametrize("shape", [(1,), (6,), (5, 7), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("steps", [1, 2])
def test_all_reduces(
    steps: int,
    shape: tuple[int, ...],
    check_vma: bool,
    make_mesh: MeshFactory,
    calls: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def is_two_shot(size: int, devices: int) -> bool:
        asked.append((size, devices))
        return steps == 2

    monkeypatch.setattr(backend, "is_two_shot", is_two_shot)
    x = numbers(3, *shape)
    sums = on_devices(
        lambda x: OneShot().all_reduce(x, AXIS), make_mesh({AXIS: 3}), P(), x, check_vma
    )
    np.testing.assert_array_equal(sums, x.sum(0))
    assert asked == [(x[0].nbytes, 3)]
    two = {"reduce_scatter": 1, "all_gather": 1}
    assert calls == ({"all_reduce": 1} if steps == 1 else two)
