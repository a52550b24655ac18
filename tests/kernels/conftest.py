"""What the tests of kernels share."""

from __future__ import annotations

import pytest

from collective_matmul.kernels import device

#: Of an H100 or H200.
MULTIPROCESSORS = 132


@pytest.fixture
def _for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has programs traced for Hopper GPUs, wherever they are."""
    monkeypatch.setattr(device, "target", lambda: device.Target(MULTIPROCESSORS))
