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


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    "differentiated", [False, pytest.param(True, marks=pytest.mark.exhaustive)]
)
def test_candidates_compute_the_same(
    heads: int, differentiated: bool, make_mesh: MeshFactory
) -> None:
    mesh = make_mesh({"heads": heads, AXIS: 2} if heads > 1 else {AXIS: 2})
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


def test_heads_on_several_devices_change_nothing(make_mesh: MeshFactory) -> None:
    results = []
    for sizes in ({AXIS: 2}, {"heads": 2, AXIS: 2}):
        mesh = make_mesh(sizes)
        case = context.ContextCase("tiny", 32, 2, jnp.float32, True)
        made = context.program(case, context.ours("gather"), mesh)
        y, dx, gradients = jax.jit(made)(*case.arguments(mesh))
        # Gradients are those of each device's part of the sequence.
        results.append((y, dx, jax.tree.map(lambda g: g.sum(0), gradients)))
    for one, two in zip(*map(jax.tree.leaves, results), strict=True):
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
