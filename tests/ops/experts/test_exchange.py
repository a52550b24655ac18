"""The exchange of tokens: where they travel, and both branches beside a dense loop in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from collective_matmul.dispatch.selection import choose
from collective_matmul.ops.experts.api import expert_mlp
from collective_matmul.ops.experts.backends import BACKENDS
from collective_matmul.ops.experts.exchange import ExchangeExperts
from collective_matmul.ops.experts.request import ExpertRequest
from collective_matmul.ops.experts.slots import assign_slots
from tests.conftest import MeshFactory
from tests.dispatch.sites import H200, tracing_for

WIDTH, HIDDEN, LOCAL_EXPERTS = 4, 6, 2
Arrays = tuple[np.ndarray, ...]
OUTCOME = ("y", "dx", "dweights", "dw_gate", "dw_up", "dw_down")


def request_of(devices: int, tokens: int, choices: int, **attributes: Any) -> ExpertRequest:
    return ExpertRequest(
        **{
            "tokens": tokens,
            "width": WIDTH,
            "hidden": HIDDEN,
            "experts": LOCAL_EXPERTS * devices,
            "choices": choices,
            "dtype": np.dtype("float32"),
            "axis_name": ("expert",),
            "axis_size": devices,
            "expert_devices": devices,
        }
        | attributes
    )


def routers(devices: int, tokens: int, choices: int) -> dict[str, np.ndarray]:
    """Ids [D T, k] of routers, by name."""
    generator, experts = np.random.default_rng(1), LOCAL_EXPERTS * devices
    shape = (devices * tokens, choices)
    t, j = np.indices(shape)
    balanced = (t + j) % devices * LOCAL_EXPERTS + (t // devices + j // devices) % LOCAL_EXPERTS
    one_device = balanced.copy()
    one_device[:tokens] = experts - 1
    one_device[tokens:, :] = -1
    return {
        "balanced": balanced,
        "all to one": np.full(shape, experts - 1),
        "one device's to one": one_device,
        # These repeat, and some are of no expert.
        "random": generator.integers(-1, experts + 1, shape),
        "none": np.full(shape, experts),
    }


def overflows(ids: np.ndarray, devices: int, capacity: int) -> bool:
    """Whether any device has more tokens for another one than a block has slots."""
    owners = ids.reshape(devices, -1, ids.shape[1]) // LOCAL_EXPERTS
    return any(
        np.any(owners[source] == target, axis=1).sum() > capacity
        for source in range(devices)
        for target in range(devices)
        if source != target
    )


def draw(rows: int, choices: int, experts: int) -> Arrays:
    generator = np.random.default_rng(0)
    shapes = [(rows, WIDTH), (rows, choices), *[(experts, WIDTH, HIDDEN)] * 2]
    shapes += [(experts, HIDDEN, WIDTH), (rows, WIDTH)]
    return tuple(generator.standard_normal(shape).astype(np.float32) for shape in shapes)


def with_gradients(fun: Callable) -> Callable:
    def both(ids: Any, *arrays: Any) -> tuple:
        *operands, dy = arrays
        y, transpose = jax.vjp(lambda *operands: fun(ids, *operands), *operands)
        return y, *transpose(dy)

    return both


def dense(ids: Any, x: Any, weights: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
    """Every expert for every token."""
    hidden = jax.nn.silu(jnp.einsum("th,ehf->etf", x, w_gate)) * jnp.einsum("th,ehf->etf", x, w_up)
    chosen = ids[:, :, None] == jnp.arange(w_gate.shape[0])[None, None]
    factors = jnp.sum(jnp.where(chosen, weights[:, :, None], 0), axis=1)
    return jnp.einsum("etf,efh,te->th", hidden, w_down, factors)


dense_with_gradients = jax.jit(with_gradients(dense))


def assert_close(actual: tuple, ids: np.ndarray, arrays: Arrays) -> None:
    with jax.enable_x64(True):
        expected = dense_with_gradients(ids, *(a.astype(np.float64) for a in arrays))
    for name, value, wanted in zip(OUTCOME, actual, expected, strict=True):
        # Sums of a few hundred terms in float32, each rounded by 6e-8 of the largest partial sum.
        bound = 3e-5 * max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(value, wanted, rtol=0, atol=bound, err_msg=name)


def program(
    mesh: jax.sharding.Mesh,
    experts: str | tuple[str, ...] = "expert",
    implementation: str = "exchange",
    **options: Any,
) -> Callable:
    hidden = "hidden" if "hidden" in mesh.axis_names else None
    tokens = P(mesh.axis_names)
    mapped = jax.shard_map(
        lambda ids, x, weights, gate, up, down: expert_mlp(
            x,
            ids,
            weights,
            gate,
            up,
            down,
            experts,
            hidden_axis_name=hidden,
            implementation=implementation,
            grouped_implementation="xla",
            **options,
        ),
        mesh=mesh,
        in_specs=(*[tokens] * 3, *[P(experts, None, hidden)] * 2, P(experts, hidden)),
        out_specs=tokens,
    )
    return with_gradients(mapped)


#: Devices, tokens of each, and k. With 2 devices and k = 8, a block has room for all tokens.
SIZES = [(1, 3, 3), (2, 8, 1), (2, 3, 8), (3, 9, 2), (5, 10, 1), (8, 8, 4)]


@pytest.mark.parametrize(("devices", "tokens", "choices"), SIZES)
def test_values_and_gradients(
    devices: int, tokens: int, choices: int, make_mesh: MeshFactory
) -> None:
    fun = jax.jit(program(make_mesh({"expert": devices})))
    arrays = draw(devices * tokens, choices, LOCAL_EXPERTS * devices)
    capacity = ExchangeExperts().capacity(request_of(devices, tokens, choices))
    branches = set()
    for ids in routers(devices, tokens, choices).values():
        assert_close(fun(ids.astype(np.int32), *arrays), ids, arrays)
        branches.add(overflows(ids, devices, capacity))
    assert branches == ({False} if capacity == tokens or devices == 1 else {False, True})


def test_further_axes_take_one_branch(make_mesh: MeshFactory) -> None:
    """Half of the program's devices overflow, and the permutes of both halves meet.

    Hidden features are divided too, and the products are computed again.
    """
    mesh = make_mesh({"data": 2, "expert": 2, "hidden": 2})
    tokens, choices, experts = 4, 1, 2 * LOCAL_EXPERTS
    fun = jax.jit(program(mesh, recompute_hidden=True))
    arrays = draw(8 * tokens, choices, experts)
    balanced = np.arange(8 * tokens)[:, None] % experts
    skewed = np.where(np.arange(8 * tokens)[:, None] < 4 * tokens, balanced, 0)
    request = request_of(4, tokens, choices, experts=experts, expert_devices=2)
    assert ExchangeExperts().capacity(request) < tokens
    for ids in (balanced, skewed):
        assert_close(fun(ids.astype(np.int32), *arrays), ids, arrays)


@pytest.mark.parametrize("implementation", ["exchange", "ring_direct"])
def test_experts_are_numbered_in_the_order_of_the_argument(
    implementation: str, make_mesh: MeshFactory
) -> None:
    """Permutes count devices in the order of the mesh, which is another one."""
    mesh = make_mesh({"hidden": 2, "inner": 2, "outer": 2})
    tokens, choices, experts = 4, 1, 4 * LOCAL_EXPERTS
    fun = jax.jit(program(mesh, ("outer", "inner"), implementation))
    arrays = draw(8 * tokens, choices, experts)
    balanced = np.arange(8 * tokens)[:, None] % experts
    for ids in (balanced, np.full_like(balanced, 5)):
        assert_close(fun(ids.astype(np.int32), *arrays), ids, arrays)


def test_results_do_not_depend_on_tokens_of_other_devices(make_mesh: MeshFactory) -> None:
    """Nor on the branch: where the last device's tokens overflow, the first one's sums stay."""
    devices, tokens, choices = 3, 9, 2
    fun = jax.jit(program(make_mesh({"expert": devices})))
    arrays = draw(devices * tokens, choices, LOCAL_EXPERTS * devices)
    found = routers(devices, tokens, choices)
    ids = found["balanced"].astype(np.int32)
    mixed = ids.copy()
    mixed[-tokens:] = 0
    results = [[np.asarray(a[:tokens]) for a in fun(each, *arrays)[:3]] for each in (ids, mixed)]
    for name, one, other, again in zip(OUTCOME, *results, fun(ids, *arrays), strict=False):
        np.testing.assert_array_equal(one, other, err_msg=name)
        np.testing.assert_array_equal(one, again[:tokens], err_msg=name)


@pytest.mark.parametrize("seed", range(6))
def test_slots(seed: int) -> None:
    """Each token has one slot in each block that it belongs to, and its places name these."""
    generator = np.random.default_rng(seed)
    devices, tokens, choices = (int(generator.integers(low, 7)) for low in (2, 1, 1))
    capacity, owners = int(generator.integers(1, tokens + 1)), devices
    of_owner = 2 if devices % 2 == 0 and seed % 2 else 1
    owners = generator.integers(-1, devices // of_owner, (tokens, choices)).astype(np.int32)
    targets = (1 + np.arange(devices)) % devices // of_owner
    copies = min(devices, choices * of_owner)
    slots = jax.jit(assign_slots, static_argnums=(2, 3))(
        owners, targets.astype(np.int32), capacity, copies
    )
    wanted = [[t for t in range(tokens) if target in owners[t]] for target in targets]
    assert bool(slots.overflow) == any(len(block) > capacity for block in wanted[1:])
    places: list[list[int]] = [[t] if t in wanted[0] else [] for t in range(tokens)]
    for i, block in enumerate(wanted[1:]):
        sent = block[:capacity]
        assert slots.tokens[i].tolist() == sent + [tokens] * (capacity - len(sent))
        for slot, t in enumerate(sent):
            places[t].append(tokens + i * capacity + slot)
    none = tokens + (devices - 1) * capacity
    padded = [found + [none] * (copies - len(found)) for found in places]
    assert slots.places.tolist() == padded


def permutes(jaxpr: Any) -> list[tuple[int, ...]]:
    """Shapes that permutes send, also those of inner programs but of branches."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute":
            found.append(eqn.invars[0].aval.shape)
        elif eqn.primitive.name != "cond":
            for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
                if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                    found += permutes(inner)
    return found


