"""Which sites the fused kernels take, and what they are asked about."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from collective_matmul.dispatch.assessment import unsupported_reason
from collective_matmul.ops.matmul.fused import all_gather, reduce_scatter
from collective_matmul.ops.matmul.request import Op, Site
from collective_matmul.peer_access import peer_kernels_allowed
from tests.dispatch.sites import BFLOAT16, H200, site_of, tracing_for
from tests.reference import AXIS

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _possible(monkeypatch: Patch) -> Iterator[None]:
    """Kernels have all that they need."""
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    with peer_kernels_allowed(True):
        yield


@pytest.fixture
def on_h200() -> Iterator[None]:
    with tracing_for(H200):
        yield


@pytest.mark.parametrize(
    ("op", "contracted", "columns", "possible"),
    [
        ("all_gather_matmul", 192, 96, True),
        ("all_gather_matmul", 160, 96, False),
        ("all_gather_matmul", 192, 80, False),
        ("matmul_reduce_scatter", 96, 160, True),
        ("matmul_reduce_scatter", 80, 192, False),
        ("matmul_reduce_scatter", 96, 144, False),
        ("matmul_all_reduce", 96, 160, True),
        ("matmul_all_reduce", 80, 192, False),
        ("matmul_all_reduce", 96, 144, False),
    ],
)
@pytest.mark.parametrize("transpose_w", [False, True])
def test_sizes_that_kernels_do_not_take(
    op: Op, contracted: int, columns: int, possible: bool, transpose_w: bool, on_h200: None
) -> None:
    """However the weights are stored, except that an all-reduce takes none transposed."""
    operands = ((64, contracted), (contracted, columns))
    is_transposed = transpose_w and op != "matmul_all_reduce"
    found = unsupported_reason(
        Site(op, (operands,), BFLOAT16, AXIS, 4, transpose_w=is_transposed), "fused"
    )
    assert (found is None) == possible
    assert found is None or "pad them" in found


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_kernels_are_asked_about_the_arrays_as_they_are_stored(op: Op, monkeypatch: Patch) -> None:
    """Measured, it has all its rows in one dimension, and weights as a model has them."""
    asked = []

    def refuse(x: Any, ws: Any, devices: int, *, dimension: int, transpose_w: bool) -> str:
        (x,) = x if isinstance(x, list) else [x]
        asked.append((x.shape, ws[0].shape, devices, dimension, transpose_w))
        return "no"

    monkeypatch.setattr(all_gather, "all_gather_unsupported_reason", refuse)
    monkeypatch.setattr(reduce_scatter, "reduce_scatter_unsupported_reason", refuse)
    operands = (((2, 64, 96), (96, 192)),)
    site = Site(op, operands, BFLOAT16, AXIS, 4, dimension=1, transpose_w=True)
    for each in (site, site.flat, dataclasses.replace(site, keep_gathered=True).flat):
        assert unsupported_reason(each, "fused") == "no"
    assert asked == [
        ((2, 64, 96), (192, 96), 4, 1, True),
        ((128, 96), (96, 192), 4, 0, False),
        ((128, 96), (192, 96), 4, 0, True),
    ]


@pytest.mark.parametrize("rows", [6, 8])
def test_a_kernel_sums_rows_that_a_ring_cannot_divide(rows: int, on_h200: None) -> None:
    site = site_of("matmul_all_reduce", rows, 512, 512)
    assert (unsupported_reason(site, "ring") is None) == (rows % 4 == 0)
    assert unsupported_reason(site, "fused") is None
