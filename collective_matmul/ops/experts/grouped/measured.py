"""Measured grouped matmuls: one data file says which kernel is fast where, and with what tiles.

``data/h100-80gb-hbm3/grouped_matmuls.jsonl`` has the times of each backend at the shapes of models,
and the tiling that was fastest for Mosaic. A request is compared with the product that is most like
it. So the file decides between the backends, until `collective_matmul.tune` has measured the
request itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from collective_matmul import data
from collective_matmul.hardware import assumed_rates
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import Tiling
from collective_matmul.ops.experts.grouped.request import GroupedRequest

#: The name of the file.
MEASURES = "grouped_matmuls"
_DEVICE_KIND = "NVIDIA H100 80GB HBM3"


class MeasuredProduct(NamedTuple):
    """A measured product.

    Attributes:
      request: the product.
      microseconds: by backend.
      tiling: of Mosaic.
    """

    request: GroupedRequest
    microseconds: Mapping[str, float]
    tiling: Tiling

    def record(self, run: data.Run | None = None) -> data.Record:
        """The record of the file."""
        return data.Record(self.request.fields(), self.microseconds, asdict(self.tiling), run)

    @classmethod
    def from_record(cls, record: data.Record) -> MeasuredProduct:
        """Reads what `record` returned."""
        assert record.config is not None
        request = GroupedRequest.from_fields(record.problem)
        return cls(request, record.microseconds, Tiling(**record.config))

    def share(self, backend: str) -> float:
        """The share of a matmul's sustained rate that a backend reached; above 1 in 8 bits."""
        gpu = assumed_rates()
        seconds = max(1e-6 * self.microseconds[backend] - gpu.kernel_seconds, 1e-6)
        return self.request.flops / seconds / gpu.sustained_flops


@functools.cache
def measured_products() -> Sequence[MeasuredProduct]:
    """The products of the shipped file."""
    found = data.shipped(_DEVICE_KIND, MEASURES)
    return [] if found is None else [*map(MeasuredProduct.from_record, found.records)]


def nearest(request: GroupedRequest, backend: str) -> MeasuredProduct | None:
    """The product of a backend that is most like a request; None if none is of its kind."""
    alike = [
        product
        for product in measured_products()
        if _kind(product.request) == _kind(request) and backend in product.microseconds
    ]
    return min(alike, key=lambda product: _distance(product.request, request), default=None)


def _kind(request: GroupedRequest) -> tuple:
    """Kinds of requests whose rates are comparable."""
    return request.op, request.format.scaled_parts


def _distance(one: GroupedRequest, other: GroupedRequest) -> float:
    """Doublings between the sizes, and one for each property that differs."""
    sizes = zip(_sizes(one), _sizes(other), strict=True)
    properties = zip(_properties(one), _properties(other), strict=True)
    return sum(abs(math.log2(a / b)) for a, b in sizes) + sum(a != b for a, b in properties)


def _sizes(request: GroupedRequest) -> tuple[float, ...]:
    return request.used_rows / request.groups, request.contracted, request.columns


def _properties(request: GroupedRequest) -> tuple:
    return request.pairs, request.transposed or request.of_gradient
