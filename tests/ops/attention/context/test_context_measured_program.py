"""`tune` can measure `context_attention`: programs of both passes run, and tables name requests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.dispatch.registry import OPS
from collective_matmul.dispatch.repetitions import AXIS
from collective_matmul.ops.attention.context.measured_program import ContextRepetitions
from collective_matmul.ops.attention.context.request import OP, ContextRequest


def request_of(direction: Any, **attributes: Any) -> ContextRequest:
    sizes: dict[str, Any] = {"batch": 1, "tokens": 4, "heads": 2, "key_value_heads": 2}
    sizes |= {"head_size": 8, "dtype": np.dtype("float32"), "axis_size": 2} | attributes
    return ContextRequest(axis_name=(), scale=8**-0.5, direction=direction, **sizes)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "implementation",
    [
        "gather",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("xla", "ring", "ulysses")),
    ],
)
def test_repetitions_run(implementation: str, direction: Any) -> None:
    made = ContextRepetitions(request_of(direction, segments=2), jax.devices())
    made.repetitions = 1
    plain = made.plain_operands(implementation)
    arrays = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), plain)
    operands = jax.jit(made.prepare)(arrays)
    described = made.operands(implementation)
    assert jax.tree.map(jnp.shape, operands) == jax.tree.map(lambda x: x.shape, described)
    # Two segments of four tokens: the first and the last chunk are of one device.
    assert np.asarray(operands.local.ids).tolist() == [[0, 0, 1, 1]] * 2
    results = jax.block_until_ready(jax.jit(made.program(implementation))(operands))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results))
    assert made.mesh.shape == {AXIS: 2}


@pytest.mark.parametrize(
    "attributes",
    [{}, {"window": 5, "layout": "contiguous"}, {"segments": 3, "kernels": ("flash3", "xla")}],
    ids=str,
)
def test_tables_read_what_they_write(attributes: dict[str, Any]) -> None:
    request = request_of("backward", **attributes)
    found: Any = OPS[OP].request_of(request.fields())
    assert found == request.flat
    assert found.doublings(request) == 0
    assert found.kind == request.kind and found.layer == request.layer


@pytest.mark.parametrize(
    ("name", "value"), [("layout", "striped"), ("tokens", 0), ("direction", "both")]
)
def test_tables_refuse_other_values(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=str(value)):
        ContextRequest.from_fields({**request_of("forward").fields(), name: value})
