"""Calls of the ops: the projections of Llama 3, and awkward shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from models.config import LlamaConfig
from models.families.llama3 import llama3_8b, llama3_70b, llama3_405b
from tests.gpu.problems import Problem, Verdict, mesh_of, normal, or_xla, size
from tests.reference import AXIS, OPS, Case, Outcome

GATHER, SCATTER, ALL_REDUCE = OPS


@dataclass(frozen=True)
class OpProblem(Problem):
    """One op: (x, ws, dys) -> its results and both gradients."""

    name: str
    full_size: Case

    def __str__(self) -> str:
        return f"{self.name}-{self.full_size.op}-{self.devices}"

    @property
    def devices(self) -> int:
        return self.full_size.devices

    @property
    def mesh(self) -> Mesh:
        return mesh_of((AXIS,), (self.devices,))

    @property
    def case(self) -> Case:
        case = self.full_size
        return replace(
            case,
            leading=tuple(map(size, case.leading)),
            contracted=size(case.contracted),
            columns=tuple(tuple(map(size, columns)) for columns in case.columns),
        )

    @property
    def specs(self) -> tuple[Any, Any]:
        x, ws, ys = self.case.specs
        return (x, ws, ys), Outcome(ys, x, ws)

    def draw(self) -> Any:
        case = self.case
        shapes = (
            (*case.leading, case.contracted),
            tuple((case.contracted, *columns) for columns in case.columns),
            tuple((*case.leading, *columns) for columns in case.columns),
        )
        return normal(shapes, case.dtype)

    def sharded(self, implementation: str) -> Callable[..., Any]:
        """(x, ws) -> results."""
        return replace(self.case, implementation=or_xla(implementation)).sharded(self.mesh)

    def function(self, implementation: str) -> Callable[..., Outcome]:
        fun = self.sharded(implementation)

        def results_and_gradients(x, ws, dys):
            ys, transpose = jax.vjp(fun, x, ws)
            return Outcome(ys, *transpose(dys))

        return results_and_gradients

    def expected(self, *operands: Any) -> Outcome:
        x, ws, dys = jax.tree.map(lambda array: array.astype(jnp.float32), operands)
        contract = functools.partial(jnp.tensordot, precision=lax.Precision.HIGHEST)
        rows = tuple(range(x.ndim - 1))
        shares = [
            contract(dy, jnp.moveaxis(w, 0, -1), w.ndim - 1) for w, dy in zip(ws, dys, strict=True)
        ]
        return Outcome(
            ys=tuple(contract(x, w, 1) for w in ws),
            dx=functools.reduce(jnp.add, shares),
            dws=tuple(contract(x, dy, (rows, rows)) for dy in dys),
        )

    def judge(self, actual: jax.Array, expected: jax.Array) -> Verdict:
        """Each element is off by no more than its roundings.

        Each rounding to `dtype` is off by at most u = eps / 2 of the value rounded: of the matmul's
        result, of the sum at each of the D - 1 additions between devices, and of the sum of several
        weights' shares, D + 1 in all. The values rounded on the way are sums of some of the terms
        that the result is the sum of. The terms are independent, so that the largest of those
        values is not much more than the largest result; one more u is for that, and for the float32
        sums, which are off by far less. Of normally distributed results the largest is some 5
        standard deviations, so that for 4 devices and bfloat16 0.12 of a standard deviation is
        allowed, where a wrong term, chunk or shard makes a difference of about one.
        """
        unit_roundoff = float(jnp.finfo(self.case.dtype).eps) / 2
        allowed = (self.devices + 2) * unit_roundoff * jnp.max(jnp.abs(expected))
        error = jnp.abs(actual.astype(jnp.float32) - expected)
        return Verdict(~(error <= allowed).all(), jnp.max(error) / allowed)  # NaN is wrong too.


def problem(
    name: str,
    op: str,
    devices: int,
    leading: tuple[int, ...],
    contracted: int,
    *columns: tuple[int, ...],
    dimension: int = 0,
    dtype: str = "bfloat16",
) -> OpProblem:
    """All sizes are global, and multiples of 8."""
    return OpProblem(
        name, Case(op, None, devices, leading, contracted, columns, dimension, dtype=dtype)
    )


def llama(name: str, config: LlamaConfig, rows: tuple[int, ...], devices: int) -> list[OpProblem]:
    """The projections of a block, each with as many rows (tokens) as its turn in `rows`."""
    k, f, head = config.features, config.hidden_features, config.head_dim
    heads, shared = (config.num_heads, head), (config.num_key_value_heads, head)
    qkv, out, up, down, reduced = ((m,) for m in rows)
    return [
        problem(f"{name}_qkv", GATHER, devices, qkv, k, heads, shared, shared),
        problem(f"{name}_out", SCATTER, devices, out, config.num_heads * head, (k,)),
        problem(f"{name}_gate_up", GATHER, devices, up, k, (f,), (f,)),
        problem(f"{name}_down", SCATTER, devices, down, f, (k,)),
        problem(f"{name}_down", ALL_REDUCE, devices, reduced, f, (k,)),
    ]


def awkward(devices: int) -> list[OpProblem]:
    """Sizes that fill no tile, sizes that kernels cannot address, dimensions all around."""
    return [
        problem("k5120_m3072", GATHER, devices, (3072,), 5120, (13_824,)),
        problem("n5120_m3072", SCATTER, devices, (3072,), 13_824, (5120,)),
        # On each of 4 devices 832, 320 and 64 columns and 1000 rows: tiles are partly filled.
        problem("ragged", GATHER, devices, (4000,), 2112, (3328,), (8, 160), (256,)),
        problem("ragged", SCATTER, devices, (4000,), 4352, (2112,)),
        # On each of 4 devices 2750 columns, 2750 contracted, 750 contracted: no kernel can.
        problem("odd", GATHER, devices, (4096,), 4096, (11_000,)),
        problem("odd", SCATTER, devices, (4096,), 11_000, (4096,)),
        problem("odd", ALL_REDUCE, devices, (8, 1000), 3000, (1000,)),
        problem("batches", GATHER, devices, (2, 3072, 8), 1024, (2048,), dimension=1),
        problem("batches", SCATTER, devices, (8, 3072, 2), 2048, (8, 128), dimension=1),
        problem("float16", GATHER, devices, (2048,), 2048, (2048,), dtype="float16"),
        problem("float16", SCATTER, devices, (2048,), 2048, (2048,), dtype="float16"),
    ]


def all_problems(devices: int) -> list[OpProblem]:
    """Every shape; rows from 512 to 32,768, fewer where there is more to multiply."""
    return [
        *llama("8B", llama3_8b(), (32_768, 512, 16_384, 2048, 8192), devices),
        *llama("70B", llama3_70b(), (1024, 8192, 4096, 8192, 2048), devices),
        *llama("405B", llama3_405b(), (2048, 4096, 2048, 4096, 1024), devices),
        # Few rows, which one-shot collectives take.
        *llama("8B_few", llama3_8b(), (64, 512, 256, 128, 16), devices),
        *awkward(devices),
    ]


def large_problems(devices: int) -> list[OpProblem]:
    """One for each op."""
    return [
        problem("large", GATHER, devices, (8192,), 4096, (14_336,)),
        problem("large", SCATTER, devices, (8192,), 14_336, (4096,)),
        problem("large", ALL_REDUCE, devices, (8192,), 14_336, (4096,)),
    ]
