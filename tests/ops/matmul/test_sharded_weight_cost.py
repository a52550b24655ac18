"""The cost models where weights are sharded over a second axis: what hides, and what does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp
import pytest

from collective_matmul.hardware import HOPPER
from collective_matmul.operands.sharded import WeightShards
from collective_matmul.ops.matmul.request import Site
from collective_matmul.ops.matmul.ring.backend import RINGS
from collective_matmul.ops.matmul.xla import xla_seconds
from tests.dispatch.sites import H200, tracing_for


@pytest.fixture(autouse=True)
def _on_h200() -> Iterator[None]:
    with tracing_for(H200):
        yield


def site_of(rows: int, direction: str = "forward", devices: int = 2) -> Site:
    """A feed-forward matmul of 8B widths without tensor parallelism."""
    shards = WeightShards("fsdp", devices, 1)
    if direction == "forward":
        operands, op, co_gathered = (((rows, 4096), (4096, 14_336)),), "all_gather_matmul", None
    else:
        operands, op = (((rows, 14_336), (14_336, 4096)),), "matmul_reduce_scatter"
        co_gathered = rows, 4096
    site = Site(op, operands, jnp.dtype("bfloat16"), "tensor", 1, weight_shards=shards)
    return replace(site, co_gathered=co_gathered, direction=direction)


def ring_seconds(site: Site) -> float:
    prediction = RINGS["ring"].predict(site)
    assert prediction is not None
    return prediction.seconds


def added_seconds(site: Site) -> float:
    """Seconds that sharding the weights adds to the ring."""
    return ring_seconds(site) - ring_seconds(replace(site, weight_shards=None))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_shards_hide_under_many_rows_and_not_under_few(direction: str) -> None:
    site, few = site_of(8192, direction), site_of(128, direction)
    assert added_seconds(site) == pytest.approx(0.0, abs=1e-6)
    # Nothing but the links matters where there is hardly a matmul to hide under.
    assert added_seconds(few) > 0.8 * few.weight_bytes / HOPPER.link_bytes


@pytest.mark.parametrize(("direction", "times"), [("forward", 1), ("backward", 2)])
def test_xla_adds_all_that_travels(direction: str, times: int) -> None:
    site = site_of(8192, direction)
    assert site.weight_bytes == times * 4096 * 14_336
    alone = xla_seconds(site) - xla_seconds(replace(site, weight_shards=None))
    assert alone >= site.weight_bytes / HOPPER.link_bytes


def test_each_device_sends_to_all_others() -> None:
    two, four = site_of(2048), site_of(2048, devices=4)
    assert four.weight_bytes / two.weight_bytes == (3 / 4) / (1 / 2)
