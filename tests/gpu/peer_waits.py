"""Kernels that wait on one GPU, ``python -m tests.gpu.peer_waits WAIT``: nobody signals.

Block 0 waits for block 1, by one of the three waits that kernels have for peers.
"""

from __future__ import annotations

import sys
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jax.sharding import PartitionSpec as P

from collective_matmul import overlap_jit
from collective_matmul._compat import in_place_kernel
from collective_matmul.mosaic_gpu.peers import peer_waits, symmetric_workspace
from collective_matmul.mosaic_gpu.peers.peer_memory import WARPGROUP, Address, layout
from collective_matmul.mosaic_gpu.peers.rendezvous import publish_pointers
from collective_matmul.mosaic_gpu.peers.self_signalled import store_message, take_message
from tests.gpu.problems import mesh_of
from tests.reference import AXIS

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu

Wait = Literal["message", "count", "pointers"]
WAITS: tuple[Wait, ...] = get_args(Wait)
WHAT = "the other block"
EPOCH = 1
ELEMENTS = 1024
# In all 50 ms, long enough that the clock is read: that happens after a few milliseconds.
DELAYS, DELAY_NANOSECONDS = 100, 500_000


def name_of(wait: Wait) -> str:
    return f"wait_for_{wait}"


def program(wait: Wait, *, comes: bool) -> Any:
    """A program that returns [1, ELEMENTS] ones, a message of block 1.

    Args:
      wait: how block 0 waits.
      comes: whether block 1 signals, after some time.
    """

    def body(pointers: Any, y: Any) -> None:
        workspace = Address(pointers[0], pointers[1], 0)
        report = workspace.plus(symmetric_workspace.report_offset(1))
        awaited = peer_waits.Awaited(name_of(wait), WHAT, report)
        mailbox = workspace.plus(symmetric_workspace.mailbox_offset(1, 0, 0, 0))
        region = workspace.plus(symmetric_workspace.region_offset(1, 0, 0, 0))
        semaphore = pl.get_global(plgpu.SemaphoreType.REGULAR((1,))).at[0]
        block = lax.axis_index("block")

        @pl.when((block == 1) & comes)
        def _() -> None:
            pl.loop(0, DELAYS)(lambda _: pl.delay(DELAY_NANOSECONDS))
            ones = jnp.full((ELEMENTS,), 1, jnp.bfloat16)
            store_message(region, plgpu.layout_cast(ones, layout((ELEMENTS,), jnp.bfloat16)))
            if wait == "count":
                pl.semaphore_signal(semaphore, EPOCH)
            elif wait == "pointers":
                publish_pointers(jnp.int32(EPOCH), [y], [mailbox], WARPGROUP)

        @pl.when(block == 0)
        def _() -> None:
            if wait == "count":
                peer_waits.wait_for_count(semaphore, EPOCH, WARPGROUP, awaited)
            elif wait == "pointers":
                epoch = jnp.int32(EPOCH)
                peer_waits.poll_pointers(epoch, mailbox, 0, 1, 1, WARPGROUP, awaited)
            y[0] = take_message(jnp.int32(EPOCH), region, (ELEMENTS,), jnp.bfloat16, awaited)

    def launch() -> jax.Array:
        mesh = plgpu.Mesh(
            grid=(2,),
            grid_names=("block",),
            num_threads=1,
            thread_name="warpgroup",
            kernel_name=name_of(wait),
        )
        y = lax.pcast(jnp.zeros((1, ELEMENTS), jnp.bfloat16), (AXIS,), to="varying")
        kernel = in_place_kernel(body, mesh, [y], name=name_of(wait))
        return kernel(symmetric_workspace.workspace_pointers(AXIS))[0]

    mesh = mesh_of((AXIS,), (1,))
    sharded = jax.shard_map(launch, mesh=mesh, in_specs=(), out_specs=P(AXIS))
    return overlap_jit(sharded, peer_kernels=True)


if __name__ == "__main__":
    _wait: Any = sys.argv[1]
    program(_wait, comes=False)().block_until_ready()
