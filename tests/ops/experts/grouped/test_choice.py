"""Which kernel multiplies groups of rows on a Hopper GPU: by one file of measured products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from collective_matmul import data
from collective_matmul.dispatch.selection import choose
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import Tiling
from collective_matmul.operands.format import FORMATS
from collective_matmul.ops.experts.grouped import measured
from collective_matmul.ops.experts.grouped.backends import GROUPED_BACKENDS
from collective_matmul.ops.experts.grouped.measured import MeasuredProduct
from collective_matmul.ops.experts.grouped.request import GroupedRequest

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
GPU = AbstractMesh((1,), ("expert",), (AxisType.Auto,), abstract_device=H100)

#: Of Qwen3-30B-A3B's layers: 64 experts of a device.
UP = GroupedRequest(
    op="grouped_matmul",
    all_rows=131072,
    used_rows=65536,
    contracted=2048,
    columns=768,
    groups=64,
    dtype=np.dtype(jnp.bfloat16),
)
GRADIENT = replace(UP, op="grouped_weight_gradient")


def chosen(request: GroupedRequest) -> str:
    with jax.sharding.use_abstract_mesh(GPU):
        return choose(request).name


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (UP, "mosaic"),
        (replace(UP, pairs=2, transposed=True), "mosaic"),
        (GRADIENT, "mosaic"),
        (replace(UP, format=FORMATS["rowwise"]), "mosaic"),
        # Sizes and dtypes that its kernels cannot multiply.
        (replace(UP, columns=720), "triton"),
        (replace(UP, all_rows=131073), "triton"),
        (replace(UP, dtype=np.dtype("float32")), "triton"),
        # Tokens that are decoded: few multiprocessors would read the matrices.
        (replace(UP, all_rows=8, used_rows=4), "triton"),
        (replace(UP, all_rows=512, used_rows=256), "triton"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error")
def test_the_fastest_that_can(request_: GroupedRequest, name: str) -> None:
    """Without a warning: a request that suits another kernel misses nothing."""
    assert chosen(request_) == name


def with_times(request: GroupedRequest, **microseconds: float) -> MeasuredProduct:
    return MeasuredProduct(
        request, microseconds, Tiling(grid_minor_dim="n", cluster_dimension=None)
    )


def test_the_file_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product most like a request counts, and has the tiling."""
    wide, other = replace(UP, columns=14336, groups=8), replace(UP, contracted=1 << 20)
    products = [
        with_times(UP, mosaic=500.0, triton=300.0),
        with_times(wide, mosaic=6000.0, triton=8000.0),
        with_times(other, mosaic=1.0),
    ]
    monkeypatch.setattr(measured, "measured_products", lambda: products)
    assert chosen(UP) == chosen(replace(UP, used_rows=50000)) == "triton"
    assert chosen(wide) == chosen(replace(wide, columns=8192)) == "mosaic"
    mosaic: Any = GROUPED_BACKENDS["mosaic"]
    with jax.sharding.use_abstract_mesh(GPU):
        assert mosaic.tiling(wide).grid_minor_dim == "n"
        assert mosaic.predict(GRADIENT) is None


def test_rates_are_those_that_were_measured() -> None:
    """A model of a measured product predicts its time."""
    with jax.sharding.use_abstract_mesh(GPU):
        for product in measured.measured_products():
            for name, took in product.microseconds.items():
                prediction = GROUPED_BACKENDS[name].predict(product.request)
                assert prediction is not None
                assert prediction.seconds * 1e6 == pytest.approx(took, rel=0.01)


def test_the_file_is_what_its_reader_writes() -> None:
    shipped = data.shipped("NVIDIA H100 80GB HBM3", measured.MEASURES)
    assert shipped is not None
    records = [
        product.record(record.run)
        for product, record in zip(measured.measured_products(), shipped.records, strict=True)
    ]
    written = data.MeasuredData(measured.MEASURES, shipped.device_kind, records)
    assert data.MeasuredData.from_text(written.to_text()).records == shipped.records
    assert {record.run.jax for record in shipped.records if record.run} == {"0.11.2"}