def branches_of(jaxpr: Any) -> list[Any]:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            found.append([branch.jaxpr for branch in eqn.params["branches"]])
            continue
        for value in eqn.params.values():
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                found += branches_of(inner)
    return found


def test_branches_send_blocks_of_the_capacity_or_all_tokens(make_mesh: MeshFactory) -> None:
    devices, tokens, choices = 8, 8, 1
    arrays = draw(devices * tokens, choices, LOCAL_EXPERTS * devices)
    ids = np.zeros((devices * tokens, choices), np.int32)
    jaxpr = jax.make_jaxpr(program(make_mesh({"expert": devices})))(ids, *arrays).jaxpr
    capacity = ExchangeExperts().capacity(request_of(devices, tokens, choices))
    assert capacity == math.ceil(1.25 * tokens / devices)
    # Columns of what travels: a routing and a token, and results. Backward: a token and its
    # gradient, and the sums of its gradient and of those of the router's weights.
    columns = [[2 * choices], [WIDTH], [WIDTH], [WIDTH] * 2, [WIDTH, choices]]
    found = branches_of(jaxpr)
    assert len(found) == len(columns) and not permutes(jaxpr)
    for (some, everything), widths in zip(found, columns, strict=True):
        for branch, rows in ((some, capacity), (everything, tokens)):
            sent = sorted(permutes(branch))
            assert sent == sorted([(rows, width) for width in widths] * (devices - 1))


