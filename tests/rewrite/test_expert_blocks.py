"""`explain` says what the collectives of hand-written blocks of experts are, and what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul import expert_mlp, explain, overlap
from collective_matmul.dispatch.decision_table import line_of
from collective_matmul.rewrite import FoundSite
from tests.conftest import MeshFactory
from tests.reference import AXIS

TOKENS, CHOICES, FEATURES, HIDDEN, EXPERTS = 8, 2, 6, 10, 4
DEVICES = 2

APPLIES = "its rows are tokens, to which lax.ragged_dot at test_expert_blocks.py"
DECIDES = "it decides which expert lax.ragged_dot at test_expert_blocks.py"
FACTORS = "it gathers the factors of results of lax.ragged_dot at test_expert_blocks.py"
ADDS = "it adds up what lax.ragged_dot at test_expert_blocks.py"
ADVICE = "write the whole block as collective_matmul.expert_mlp or layers.ExpertMLP"

Arrays = tuple[jax.Array, ...]


def gathered(array: jax.Array) -> jax.Array:
    return lax.all_gather(array, AXIS, tiled=True)


def sorted_by_expert(ids: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """The order of the pairs, and the number of pairs of each of this device's experts."""
    local = ids.reshape(-1) - lax.axis_index(AXIS) * experts
    local = jnp.where((local >= 0) & (local < experts), local, experts)
    return jnp.argsort(local), jnp.bincount(local, length=experts + 1)[:experts]


def experts_of(rows: jax.Array, sizes: jax.Array, gate: Any, up: Any, down: Any) -> jax.Array:
    hidden = jax.nn.silu(lax.ragged_dot(rows, gate, sizes)) * lax.ragged_dot(rows, up, sizes)
    return lax.ragged_dot(hidden, down, sizes)


