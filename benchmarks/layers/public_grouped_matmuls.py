"""Tokamax's grouped matmuls, for each product the fastest of its kernels on this machine.

Tokamax is not a dependency: `pip install tokamax`. It cannot be installed beside the version of
typeguard that the command line needs; start the benchmark from Python where it is installed::

    python -c "from benchmarks.layers import experts; experts.run(experts.Experts())"
"""

# Where it is not installed, nothing of this module runs.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.layers.expert_programs import ExpertLayer, GroupedMatmul

#: Rows, columns and contracted size of a block, warps and stages.
_TRITON = ((128, 128, 32, 4, 4), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (128, 128, 64, 4, 4))
#: Rows and contracted size of a block, stages, width of the grid's tiles, persistent, minor M.
_MOSAIC = (
    (128, 128, 4, 8, True, True),
    (128, 128, 4, 4, True, False),
    (128, 128, 4, 8, False, False),
    (128, 256, 2, 4, True, True),
    (64, 128, 4, 8, True, True),
)
_CALLS = 5


class Chosen(NamedTuple):
    """The kernels of a layer.

    Attributes:
      products: the differentiable grouped matmul by "up" and "down".
      teraflops: what was chosen for each product, and its rate.
    """

    products: Callable[[str], GroupedMatmul]
    teraflops: dict[str, str]


@functools.cache
def fastest(layer: ExpertLayer, devices: int) -> Chosen:
    """The fastest kernel of each product of a layer, measured on the first device.

    Raises:
      ImportError: if tokamax is not installed.
    """
    from tokamax._src.ops.ragged_dot import base

    forward, transposed, over_rows = (
        base.DEFAULT_RAGGED_DOT_DIM_NUMS,
        base.TRANS_RHS_RAGGED_DOT_DIM_NUMS,
        base.RAGGED_CONTRACTING_DOT_DIM_NUMS,
    )
    h, f, groups = layer.width, layer.hidden, layer.experts // devices
    rows = devices * layer.tokens * layer.choices
    sizes = jnp.full((groups,), rows // devices // groups, jnp.int32)
    flops = 2 * rows // devices * h * f
    found: dict[str, str] = {}

    def array(*shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(len(shape)), shape, layer.dtype)

    def best(name: str, left: tuple, right: tuple, dimensions: Any) -> Callable:
        seconds = {}
        for kernel, op in _kernels().items():
            run = _compiled(op, array(*left), array(*right), sizes, dimensions)
            if run is not None:
                seconds[kernel] = _seconds(run)
        kernel = min(seconds, key=seconds.__getitem__)
        found[name] = f"{kernel} {flops / seconds[kernel] / 1e12:.0f}"
        op = _kernels()[kernel]
        return lambda a, b, sizes: op(
            a, b, group_sizes=sizes, ragged_dot_dimension_numbers=dimensions
        )

    def product(name: str, k: int, n: int) -> GroupedMatmul:
        return _differentiable(
            best(name, (rows, k), (groups, k, n), forward),
            best(f"{name} dx", (rows, n), (groups, k, n), transposed),
            best(f"{name} dw", (rows, k), (rows, n), over_rows),
        )

    products = {"up": product("up", h, f), "down": product("down", f, h)}
    return Chosen(products.__getitem__, found)


def _kernels() -> dict[str, Any]:
    from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu as mosaic
    from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu_common as common
    from tokamax._src.ops.ragged_dot import pallas_triton as triton

    def of_mosaic(m: int, k: int, stages: int, width: int, persistent: bool, minor_m: bool) -> Any:
        minor = common.MatmulDimension.M if minor_m else common.MatmulDimension.N
        settings = {
            "block_m": m,
            "block_n": 64,
            "block_k": k,
            "num_stages": stages,
            "split_k": 1,
            "grid_block_n": width,
            "warp_specialized": False,
            "persistent": persistent,
            "async_store": False,
            "grid_minor_dim": minor,
            "grid_tile_width": width,
        }
        known = common.Config.__dataclass_fields__
        config = common.Config(**{name: settings[name] for name in settings if name in known})
        return mosaic.PallasMosaicGpuRaggedDot(config=config)

    def of_triton(m: int, n: int, k: int, warps: int, stages: int) -> Any:
        config = triton.Config(block_m=m, block_n=n, block_k=k, num_warps=warps, num_stages=stages)
        return triton.PallasTritonRaggedDot(config=config)

    kernels = {
        "triton": triton.PallasTritonRaggedDot(),
        "mosaic": mosaic.PallasMosaicGpuRaggedDot(),
    }
    for blocks in _TRITON:
        kernels["triton " + "x".join(map(str, blocks))] = of_triton(*blocks)
    for blocks in _MOSAIC:
        kernels["mosaic " + "x".join(map(str, map(int, blocks)))] = of_mosaic(*blocks)
    return kernels


def _compiled(op: Any, left: Any, right: Any, sizes: Any, dimensions: Any) -> Callable | None:
    """A call of a kernel; None if it does not take the shapes."""
    fun = jax.jit(lambda a, b: op(a, b, group_sizes=sizes, ragged_dot_dimension_numbers=dimensions))
    try:
        jax.block_until_ready(fun(left, right))
    except Exception:  # Whatever a kernel says that does not fit.
        return None
    return lambda: fun(left, right)


def _seconds(run: Callable) -> float:
    samples = []
    for _ in range(3):
        started = time.perf_counter()
        results = [run() for _ in range(_CALLS)]
        jax.block_until_ready(results)
        samples.append((time.perf_counter() - started) / _CALLS)
    return statistics.median(samples)


def _differentiable(forward: Callable, of_x: Callable, of_w: Callable) -> GroupedMatmul:
    product = jax.custom_vjp(forward)
    product.defvjp(
        lambda x, w, sizes: (forward(x, w, sizes), (x, w, sizes)),
        lambda kept, dy: (
            of_x(dy, kept[1], kept[2]),
            of_w(kept[0], dy, kept[2]),
            np.zeros(kept[2].shape, jax.dtypes.float0),
        ),
    )
    return product
