"""Values and all gradients of `context_attention` beside dense attention in float64."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from collective_matmul import zigzag_order
from collective_matmul.ops.attention.context.backends import BACKENDS
from tests.conftest import MeshFactory
from tests.ops.attention.context.reference import ContextCase

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

DEVICES = (1, 2, 3, 6, 8)
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"segments": True},
    {"causal": False, "segments": True},
    {"window": 5},
    {"window": 1},
    {"window": 29, "segments": True},
]
HEADS = [(1, 2), (2, 1), (3, 2)]

QUICK = [
    ContextCase(devices=1, queries=26, layout="contiguous"),
    ContextCase(devices=2, queries=28, implementation="xla", segments=True, groups=3),
    ContextCase(devices=3, queries=30, implementation="xla", dtype="bfloat16", window=7),
]


def product() -> list[ContextCase]:
    """Every backend, number of devices, layout and mask; heads and dtypes in turn."""
    rest = itertools.cycle(itertools.product(HEADS, ("float32", "bfloat16", "float16")))
    return [
        ContextCase(
            devices=devices,
            queries=2 * devices * 5,
            layout=layout,
            implementation=implementation,
            groups=groups,
            key_value_heads=key_value_heads,
            dtype=dtype,
            **mask,
        )
        for (devices, layout, implementation, mask), ((groups, key_value_heads), dtype) in zip(
            itertools.product(DEVICES, ("zigzag", "contiguous"), BACKENDS, MASKS),
            rest,
            strict=False,
        )
    ]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_values_and_gradients(case: ContextCase, make_mesh: MeshFactory) -> None:
    case.check_on(make_mesh)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", product(), ids=str)
def test_values_and_gradients_of_the_product(case: ContextCase, make_mesh: MeshFactory) -> None:
    case.check_on(make_mesh)


@pytest.mark.parametrize("devices", DEVICES)
def test_zigzag_order_gives_each_device_an_early_and_a_late_chunk(devices: int) -> None:
    order = zigzag_order(6 * devices, devices)
    assert sorted(order) == list(range(6 * devices))
    for device, own in enumerate(order.reshape(devices, 2, 3)):
        assert list(own[:, 0]) == [3 * device, 3 * (2 * devices - 1 - device)]
        assert (np.diff(own) == 1).all()


def test_zigzag_order_refuses_lengths_that_it_cannot_cut() -> None:
    with pytest.raises(ValueError, match=r"length=10, devices=4: .*multiple of 2 \* devices"):
        zigzag_order(10, 4)
    with pytest.raises(TypeError, match=r"devices=2\.0: expected a whole number"):
        zigzag_order(10, 2.0)  # type: ignore[arg-type]


def test_kept_are_local_arrays_alone(make_mesh: MeshFactory) -> None:
    case = ContextCase(devices=4, queries=16)
    attend = case.sharded(make_mesh)
    query, key, value, _ = case.arrays()[0]
    _, pullback = jax.vjp(lambda *x: attend(*x, None), query, key, value)
    kept = sorted(leaf.size for leaf in jax.tree.leaves(pullback) if leaf.size)
    statistics = case.batch * case.heads * case.queries
    assert kept == sorted([query.size, query.size, key.size, key.size, statistics])
