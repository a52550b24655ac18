"""Set-up that tests of kernels share: programs are lowered for Hopper GPUs on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.experimental.mosaic import gpu as mosaic

from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.peers import symmetric_workspace
from collective_matmul.peer_access import peer_kernels_allowed

#: The number of multiprocessors of an H100 or H200.
MULTIPROCESSORS = 132

#: Whether this JAX has what kernels that address peers need.
HAS_KERNELS = jax.__version_info__ >= (0, 11)
needs_kernels = pytest.mark.skipif(
    not HAS_KERNELS,
    reason=f"kernels that address peers need jax 0.11 or newer, and this is {jax.__version__}",
)


def skip_without_hopper() -> None:
    """Skips a test that executes a kernel: in a rehearsal, and on GPUs that have no wgmma."""
    if device.target() is None:
        pytest.skip(f"{jax.devices()[0].device_kind}: Mosaic kernels run on Hopper GPUs only")


@pytest.fixture
def _for_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes programs be traced for Hopper GPUs. They never run, so workspaces are small.

    Kernels that ask XLA for the address of a peer's array fail. Kernels may address peers, also in
    programs that `overlap_jit` does not compile.
    """
    monkeypatch.setattr(device, "target", lambda: device.Target(MULTIPROCESSORS))
    monkeypatch.setattr(symmetric_workspace, "workspace_bytes", lambda devices: 16)
    monkeypatch.setattr(symmetric_workspace, "_allocated", {})

    def look_up(*operands: Any, **options: Any) -> None:
        raise AssertionError("XLA is asked where a peer's array is")

    monkeypatch.setattr(mosaic.LaunchContext, "to_remote", look_up)
    with peer_kernels_allowed(True):
        yield


def assert_an_ordinary_kernel(text: str) -> None:
    """Asserts that a program's one kernel is an ordinary one for XLA, though it accesses peers.

    So its launches need no preparation by the host, and do not synchronise the devices.
    """
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "uses_xla_collective_metadata = false" in text
    assert "nvshmem" not in text and "symmetric_memory" not in text
