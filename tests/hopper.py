"""What the tests of kernels share."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.experimental.mosaic import gpu as mosaic

from collective_matmul.mosaic_gpu import device, symmetric_workspace

#: Of an H100 or H200.
MULTIPROCESSORS = 132

needs_kernels = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="unsupported_reason says that this JAX has no kernels that address peers",
)


@pytest.fixture
def _for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has programs traced for Hopper GPUs, wherever they are. They never run: workspaces are small.

    Kernels must find their peers by themselves.
    """
    monkeypatch.setattr(device, "target", lambda: device.Target(MULTIPROCESSORS))
    monkeypatch.setattr(symmetric_workspace, "workspace_bytes", lambda devices: 4)
    monkeypatch.setattr(symmetric_workspace, "_allocated", {})

    def look_up(*operands: Any, **options: Any) -> None:
        raise AssertionError("XLA is asked where a peer's array is")

    monkeypatch.setattr(mosaic.LaunchContext, "to_remote", look_up)


def assert_an_ordinary_kernel(text: str) -> None:
    """That a program's one kernel is like any other for the host, though it addresses peers.

    Its launches need no preparation, and none holds the devices before it.
    """
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "uses_xla_collective_metadata = false" in text
    assert "nvshmem" not in text and "symmetric_memory" not in text
