"""Attention traced for GPUs computes the same values and saves no more than on GPUs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P
from models.attention import causal_attention

from models import attention

SHAPES = (2, 256, 8, 64), (2, 256, 2, 64), (2, 256, 2, 64)


def residual_bytes(device: AbstractDevice | None, dtype: Any) -> int:
    """The bytes that the forward saves for the backward, traced for a device that may be absent."""
    saved = 0

    def forward(*heads):
        nonlocal saved
        attended, transpose = jax.vjp(causal_attention, *heads)
        leaves = {id(leaf): leaf for leaf in jax.tree.leaves(transpose)}.values()
        saved = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        return attended

    mesh = AbstractMesh((1,), ("tensor",), abstract_device=device)
    traced = jax.shard_map(forward, mesh=mesh, in_specs=P(), out_specs=P())
    jax.eval_shape(traced, *(jax.ShapeDtypeStruct(shape, dtype) for shape in SHAPES))
    return saved


def test_scores_are_not_saved_where_cudnn_does_not_save_them() -> None:
    h200 = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    heads = 2 * sum(map(math.prod, SHAPES))
    batch, sequence, count, _ = SHAPES[0]
    result, log_sum_exp = 2 * math.prod(SHAPES[0]), 4 * batch * sequence * count
    assert residual_bytes(h200, jnp.bfloat16) == heads + result + log_sum_exp
    scores = batch * count * sequence**2
    assert residual_bytes(None, jnp.bfloat16) > 2 * scores
    # cuDNN supports half precision only.
    assert residual_bytes(h200, jnp.float32) > 4 * scores


def test_traces_for_gpus_compute_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    *heads, cotangent = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, (*SHAPES, SHAPES[0]), strict=True)
    )

    def values() -> list[jax.Array]:
        # A function of its own each time, so that it is traced again.
        def compute(*heads: jax.Array) -> list[jax.Array]:
            attended, transpose = jax.vjp(causal_attention, *heads)
            return [attended, *transpose(cotangent)]

        return jax.jit(compute)(*heads)

    expected = values()
    monkeypatch.setattr(attention, "_for_gpus", lambda: True)
    for actual, value in zip(values(), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(value))
