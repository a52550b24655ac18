"""Sums that are scattered by copies between peers, beside XLA's reduce-scatter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from collective_matmul.operands.sharded import WeightShards
from collective_matmul.ops.matmul import call
from collective_matmul.ops.matmul.call import Call
from collective_matmul.schedule.direct_scatter import scattered_sum
from tests.conftest import MeshFactory

AXIS = "fsdp"


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize(
    ("term_dtype", "dtype"), [("bfloat16", "float32"), ("float32", "float32"), ("bfloat16",) * 2]
)
def test_each_device_gets_the_sum_of_its_shard(
    dimension: Any, devices: int, term_dtype: str, dtype: str, make_mesh: MeshFactory
) -> None:
    """All terms are multiples of a power of two, so that float32 adds them exactly in any order."""
    draw = np.random.default_rng(0).integers
    terms = jnp.asarray(draw(-128, 128, (devices, 8, 12)) / 64, term_dtype)

    def scatter(term: jax.Array) -> jax.Array:
        return scattered_sum(term[0], AXIS, dimension, dtype)

    spec = P(AXIS) if dimension == 0 else P(None, AXIS)
    mapped = jax.shard_map(
        scatter, mesh=make_mesh({AXIS: devices}), in_specs=P(AXIS), out_specs=spec
    )
    result = jax.jit(mapped)(terms)
    expected = jnp.sum(terms.astype(jnp.float32), 0).astype(dtype)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))


def test_terms_travel_in_the_narrower_dtype(make_mesh: MeshFactory) -> None:
    def sent(term_dtype: str, dtype: str) -> set[str]:
        mapped = jax.shard_map(
            lambda term: scattered_sum(term, AXIS, 0, dtype),
            mesh=make_mesh({AXIS: 2}),
            in_specs=P(),
            out_specs=P(AXIS),
            check_vma=False,
        )
        jaxpr: Any = jax.make_jaxpr(mapped)(jnp.ones((4, 4), term_dtype)).eqns[0].params["jaxpr"]
        return {str(e.invars[0].aval.dtype) for e in jaxpr.eqns if e.primitive.name == "ppermute"}

    assert sent("bfloat16", "float32") == {"bfloat16"}
    assert sent("float32", "bfloat16") == {"bfloat16"}
    assert sent("float32", "float32") == {"float32"}


@pytest.mark.parametrize(
    ("requested", "divergent_axes", "transport", "expected"),
    [
        (None, (), "peer_copies", True),
        (("xla", "ring_direct"), (), "peer_copies", True),
        (("xla",), (), "peer_copies", False),
        (None, (AXIS,), "peer_copies", False),
        (None, (), "nccl", False),
    ],
)
def test_terms_are_copied_where_a_ring_may_be(
    monkeypatch: pytest.MonkeyPatch,
    requested: Any,
    divergent_axes: Any,
    transport: str,
    expected: bool,
) -> None:
    monkeypatch.setattr(call, "transport_over", lambda axis_name: transport)
    made = Call("tensor", 0, requested, divergent_axes=divergent_axes)
    assert made.copies_between_peers(WeightShards(AXIS, 2, 0)) == expected
