"""The benchmark of Llama blocks on simulated devices."""

from __future__ import annotations

import functools

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from benchmarks import block
from collective_matmul import layers
from models.config import debug
from models.llama import Block
from tests.benchmarks.compiling import (
    assert_close,
    assert_whole_and_silent,
    compiled,
)


@pytest.fixture(scope="module")
def mesh(make_mesh):
    return make_mesh({"tensor": 4})


def building(direction):
    return functools.partial(block.build, block.BlockCase("debug", 16, direction, layers=1))


def as_state(weights):
    """A block's weights as the model names and shapes them."""
    config = debug()
    heads = (-1, config.head_dim)
    return {
        "attention_norm": {"scale": jax.numpy.ones(config.features)},
        "attention": {
            "projection": {
                name: {"kernel": getattr(weights, name).reshape(config.features, *heads)}
                for name in ("query", "key", "value")
            },
            "output": {"kernel": weights.output.reshape(*heads, config.features)},
        },
        "feed_forward_norm": {"scale": jax.numpy.ones(config.features)},
        "feed_forward": {
            name: {"kernel": getattr(weights, name)} for name in ("gate", "up", "down")
        },
    }


def reference(make_mesh, x, weights, cotangent):
    """By the model's own block, on one device."""
    graph, _ = nnx.split(
        nnx.eval_shape(
            lambda: Block(debug(), layers, axis_name="tensor", dtype="float32", rngs=nnx.Rngs(0))
        )
    )

    def forward(x, weights):
        x = x[None]
        for block_weights in weights:
            x = nnx.merge(graph, nnx.State(as_state(block_weights)))(x)
        return x[0]

    mesh = make_mesh({"tensor": 1})

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    def forward_backward(x, weights, cotangent):
        result, vjp = jax.vjp(forward, x, weights)
        return result, *vjp(cotangent)

    return jax.jit(forward_backward)(*jax.device_get((x, weights, cotangent)))


@pytest.mark.parametrize("name", ["baseline", "ring"])
def test_every_contender_computes_the_models_block_and_its_gradients(mesh, make_mesh, name):
    run, arguments = compiled(building("forward_backward"), mesh, name)
    expected = reference(make_mesh, *arguments)
    jax.tree.map(assert_close, jax.device_get(run(*arguments)), expected)


def test_ceiling_keeps_every_matmul_whole_and_communicates_nothing(mesh):
    ceiling, _ = compiled(building("forward_backward"), mesh, "ceiling")
    baseline, _ = compiled(building("forward_backward"), mesh, "baseline")
    # Seven weights; scores and values of the attention.
    assert_whole_and_silent(ceiling, baseline, 3 * (7 + 2))
