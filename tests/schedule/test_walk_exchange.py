"""The exchange of blocks, beside XLA's all-to-all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul.schedule.walk import walk_exchange
from tests.conftest import MeshFactory


@pytest.mark.parametrize("axes", [{"a": 1}, {"a": 2}, {"a": 5}, {"a": 2, "b": 3}], ids=str)
def test_every_block_arrives_and_returns(axes: dict[str, int], make_mesh: MeshFactory) -> None:
    names, devices = tuple(axes), int(np.prod(list(axes.values())))

    def both(x: jax.Array) -> tuple[jax.Array, ...]:
        """Blocks [D, rows, columns] by the number of their destination."""
        device = lax.axis_index(names)
        wanted = lax.all_to_all(x, names, split_axis=0, concat_axis=0)
        places = (device + jnp.arange(devices)) % devices
        blocks = [{"block": block, "sum": block.sum()} for block in x[places]]
        arrived = walk_exchange(blocks, names)
        origins = (device - jnp.arange(devices)) % devices
        returned = walk_exchange([arrived[-i % devices] for i in range(devices)], names)
        sent = [returned[-i % devices]["block"] for i in range(devices)]
        return (
            wanted[origins],
            jnp.stack([block["block"] for block in arrived]),
            jnp.stack([block["sum"] for block in arrived]),
            x[places],
            jnp.stack(sent),
        )

    mapped = jax.shard_map(both, mesh=make_mesh(axes), in_specs=P(names), out_specs=P(names))
    x = jnp.arange(devices * devices * 6, dtype=jnp.float32).reshape(devices * devices, 2, 3)
    wanted, arrived, sums, sent, returned = jax.jit(mapped)(x)
    np.testing.assert_array_equal(arrived, wanted)
    np.testing.assert_array_equal(sums, wanted.sum((1, 2)))
    np.testing.assert_array_equal(returned, sent)


def test_each_device_sends_a_block_to_each_other(make_mesh: MeshFactory) -> None:
    mapped = jax.shard_map(
        lambda x: jnp.stack(walk_exchange(list(x), "a")),
        mesh=make_mesh({"a": 4}),
        in_specs=P("a"),
        out_specs=P("a"),
    )
    jaxpr: Any = jax.make_jaxpr(mapped)(jnp.ones((16, 8))).eqns[0].params["jaxpr"]
    permutes = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "ppermute"]
    assert [eqn.invars[0].aval.shape for eqn in permutes] == [(8,)] * 3
    hops = [{(t - s) % 4 for s, t in eqn.params["perm"]} for eqn in permutes]
    assert hops == [{1}, {2}, {3}]
