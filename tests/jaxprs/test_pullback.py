"""Arrays that a function keeps for its pullback, where that gets the weights again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from collective_matmul.jaxprs import split_pullback
from collective_matmul.jaxprs.pullback import dependents

ROWS, FEATURES, HIDDEN = 5, 16, 64
Weights = dict[str, jax.Array]


@jax.jit
def contract(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A jitted function, which hands a transposed weight to the backward."""
    return x @ kernel.T.T


def block(weights: Weights, x: jax.Array, shift: jax.Array) -> jax.Array:
    hidden = jnp.tanh(contract(x * weights["scale"].reshape(1, -1) + shift, weights["up"]))
    return x + contract(hidden, weights["down"])


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape).astype("float32") / 4)


WEIGHTS = {
    "up": random(FEATURES, HIDDEN),
    "down": random(HIDDEN, FEATURES),
    "scale": random(FEATURES),
}
X, SHIFT = random(ROWS, FEATURES), jnp.float32(0.5)


def test_only_what_depends_on_activations_is_kept():
    split = split_pullback(block, WEIGHTS, X, SHIFT)
    y, kept = split.forward(WEIGHTS, X, SHIFT)
    right_y, pull = jax.vjp(lambda weights, x: block(weights, x, SHIFT), WEIGHTS, X)
    np.testing.assert_array_equal(y, right_y)
    for found, right in zip(
        jax.tree.leaves(split.backward(WEIGHTS, kept, y)), jax.tree.leaves(pull(y)), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
    # All have the rows of x, and none the shape of a weight.
    assert kept
    assert {leaf.shape[0] for leaf in kept} == {ROWS}


def test_parts_inside_keep_what_their_own_policies_say():
    """A policy around the whole function would replace theirs."""

    def with_part(weights: Weights, x: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda x: jnp.tanh(jnp.sin(x @ weights["up"])))(x)

    _, kept = split_pullback(with_part, WEIGHTS, X).forward(WEIGHTS, X)
    assert [leaf.shape for leaf in kept] == [X.shape]
    everything = jax.checkpoint(with_part, policy=jax.checkpoint_policies.everything_saveable)
    _, pull = jax.vjp(everything, WEIGHTS, X)
    assert any(leaf.shape == (ROWS, HIDDEN) for leaf in jax.tree.leaves(pull))


def test_the_backward_computes_again_what_is_made_of_weights_alone():
    """And nothing else: one matmul less than the forward and the pullback."""

    def cast(weights: Weights, x: jax.Array) -> jax.Array:
        return jnp.sin(x @ weights["up"].astype("bfloat16"))

    x = X.astype("bfloat16")
    split = split_pullback(cast, WEIGHTS, x)
    y, kept = split.forward(WEIGHTS, x)
    program = str(jax.make_jaxpr(split.backward)(WEIGHTS, kept, y))
    assert program.count("convert_element_type[new_dtype=bfloat16") == 1
    assert program.count("dot_general[") == 2


def test_what_depends_on_an_argument_is_found_in_jitted_functions():
    def fun(w, x):
        a, b = jax.jit(lambda w, x: (w.T, x * 2))(w, x)
        c, d = jax.lax.optimization_barrier((a, b))
        return a, b, c, d, c @ d

    jaxpr = jax.make_jaxpr(fun)(jnp.ones((2, 2)), jnp.ones((2, 2))).jaxpr
    found = dependents(jaxpr, jaxpr.invars[1:])
    assert [v in found for v in jaxpr.outvars] == [False, True, False, True, True]
