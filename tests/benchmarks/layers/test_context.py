"""``python -m benchmarks context``: its programs agree, and the bound moves nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.comparison.communication import AXIS
from benchmarks.layers import context
from tests.conftest import MeshFactory


@pytest.mark.parametrize(
    "differentiated", [False, pytest.param(True, marks=pytest.mark.exhaustive)]
)
def test_candidates_compute_the_same(differentiated: bool, make_mesh: MeshFactory) -> None:
    mesh = make_mesh({AXIS: 2})
    case = context.ContextCase("tiny", 32, 1, jnp.float32, differentiated)
    arguments = case.arguments(mesh)
    results: dict[str, Any] = {}
    for name in ("gather", "ring", "plain JAX"):
        attend, _ = context.attention_of(name)
        results[name] = jax.jit(context.program(case, attend, mesh))(*arguments)
    first, *others = (jax.block_until_ready(each) for each in results.values())
    for other in others:
        for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
            # Float32 throughout; sums of 64 terms are in another order.
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


def test_the_bound_communicates_nothing(make_mesh: MeshFactory) -> None:
    mesh = make_mesh({AXIS: 2})
    case = context.ContextCase("tiny", 32, 1, jnp.float32, True)
    arguments = case.arguments(mesh)
    counts = {}
    for name in ("gather", "compute"):
        made = context.program(case, context.ours("gather"), mesh)
        made = made if name == "gather" else context.without_communication(made)
        counts[name] = str(jax.make_jaxpr(made)(*arguments)).count("ppermute")
    assert counts["gather"] == 3
    assert counts["compute"] == 0