def adding(x: Any, ids: Any, weights: Any, *ws: Any) -> jax.Array:
    """Adds rows to their tokens one by one."""
    x, ids, weights = map(gathered, (x, ids, weights))
    order, sizes = sorted_by_expert(ids, ws[0].shape[0])
    y = experts_of(x[order // CHOICES], sizes, *ws) * weights.reshape(-1)[order][:, None]
    y = jnp.zeros_like(x).at[order // CHOICES].add(y)
    return lax.psum_scatter(y, AXIS, tiled=True)


def unsorting(x: Any, ids: Any, weights: Any, *ws: Any) -> jax.Array:
    """Sorts the rows back before it multiplies them by the weights, in another dtype."""
    x, ids, weights = map(gathered, (x, ids, weights))
    order, sizes = sorted_by_expert(ids, ws[0].shape[0])
    rows = jnp.take(x.astype(jnp.bfloat16), order // CHOICES, axis=0)
    y = experts_of(rows, sizes, *(w.astype(jnp.bfloat16) for w in ws)).astype(x.dtype)
    y = jnp.take(y, jnp.argsort(order), axis=0).reshape(*weights.shape, -1)
    return lax.psum_scatter(jnp.sum(y * weights[..., None], axis=1), AXIS, tiled=True)


def recomputing(x: Any, ids: Any, weights: Any, *ws: Any) -> jax.Array:
    """Has a checkpoint between the gathers and the experts, and a function around the sum."""
    x, ids, weights = map(gathered, (x, ids, weights))
    order, sizes = sorted_by_expert(ids, ws[0].shape[0])

    @jax.checkpoint
    def inner(x: Any, weights: Any, *ws: Any) -> jax.Array:
        y = experts_of(x[order // CHOICES], sizes, *ws) * weights.reshape(-1)[order][:, None]
        return jax.ops.segment_sum(y, order // CHOICES, x.shape[0])

    return jax.jit(lambda y: lax.psum_scatter(y, AXIS, tiled=True))(inner(x, weights, *ws))


def looping(x: Any, ids: Any, weights: Any, *ws: Any) -> jax.Array:
    """Has two layers in a loop. Their gradients gather what each step needs alike outside of it."""

    def layer(x: Any, _: None) -> tuple[jax.Array, None]:
        return x + adding(x, ids, weights, *ws), None

    return lax.scan(layer, x, length=2)[0]


def dropping(x: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any) -> jax.Array:
    """Has gate and up in one product, weights before down, and room for fewer rows."""
    x, ids, weights = map(gathered, (x, ids, weights))
    order, sizes = sorted_by_expert(ids, gate.shape[0])
    order = order[:-3]
    both = lax.ragged_dot(x[order // CHOICES], jnp.concatenate([gate, up], axis=-1), sizes)
    gate, up = jnp.split(both, 2, axis=-1)
    hidden = jax.nn.gelu(gate) * up * weights.reshape(-1)[order][:, None]
    y = jnp.zeros_like(x).at[order // CHOICES].add(lax.ragged_dot(hidden, down, sizes))
    return lax.psum_scatter(y, AXIS, tiled=True)


def routing_later(x: Any, ids: Any, weights: Any, *ws: Any) -> jax.Array:
    """Gathers the router's logits, and over two axes at once."""
    del ids
    axes = AXIS, "data"
    logits = jnp.tile(weights, EXPERTS // CHOICES)
    x, logits = (lax.all_gather(array, axes, tiled=True) for array in (x, logits))
    weights, ids = lax.top_k(jax.nn.softmax(logits), CHOICES)
    order, sizes = sorted_by_expert(ids, ws[0].shape[0])
    y = experts_of(x[order // CHOICES], sizes, *ws) * weights.reshape(-1)[order][:, None]
    return lax.psum_scatter(jax.ops.segment_sum(y, order // CHOICES, x.shape[0]), axes, tiled=True)


def of_summed(x: Any, ids: Any, weights: Any, *ws: Any) -> jax.Array:
    """Adds a shared expert before the sum over devices, in a loop over two layers."""

    def layer(x: Any, _: None) -> tuple[jax.Array, None]:
        x_all, ids_all, weights_all = map(gathered, (x, ids, weights))
        order, sizes = sorted_by_expert(ids_all, ws[0].shape[0])
        y = experts_of(x_all[order // CHOICES], sizes, *ws)
        y *= weights_all.reshape(-1)[order][:, None]
        y = jax.ops.segment_sum(y, order // CHOICES, x_all.shape[0])
        return lax.psum_scatter(y + jnp.tanh(x_all @ ws[0][0]) @ ws[2][0], AXIS, tiled=True), None

    return lax.scan(layer, x, length=2)[0]


def shapes() -> list[jax.ShapeDtypeStruct]:
    def of(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    return [
        of(TOKENS, FEATURES),
        of(TOKENS, CHOICES, dtype=jnp.int32),
        of(TOKENS, CHOICES),
        of(EXPERTS, FEATURES, HIDDEN),
        of(EXPERTS, FEATURES, HIDDEN),
        of(EXPERTS, HIDDEN, FEATURES),
    ]


def sharded(fun: Callable, make_mesh: MeshFactory, **options: Any) -> Callable:
    mesh = make_mesh({AXIS: DEVICES})
    return jax.shard_map(fun, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), **options)


def with_gradients(fun: Callable) -> Callable:
    def loss(x: Any, weights: Any, ws: Any, ids: Any) -> jax.Array:
        return jnp.sum(fun(x, ids, weights, *ws) ** 2)

    def gradients(x: Any, ids: Any, weights: Any, *ws: Any) -> Arrays:
        return jax.grad(loss, (0, 1, 2))(x, weights, ws, ids)

    return gradients


def plain_of(fun: Callable) -> tuple[FoundSite, ...]:
    return explain(fun)(*shapes()).plain


BLOCKS = [adding, unsorting, recomputing, looping, dropping]


@pytest.mark.parametrize("block", BLOCKS)
def test_each_collective_of_a_block_has_its_part_and_what_to_write(
    block: Callable, make_mesh: MeshFactory
) -> None:
    sites = sorted(plain_of(sharded(block, make_mesh, check_vma=False)), key=lambda s: s.kind)
    assert [site.kind for site in sites] == ["all_gather"] * 3 + ["reduce_scatter"]
    for site, part in zip(sites, (APPLIES, DECIDES, FACTORS, ADDS), strict=True):
        assert not site.replaced
        assert site.reason.startswith(part) and site.reason.endswith(ADVICE)


@pytest.mark.parametrize("block", BLOCKS[:-1])
def test_gradients_of_a_block_are_explained_too(block: Callable, make_mesh: MeshFactory) -> None:
    sites = plain_of(with_gradients(sharded(block, make_mesh, check_vma=False)))
    assert len(sites) >= 7
    assert all(site.reason.endswith(ADVICE) for site in sites)


def test_a_gather_of_logits_decides_which_expert_comes(make_mesh: MeshFactory) -> None:
    mesh = make_mesh({AXIS: DEVICES, "data": 2})
    specs = P((AXIS, "data"))
    fun = jax.shard_map(
        routing_later,
        mesh=mesh,
        in_specs=(specs, specs, specs, P(AXIS), P(AXIS), P(AXIS)),
        out_specs=specs,
        check_vma=False,
    )
    for site, part in zip(plain_of(fun), (APPLIES, DECIDES, ADDS), strict=True):
        assert site.reason.startswith(part) and site.reason.endswith(ADVICE)


def test_a_shared_expert_and_a_loop_are_seen_through(make_mesh: MeshFactory) -> None:
    sites = plain_of(sharded(of_summed, make_mesh, check_vma=False))
    tokens, ids, weights, summed = sites
    assert tokens.replaced  # For the shared expert. The experts take what it gathers.
    assert ids.reason.startswith(DECIDES) and weights.reason.startswith(FACTORS)
    assert summed.reason.startswith(ADDS)


def test_overlap_says_so_if_it_is_required_to_replace_a_block(make_mesh: MeshFactory) -> None:
    fun = sharded(adding, make_mesh)
    with pytest.raises(ValueError, match=r"layers\.ExpertMLP"):
        overlap(fun, require=1)(*shapes())


def test_gathers_of_experts_weights_have_an_argument_of_the_op(make_mesh: MeshFactory) -> None:
    """Weights may be sharded as in fully sharded data parallelism, and so are their gradients."""

    def block(x: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any) -> jax.Array:
        gate, up, down = map(gathered, (gate, up, down))
        order = jnp.argsort(ids.reshape(-1))
        sizes = jnp.bincount(ids.reshape(-1), length=EXPERTS)
        y = experts_of(x[order // CHOICES], sizes, gate, up, down)
        y *= weights.reshape(-1)[order][:, None]
        return jnp.zeros_like(x).at[order // CHOICES].add(y)

    sites = plain_of(with_gradients(sharded(block, make_mesh)))
    assert {site.kind for site in sites} == {"all_gather", "reduce_scatter"}
    for site in sites:
        begin = "it gathers weights of experts for" if site.kind == "all_gather" else "it adds up"
        assert site.reason.startswith(begin) and "(weight_axis_name)" in site.reason


def test_other_collectives_of_such_a_program_have_their_own_reasons(make_mesh: MeshFactory) -> None:
    """A residual stream leads from the experts to arrays that no block gathers or adds up."""

    def fun(x: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any) -> Arrays:
        y = x + adding(x, ids, weights, gate, up, down)
        z = lax.all_gather(y, AXIS, tiled=True)
        table = jnp.zeros((7, FEATURES)).at[ids[:, 0]].add(y)
        return y, jnp.sin(z), lax.psum(table, AXIS), lax.psum(jnp.mean(y), AXIS)

    specs = P(AXIS), P(), P(), P()
    mesh = make_mesh({AXIS: DEVICES})
    whole = jax.shard_map(fun, mesh=mesh, in_specs=P(AXIS), out_specs=specs, check_vma=False)
    *block, gather, table, mean = plain_of(whole)
    assert all(site.reason.endswith(ADVICE) for site in block)
    assert gather.reason.startswith("sin at")
    for site in (table, mean):
        assert site.reason.startswith("the summed array comes from") and ADVICE not in site.reason


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_op_has_one_line_and_its_permutes_none(check_vma: bool, make_mesh: MeshFactory) -> None:
    def block(x: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any) -> jax.Array:
        own = gathered(x)[: x.shape[0]]
        return expert_mlp(own, ids, weights, gate, up, down, AXIS, implementation="ring")

    fun = sharded(block, make_mesh, check_vma=check_vma)
    explanation = explain(with_gradients(fun))(*shapes())
    ops = [each for each in explanation.decisions if line_of(each).op == "expert_mlp"]
    assert len(ops) == 2  # Forward and backward.
    assert "0×" not in str(explanation)
    # What the program gathers itself is no part of a block, though rows of it are multiplied.
    assert len(explanation.plain) == 2
    assert not any("ExpertMLP" in site.reason for site in explanation.plain)
