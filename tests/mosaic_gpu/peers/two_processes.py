"""Two processes that share memory.

Each is `python -m tests.mosaic_gpu.peers.two_processes ADDRESS NUMBER`.

JAX has one simulated device in each, and the driver is simulated.
"""

from __future__ import annotations

import ctypes
import sys
from unittest import mock

import jax
import numpy as np

from collective_matmul import peer_access
from collective_matmul._compat import key_value_store
from collective_matmul.mosaic_gpu import requirements
from collective_matmul.mosaic_gpu.peers import (
    shared_memory,
    symmetric_workspace,
    timeout_reports,
    virtual_memory,
)
from tests import processes
from tests.mosaic_gpu.peers.simulated_driver import GRANULARITY, SimulatedDriver

ENVIRONMENT = {
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "COLLECTIVE_MATMUL_PEER_TIMEOUT": "60",
}


def run_two_processes() -> None:
    """Runs both, and asserts that they have found what they expect."""
    processes.run("tests.mosaic_gpu.peers.two_processes", [ENVIRONMENT] * 2, [[]] * 2)


def main(address: str, number: int) -> None:
    jax.distributed.initialize(address, 2, number, initialization_timeout=60)
    driver = SimulatedDriver()
    with (
        mock.patch.object(peer_access, "cuda_driver", lambda: driver),
        mock.patch.object(timeout_reports, "allocate", lambda device: 1 << 40 | device.id),
    ):
        assert requirements.workspaces_reason("nccl") is None
        assert not driver.handles and not driver.reserved
        with (
            mock.patch.object(shared_memory, "_any_address", lambda device: pool.base + 100),
            mock.patch.object(shared_memory, "_pool_bytes", lambda device: 3 * GRANULARITY),
        ):
            handle = virtual_memory.allocate(3 * GRANULARITY, 0)
            pool = virtual_memory.MappedRange([handle], 3 * GRANULARITY, [0])
            virtual_memory.release(handle)
            assert requirements.peer_arrays_reason("nccl") is None
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
    # An array in the peer's pool, at the address that the peer would publish.
    translation = shared_memory.pool_translation(devices[number])
    store.key_value_set(f"array/{number}", str((pool.base + 400 + translation) % (1 << 64)))
    published = int(store.blocking_key_value_get(f"array/{1 - number}", 30_000))
    ctypes.c_uint32.from_address(published).value = 2000 + number
    store.wait_at_barrier("stored", 30_000)
    assert ctypes.c_uint32.from_address(pool.base + 400).value == 2000 + 1 - number
    store.wait_at_barrier("end", 30_000)


if __name__ == "__main__":
    with processes.ending_at_once():
        main(sys.argv[1], int(sys.argv[2]))
