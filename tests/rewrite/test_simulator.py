"""The simulator computes what XLA does, and finds the programs that never end."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.rewrite.simulator import DeadlockError, simulated

MESH = {"d": 2, "t": 2}
X = np.arange(32, dtype=np.float32).reshape(8, 4) / 8


def gathered(x):
    return lax.all_gather(x, "t", tiled=True)[: len(x)]


def scattered(x):
    return lax.psum_scatter(jnp.concatenate([x, 2 * x]), "t", tiled=True)


def summed(x):
    return lax.psum(x, "t") + lax.pmax(x, "t")


def permuted(x):
    return lax.ppermute(x, "t", [(0, 1), (1, 0)])


def branched(communicate, axis):
    """Communicates where this axis has its first index."""
    return lambda x: lax.cond(lax.axis_index(axis) == 0, communicate, lambda x: 2 * x, x)


def repeated(communicate, axis):
    """Communicates once more on every device of this axis than on the one before."""

    def body(x):
        steps = 1 + lax.axis_index(axis)
        return lax.fori_loop(0, steps, lambda _, x: communicate(x) + 1, x)

    return body


def switched(communicate, axis):
    """Communicates on all devices, but in different branches."""
    return lambda x: lax.switch(
        lax.axis_index(axis), [communicate, lambda x: communicate(2 * x)], x
    )


def sharded(body):
    mesh = jax.make_mesh(
        (2, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    return jax.shard_map(
        body, mesh=mesh, in_specs=P(("d", "t")), out_specs=P(("d", "t")), check_vma=False
    )


@pytest.mark.parametrize("around", [branched, repeated, switched])
@pytest.mark.parametrize("communicate", [gathered, scattered, summed])
def test_collectives_meet_per_group(around, communicate) -> None:
    fun = sharded(around(communicate, "d"))
    np.testing.assert_allclose(simulated(fun)(X), jax.jit(fun)(X), rtol=1e-6)


@pytest.mark.parametrize("around", [branched, repeated, switched])
@pytest.mark.parametrize(
    "communicate, axis",
    [(gathered, "t"), (scattered, "t"), (summed, "t"), (permuted, "t"), (permuted, "d")],
)
def test_devices_that_wait_for_ever_are_found(around, communicate, axis) -> None:
    with pytest.raises(DeadlockError):
        simulated(sharded(around(communicate, axis)))(X)


def test_a_permute_on_all_devices_ends() -> None:
    fun = sharded(permuted)
    np.testing.assert_array_equal(simulated(fun)(X), jax.jit(fun)(X))


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize(("split", "concat"), [(0, 1), (1, 0), (2, 0), (0, 2), (1, 1)])
def test_devices_exchange_parts(split: int, concat: int, tiled: bool) -> None:
    """Each dimension of a device's [2, 2, 4, 4] is divided by two devices, or has one for each."""
    x = np.arange(8 * 2 * 4 * 4, dtype=np.float32).reshape(8, 2, 4, 4)
    fun = sharded(lambda x: lax.all_to_all(x, "t", split, concat, tiled=tiled))
    if not tiled and split == 2:
        x = x.reshape(8, 4, 2, 4)
    np.testing.assert_array_equal(simulated(fun)(x), jax.jit(fun)(x))


@pytest.mark.parametrize("around", ["branched", "repeated"])
@pytest.mark.exhaustive
def test_xla_waits_where_the_simulator_does(around: str) -> None:
    """Not for permutes in different branches, some of which XLA lets meet on CPUs."""
    program = f"""
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
from tests.rewrite.test_simulator import X, {around}, gathered, permuted, sharded
for communicate in (gathered, permuted):
    jax.jit(sharded({around}(communicate, "d")))(X).block_until_ready()
    print(communicate.__name__, flush=True)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"gathered\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.communicate(timeout=5)
        finally:
            process.kill()


def bytes_of_each(x):
    """Numbers as bytes, exchanged and then read back, as messages in 8 bits are."""
    raw = lax.bitcast_convert_type(x, jnp.uint8)
    sent = lax.ppermute(raw.reshape(len(x), -1), "t", [(0, 1), (1, 0)])
    return lax.bitcast_convert_type(sent.reshape(raw.shape), jnp.float32)


def reduced_by_an_own_function(x):
    """The sums and the largest magnitudes of rows, three of which are not a power of two."""

    def combined(left, right):
        return left[0] + right[0], jnp.maximum(abs(left[1]), abs(right[1]))

    zeros = np.float32(0), np.float32(0)
    whole = lax.pad(x - 1, np.float32(0), [(0, 1, 0), (0, 0, 0)])
    sums, largest = lax.reduce((whole, whole), zeros, combined, (0,))
    return jnp.stack([sums, largest])


@pytest.mark.parametrize("body", [bytes_of_each, reduced_by_an_own_function])
def test_bytes_and_reductions(body) -> None:
    fun = sharded(body)
    np.testing.assert_allclose(simulated(fun)(X), jax.jit(fun)(X), rtol=1e-6)
