"""Choices of the model on described H100: a kernel, never XLA's scores, and balance."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from collective_matmul.dispatch.selection import choose
from collective_matmul.ops.attention import flash_attention
from collective_matmul.ops.attention.context import context_cost
from collective_matmul.ops.attention.context.request import ContextRequest

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
BF16 = np.dtype(jnp.bfloat16)


def request_of(devices: int, length: int = 32768, **attributes: Any) -> ContextRequest:
    return ContextRequest(
        1, length // devices, 32, 8, 128, BF16, (), devices, scale=0.1, **attributes
    )


def chosen(request: ContextRequest) -> str:
    axes = AbstractMesh((request.axis_size,), ("a",), (AxisType.Auto,), abstract_device=H100)
    with jax.sharding.use_abstract_mesh(axes):
        return choose(request).name


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("flash", [True, False])
def test_no_scores_are_in_memory(
    flash: bool, devices: int, direction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_attention, "missing_reason", lambda: None if flash else "not here")
    masks: list[dict[str, Any]] = [{}, {"segments": 16}, {"window": 4096}, {"causal": False}]
    for mask in masks:
        name = chosen(request_of(devices, direction=direction, **mask))
        # cuDNN's own segments and windows are those of whole sequences.
        has_own = flash or not mask or "causal" in mask
        assert name in (("gather", "ring", "ulysses") if has_own else ("ulysses",))
    # One device has most to do in the contiguous layout, unless heads are divided.
    assert chosen(request_of(devices, layout="contiguous", direction=direction)) == "ulysses"


def test_two_devices_gather_where_the_projection_hides_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_attention, "missing_reason", lambda: None)
    for length in (8192, 32768, 131072):
        assert chosen(request_of(2, length)) == "gather"


def test_heads_send_less_than_keys_from_some_number_of_devices_on() -> None:
    for devices in (2, 4):
        request = request_of(devices)
        assert context_cost.bytes_of_exchanges(request) > request.bytes_communicated
    assert context_cost.bytes_of_exchanges(request_of(8)) < request_of(8).bytes_communicated