def test_capacity() -> None:
    """The share of tokens that have one of a device's experts, if all sets of k are as likely."""
    exchange = ExchangeExperts()
    tokens = 10_000
    assert exchange.capacity(request_of(4, tokens, 1)) == 3125
    assert exchange.capacity(request_of(4, tokens, 1, experts=4)) == 3125
    independent = 1 - (1 - 1 / 8) ** 2
    assert exchange.capacity(request_of(8, tokens, 2, experts=8000)) / tokens == pytest.approx(
        1.25 * independent, rel=1e-3
    )
    assert exchange.capacity(request_of(2, tokens, 8)) == tokens
    assert exchange.capacity(request_of(2, 1, 1)) == 1


LARGE: Mapping[str, Any] = {"dtype": np.dtype("bfloat16"), "width": 1024, "hidden": 512}


@pytest.mark.parametrize(
    ("devices", "choices", "expected"), [(16, 1, True), (8, 1, True), (8, 8, False), (2, 8, False)]
)
def test_the_model_chooses_it_for_many_devices_and_few_experts_of_a_token(
    devices: int, choices: int, expected: bool
) -> None:
    request = request_of(devices, 8192, choices, experts=64, **LARGE)
    with tracing_for(H200):
        assert (choose(request).name == "exchange") == expected
        prediction = BACKENDS["exchange"].predict(request_of(2, 8192, 8, experts=64))
    assert prediction is None


def test_it_is_refused_where_devices_may_diverge() -> None:
    request = request_of(4, 8, 1)
    assert BACKENDS["exchange"].unsupported_reason(request) is None
    reason = BACKENDS["exchange"].unsupported_reason(replace(request, divergent_axes=("data",)))
    assert reason is not None and "along 'data' may take different branches" in reason
