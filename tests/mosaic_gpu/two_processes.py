"""Two processes that share memory, each `python -m tests.mosaic_gpu.two_processes ADDRESS NUMBER`.

JAX has one simulated device in each, and the driver is simulated.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from unittest import mock

import jax
import numpy as np

from collective_matmul import peer_access
from collective_matmul._compat import key_value_store
from collective_matmul.mosaic_gpu import requirements, symmetric_workspace, timeout_reports
from tests.mosaic_gpu.simulated_driver import SimulatedDriver

ENVIRONMENT = {
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "COLLECTIVE_MATMUL_PEER_TIMEOUT": "60",
}
TIMEOUT_SECONDS = 100


def run_two_processes(folder: Path) -> None:
    """Runs both, and asserts that they have found what they expect."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    outputs = [folder / f"{number}.txt" for number in range(2)]
    processes = []
    for number, path in enumerate(outputs):
        command = [sys.executable, "-m", "tests.mosaic_gpu.two_processes", address, str(number)]
        with path.open("w") as output:
            environment = {**os.environ, **ENVIRONMENT}
            processes.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            )
    try:
        codes = [process.wait(timeout=TIMEOUT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n\n".join(path.read_text() for path in outputs)


def main(address: str, number: int) -> None:
    jax.distributed.initialize(address, 2, number, initialization_timeout=60)
    driver = SimulatedDriver()
    with (
        mock.patch.object(peer_access, "cuda_driver", lambda: driver),
        mock.patch.object(timeout_reports, "allocate", lambda device: 1 << 40 | device.id),
    ):
        assert requirements.shared_workspaces_reason() is None
        assert not driver.handles and not driver.reserved
        devices = np.array(sorted(jax.devices(), key=lambda device: device.id))
        table = symmetric_workspace._PointerTable(0)(devices)
    pointers = [int(each) for each in table[number].view(np.uint64)[:, 0]]
    word = ctypes.c_uint32.from_address(pointers[1 - number])
    assert word.value == 0
    word.value = 1000 + number
    store = key_value_store()
    assert store is not None
    store.key_value_set(f"table/{number}", str(table.tolist()))
    assert store.blocking_key_value_get(f"table/{1 - number}", 30_000) == str(table.tolist())
    assert ctypes.c_uint32.from_address(pointers[number]).value == 1000 + 1 - number
    store.wait_at_barrier("end", 30_000)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except BaseException:
        # An orderly exit would wait for the other process.
        traceback.print_exc()
        os._exit(1)
