"""Random operands of the programs that are timed."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.comparison.operands import RandomArray, compile_maker
from tests.conftest import MeshFactory


def test_arrays_are_as_described_and_equal_leaves_are_one_array(make_mesh: MeshFactory) -> None:
    sharding = NamedSharding(make_mesh({"tensor": 4}), P("tensor"))
    dtype = np.dtype(jax.numpy.bfloat16)
    narrow, other = (RandomArray((64, 128), dtype, sharding, 0.25, seed) for seed in (3, 4))
    wide = RandomArray((64, 128), dtype, sharding, seed=3)
    arguments = {"narrow": narrow, "pair": (other, wide), "again": narrow}
    made = compile_maker([arguments])().fill(arguments)
    assert made["again"] is made["narrow"]
    for leaf, array in zip(jax.tree.leaves(arguments), jax.tree.leaves(made), strict=True):
        assert (array.shape, array.dtype, array.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)
        # Of 8192 numbers the standard deviation is known to one percent.
        assert np.std(np.asarray(array, np.float32)) == pytest.approx(leaf.scale, rel=0.05)
    assert np.any(np.asarray(made["narrow"]) != np.asarray(made["pair"][0]))
