"""Embedding and cross-entropy over a sharded vocabulary."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from collective_matmul.jaxprs.walks import all_equations
from models.layers import vocabulary

BATCH, SEQUENCE, FEATURES, VOCABULARY = 2, 8, 3, 16


@pytest.fixture
def tokens() -> np.ndarray:
    # Every token once, so the first and the last row of each device are looked up.
    return np.random.default_rng(0).permutation(VOCABULARY).reshape(BATCH, SEQUENCE).astype("int32")


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_embedding_and_its_gradient(make_mesh, tokens, devices):
    rng = np.random.default_rng(1)
    table = rng.normal(size=(VOCABULARY, FEATURES)).astype(np.float32)
    weight = rng.normal(size=(BATCH, SEQUENCE, FEATURES)).astype(np.float32)
    embed = jax.shard_map(
        lambda tokens, table: vocabulary.embed(tokens, table, "tensor"),
        mesh=make_mesh({"tensor": devices}),
        in_specs=(P(), P("tensor")),
        out_specs=P(None, "tensor"),
    )
    value, backward = jax.vjp(jax.jit(lambda table: embed(tokens, table)), table)
    np.testing.assert_array_equal(value, table[tokens])
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, weight)
    np.testing.assert_allclose(backward(weight)[0], expected, rtol=1e-6)


@pytest.mark.parametrize(("devices", "column_devices"), [(1, 2), (4, 2)])
def test_columns_of_the_embedding_may_be_sharded_too(make_mesh, tokens, devices, column_devices):
    rng = np.random.default_rng(1)
    table = rng.normal(size=(VOCABULARY, 4)).astype(np.float32)
    weight = rng.normal(size=(BATCH, SEQUENCE, 4)).astype(np.float32)
    embed = jax.shard_map(
        lambda tokens, table: vocabulary.embed(
            tokens, table, "tensor", column_axis_name="fsdp", dtype=jnp.bfloat16
        ),
        mesh=make_mesh({"fsdp": column_devices, "tensor": devices}),
        in_specs=(P("fsdp"), P("tensor", "fsdp")),
        out_specs=P("fsdp", "tensor"),
    )
    tokens = tokens // 4  # Several devices look up the same rows.
    value, backward = jax.vjp(jax.jit(lambda table: embed(tokens, table)), table)
    np.testing.assert_array_equal(value, jnp.asarray(table[tokens], jnp.bfloat16))
    half = jnp.asarray(weight, jnp.bfloat16)
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, np.asarray(half, np.float32))
    # Terms are in half precision, their sums are not.
    np.testing.assert_allclose(backward(half)[0], expected, rtol=1e-5, atol=1e-6)


def test_zeros_of_the_tables_gradient_are_not_made_before_it_is_needed(make_mesh, tokens):
    """XLA would keep them, of the table's size, from the begin of the program."""
    embed = jax.shard_map(
        lambda tokens, table: vocabulary.embed(tokens, table, "tensor"),
        mesh=make_mesh({"tensor": 4}),
        in_specs=(P(), P("tensor")),
        out_specs=P(None, "tensor"),
    )
    table = jnp.zeros((VOCABULARY, FEATURES))
    closed = jax.make_jaxpr(jax.grad(lambda table: embed(tokens, table).sum()))(table)
    (backward,) = [e for e in closed.eqns[::-1] if e.primitive.name == "shard_map"][:1]
    body = backward.params["jaxpr"]
    makers = {v: e for e in body.eqns for v in e.outvars}
    (scatter,) = [e for e in body.eqns if e.primitive.name == "scatter-add"]
    zeros = makers[scatter.invars[0]]
    assert zeros.primitive.name == "broadcast_in_dim"
    assert makers[zeros.invars[0]].primitive.name == "optimization_barrier"


def test_rows_of_the_table_are_stored(make_mesh, tokens):
    """XLA would look them up again in the backward, and keep a gathered table until then."""
    embed = jax.shard_map(
        lambda tokens, table: vocabulary.embed(tokens, table, "tensor"),
        mesh=make_mesh({"tensor": 1}),
        in_specs=(P(), P("tensor")),
        out_specs=P(None, "tensor"),
    )
    closed = jax.make_jaxpr(embed)(tokens, jnp.zeros((VOCABULARY, FEATURES)))
    names = [equation.primitive.name for equation in all_equations(closed.jaxpr)]
    assert [n for n in names if n in ("gather", "optimization_barrier")] == [
        "gather",
        "optimization_barrier",
    ]


