"""A wait for a peer that never comes ends the program, and says why. One GPU is enough."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from collective_matmul.mosaic_gpu.peers import symmetric_workspace
from collective_matmul.mosaic_gpu.peers.timeout_reports import TIMEOUT_VARIABLE
from tests.gpu.peer_waits import EPOCH, WAITS, WHAT, Wait, name_of, program

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_with_kernels")]

each_wait = pytest.mark.parametrize("wait", WAITS)

ENVIRONMENT = {
    TIMEOUT_VARIABLE: "2",
    "JAX_PLATFORMS": "cuda,cpu",
    # This process has allocated most of the memory.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


@each_wait
def test_a_wait_ends_when_the_peer_comes(wait: Wait) -> None:
    y = program(wait, comes=True)()
    np.testing.assert_array_equal(np.asarray(y, np.float32), 1)


@each_wait
def test_a_wait_in_vain_ends_the_program(wait: Wait) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu.peer_waits", wait],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode != 0
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in ended.stderr, ended.stderr
    found = symmetric_workspace.SENTINEL if wait == "message" else 0
    sentence = f"{name_of(wait)} waited 2 s for {WHAT}; it found {found} instead of {EPOCH}"
    assert sentence in ended.stderr, ended.stderr
