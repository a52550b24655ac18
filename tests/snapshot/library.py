"""Needs of a snapshot besides the library's public names: the place to follow moved names.

Where a name has moved, a ``try`` here takes it from either place, so that old and new trees can be
compared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice

from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.peers import symmetric_workspace
from collective_matmul.peer_access import peer_kernels_allowed

RECIPES = ("tensorwise", "rowwise", "blockwise")
#: Without and with kernels that address the memory of peers.
PORTABLE = ("xla", "ring", "ring_two_way", "ring_direct")
IMPLEMENTATIONS = (*PORTABLE, "one_shot", "fused")
#: Whether this JAX has what kernels that address peers need.
HAS_PEER_KERNELS = jax.__version_info__ >= (0, 11)

H200 = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
_MULTIPROCESSORS = 132


def set_up() -> None:
    """Configures JAX for snapshots. Call it before anything is traced."""
    # The tables of this machine's user decide nothing.
    os.environ["COLLECTIVE_MATMUL_CACHE_DIR"] = tempfile.mkdtemp()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


@contextlib.contextmanager
def for_hopper() -> Iterator[None]:
    """Traces programs over meshes of CPUs as for Hopper GPUs; kernels may address peers.

    The programs never run, so that workspaces are small.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "target", lambda: device.Target(_MULTIPROCESSORS))
        patch.setattr(symmetric_workspace, "workspace_bytes", lambda devices: 16)
        patch.setattr(symmetric_workspace, "_allocated", {})
        with peer_kernels_allowed(True):
            yield


@contextlib.contextmanager
def warnings_of_library() -> Iterator[list[str]]:
    """Collects what the library warns of inside the block."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("collective_matmul")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield messages
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


def error_text(error: Exception) -> str:
    """The type and the text of an error, without addresses of memory."""
    return f"{type(error).__name__}: {without_addresses(str(error))}"


def without_addresses(text: str) -> str:
    """A text without the addresses of objects, which differ from run to run."""
    return re.sub(r" at 0x[0-9a-f]+|(?<=id=)\d+", "", text)


def decision_fields(decision: Any) -> dict[str, Any]:
    """Fields of a decision, without the description of the call."""
    other = decision.peer_alternative
    return {
        "implementation": decision.implementation,
        "reason": decision.reason,
        "seconds": _rounded(decision.seconds),
        "reference_seconds": _rounded(decision.reference_seconds),
        "communication_seconds": _rounded(decision.communication_seconds),
        "multiplied_dtypes": decision.multiplied_dtypes and list(decision.multiplied_dtypes),
        "peer_alternative": other
        and [other.implementation, _rounded(other.seconds_gained), other.missed],
    }


def _rounded(seconds: float | None) -> float | None:
    """Twelve digits: equal sums may be added up in another order."""
    return None if seconds is None else float(f"{seconds:.12g}")
