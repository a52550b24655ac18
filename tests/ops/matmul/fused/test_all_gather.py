"""The all-gather and matmul kernel: it lowers for CUDA, and multiplies the rows that have arrived.

The interpreter has neither semaphores nor other devices. So it runs the last of two devices after
all messages have arrived, and the device stores to its own gathered array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct
from jax.experimental import pallas
from jax.experimental.pallas import mosaic_gpu
from jax.sharding import PartitionSpec as P

from collective_matmul.mosaic_gpu.hopper_matmul.tiling import Tiling
from collective_matmul.mosaic_gpu.peers import shared_memory
from collective_matmul.ops.matmul.fused import all_gather_kernel, all_gather_sender
from collective_matmul.ops.matmul.fused.all_gather import (
    all_gather_matmul,
    all_gather_unsupported_reason,
)
from collective_matmul.ops.matmul.fused.all_gather_config import AllGatherConfig, AllGatherProblem
from collective_matmul.ops.matmul.fused.all_gather_kernel import AllGatherGemm
from collective_matmul.ops.matmul.fused.all_gather_sender import Sender
from tests.conftest import MeshFactory
from tests.hopper import assert_an_ordinary_kernel, needs_kernels
from tests.mosaic_gpu.hopper_matmul.test_interpreted import (
    assert_sum_of_products,
    interpreter,
    needs_interpreter,
)
from tests.reference import AXIS


@dataclass(frozen=True)
class Call:
    """A call of `all_gather_matmul`.

    Attributes:
      mesh: sizes of its axes. The operands are replicated over all but one.
      leading: global dimensions of x without the last.
      contracted: K.
      columns: global columns of each result.
      dimension: the gathered dimension.
    """

    mesh: tuple[tuple[str, int], ...] = ((AXIS, 4),)
    leading: tuple[int, ...] = (1024,)
    contracted: int = 512
    columns: tuple[int, ...] = (1024,)
    dimension: int = 0
    transpose_w: bool = False
    keep: bool = False
    race_delays: bool = False
    dtype: str = "bfloat16"
    check_vma: bool = True

    def lowered(self, make_mesh: MeshFactory) -> str:
        x = ShapeDtypeStruct((*self.leading, self.contracted), self.dtype)
        shapes = [(self.contracted, n) for n in self.columns]
        ws = [ShapeDtypeStruct(s[::-1] if self.transpose_w else s, self.dtype) for s in shapes]
        x_spec = P(*[None] * self.dimension, AXIS)
        y_spec = P(*[None] * len(self.leading), AXIS)

        def call(x: jax.Array, ws: list[jax.Array]) -> Any:
            return all_gather_matmul(
                x,
                ws,
                AXIS,
                dimension=self.dimension,
                transpose_w=self.transpose_w,
                keep_gathered=self.keep,
                race_delays=self.race_delays,
            )

        sharded = jax.shard_map(
            call,
            mesh=make_mesh(dict(self.mesh)),
            in_specs=(x_spec, P(AXIS) if self.transpose_w else P(None, AXIS)),
            out_specs=((y_spec,) * len(ws), x_spec if self.keep else None),
            check_vma=self.check_vma,
        )
        traced = jax.jit(sharded).trace(x, ws)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


CALLS = {
    "plain": Call(),
    "several weights": Call(columns=(1024, 256), dtype="float16"),
    "dimensions around": Call(leading=(3, 256, 2), dimension=1, keep=True, check_vma=False),
    "transposed, delayed": Call(transpose_w=True, keep=True, race_delays=True),
    "major axis of two": Call(mesh=((AXIS, 2), ("data", 4))),
    "minor axis of two": Call(mesh=(("data", 2), (AXIS, 2))),
    "few rows": Call(leading=(16,), contracted=4096),
    "few rows, kept": Call(leading=(64,), contracted=4096, columns=(14336,), keep=True),
    "few rows, an odd number of swizzles": Call(
        mesh=((AXIS, 2), ("data", 4)), leading=(48,), contracted=1792, columns=(8192,)
    ),
    "ragged": Call(leading=(4000,), contracted=192, columns=(384,)),
    "rows that are padded": Call(leading=(400,), keep=True),
    "a row for each device": Call(leading=(4,), keep=True),
}


@needs_kernels
@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_lowers_to_one_ordinary_kernel(call: Call, make_mesh: MeshFactory) -> None:
    text = call.lowered(make_mesh)
    assert_an_ordinary_kernel(text)
    assert "stablehlo.all_gather" not in text


@needs_kernels
@pytest.mark.usefixtures("_for_hopper")
def test_devices_of_several_processes_publish_other_addresses(
    make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: dict[int, int] = {}

    def translation(device: Any) -> int:
        return added.setdefault(device.id, (0x2000 - device.id << 32) - (1 << 48) + device.id)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        shared_memory, "pool_translation", lambda device: translation(device) % (1 << 64)
    )
    # Nothing else has this shape: one process traces equal launches once.
    text = Call(mesh=((AXIS, 2),), contracted=320).lowered(make_mesh)
    assert_an_ordinary_kernel(text)
    words = np.array(list(added.values())).view(np.int32)
    assert f"dense<[[{words[0]}, {words[1]}], [{words[2]}, {words[3]}]]>" in text


@needs_kernels
@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "dtypes"),
        ({"contracted": 96}, "multiple of 64"),
        ({"leading": (0,)}, "without elements"),
        ({"mesh": ((AXIS, 1),)}, "nothing to communicate"),
    ],
    ids=str,
)
def test_what_it_cannot_do_it_says(
    change: dict[str, Any], message: str, make_mesh: MeshFactory
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Call(), **change).lowered(make_mesh)


def test_other_machines_have_no_kernel() -> None:
    x = jnp.zeros((8, 64), jnp.bfloat16)
    reason = all_gather_unsupported_reason(x, [x.T], 2, dimension=0, transpose_w=False)
    assert reason is not None and "Hopper" in reason


LOW = Tiling(
    64,
    128,
    max_concurrent_steps=3,
    epilogue_stages=1,
    wg_dimension="n",
    cluster_dimension=None,
    grid_minor_dim="n",
)
HIGH = Tiling(
    128,
    128,
    max_concurrent_steps=3,
    epilogue_stages=1,
    cluster_dimension="m",
    grid_minor_dim="n",
    grid_tile_width=2,
)
CONFIGS = {
    "ragged rows": AllGatherConfig(
        AllGatherProblem(2, 1, 72, 192, (192, 64)), LOW, False, 72, 1, (12, 192), 1, (1,)
    ),
    "clusters": AllGatherConfig(
        AllGatherProblem(2, 1, 136, 128, (192,)), HIGH, False, 136, 2, (8, 64), 1, (1,)
    ),
    "transposed": AllGatherConfig(
        AllGatherProblem(2, 1, 64, 128, (128,), 2), LOW, False, 64, 1, (1, 64), 4, (1,)
    ),
    "tiles span shards": AllGatherConfig(
        AllGatherProblem(2, 2, 36, 128, (192,)), LOW, True, 36, 2, (12, 64), 1, (1,)
    ),
}


@needs_interpreter
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_it_multiplies_all_shards(config: AllGatherConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, matmul = config.problem, config.problem.matmul(config.tiles_span_shards)
    run_the_last_device_alone(monkeypatch, sends=not config.tiles_span_shards)
    generator = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(jnp.bfloat16)

    whole = draw(problem.planes, problem.devices, problem.m, problem.k)
    shard, gathered = whole[:, -1], whole.copy()
    if not config.tiles_span_shards:
        gathered[:, -1] = math.nan
    ws = [draw(problem.k, n) for n in problem.n]
    arrays = [jnp.asarray(w.T if problem.w_contracted_axis == 2 else w)[None] for w in ws]
    outs = [draw(matmul.batch, matmul.m, n) for n in problem.n]
    places = jnp.asarray(gathered).reshape(matmul.batch, matmul.m, problem.k)
    gemm = AllGatherGemm(config, False, False, places, arrays, outs)
    blocks = max(2, math.prod(config.tiling.cluster))
    kernel = gemm.kernel([*map(jnp.asarray, outs), places], "gather", blocks, interpreter())
    words = jnp.zeros(2 * problem.devices + 1, jnp.int32)
    *products, filled = kernel(words, jnp.asarray(shard), *arrays)
    assert np.asarray(filled).tobytes() == whole.tobytes()
    for product, w in zip(products, ws, strict=True):
        rows = whole.reshape(-1, problem.k)
        assert_sum_of_products(np.asarray(product).reshape(len(rows), -1), [(rows, w)])


def run_the_last_device_alone(monkeypatch: pytest.MonkeyPatch, *, sends: bool) -> None:
    """Replaces what connects devices, so that the second of two devices can run alone."""
    monkeypatch.setattr(all_gather_kernel, "Rendezvous", NoPeers)
    monkeypatch.setattr(all_gather_sender, "async_remote_store", async_remote_store)
    monkeypatch.setattr(all_gather_sender, "signal_peers", lambda *arguments: None)
    monkeypatch.setattr(pallas, "get_global", lambda kind: UnusedSemaphores())
    if not sends:
        monkeypatch.setattr(Sender, "send", lambda *arguments: None)


class NoPeers:
    """The rendezvous of a device that runs alone."""

    axis_index = 1

    def __init__(self, words: Any, devices: int, block: Any, arrays: Sequence[Any], kernel: str):
        pass

    def publish(self, scope: Any) -> None:
        pass

    def wait_for_peers(self, scope: Any) -> None:
        pass

    def wait_for_count(self, semaphore: Any, count: Any, what: str, scope: Any) -> None:
        pass

    def peer_buffer(self, number: int, offset: Any) -> None:
        pass


def async_remote_store(box: Any, place: Any, peer_buffer: None, *, scope: Any) -> None:
    mosaic_gpu.copy_smem_to_gmem(box, place, commit_group=False)


class UnusedSemaphores:
    """Semaphores that nobody reads."""

    @property
    def at(self) -> Any:
        return self

    def __getitem__(self, index: Any) -> Any:
        return self
