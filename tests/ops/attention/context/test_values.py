"""Values and all gradients of `context_attention` beside dense attention in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from collective_matmul import zigzag_order
from collective_matmul.ops.attention.context.backends import BACKENDS
from collective_matmul.ops.attention.context.layout import LAYOUTS, Chunks
from collective_matmul.ops.attention.context.pieces import chunks_attended, pieces_of
from collective_matmul.ops.attention.context.request import ContextRequest
from tests.conftest import MeshFactory
from tests.covering import covering
from tests.ops.attention.context.parts import NAME, kernel_of_parts
from tests.ops.attention.context.reference import ContextCase

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

DEVICES = (1, 2, 3, 4)
MASKS: list[dict[str, Any]] = [{}, {"causal": False}, {"window": 1}, {"window": 4}, {"window": 11}]
HEADS = [(1, 2), (2, 1), (3, 2)]
DTYPES = ("float32", "bfloat16", "float16")

PARTS = NAME

QUICK = [
    ContextCase(devices=3, queries=18, implementation="xla", window=5, segments=True, groups=3),
    ContextCase(devices=3, queries=18, implementation="gather", dtype="bfloat16"),
    ContextCase(devices=2, queries=12, implementation="gather", window=5, segments=True),
    ContextCase(devices=4, queries=16, implementation="gather", kernel=PARTS, window=4),
    ContextCase(devices=3, queries=18, implementation="ring", dtype="float16", scale=0.3),
    ContextCase(devices=2, queries=12, implementation="ring", window=5, sinks=True),
    ContextCase(devices=3, queries=18, implementation="gather", dtype="bfloat16", sinks=True),
    ContextCase(
        devices=3, queries=18, implementation="ulysses", key_value_heads=3, window=5, segments=True
    ),
]


def pairs() -> list[ContextCase]:
    """Cases that hold each pair of a backend, devices, layout, mask, documents, heads and dtype."""
    ways = [*((name, None) for name in BACKENDS), ("gather", PARTS)]
    factors = (DEVICES, LAYOUTS, ways, range(len(MASKS)), (False, True), HEADS, DTYPES)
    names = ("devices", "layout", "way", "mask", "segments", "heads", "dtype")
    every = [case for case in itertools.product(*factors) if case[0] > 1 or case[2][1] is None]
    few = covering(every, lambda case: dict(zip(names, case, strict=True)))
    return [
        ContextCase(
            devices=devices,
            queries=2 * devices * 3,
            size=8,
            layout=layout,
            implementation=implementation,
            kernel=kernel,
            groups=groups,
            key_value_heads=devices if implementation == "ulysses" else key_value_heads,
            dtype=dtype,
            segments=segments,
            sinks=groups > 1,
            **MASKS[mask],
        )
        for devices, layout, (implementation, kernel), mask, segments, heads, dtype in few
        for groups, key_value_heads in [heads]
    ]


@pytest.fixture(autouse=True)
def _parts() -> Iterator[None]:
    with kernel_of_parts():
        yield


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_values_and_gradients(case: ContextCase, make_mesh: MeshFactory) -> None:
    case.check_on(make_mesh, repeats=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", pairs(), ids=str)
def test_values_and_gradients_of_all_pairs(case: ContextCase, make_mesh: MeshFactory) -> None:
    case.check_on(make_mesh, repeats=True)


@pytest.mark.parametrize("devices", [1, 2, 3, 6, 8])
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
    vjp = lambda *x: jax.vjp(lambda *y: attend(*y, None), *x)[1]  # noqa: E731
    pullback = jax.eval_shape(vjp, query, key, value)
    kept = sorted(leaf.size for leaf in jax.tree.leaves(pullback) if leaf.size)
    statistics = case.batch * case.heads * case.queries
    assert kept == sorted([query.size, query.size, key.size, key.size, statistics])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("devices", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 20])
def test_every_device_receives_the_chunks_that_it_attends_to(
    window: int | None, devices: int, layout: Any
) -> None:
    request = ContextRequest(
        1, 8, 1, 1, 8, np.dtype("float32"), (), devices, layout=layout, window=window
    )
    chunks: Chunks = request.chunks
    owned = chunks.numbers_by_device()
    assert sorted(number for own in owned for number in own) == list(range(chunks.count))
    attended: set[int] = set()
    for device, own in enumerate(owned):
        needed = {n for number in own for n in chunks_attended(chunks, request, number)}
        received = {owned[(device - p.offset) % devices][p.half] for p in pieces_of(request)}
        assert needed <= received
        attended |= {
            (device - next(d for d in range(devices) if n in owned[d])) % devices for n in needed
        }
    # Nothing travels that no device needs.
    assert {piece.offset for piece in pieces_of(request)} == attended | {0}


@pytest.mark.parametrize("devices", [1, 2, 3, 6, 8])
def test_the_zigzag_layout_balances_causal_attention(devices: int) -> None:
    def pairs(layout: Any) -> int:
        return ContextRequest(1, 16, 1, 1, 8, np.dtype("float32"), (), devices, layout=layout).pairs

    length = 16 * devices
    assert pairs("zigzag") == length * (length + 1) // 2 // devices
    assert pairs("contiguous") == 16 * 17 // 2 + 16 * 16 * (devices - 1)
