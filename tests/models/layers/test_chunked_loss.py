"""Head and loss in chunks of tokens equal those of all tokens, and no array has all logits."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from models.config import LlamaConfig
from models.layers.chunked_loss import chunk_size, loss_in_chunks
from tests.models import reference
from tests.models.test_llama import (
    BATCH,
    SEQUENCE,
    SMALL,
    TOLERANCE,
    random_params,
    random_tokens,
    sharded_loss_and_grads,
)
from train.config.config import Config, MeshSizes
from train.parallel.model import ModelFunctions


def functions_of(tensor: int, **changes: Any) -> ModelFunctions:
    own = {name: changes.pop(name) for name in ("tied_head", "vocabulary_size") if name in changes}
    model = dataclasses.replace(SMALL, **own)
    config = Config(model=model, compute_dtype="float32", **changes)
    return ModelFunctions(config, MeshSizes(1, 1, tensor))


@cache
def expected_of(model: LlamaConfig) -> Any:
    def loss(params):
        return jnp.mean(reference.loss(model, params, *random_tokens()))

    functions = ModelFunctions(Config(model=model, compute_dtype="float32"))
    return jax.jit(jax.value_and_grad(loss))(random_params(functions))


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        # 8 tokens, of which a device has 8, 4 or 2: chunks that fit and chunks to be filled up.
        ((1, 2), dict(loss_chunk=6, overlap="ring")),
        ((2, 1), dict(loss_chunk=3, tied_head=True)),
        ((1, 4), dict(loss_chunk=4, overlap="rewrite")),
        pytest.param(
            (2, 4), dict(loss_chunk=5, overlap="ring", tied_head=True), marks=pytest.mark.exhaustive
        ),
        pytest.param((1, 2), dict(loss_chunk=2, overlap="xla"), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_those_of_the_unsharded_model(make_mesh, sizes, changes):
    data, tensor = sizes
    functions = functions_of(tensor, **changes)
    mesh = make_mesh({"data": data, "fsdp": 1, "tensor": tensor})
    loss, grads = sharded_loss_and_grads(functions, mesh)(
        random_params(functions), *random_tokens()
    )
    model = dataclasses.replace(SMALL, tied_head=changes.get("tied_head", False))
    expected, expected_grads = expected_of(model)
    np.testing.assert_allclose(loss, expected, **TOLERANCE)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected_grads[name], **TOLERANCE, err_msg=name)


def shapes_of(functions: ModelFunctions, mesh: Any) -> set[tuple[int, ...]]:
    """The shapes of all arrays of forward and backward."""
    traced = jax.make_jaxpr(sharded_loss_and_grads(functions, mesh))(
        functions.abstract_params, *random_tokens()
    )
    found = re.findall(r":\w+\[([\d,]+)\]", str(traced))
    return {tuple(map(int, shape.split(","))) for shape in found}


@pytest.mark.parametrize("changes", [{}, {"overlap": "rewrite"}, {"tied_head": True}], ids=str)
def test_no_array_of_the_step_has_the_logits_of_all_tokens(make_mesh, changes):
    mesh = make_mesh({"data": 1, "fsdp": 1, "tensor": 2})
    columns = 20  # As no other array has.
    changes = {"vocabulary_size": 2 * columns, **changes}
    whole = shapes_of(functions_of(2, **changes), mesh)
    assert (BATCH, SEQUENCE, columns) in whole
    chunked = shapes_of(functions_of(2, loss_chunk=2, **changes), mesh)
    logits = [shape for shape in chunked if shape[-1] == columns and len(shape) > 2]
    assert {(BATCH, 2, columns)} <= {*logits}
    assert all(np.prod(shape[:-1]) <= BATCH * 2 for shape in logits)


def test_gradients_of_weights_are_summed_in_float32():
    """In bfloat16, a sum of 1024 ones would end at 256."""
    tokens = 1024
    weights = {"w": jnp.zeros((1, 1), jnp.bfloat16)}
    x = jnp.ones((1, tokens, 1), jnp.bfloat16)
    targets = jnp.zeros((1, tokens), jnp.int32)

    def loss(weights, x, targets):
        del targets
        return (x @ weights["w"])[..., 0].astype(jnp.float32)

    def total(weights):
        return jnp.sum(loss_in_chunks(loss, weights, x, targets, 1))

    assert jax.grad(total)(weights)["w"] == tokens


@pytest.mark.parametrize("devices", [1, 4])
def test_each_chunk_has_the_targets_of_its_tokens(make_mesh, devices):
    """The tokens of a chunk are those that a gather over the axis puts together."""
    own, features = 5, 2
    x = np.arange(2 * devices * own * features, dtype=np.float32)
    x = x.reshape(2, devices * own, features)
    targets = np.arange(2 * devices * own, dtype=np.int32).reshape(2, -1)
    seen = []

    def loss(weights, x, targets):
        whole = jax.lax.all_gather(x, "tensor", axis=1, tiled=True, to="invarying")
        seen.append(targets.shape)
        return whole[..., 0] * 1000 + targets * weights

    chunked = jax.shard_map(
        lambda x, targets: loss_in_chunks(loss, jnp.float32(1), x, targets, 2 * devices),
        mesh=make_mesh({"tensor": devices}),
        in_specs=(P(None, "tensor"), P()),
        out_specs=P(),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(chunked)(x, targets), x[..., 0] * 1000 + targets)
    assert set(seen) == {(2, 2 * devices)}


@given(own=st.integers(1, 5000), devices=st.sampled_from([1, 2, 3, 8]), tokens=st.integers(1, 9000))
def test_chunks_cover_a_sequence_and_are_no_larger_than_asked_for(own, devices, tokens):
    size = chunk_size(own * devices, devices, tokens)
    assert size % devices == 0
    assert size <= max(tokens, devices)
    count = -(-own * devices // size)
    # No chunk is filled up alone, and where kernels have whole tiles at most one tile is.
    assert (count - 1) * size < own * devices
    if tokens // devices >= 128 and count > 1:
        assert size // devices % 128 == 0
