"""The all-gather and matmul kernel in 8 bits, interpreted, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct, lax
from jax.experimental import pallas as pl

from collective_matmul.mosaic_gpu.hopper_matmul.scaled_kernel import can_scale
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import SHARED_MEMORY_BYTES, Tiling
from collective_matmul.operands.format import FORMATS
from collective_matmul.operands.scaled.packed_rows import PackedRows
from collective_matmul.operands.scaled.scaled_chunks import column_scales
from collective_matmul.ops.matmul.fused import all_gather_kernel
from collective_matmul.ops.matmul.fused.all_gather import all_gather_unsupported_reason
from collective_matmul.ops.matmul.fused.all_gather_config import AllGatherConfig, AllGatherProblem
from collective_matmul.ops.matmul.fused.all_gather_kernel import ScaledAllGatherGemm
from collective_matmul.ops.matmul.fused.all_gather_search import candidate_all_gather_configs
from tests.fp8_reference import dequantized, quantize_rows, quantize_weights
from tests.hopper import needs_kernels
from tests.mosaic_gpu.hopper_matmul.test_interpreted import (
    assert_sum_of_products,
    interpreter,
    needs_interpreter,
)
from tests.ops.matmul.fused.test_all_gather import run_the_last_device_alone

E4M3 = jnp.dtype("float8_e4m3fn")
TILING = Tiling(
    128,
    128,
    tile_k=128,
    max_concurrent_steps=3,
    epilogue_stages=1,
    cluster_dimension=None,
    grid_minor_dim="n",
)
CONFIGS = {
    "rowwise": AllGatherConfig(
        AllGatherProblem(2, 1, 128, 256, (192, 64), 2, "rows"),
        replace(TILING, cluster_dimension="m"),
        False,
        128,
        1,
        (64, 128),
        3,
        (1,),
    ),
    "tensorwise": AllGatherConfig(
        AllGatherProblem(2, 2, 64, 128, (192,), 2, "rows"), TILING, True, 64, 1, (16, 128), 1, (1,)
    ),
    "blockwise": AllGatherConfig(
        AllGatherProblem(2, 2, 128, 384, (192, 64), 2, "blocks"),
        TILING,
        False,
        128,
        1,
        (64, 128),
        1,
        (1,),
    ),
}


def load_from_rows(arrays: Sequence[Any], number: Any, plane: Any, row: Any, column: Any) -> Any:
    """Loads as the interpreter can: any numbers for parts of tiles that are beyond the last row."""

    def read(array: Any) -> Any:
        planes, rows, _ = array.shape
        first = jnp.minimum(row, rows - 64)
        place = jnp.minimum(plane, planes - 1), pl.ds(first, 64), pl.ds(column, 4)
        return lax.bitcast_convert_type(array[place], jnp.float32)

    values = list(map(read, arrays))
    return values[0] if len(arrays) == 1 else jnp.where(number == 1, values[1], values[0])


@needs_interpreter
@pytest.mark.parametrize("fp8", CONFIGS)
def test_it_multiplies_all_messages(fp8: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, recipe = CONFIGS[fp8], FORMATS[fp8]
    problem, matmul = config.problem, config.matmul
    # The interpreter does not know the lines of messages, which are sent.
    run_the_last_device_alone(monkeypatch, sends=False)
    monkeypatch.setattr(all_gather_kernel, "load_from_rows", load_from_rows)
    draw = np.random.default_rng(0).standard_normal
    x = draw((problem.planes, problem.devices, problem.m, problem.k)).astype(jnp.bfloat16)
    # The scale of a tensor is that of a device's shard.
    sent = [quantize_rows([x[:, d]], recipe)[0] for d in range(problem.devices)]
    whole = jax.tree.map(lambda *shards: jnp.stack(shards, 1), *sent)
    ws = [
        quantize_weights([draw((problem.k, n)).astype(jnp.bfloat16)], recipe)[0] for n in problem.n
    ]
    values = lax.bitcast_convert_type(whole.packed, E4M3)
    shard, gathered = values[:, -1], values
    if not config.tiles_span_shards:
        gathered = gathered.at[:, -1].set(math.nan)
    shape = matmul.batch, matmul.m, problem.columns
    outs = [jnp.full((matmul.batch, matmul.m, n), math.nan, jnp.bfloat16) for n in problem.n]
    places, arrays = gathered.reshape(shape), [w.values[None] for w in ws]
    gemm = ScaledAllGatherGemm(config, False, False, places, arrays, outs)
    blocks = max(2, math.prod(config.tiling.cluster))
    kernel = gemm.kernel([*outs, places], "gather", blocks, interpreter())
    words = jnp.zeros(2 * problem.devices + 1, jnp.int32)
    lines = shard.reshape(problem.planes, -1, config.sent_columns)
    scales = column_scales([ws], config.tiling)
    *products, _ = kernel(words, scales, lines, shard, *arrays)
    rows = np.asarray(dequantized(whole)).reshape(-1, problem.k)
    for product, w in zip(products, ws, strict=True):
        # Sums are scaled by rows and by columns, or every 128 terms.
        pairs = [(rows, np.asarray(dequantized(w)))]
        result = np.asarray(product).reshape(len(rows), -1)
        assert_sum_of_products(result, pairs, roundings=2)


def quantized(fp8: str, *shapes: tuple[int, int], dtype: str = "bfloat16") -> list[Any]:
    zeros = [np.zeros(shape, jnp.dtype(dtype)) for shape in shapes]
    return [quantize_weights([w], FORMATS[fp8])[0] for w in zeros]


@needs_kernels
@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize(
    ("fp8", "shape", "dtype", "reason"),
    [
        ("rowwise", (192, 128), "bfloat16", "K to be a multiple of 128 and the columns of 64"),
        ("blockwise", (256, 96), "bfloat16", "K to be a multiple of 128 and the columns of 64"),
        ("tensorwise", (256, 128), "float32", "dtypes"),
        ("blockwise", (256, 128), "float16", None),
    ],
)
def test_what_it_cannot_do_it_says(
    fp8: str, shape: tuple[int, int], dtype: str, reason: str | None
) -> None:
    ws, columns = quantized(fp8, shape, dtype=dtype), FORMATS[fp8].row_bytes(shape[0], 1)
    packed = ShapeDtypeStruct((64, columns), jnp.uint8)
    x = PackedRows(packed, None, jnp.dtype(E4M3), 128 if fp8 == "blockwise" else None)
    found = all_gather_unsupported_reason(x, ws, 2, dimension=0, transpose_w=False)
    assert (found is None) if reason is None else (found is not None and reason in found)


@pytest.mark.parametrize("scales", ["rows", "blocks"])
@pytest.mark.parametrize(
    ("rows", "contracted"), [(8, 128), (24, 4096), (1000, 14336), (2048, 8192)]
)
def test_messages_are_sent_in_large_boxes(scales: Any, rows: int, contracted: int) -> None:
    """Also where a row has a number of bytes that no large box divides."""
    problem = AllGatherProblem(4, 2, rows, contracted, (1024, 64), 2, scales)
    configs = candidate_all_gather_configs(problem)
    assert {config.slabs for config in configs} == {1}
    for config in configs:
        lines, columns = config.box
        boxes = config.messages * config.boxes_per_message
        assert boxes * lines * columns == problem.shard_bytes
        assert config.pieces == 1 and columns == config.sent_columns == 128
        groups = {config.rows_per_group, rows - (config.groups - 1) * config.rows_per_group}
        message = lines * config.boxes_per_message
        assert not any(group * config.lines_per_row % message for group in groups)
        assert config.buffers >= 2 and can_scale(config.tiling, scales)
        boxes_bytes = config.buffers * lines * columns
        tile_bytes = config.tiling.shared_memory_bytes_of(1)
        assert tile_bytes + boxes_bytes <= SHARED_MEMORY_BYTES
    assert max(math.prod(config.box) for config in configs) >= min(2048, problem.shard_bytes // 8)