@pytest.mark.parametrize("devices", [1, 4, 8])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_cross_entropy_and_its_gradient(make_mesh, tokens, devices, scale):
    """Includes logits whose exponential overflows float32 unless the largest is subtracted."""
    rng = np.random.default_rng(2)
    logits = (scale * rng.normal(size=(BATCH, SEQUENCE, VOCABULARY))).astype(np.float32)
    sharded = jax.shard_map(
        lambda logits, targets: vocabulary.cross_entropy(logits, targets, "tensor"),
        mesh=make_mesh({"tensor": devices}),
        in_specs=(P(None, None, "tensor"), P()),
        out_specs=P(),
    )
    loss, grad = jax.jit(jax.value_and_grad(lambda x: jnp.mean(sharded(x, tokens))))(logits)

    wide = logits.astype(np.float64)
    shifted = np.exp(wide - wide.max(-1, keepdims=True))
    probabilities = shifted / shifted.sum(-1, keepdims=True)
    one_hot = np.eye(VOCABULARY)[tokens]
    log_sum = np.log(shifted.sum(-1)) + wide.max(-1)
    np.testing.assert_allclose(loss, np.mean(log_sum - (wide * one_hot).sum(-1)), rtol=1e-6)
    np.testing.assert_allclose(grad, (probabilities - one_hot) / tokens.size, atol=1e-7)


def test_infinite_and_masked_logits(make_mesh):
    """Columns without probability, also all of a device's, and columns that are all alike."""
    least = np.finfo(np.float32).min
    logits = np.array([[[0, 1, -np.inf, least], [3, 3, 3, 3], [-np.inf, 2, 0, 9]]])
    targets = np.array([[1, 0, 3]], np.int32)
    sharded = jax.shard_map(
        lambda logits, targets: vocabulary.cross_entropy(logits, targets, "tensor"),
        mesh=make_mesh({"tensor": 2}),
        in_specs=(P(None, None, "tensor"), P()),
        out_specs=P(),
    )
    losses = sharded(np.float32(logits), targets)[0]
    expected = [np.log(np.e + 1) - 1, np.log(4), np.log(np.exp([-7, -9, 0]).sum())]
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)
    logits[0, 0, 0] = np.nan
    assert np.isnan(sharded(np.float32(logits), targets)[0]).tolist() == [True, False, False]


def test_the_loss_reads_the_logits_once(make_mesh, tokens):
    """The largest of a row and the sum of exponentials are one reduction."""
    sharded = jax.shard_map(
        lambda logits, targets: vocabulary.cross_entropy(logits, targets, "tensor"),
        mesh=make_mesh({"tensor": 2}),
        in_specs=(P(None, None, "tensor"), P()),
        out_specs=P(),
    )
    logits = jax.ShapeDtypeStruct((BATCH, SEQUENCE, VOCABULARY), jnp.bfloat16)
    text = str(jax.make_jaxpr(sharded)(logits, tokens))
    assert len(re.findall(r"= reduce\[", text)) == 1
    assert not re.search(r"reduce_\w+\[\s*axes=\(2,\)", text)


def test_the_backward_of_the_loss_keeps_the_logits_and_one_number_per_token(make_mesh, tokens):
    kept: list[jax.Array] = []

    def losses(logits, targets):
        loss, pullback = jax.vjp(
            lambda logits: vocabulary.cross_entropy(logits, targets, "tensor"), logits
        )
        kept.extend(leaf for leaf in jax.tree.leaves(pullback) if leaf.ndim)
        (gradient,) = pullback(jnp.ones_like(loss))
        return gradient

    sharded = jax.shard_map(
        losses,
        mesh=make_mesh({"tensor": 4}),
        in_specs=(P(None, None, "tensor"), P()),
        out_specs=P(None, None, "tensor"),
    )
    logits = jax.ShapeDtypeStruct((BATCH, SEQUENCE, VOCABULARY), jnp.bfloat16)
    closed = jax.make_jaxpr(sharded)(logits, tokens)
    assert closed.out_avals[0].dtype == jnp.bfloat16
    local = (BATCH, SEQUENCE, VOCABULARY // 4)
    assert sorted((leaf.dtype.name, leaf.shape) for leaf in kept) == [
        ("bfloat16", local),
        ("float32", local[:2]),
        ("int32", local[:2]),
    ]
    # A scatter into an array of the logits' size would be a pass over memory of its own.
    assert "scatter" not in str(closed)
