"""Gathered weights are freed after the forward and gathered again, and gradients are right."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from models.regather import apply_blocks, dependents, split_pullback
from models.sharded_weights import WeightShards

DEVICES, ROWS, FEATURES, HIDDEN = 8, 2, 16, 64
#: Both matrices of a block are sharded in the dimension of size FEATURES.
SHARDS = {
    "up": WeightShards("fsdp", 0, "float32", "float32"),
    "down": WeightShards("fsdp", 1, "float32", "float32"),
}
SPECS = {"up": P("fsdp"), "down": P(None, "fsdp"), "scale": P()}
Block = dict[str, jax.Array]


@jax.jit
def contract(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A jitted function in a block, which hands a transposed weight to the backward."""
    return x @ kernel.T.T


def block(weights: Block, x: jax.Array, shift: jax.Array) -> jax.Array:
    hidden = jnp.tanh(contract(x * weights["scale"].reshape(1, -1) + shift, weights["up"]))
    return x + contract(hidden, weights["down"])


def gather(shards: Block) -> Block:
    return {name: SHARDS[name].gather(x) if name in SHARDS else x for name, x in shards.items()}


def make_blocks(depth: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shapes = {"up": (FEATURES, HIDDEN), "down": (HIDDEN, FEATURES), "scale": (FEATURES,)}
    return [
        {name: rng.normal(size=shape).astype("float32") / 4 for name, shape in shapes.items()}
        for _ in range(depth)
    ]


def loss_and_gradients(mesh: Any, *, remat: bool = False) -> Callable[..., Any]:
    fun = jax.checkpoint(block) if remat else block

    def local(blocks: list[Block], x: jax.Array) -> Any:
        def loss(blocks: list[Block], x: jax.Array) -> jax.Array:
            y, head = apply_blocks(fun, gather, blocks, x, jnp.float32(0.5), last=blocks[0])
            y = y @ SHARDS["up"].gather(head["up"])
            return jax.lax.psum(jnp.sum(y * y), "fsdp")

        # Vectors are typed as varying, as in training, so that their gradients stay local.
        blocks = [b | {"scale": jax.lax.pcast(b["scale"], "fsdp", to="varying")} for b in blocks]
        value, (gradients, dx) = jax.value_and_grad(loss, (0, 1))(blocks, x)
        for g in gradients:
            g["scale"] = jax.lax.psum(g["scale"], "fsdp")
        return value, gradients, dx

    @jax.jit
    def sharded(blocks: list[Block], x: jax.Array) -> Any:
        specs = [SPECS] * len(blocks)
        return jax.shard_map(
            local, mesh=mesh, in_specs=(specs, P("fsdp")), out_specs=(P(), specs, P("fsdp"))
        )(blocks, x)

    return sharded


def expected(blocks: list[Block], x: jax.Array) -> jax.Array:
    y = functools.reduce(lambda y, weights: block(weights, y, jnp.float32(0.5)), blocks, x)
    return jnp.sum((y @ blocks[0]["up"]) ** 2)


X = np.random.default_rng(1).normal(size=(DEVICES * ROWS, FEATURES)).astype("float32")


@pytest.mark.parametrize("depth", [1, 3])
def test_gradients_equal_those_of_whole_weights(make_mesh, depth):
    blocks = make_blocks(depth)
    loss, gradients, dx = loss_and_gradients(make_mesh({"fsdp": DEVICES}), remat=depth == 1)(
        blocks, X
    )
    value, (whole, expected_dx) = jax.jit(jax.value_and_grad(expected, (0, 1)))(blocks, X)
    # Sums of float32 in another order.
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    np.testing.assert_allclose(dx, expected_dx, rtol=1e-4, atol=1e-4)
    for found, right in zip(gradients, whole, strict=True):
        for name in right:
            np.testing.assert_allclose(found[name], right[name], rtol=1e-4, atol=1e-3)


def test_weights_are_gathered_twice_and_not_kept(make_mesh):
    """A block more takes memory for its activations and its shards, less than for its weights."""
    compiled = {
        depth: loss_and_gradients(make_mesh({"fsdp": DEVICES}))
        .lower(make_blocks(depth), X)
        # Older jaxlib removes barriers early on CPUs, and merges the gathers of both passes.
        .compile({"xla_disable_hlo_passes": "cse_barrier_expander"})
        for depth in (3, 7)
    }
    texts = {depth: program.as_text() or "" for depth, program in compiled.items()}
    gathers = {
        depth: len(re.findall(r"= \S+ all-gather(?:-start)?\(", text))
        for depth, text in texts.items()
    }
    # Of two weights of each block, of which the forward and the backward gather both.
    assert gathers[7] - gathers[3] == 4 * 2 * 2
    memory = {
        depth: program.memory_analysis().temp_size_in_bytes for depth, program in compiled.items()
    }
    of_weights = 4 * 2 * FEATURES * HIDDEN
    activations = 4 * ROWS * (2 * FEATURES + HIDDEN)
    for_one_block = (memory[7] - memory[3]) / 4
    assert for_one_block < of_weights / DEVICES + 2 * activations < of_weights / 2


def test_only_what_depends_on_activations_is_kept():
    weights = {name: jnp.asarray(array) for name, array in make_blocks(1)[0].items()}
    x, shift = jnp.asarray(X[:5]), jnp.float32(0.5)
    split = split_pullback(block, weights, x, shift)
    y, kept = split.forward(weights, x, shift)
    _, pull = jax.vjp(lambda weights, x: block(weights, x, shift), weights, x)
    for found, right in zip(
        jax.tree.leaves(split.backward(weights, kept, y)), jax.tree.leaves(pull(y)), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
    # All have the rows of x, and none the shape of a weight.
    assert kept
    assert {leaf.shape[0] for leaf in kept} == {5}


def test_what_depends_on_an_argument_is_found_in_jitted_functions():
    def fun(w, x):
        a, b = jax.jit(lambda w, x: (w.T, x * 2))(w, x)
        c, d = jax.lax.optimization_barrier((a, b))
        return a, b, c, d, c @ d

    jaxpr = jax.make_jaxpr(fun)(jnp.ones((2, 2)), jnp.ones((2, 2))).jaxpr
    found = dependents(jaxpr, jaxpr.invars[1:])
    assert [v in found for v in jaxpr.outvars] == [False, True, False, True, True]
