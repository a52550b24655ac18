"""Routers choose as their models define it, and their losses are those of the global batch."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collective_matmul import CHECKPOINT_NAME
from collective_matmul.layers import (
    Router,
    RouterStatistics,
    largest_over_mean,
    load_balancing_loss,
    router_z_loss,
    updated_bias,
)
from tests.layers.experts.expert_reference import dense_losses, dense_router
from tests.layers.reference import assert_close, assert_identical, random

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

FEATURES, EXPERTS, CHOICES, TOKENS = 6, 8, 3, 20


def router(**options: Any) -> Router:
    return Router(FEATURES, EXPERTS, CHOICES, **options, rngs=nnx.Rngs(0))


def dense_weights(decision: Any) -> np.ndarray:
    """The weights by number of the expert: [T, E]."""
    weights = np.zeros((len(decision.expert_ids), EXPERTS), np.float32)
    np.put_along_axis(weights, np.asarray(decision.expert_ids), decision.expert_weights, -1)
    return weights


def test_a_softmax_over_all_that_is_normalized_is_one_over_the_chosen() -> None:
    x, layer = random(TOKENS, FEATURES), router()
    decision = layer(x)
    logits, probabilities, _, weights = dense_router(layer.kernel[...], x, CHOICES)
    assert_close(dense_weights(decision), weights)
    chosen = np.take_along_axis(np.asarray(logits), np.asarray(decision.expert_ids), -1)
    assert_close(decision.expert_weights, jax.nn.softmax(chosen))
    assert np.all(np.diff(decision.expert_weights) <= 0)
    other = router(normalize_weights=False, weight_scale=2.5)(x)
    expected = np.take_along_axis(np.asarray(probabilities), np.asarray(other.expert_ids), -1)
    assert_close(other.expert_weights, 2.5 * expected)


def test_of_equal_scores_the_first_expert_is_chosen() -> None:
    layer = router()
    columns = random(FEATURES, 2)
    layer.kernel[...] = jnp.asarray(columns[:, [0, 1, 1, 0, 0, 1, 0, 1]])
    x = random(TOKENS, FEATURES)
    first_wins = (x @ columns)[:, 0] > (x @ columns)[:, 1]
    expected = np.where(first_wins[:, None], [[0, 3, 4]], [[1, 2, 5]])
    assert_identical(layer(x).expert_ids, expected)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_selection_bias_changes_choices_and_nothing_else(score: Any) -> None:
    x, layer = random(TOKENS, FEATURES), router(score=score, selection_bias=True)
    bias = random(EXPERTS, seed=1)
    assert layer.bias is not None
    layer.bias[...] = jnp.asarray(bias)
    decision = layer(x)
    reference = dense_router(layer.kernel[...], x, CHOICES, score=score, bias=bias)
    assert_close(dense_weights(decision), reference[-1])
    assert_close(decision.statistics.probability_per_expert, reference[1].sum(0))
    unbiased = dense_router(layer.kernel[...], x, CHOICES, score=score)
    assert np.any(np.asarray(unbiased[2]) != np.asarray(reference[2]))


def test_a_bias_is_no_parameter_and_has_no_gradient() -> None:
    layer = router(score="sigmoid", selection_bias=True)
    assert "bias" not in nnx.state(layer, nnx.Param)
    graph, state = nnx.split(layer)

    def loss(state: nnx.State) -> jax.Array:
        decision = nnx.merge(graph, state)(random(TOKENS, FEATURES))
        return jnp.sum(decision.expert_weights**2) + load_balancing_loss(decision.statistics)

    gradient = jax.grad(loss)(state)
    assert not np.any(gradient["bias"][...])
    assert np.any(gradient["kernel"][...])


def test_a_token_goes_to_experts_of_the_best_groups() -> None:
    layer = router(score="sigmoid", groups=4, chosen_groups=2)
    x = random(TOKENS, FEATURES)
    ids = np.asarray(layer(x).expert_ids)
    scores = np.asarray(x @ layer.kernel[...])
    scores = 1 / (1 + np.exp(-scores))
    # Groups have two experts each, so all of a group's scores count.
    groups = np.argsort(-scores.reshape(TOKENS, 4, 2).sum(-1), stable=True)[:, :2]
    allowed = (np.arange(EXPERTS) // 2 == groups[..., None]).any(1)
    expected = np.argsort(-np.where(allowed, scores, -np.inf), stable=True)[:, :CHOICES]
    assert_identical(ids, expected)
    assert np.any(ids != np.argsort(-scores, stable=True)[:, :CHOICES])


def test_logits_are_products_in_float32_of_what_is_given() -> None:
    half = jnp.asarray(random(TOKENS, FEATURES), jnp.bfloat16)
    layer = router(param_dtype=jnp.bfloat16)
    decision = layer(half)
    wide = router()
    wide.kernel[...] = layer.kernel[...].astype(jnp.float32)
    assert_identical(decision, wide(half.astype(jnp.float32)))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(decision)} == {"int32", "float32"}
    # GPUs multiply float32 in fewer bits unless they are asked for all.
    assert "Precision.HIGHEST" in str(jax.make_jaxpr(layer)(half))


LAYERS = 3
MASK = np.random.default_rng(2).random(TOKENS) < 0.7


def layer_statistics(kernels: Any, x: Any, mask: Any) -> RouterStatistics:
    """The statistics of several layers' routers: [layers, ...]."""
    layer = router()
    return jax.vmap(lambda kernel: layer.route(x, mask, kernel, None).statistics)(kernels)


