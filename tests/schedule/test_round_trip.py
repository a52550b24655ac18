"""Round trips: who works on which shard, what comes home, and how many bytes travel."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul._compat import axis_index
from collective_matmul.schedule.round_trip import (
    bytes_returned,
    owner_of,
    visits_of,
    walk_round_trip,
)
from collective_matmul.schedule.schedules import Pattern, make_schedule
from collective_matmul.schedule.walk import Gather
from tests.conftest import MeshFactory

AXIS = "expert"
every_pattern = pytest.mark.parametrize("pattern", get_args(Pattern))


@every_pattern
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_every_device_visits_each_row_once(pattern: Pattern, devices: int, rows: int) -> None:
    # One row has no halves.
    schedule = make_schedule("gather", pattern if rows > 1 else "one_way", devices)
    visits = visits_of(schedule, rows, last_pieces=2)
    seen = Counter((v.chunk.offset, v.start + i) for v in visits for i in range(v.size))
    assert seen == {(offset, row): 1 for offset in range(devices) for row in range(rows)}
    # Own rows are first. Only the last result, which has nothing to travel under, is in pieces.
    assert visits[0].chunk.offset == 0
    assert [v.pieces for v in visits[:-1]] == [1] * (len(visits) - 1)
    assert visits[-1].pieces == (2 if devices > 1 else 1)


@every_pattern
@pytest.mark.parametrize("devices", [2, 3, 5])
def test_each_result_comes_home_once(
    pattern: Pattern, devices: int, make_mesh: MeshFactory
) -> None:
    """A result is one bit for the device that made it: each owner's sum has all bits once."""
    rows, order = 3, []

    def local(x: jax.Array) -> Any:
        gather = Gather(x, pattern, AXIS, 0)
        visits = visits_of(gather.schedule, rows, last_pieces=2)
        bit = lax.shift_left(jnp.int32(1), axis_index(AXIS)).astype(jnp.float32)

        def work(number: int, shard: jax.Array, operands: Any) -> Any:
            """The owner's own numbers, checked against what the schedule says of the owner."""
            visit = visits[number]
            order.append(number)
            owner = owner_of(gather, visit).astype(jnp.float32)
            expected = owner * rows + visit.start + jnp.arange(visit.size, dtype=jnp.float32)
            is_right = (shard[:, :1] == expected[:, None]).astype(jnp.float32)
            result = jnp.tile(bit * is_right, (1, 4))
            width = 4 // visit.pieces
            pieces = [
                lambda *_, i=i: result[:, i * width : (i + 1) * width] for i in range(visit.pieces)
            ]
            return pieces, shard

        def finish(number: int, state: jax.Array, operands: Any, carry: Any) -> Any:
            return carry + state.sum(0, keepdims=True)

        start = 0 * x[:1]
        return walk_round_trip(gather, visits, work, finish, (), start)

    mapped = jax.shard_map(
        local, mesh=make_mesh({AXIS: devices}), in_specs=P(AXIS), out_specs=(P(AXIS), P(AXIS))
    )
    x = np.arange(devices * rows, dtype=np.float32)[:, None]
    home, carries = jax.jit(mapped)(x)
    np.testing.assert_array_equal(home, np.full((devices * rows, 4), 2**devices - 1))
    # Every device finished all shards, each once.
    np.testing.assert_array_equal(carries, np.full((devices, 1), x.sum()))
    assert order == sorted(order)


@every_pattern
def test_bytes_that_return(pattern: Pattern) -> None:
    """All results but those of a device's own rows go to another device."""
    for devices in (1, 2, 5):
        schedule = make_schedule("gather", pattern, devices)
        rows_sent = sum(v.size for v in visits_of(schedule, 6) if v.chunk.offset)
        assert bytes_returned(schedule, 6 * 10) == rows_sent * 10 == (devices - 1) * 60
