"""Programs for the tests of `explain`, and the lines of their tables."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, explain, matmul_reduce_scatter
from tests.reference import AXIS

#: No line of a table is as long.
WIDE = 1000


def arguments(rows: int = 8, features: int = 4, hidden: int = 12, dtype: Any = np.float32):
    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    return shape(rows, features), [(shape(features, hidden), shape(hidden, features))] * 2


def flat_arguments(*sizes, **keywords):
    x, [(up, down), _] = arguments(*sizes, **keywords)
    return x, up, down


def lines_of(fun, *args, **options) -> list[list[str]]:
    """The cells of every line of the table, without its head and its totals."""
    _, *lines = explain(fun, **options)(*args).table(WIDE).splitlines()
    return [re.split(r"  +", line) for line in lines if re.match(r"\d+×", line)]


def blocks(x, weights, implementation=None):
    for up, down in weights:
        hidden = all_gather_matmul(x, up, AXIS, implementation=implementation)
        x = matmul_reduce_scatter(hidden, down, AXIS, implementation=implementation)
    return x


def on(mesh, **keywords):
    fun = functools.partial(blocks, **keywords)
    specs = (P(AXIS), [(P(None, AXIS), P(AXIS))] * 2)
    return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P(AXIS))


def gram(y):
    """Products of all rows. One axis cannot shard both dimensions, so XLA gathers some array."""
    return y @ y.T


def plain_block(x, up, down):
    """Its gather and its scatter have matmuls; its psum has none."""
    hidden = lax.all_gather(x, AXIS, tiled=True) @ up
    y = lax.psum_scatter(hidden @ down, AXIS, tiled=True)
    return y, lax.psum(y.sum(), AXIS)


def plain(mesh):
    in_specs, out_specs = (P(AXIS), P(None, AXIS), P(AXIS)), (P(AXIS), P())
    return jax.shard_map(plain_block, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
