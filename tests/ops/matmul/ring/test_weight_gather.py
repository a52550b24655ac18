"""When what travels beside products with sharded weights is in flight.

XLA for GPUs executes two permutes at one time. It makes others synchronous, and then no product
hides them. Legend: T devices on the axis of the ring, F on that of the weights.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec as P

from collective_matmul.operands.sharded import Sharded, WeightShards
from collective_matmul.ops.matmul.call import Call
from collective_matmul.ops.matmul.gradients import gather_matmul, matmul_scatter
from tests.conftest import MeshFactory
from tests.ops.matmul.ring.test_program_structure import ancestors, indices, local_jaxpr
from tests.reference import AXIS

FSDP = "fsdp"
_ROWS, _FEATURES, _HIDDEN = 4, 24, 48  # Of one device of T; of x; of a weight's other dimension.

#: A pass of an op, and whether it contracts the first dimension of the weights.
PASSES = {
    "gather": True,
    "gather backward": False,
    "scatter": True,
    "scatter backward": False,
}


def is_possible(name: str, sizes: tuple[int, int], count: int, dimension: int) -> bool:
    """Whether the op takes several weights, and two permutes at one time are enough.

    In a sum over more than two shards, all travel beside the first product. Without a ring, the
    gradients of several weights travel beside their shards.
    """
    gathers = name.startswith("gather")
    is_sum = (dimension == 0) == PASSES[name]
    several = count > 1 and sizes[0] == 1 and not PASSES[name]
    return (gathers or count == 1) and (sizes[1] == 2 or not (is_sum or several))


CASES = [
    case
    for case in itertools.product(PASSES, ((1, 2), (2, 2), (4, 2), (2, 3), (1, 3)), (1, 2), (0, 1))
    if is_possible(*case)
]


def pass_jaxpr(
    make_mesh: MeshFactory,
    name: str,
    sizes: tuple[int, int],
    count: int,
    dimension: Literal[0, 1],
) -> Jaxpr:
    """One pass of an op of the one-way ring: one flat list of equations."""
    mesh = make_mesh({FSDP: sizes[1], AXIS: sizes[0]})
    sharding = WeightShards(FSDP, sizes[1], dimension)
    gathers, forward = name.startswith("gather"), PASSES[name]

    call = Call(AXIS, 0, ("ring",))

    def fun(x: jax.Array, shards: tuple[jax.Array, ...], dys: tuple[jax.Array, ...]) -> Any:
        ws = tuple(Sharded(shard, sharding) for shard in shards)
        if gathers:
            op = lambda x, ws: gather_matmul(x, ws, call)[0]  # noqa: E731
        else:
            op = lambda x, ws: matmul_scatter((x,), ws, call)  # noqa: E731
        if forward:
            name = "all_gather_matmul" if gathers else "matmul_reduce_scatter"
            backend, request = call.choose(name, [x] * count, ws)
            return backend.execute(request, [x], ws)[0]
        _, pullback = jax.vjp(op, x, ws)
        return pullback(dys if gathers else dys[0])

    rows = {True: _ROWS, False: _ROWS * sizes[0]}
    shape = [_FEATURES, _HIDDEN]
    shape[dimension] //= sizes[1]
    arguments = (
        jnp.ones((rows[gathers], _FEATURES)),
        (jnp.ones(shape),) * count,
        (jnp.ones((rows[not gathers], _HIDDEN)),) * count,
    )
    sharded = jax.shard_map(fun, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return local_jaxpr(sharded, arguments)


@pytest.mark.parametrize(("name", "sizes", "count", "dimension"), CASES)
def test_two_permutes_at_most_beside_a_product(
    name: str,
    sizes: tuple[int, int],
    count: int,
    dimension: Literal[0, 1],
    make_mesh: MeshFactory,
) -> None:
    """Whatever order a compiler chooses: what does not wait for each other may run at one time.

    Products keep their order, or one that waits for a permute could take the place beside it.
    """
    jaxpr = pass_jaxpr(make_mesh, name, sizes, count, dimension)
    waits_for = ancestors(jaxpr)
    permutes, products = indices(jaxpr, "ppermute"), indices(jaxpr, "dot_general")

    def unordered(one: int, other: int) -> bool:
        return one not in waits_for[other] and other not in waits_for[one]

    assert permutes
    for permute in permutes:
        assert waits_for[permute].issuperset(i for i in products if i < permute)
        assert any(unordered(permute, product) for product in products)
        beside = [other for other in permutes if unordered(permute, other) and other != permute]
        assert not any(itertools.starmap(unordered, itertools.combinations(beside, 2)))