def test_losses_of_all_layers_are_those_of_their_concatenated_logits() -> None:
    kernels, x = random(LAYERS, FEATURES, EXPERTS), random(TOKENS, FEATURES)
    references = [dense_router(kernel, x, CHOICES) for kernel in kernels]
    concatenated = jax.tree.map(lambda *parts: jnp.concatenate(parts), *references)
    for mask in (None, MASK):
        counted = np.ones(TOKENS) if mask is None else mask
        layers = jax.jit(layer_statistics)(kernels, x, mask)
        total = layers.sum_over_layers()
        expected = dense_losses(concatenated, np.tile(counted, LAYERS))
        assert_close((load_balancing_loss(total), router_z_loss(total)), expected)
        each = [dense_losses(reference, counted) for reference in references]
        both = jnp.stack([load_balancing_loss(layers), router_z_loss(layers)], 1)
        assert_close(both, np.array(each))


def test_shares_of_microbatches_add_up_to_the_losses_of_the_batch_and_their_gradients() -> None:
    kernels, x = random(LAYERS, FEATURES, EXPERTS), random(TOKENS, FEATURES)

    def losses(kernels: Any, x: Any, mask: Any, whole: Any = None) -> tuple[jax.Array, Any]:
        statistics = layer_statistics(kernels, x, mask).sum_over_layers()
        loss = load_balancing_loss(statistics, whole) + router_z_loss(statistics, whole)
        return loss, statistics

    differentiated = jax.jit(jax.value_and_grad(losses, has_aux=True))
    (expected_loss, statistics), expected_gradient = differentiated(kernels, x, MASK)
    parts = [slice(0, TOKENS // 2), slice(TOKENS // 2, TOKENS)]
    # Of unequal sizes, so that means of the parts' means would differ.
    assert MASK[parts[0]].sum() != MASK[parts[1]].sum()
    first, second = (differentiated(kernels, x[part], MASK[part])[0][1] for part in parts)
    whole = first + second
    assert_close(whole, statistics)
    assert_identical(whole.tokens_per_expert, statistics.tokens_per_expert)
    shares = [differentiated(kernels, x[part], MASK[part], whole) for part in parts]
    assert_close(sum(loss for (loss, _), _ in shares), expected_loss)
    assert_close(sum(gradient for _, gradient in shares), expected_gradient)


def test_balanced_experts_have_the_smallest_losses() -> None:
    balanced = RouterStatistics(jnp.full(4, 6.0), jnp.full(4, 3.0), jnp.float32(0), jnp.float32(12))
    assert load_balancing_loss(balanced) == 2  # k = 24 choices of 12 tokens
    assert largest_over_mean(balanced) == 1
    counts = jnp.array([[12.0, 12, 0, 0], [24, 0, 0, 0], [0, 0, 0, 0]])
    several = RouterStatistics(counts, counts / 2, counts.sum(-1), counts.sum(-1) / 2)
    assert_identical(largest_over_mean(several), [2, 4, 1])
    assert_identical(load_balancing_loss(several), [4, 8, 0])


def test_a_bias_rises_for_experts_with_few_tokens() -> None:
    bias = updated_bias(jnp.zeros(4), jnp.array([9.0, 4, 2, 1]), 0.5)
    assert_identical(bias, [-0.5, 0, 0.5, 0.5])
    assert updated_bias(jnp.zeros(2, jnp.bfloat16), jnp.ones(2), 0.5).dtype == jnp.bfloat16


def test_updates_of_the_bias_balance_a_router() -> None:
    layer, x = router(score="sigmoid", selection_bias=True), random(200, FEATURES) + 1

    @jax.jit
    def step(bias: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
        statistics = layer.route(x, None, layer.kernel[...], bias).statistics
        bias = updated_bias(bias, statistics.tokens_per_expert, 0.01)
        return bias, largest_over_mean(statistics)

    assert layer.bias is not None
    _, imbalance = jax.lax.scan(step, layer.bias[...], length=200)
    # At the end a step of the bias moves a few tokens of 75.
    assert imbalance[0] > 2 and imbalance[-1] < 1.25


def test_policies_that_keep_matmuls_keep_the_choice() -> None:
    """A backward that chose again might choose others than the forward."""
    layer = router()

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(layer(x).expert_weights[:, 0] ** 2)

    policy = jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME)
    gradient = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))
    assert str(gradient(random(TOKENS, FEATURES))).count(" top_k[") == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(score="relu"), "score='relu': expected one of 'softmax', 'sigmoid'"),
        (dict(groups=3), "groups=3: expected a number that divides experts=8"),
        (dict(groups=2, chosen_groups=3), "chosen_groups=3: expected a whole number from 1 to"),
        (dict(groups=4, chosen_groups=1), "chosen_groups=1: 1 of 4 groups have 2 experts"),
        (dict(choices=9), "choices=9: expected a whole number from 1 to experts=8"),
        (dict(experts=0), "experts=0: expected a whole number of at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], expected: str) -> None:
    options = dict(experts=EXPERTS, choices=CHOICES) | options
    with pytest.raises(ValueError, match=re.escape(expected)):
        Router(FEATURES, **options, rngs=nnx.Rngs(0))
