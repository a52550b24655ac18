"""The matmul and reduce-scatter kernel, which also all-reduces: every op lowers to one launch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct
from jax.sharding import PartitionSpec as P

from collective_matmul import matmul_all_reduce, matmul_reduce_scatter, overlap_jit
from collective_matmul.mosaic_gpu.hopper_matmul.tiling import SHARED_MEMORY_BYTES
from collective_matmul.ops.matmul.fused import reduce_scatter
from collective_matmul.ops.matmul.fused.backend import Fused
from collective_matmul.ops.matmul.fused.reduce_scatter_config import (
    ReduceScatterProblem,
    ReductionKind,
)
from collective_matmul.ops.matmul.fused.reduce_scatter_search import (
    candidate_reduce_scatter_configs,
)
from tests.conftest import MeshFactory
from tests.hopper import assert_an_ordinary_kernel, needs_kernels
from tests.ops.matmul.requests import request_of
from tests.reference import AXIS


@dataclass(frozen=True)
class Call:
    """A call of a kernel; shapes are local.

    Attributes:
      mesh: sizes of its axes. The operands are replicated over all but one.
      leading: dimensions of x without the last.
      contracted: K of each term.
      dimension: the scattered dimension; None all-reduces.
    """

    mesh: tuple[tuple[str, int], ...] = ((AXIS, 4),)
    leading: tuple[int, ...] = (1024,)
    contracted: tuple[int, ...] = (512,)
    columns: int = 1024
    dimension: int | None = 0
    transpose_w: bool = False
    race_delays: bool = False
    dtype: str = "bfloat16"
    check_vma: bool = True

    def lowered(self, make_mesh: MeshFactory) -> tuple[str, Any]:
        """Returns the lowered program and the type of its result."""
        devices = dict(self.mesh)[AXIS]
        sizes = [k * devices for k in self.contracted]
        xs = [ShapeDtypeStruct((*self.leading, k), self.dtype) for k in sizes]
        shapes = [(k, self.columns)[:: -1 if self.transpose_w else 1] for k in sizes]
        ws = [ShapeDtypeStruct(shape, self.dtype) for shape in shapes]

        def call(xs: list[jax.Array], ws: list[jax.Array]) -> jax.Array:
            if self.dimension is None:
                return reduce_scatter.matmul_all_reduce(
                    xs[0], ws[0], AXIS, race_delays=self.race_delays
                )
            return reduce_scatter.matmul_reduce_scatter(
                xs,
                ws,
                AXIS,
                dimension=self.dimension,
                transpose_w=self.transpose_w,
                race_delays=self.race_delays,
            )

        sharded = jax.shard_map(
            call,
            mesh=make_mesh(dict(self.mesh)),
            in_specs=(
                P(*[None] * len(self.leading), AXIS),
                P(None, AXIS) if self.transpose_w else P(AXIS),
            ),
            out_specs=P() if self.dimension is None else P(*[None] * self.dimension, AXIS),
            check_vma=self.check_vma,
        )
        traced = jax.jit(sharded).trace(xs, ws)
        return traced.lower(lowering_platforms=("cuda",)).as_text(), traced.out_info


TWO_AXES = (("data", 2), (AXIS, 2))

CALLS = {
    "rows of one owner to a tile": Call(),
    "one row for each device": Call(leading=(4,), race_delays=True),
    "ragged rows, an inner axis": Call(
        TWO_AXES, (2, 6, 50), contracted=(96, 64), columns=320, dimension=1, transpose_w=True
    ),
    "an outer axis, untracked": Call(TWO_AXES[::-1], (256,), dtype="float16", check_vma=False),
    "eight devices": Call(((AXIS, 8),), (2048,), race_delays=True),
    "reduced, an odd number of swizzles": Call(
        ((AXIS, 2), ("data", 4)), (24,), contracted=(4096,), columns=1024, dimension=None
    ),
    "reduced in one shot": Call(leading=(3, 5), dimension=None, race_delays=True),
    "reduced in two steps": Call(TWO_AXES, (1001,), dimension=None, dtype="float16"),
    "reduced by eight, untracked": Call(((AXIS, 8),), (640,), dimension=None, check_vma=False),
}


@needs_kernels
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_lowers_to_one_launch(call: Call, make_mesh: MeshFactory, _for_hopper: None) -> None:
    text, result = call.lowered(make_mesh)
    leading = list(call.leading)
    assert result.shape == (*leading, call.columns)
    assert result.dtype == jnp.dtype(call.dtype)
    assert_an_ordinary_kernel(text)
    # Nothing but the kernel multiplies, sums or communicates. Indices of devices are added.
    others = "dot_general|reduce|reduce_scatter|all_reduce|collective_permute|all_gather"
    assert not re.findall(rf"stablehlo\.(?:{others})\b", text)
    assert not re.findall(r"stablehlo\.add\b.*f(?:16|32)>", text)


@pytest.mark.parametrize("kind", ["scatter", "two_shot", "one_shot"])
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 8, 24, 64, 72, 192, 1000, 2048])
def test_every_config_fits_and_covers_all_rows(
    kind: ReductionKind, devices: int, rows: int
) -> None:
    """All rows are owned, all blocks are resident, and shared memory is large enough.

    Blocks that wait for each other must all be resident. Clusters of two fit everywhere. Clusters
    of four do not where a part of the GPU has an odd number of pairs of multiprocessors.
    """
    configs = candidate_reduce_scatter_configs(
        ReduceScatterProblem(kind, devices, 2, rows, (512, 96), 4096)
    )
    assert len(set(configs)) == len(configs) > 0
    for config in configs:
        assert config.fits()
        assert config.problem.m >= rows and config.problem.m % 8 == 0
        assert config.problem.m - rows < (256 if rows > 64 else max(8, rows))
        assert config.grid_m * config.cluster_tile_m >= config.problem.all_rows
        assert config.tiling.cluster_dimension != "mn"
        assert config.tiling.shared_memory_bytes <= SHARED_MEMORY_BYTES


def test_owners_share_all_their_tiles_or_none() -> None:
    """If devices shared some of their tiles and not all, they could wait for each other."""
    problem = ReduceScatterProblem("scatter", 4, 1, 192, (512,), 4096)
    (config, *_) = (
        config for config in candidate_reduce_scatter_configs(problem) if config.problem == problem
    )
    assert not config.tiles_span_owners
    high = replace(config.tiling, tile_m=128, tile_n=128, wg_dimension="m")
    assert not replace(config, tiling=high).fits()


@needs_kernels
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"contracted": (50,)}, "wants every K, and N, to be a multiple of 32"),
        ({"columns": 100}, "every K, and N, to be a multiple of 32"),
        ({"dtype": "float32"}, "take bfloat16, or float16, for all"),
        ({"mesh": ((AXIS, 1),)}, "axis of size 1"),
        ({"leading": (0,)}, "without elements"),
    ],
)
@pytest.mark.parametrize("dimension", [0, None])
def test_refuses_what_it_cannot_do(
    changes: dict[str, Any],
    sentence: str,
    dimension: int | None,
    make_mesh: MeshFactory,
    _for_hopper: None,
) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(Call(dimension=dimension), **changes).lowered(make_mesh)


def test_refuses_other_devices(make_mesh: MeshFactory) -> None:
    with pytest.raises(ValueError, match="Hopper GPUs only"):
        Call().lowered(make_mesh)


@needs_kernels
@pytest.mark.parametrize("op", [matmul_reduce_scatter, matmul_all_reduce])
def test_ops_vmap_and_gradients(op: Any, make_mesh: MeshFactory, _for_hopper: None) -> None:
    """By name, the ops launch the kernel; a batch launches it again and again."""
    mesh = make_mesh({AXIS: 2})
    out_spec = P() if op is matmul_all_reduce else P(None, AXIS)

    def call(xs: jax.Array, w: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: op(x, w, AXIS, implementation="fused"))(xs)

    specs = (P(None, None, AXIS), P(AXIS))
    sharded = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out_spec)

    def loss(xs: jax.Array, w: jax.Array) -> jax.Array:
        return sharded(xs, w).astype(jnp.float32).sum()

    xs, w = (ShapeDtypeStruct(shape, "bfloat16") for shape in ((3, 64, 256), (256, 128)))
    traced = overlap_jit(jax.value_and_grad(loss, (0, 1)), peer_kernels=True).trace(xs, w)
    assert "@mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_kernels
def test_a_co_gathered_operand_is_gathered_before_the_launch(
    make_mesh: MeshFactory, _for_hopper: None
) -> None:
    """A collective that runs while a kernel occupies all multiprocessors could wait forever."""

    def call(x: jax.Array, w: jax.Array, co_gathered: jax.Array) -> Any:
        request = request_of("matmul_reduce_scatter", [x], [w])
        return Fused().execute(request, [x], [w], co_gathered)

    specs = (P(None, AXIS), P(AXIS), P(AXIS))
    mesh = make_mesh({AXIS: 2})
    sharded = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False)
    shapes = [ShapeDtypeStruct(shape, "bfloat16") for shape in ((64, 256), (256, 128), (64, 32))]
    text = jax.jit(sharded).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    gather, barrier, launch = map(
        text.index, ("stablehlo.all_gather", "stablehlo.optimization_barrier", "call @launch")
    )
    assert gather < barrier < launch
