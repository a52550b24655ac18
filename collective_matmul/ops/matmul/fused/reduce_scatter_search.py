"""Candidate configurations of the reduce-scatter matmul kernel, and the best of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from collective_matmul.mosaic_gpu.hopper_matmul.tiling import ROW_MULTIPLE, Tiling
from collective_matmul.ops.matmul.fused.config_search import (
    KernelCall,
    feasible_tilings,
    other_tile_orders,
    ranked,
)
from collective_matmul.ops.matmul.fused.reduce_scatter_config import (
    ReduceScatterConfig,
    ReduceScatterProblem,
)


def choose_reduce_scatter_config(
    problem: ReduceScatterProblem, multiprocessors: int = 132
) -> ReduceScatterConfig | None:
    """The configuration measured or predicted to be fastest; None if the kernel cannot do it.

    Args:
      problem: the shapes, with any number of rows; the rows of the configuration's problem are
        padded. An all-reduce has the kind "one_shot", and the configuration may have another kind.
      multiprocessors: number of multiprocessors of each GPU.
    """
    if problem.kind == "one_shot":
        configs = candidate_all_reduce_configs(problem, multiprocessors)
    else:
        configs = candidate_reduce_scatter_configs(problem, multiprocessors)
    return _call(problem, multiprocessors).choose(configs)


@functools.cache
def candidate_all_reduce_configs(
    problem: ReduceScatterProblem, multiprocessors: int = 132
) -> tuple[ReduceScatterConfig, ...]:
    """All configurations for a "one_shot" problem, of either kind, the likeliest first."""
    two_shot = replace(problem, kind="two_shot", m=math.ceil(problem.m / problem.devices))
    return _ranked([*_configs(problem), *_configs(two_shot)], _call(problem, multiprocessors))


@functools.cache
def candidate_reduce_scatter_configs(
    problem: ReduceScatterProblem, multiprocessors: int = 132
) -> tuple[ReduceScatterConfig, ...]:
    """All configurations of the problem's kind that the kernel can run, the likeliest first."""
    return _ranked(_configs(problem), _call(problem, multiprocessors))


def _call(problem: ReduceScatterProblem, multiprocessors: int) -> KernelCall:
    op = "matmul_all_reduce" if problem.kind == "one_shot" else "matmul_reduce_scatter"
    return KernelCall(op, problem, multiprocessors)


def _ranked(
    configs: Iterable[ReduceScatterConfig], call: KernelCall
) -> tuple[ReduceScatterConfig, ...]:
    return ranked(configs, call.predicted_microseconds, _sizes, _other_orders)


def _configs(problem: ReduceScatterProblem) -> list[ReduceScatterConfig]:
    if problem.kind == "one_shot":
        heights = [-(-problem.m // ROW_MULTIPLE) * ROW_MULTIPLE]
    else:
        heights = padded_rows(problem.m)
    return [
        ReduceScatterConfig(padded, tiling)
        for padded in (replace(problem, m=rows) for rows in heights)
        for tiling in feasible_tilings(
            functools.partial(_fits, padded), padded.scales, all_epilogue_tiles=True
        )
    ]


def padded_rows(rows: int) -> list[int]:
    """The numbers of rows that a device's rows may be padded to, so that tiles fit the owners.

    The fewest fit if one tile has the rows of all owners.
    """
    fewest = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    if rows <= 64:
        return sorted({fewest, max(ROW_MULTIPLE, 1 << (rows - 1).bit_length())})
    return sorted({fewest, *(-(-rows // height) * height for height in (64, 128, 256))})


def _fits(problem: ReduceScatterProblem, tiling: Tiling) -> bool:
    return ReduceScatterConfig(problem, tiling).fits()


def _sizes(config: ReduceScatterConfig) -> tuple[Any, ...]:
    return config.problem, config.tiling.tile_m, config.tiling.tile_n


def _other_orders(config: ReduceScatterConfig) -> list[ReduceScatterConfig]:
    # Local and remote tiles are visited apart from each other.
    most = max(config.local_grid_m, config.grid_m - config.local_grid_m)
    orders = other_tile_orders(config.tiling, most, config.grid_n)
    return [replace(config, tiling=tiling) for tiling in orders]
