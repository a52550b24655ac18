"""One-shot collectives on GPUs, beside what the tests of all implementations find.

Against XLA's, on whole numbers so small that all sums are exact. What is late, or of another
exchange, is wrong by at least one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    overlap_jit,
)
from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.mosaic_gpu.peers import symmetric_workspace
from collective_matmul.ops.matmul.one_shot import exchange_kernel
from tests.conftest import skip_without
from tests.gpu.problems import mesh_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_with_kernels")]

AXIS, OTHER = "tensor", "data"
TURNS = 200

MESHES = {
    "4": ((4,), (AXIS,)),
    "2": ((2,), (AXIS,)),
    "2x2": ((2, 2), (OTHER, AXIS)),
    "2x2 across": ((2, 2), (AXIS, OTHER)),
}
# A vector for some lanes, boxes that grow with the array, two boxes for a block, all that there is.
ELEMENTS = (8, 1000, 65_536, 300_000, 1_500_000, exchange_kernel.MOST_BYTES // 2)


def differences(
    mesh: Mesh, elements: int, axes: tuple[str, ...], dtype: str, delays: bool, turns: int
) -> Any:
    """A program that counts what one-shot collectives do otherwise than XLA's, by kind."""

    def turn(wrong: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        counts = jnp.zeros(3, jnp.int32)
        for number, axis in enumerate(axes):
            devices = lax.axis_size(axis)
            x = jax.random.randint(jax.random.fold_in(key, number), (devices, elements), -8, 9)
            x = x.astype(dtype)
            pairs = (
                (
                    exchange_kernel.all_gather(x[0], axis, race_delays=delays),
                    lax.all_gather(x[0], axis),
                ),
                (
                    exchange_kernel.reduce_scatter(x, axis, race_delays=delays),
                    lax.psum_scatter(x, axis),
                ),
                (exchange_kernel.all_reduce(x[1], axis, race_delays=delays), lax.psum(x[1], axis)),
            )
            counts += jnp.stack([jnp.sum(a != b) for a, b in pairs])
        return wrong + counts, None

    def count(seed: jax.Array) -> jax.Array:
        place = sum(lax.axis_index(name) * 64**i for i, name in enumerate(mesh.axis_names))
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), place), turns)
        return lax.psum(lax.scan(turn, jnp.zeros(3, jnp.int32), keys)[0], mesh.axis_names)

    sharded = jax.shard_map(count, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return overlap_jit(sharded, peer_kernels=True)


def mesh_called(name: str) -> Mesh:
    sizes, names = MESHES[name]
    skip_without(int(np.prod(sizes)))
    return mesh_of(names, sizes)


@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("mesh", ["4", "2"])
def test_values(mesh: str, elements: int) -> None:
    wrong = differences(mesh_called(mesh), elements, (AXIS,), "bfloat16", False, TURNS)(0)
    assert not np.asarray(wrong).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_messages_may_have_the_bits_of_the_sentinel(dtype: str) -> None:
    """Such a pair of NaNs would be waited for in vain; all other bits travel unchanged."""
    mesh = mesh_called("2")
    words = np.resize(
        np.array([symmetric_workspace.SENTINEL, 0x3F80C000, 0x40414243], np.int32), 2 * 30_000
    )
    x = words.view(np.uint16)
    sharded = jax.shard_map(
        lambda bits: lax.bitcast_convert_type(
            exchange_kernel.all_gather(lax.bitcast_convert_type(bits, dtype), AXIS), np.uint16
        ).reshape(-1),
        mesh=mesh,
        in_specs=P(AXIS),
        out_specs=P(AXIS),
        check_vma=False,
    )
    gathered = np.asarray(overlap_jit(sharded, peer_kernels=True)(x)).reshape(2, -1)
    for found in gathered.view(np.int32):
        is_sentinel = words == symmetric_workspace.SENTINEL
        np.testing.assert_array_equal(found[~is_sentinel], words[~is_sentinel])
        assert np.isnan(found[is_sentinel].view(np.float16).astype(np.float32)).all()


@pytest.mark.parametrize("mesh", ["2x2", "2x2 across"])
def test_one_axis_after_the_other(mesh: str) -> None:
    axes = AXIS, OTHER, AXIS
    wrong = differences(mesh_called(mesh), 65_536, axes, "float16", False, TURNS)(1)
    assert not np.asarray(wrong).any()


@pytest.mark.parametrize("elements", [1000, 300_000])
@pytest.mark.parametrize("mesh", ["4", "2x2"])
def test_random_delays_change_nothing(mesh: str, elements: int) -> None:
    wrong = differences(mesh_called(mesh), elements, (AXIS,), "bfloat16", True, TURNS)(2)
    assert not np.asarray(wrong).any()


def test_devices_in_another_order() -> None:
    """Programs that JAX traces once for both meshes."""
    skip_without(4)
    devices = jax.devices()[:4]
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        placed = np.array([devices[place] for place in order])
        mesh = Mesh(placed, (AXIS,), axis_types=(AxisType.Auto,))
        wrong = differences(mesh, 65_536, (AXIS,), "bfloat16", False, TURNS)(3)
        assert not np.asarray(wrong).any()


def test_programs_launched_by_several_threads() -> None:
    """Each of many exchanges, of different sizes; all devices have them in the same order."""
    mesh = mesh_called("4")
    runs = [
        differences(mesh, elements, (AXIS,), "bfloat16", False, 20) for elements in (1000, 300_000)
    ]
    for run in runs:
        jax.block_until_ready(run(0))
    found: list[Any] = []
    start = threading.Barrier(len(runs))

    def launch(run: Callable[[int], Any]) -> None:
        start.wait()
        found.extend([run(seed) for seed in range(20)])

    threads = [threading.Thread(target=launch, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40 and not np.asarray(found).any()


OPS: dict[str, tuple[Callable, P, P, P]] = {
    "gather": (all_gather_matmul, P(AXIS), P(None, AXIS), P(None, AXIS)),
    "scatter": (matmul_reduce_scatter, P(None, AXIS), P(AXIS), P(AXIS)),
    "reduce": (matmul_all_reduce, P(None, AXIS), P(AXIS), P()),
}


@pytest.mark.parametrize("rows", [16, 200, 512])
@pytest.mark.parametrize("op", OPS)
def test_ops_and_their_gradients(op: str, rows: int) -> None:
    mesh = mesh_called("4")
    function, *specs = OPS[op]
    x_spec, w_spec, y_spec = specs
    way = functools.partial(function, axis_name=AXIS, implementation="one_shot")
    sharded = jax.shard_map(way, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec)
    draw = np.random.default_rng(rows)
    sizes = (rows, 1024), (1024, 512), (rows, 512)
    # Sums of so few whole numbers are exact.
    x, w, dy = (
        (draw.choice([-1.0, 1.0], size) * (draw.random(size) < 0.05)).astype(jnp.bfloat16)
        for size in sizes
    )

    @functools.partial(overlap_jit, peer_kernels=True)
    def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        y, transpose = jax.vjp(sharded, x, w)
        return y, *transpose(dy)

    with record_decisions() as decisions:
        results = run(x, w, dy)
    assert {decision.implementation for decision in decisions} == {"one_shot"}
    x, w, dy = (array.astype(np.float64) for array in (x, w, dy))
    for result, expected in zip(results, (x @ w, dy @ w.T, x.T @ dy), strict=True):
        np.testing.assert_array_equal(np.asarray(result, np.float64), expected)
