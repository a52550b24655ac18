"""What the tests of kernels share."""

from __future__ import annotations

from typing import Any

import pytest
from jax.experimental.mosaic import gpu as mosaic

from collective_matmul.kernels import device

#: Of an H100 or H200.
MULTIPROCESSORS = 132


@pytest.fixture
def _for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has programs traced for Hopper GPUs, wherever they are."""
    monkeypatch.setattr(device, "target", lambda: device.Target(MULTIPROCESSORS))


@pytest.fixture
def host_lookups(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each look-up of a peer's address in kernels that are lowered: whether the host does it.

    What the host looks up is as old as the CUDA graph that the kernel is launched by.
    """
    found: list[bool] = []
    to_remote = mosaic.LaunchContext.to_remote

    def look_up(context: Any, *operands: Any, **options: Any) -> Any:
        found.append(options.get("on_host", False))
        return to_remote(context, *operands, **options)

    monkeypatch.setattr(mosaic.LaunchContext, "to_remote", look_up)
    return found
