"""``python -m benchmarks experts``: its programs agree, on meshes of one axis and of two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

from benchmarks.comparison.communication import AXIS
from benchmarks.layers import expert_programs, experts
from tests.conftest import MeshFactory

_LAYER = expert_programs.ExpertLayer("tiny", 8, *experts.MODELS["tiny"], jnp.float32)


@pytest.mark.parametrize("fsdp", [1, 2])
def test_candidates_compute_the_same(fsdp: int, make_mesh: MeshFactory) -> None:
    mesh = make_mesh({expert_programs.FSDP: fsdp, AXIS: 2} if fsdp > 1 else {AXIS: 2})
    *tokens, ws, dy = _LAYER.arguments(2 * fsdp).values()
    placed = NamedSharding(mesh, expert_programs.token_spec(mesh))
    *arguments, dy = jax.device_put([*tokens, dy], placed)
    ws = jax.device_put(ws, NamedSharding(mesh, expert_programs.weight_spec(mesh)))
    layers = [expert_programs.plain(lambda _: lax.ragged_dot, mesh)]
    layers += [expert_programs.ours(name, mesh) for name in ("ring_direct", "exchange")]
    results = [
        jax.jit(expert_programs.program(each, mesh, differentiated=True))(*arguments, ws, {}, dy)
        for each in layers
    ]
    expected, *others = (jax.tree.leaves(jax.block_until_ready(each)) for each in results)
    for other in others:
        for one, two in zip(expected, other, strict=True):
            # Float32 throughout; sums of 64 terms are in another order.
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)
