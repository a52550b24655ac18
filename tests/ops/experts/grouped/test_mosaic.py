"""`grouped_implementation="mosaic"`: whole layers in Mosaic's interpreter, and lowered for CUDA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.device import Target
from collective_matmul.mosaic_gpu.grouped_matmul.grouped_matmul import OuterPart
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import SHARED_MEMORY_BYTES, Tiling
from collective_matmul.ops.experts.grouped.backends import GROUPED_BACKENDS
from collective_matmul.ops.experts.grouped.mosaic import MosaicGrouped
from collective_matmul.ops.experts.grouped.request import GroupedRequest
from tests.conftest import MeshFactory
from tests.mosaic_gpu.conftest import _without_races  # noqa: F401
from tests.mosaic_gpu.grouped_matmul.test_grouped_matmul import TILING
from tests.mosaic_gpu.hopper_matmul.test_interpreted import interpreter, needs_interpreter
from tests.ops.experts.reference import Case

from tests.hopper import _for_hopper  # noqa: F401  # isort: skip

MOSAIC: Any = GROUPED_BACKENDS["mosaic"]
XLA: Any = GROUPED_BACKENDS["xla"]

CASE = Case(
    {"expert": 1},
    "xla",
    "mosaic",
    tokens=8,
    width=64,
    hidden=64,
    local_experts=3,
    dtype="bfloat16",
    check_vma=False,
)


def request_of(**changes: Any) -> GroupedRequest:
    sizes = {"all_rows": 24, "used_rows": 20, "contracted": 64, "columns": 128, "groups": 3}
    fields = {"op": "grouped_matmul", "dtype": np.dtype(jnp.bfloat16), **sizes, **changes}
    return GroupedRequest(**fields)


@pytest.fixture
def _interpreted(_without_races: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(device, "target", lambda: Target(2, interpreter()))
    # Small ones: the interpreter computes what of a tile is beyond all rows, too.
    monkeypatch.setattr(MosaicGrouped, "configurations", lambda self, request: [TILING])


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
def test_values_and_gradients_of_a_layer(make_mesh: MeshFactory) -> None:
    CASE.check(make_mesh)


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.exhaustive
@pytest.mark.parametrize("routing", ["first", "none"])
def test_routings(routing: str, make_mesh: MeshFactory) -> None:
    replace(CASE, routing=routing).check(make_mesh)


def drawn(*shape: int, seed: int) -> jax.Array:
    """Multiples of 1/8, whose products float32 adds exactly."""
    values = np.random.default_rng(seed).integers(-8, 9, shape) / 8
    return jnp.asarray(values, jnp.bfloat16)


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", [(64, 128), (0, 96)])
def test_some_columns(columns: tuple[int, int]) -> None:
    """Blocks that TMA can address are multiplied alone, others with all columns."""
    request, sizes = request_of(), jnp.asarray([4, 0, 16], jnp.int32)
    pairs = [(drawn(24, 64, seed=0), drawn(3, 64, 128, seed=1))]
    found = MOSAIC.matmul(request, pairs, sizes, None, columns)
    expected = XLA.matmul(request, pairs, sizes, None, columns)
    np.testing.assert_array_equal(found[:20], expected[:20])


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.exhaustive
def test_weight_gradients_of_parts_that_come_differently() -> None:
    request = request_of(op="grouped_weight_gradient")
    sizes = jnp.asarray([4, 0, 16], jnp.int32)
    index = jnp.arange(24, dtype=jnp.int32)[::-1]
    x, y, before = drawn(24, 64, seed=0), drawn(24, 128, seed=1), drawn(3, 64, 128, seed=2)
    parts = [OuterPart(x, y, sizes, index), OuterPart(x, y, sizes)]
    found = MOSAIC.weight_gradient(request, parts, before)
    expected = XLA.weight_gradient(request, parts, before)
    # One is rounded before the addition, and both after it.
    np.testing.assert_allclose(*(a.astype(np.float32) for a in (found, expected)), rtol=2.0**-7)


@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize("check_vma", [False, True])
def test_layers_lower_inside_of_shard_map(check_vma: bool, make_mesh: MeshFactory) -> None:
    """Gate and up in one, and down; in the backward two products, and two kinds of gradients."""
    case = replace(CASE, axes={"expert": 2}, check_vma=check_vma)
    program, arrays = case.program(make_mesh(dict(case.axes))), case.arrays()
    traced = jax.jit(program).trace(jax.tree.map(jnp.asarray, arrays))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2 + 2 + 2
    assert "ragged_dot" not in text and "xla.gpu.triton" not in text


@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"all_rows": 12}, "rows 12: not a multiple of 8"),
        ({"contracted": 96}, "contracted size 96: not a multiple of 64"),
        ({"columns": 72}, "columns 72: not a multiple of 64"),
        ({"dtype": np.dtype("float32")}, "its kernels multiply no float32"),
        ({}, None),
    ],
)
def test_what_the_kernels_cannot_multiply(changes: dict, reason: str | None) -> None:
    assert MOSAIC.unsupported_reason(request_of(**changes)) == reason


def test_without_a_hopper_gpu() -> None:
    assert MOSAIC.unsupported_reason(request_of()) == "its kernels run on Hopper GPUs only"


@pytest.mark.parametrize("op", ["grouped_matmul", "grouped_weight_gradient"])
@pytest.mark.parametrize("used_rows", [3, 3000])
def test_tilings_fit(op: str, used_rows: int) -> None:
    tilings = MOSAIC.configurations(request_of(op=op, used_rows=used_rows))
    assert len(set(tilings)) == len(tilings) >= 5
    assert all(tiling.shared_memory_bytes <= SHARED_MEMORY_BYTES for tiling in tilings)
    is_few = op == "grouped_matmul" and used_rows == 3
    assert tilings[0].tile_m == (64 if is_few else 128)
    assert MOSAIC.configured(Tiling()).tiling(request_of()) == Tiling()
