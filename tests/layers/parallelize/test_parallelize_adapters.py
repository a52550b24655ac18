"""`parallelize` on nnx models that have Flax's adapters."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collective_matmul.layers import Column, ColumnParallelLinear, Row, RowParallelLinear
from collective_matmul.layers.parallelize.parallelize import parallelize
from tests.conftest import MeshFactory
from tests.layers.linear.test_lora import equations
from tests.layers.reference import (
    SHARDED,
    assert_close,
    assert_identical,
    exhaustive,
    outcome,
    pure,
    random,
    unsharded_outcome,
)

FEATURES, HIDDEN, RANK = 12, 16, 3
PLAN = {"up": Column(), "down": Row()}


def wrapped(inputs: int, outputs: int, *, rngs: nnx.Rngs, **options: Any) -> nnx.LoRA:
    base = nnx.Linear(inputs, outputs, rngs=rngs, bias_init=nnx.initializers.normal(1.0))
    return nnx.LoRA(inputs, RANK, outputs, base_module=base, rngs=rngs, **options)


def with_lora(inputs: int, outputs: int, *, rngs: nnx.Rngs, **options: Any) -> nnx.LoRALinear:
    bias_init = nnx.initializers.normal(1.0)
    return nnx.LoRALinear(
        inputs, outputs, lora_rank=RANK, rngs=rngs, bias_init=bias_init, **options
    )


class FeedForward(nnx.Module):
    """Adapters whose B is not zero, as it is at first."""

    def __init__(self, up: Any = with_lora, down: Any = wrapped):
        options: Any = dict(rngs=nnx.Rngs(0), b_initializer=nnx.initializers.normal(0.3))
        self.up = up(FEATURES, HIDDEN, **options)
        self.down = down(HIDDEN, FEATURES, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(x)))


def without_kernels(outcome: Any) -> Any:
    """An outcome without the gradients of kernels, which become zero."""
    y, by_state, by_x = outcome
    flat = jax.tree_util.tree_leaves_with_path(by_state)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in flat}
    return y, {name: leaf for name, leaf in named.items() if "'kernel'" not in name}, by_x


@pytest.mark.parametrize("kinds", [(with_lora, wrapped), exhaustive((wrapped, with_lora))])
@pytest.mark.parametrize("context", ["auto", "local", exhaustive("explicit")])
def test_a_model_with_adapters_computes_the_same(kinds: Any, context: str, make_mesh: MeshFactory):
    x = random(4, 8, FEATURES)
    model = parallelize(FeedForward(*kinds), PLAN, implementation="ring")
    actual = outcome(model, x, context, make_mesh({"data": 2, "tensor": 4}))
    assert_close(
        without_kernels(actual), without_kernels(unsharded_outcome(FeedForward(*kinds), x))
    )
    kernels = jax.tree.leaves(nnx.filter_state(nnx.state(model), nnx.PathContains("kernel")))
    zeros = [leaf for leaf in jax.tree.leaves(actual[1]) if leaf.ndim == 2 and not leaf.any()]
    assert len(zeros) == len(kernels) == 2


def test_parameters_keep_their_values_types_and_paths():
    model = FeedForward()
    assert parallelize(model, {"up*": Column(), "down*": Row()}) is model
    assert_identical(pure(nnx.state(model)), pure(nnx.state(FeedForward())))
    adapters = nnx.state(model, nnx.LoRAParam)
    assert_identical(pure(adapters), pure(nnx.state(FeedForward(), nnx.LoRAParam)))
    assert isinstance(model.up, ColumnParallelLinear) and isinstance(model.down, nnx.LoRA)
    assert isinstance(model.down.base_module, RowParallelLinear)
    specs = pure(nnx.get_partition_spec(adapters))
    P = jax.sharding.PartitionSpec
    assert specs == {
        "up": {"lora": {"lora_a": P(None, None), "lora_b": P(None, "tensor")}},
        "down": {"lora_a": P("tensor", None), "lora_b": P(None, None)},
    }


def test_an_adapter_travels_in_the_collective_of_its_layer(make_mesh: MeshFactory):
    graph, state = nnx.split(parallelize(FeedForward(), PLAN, implementation="xla"))
    run = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x),
        mesh=make_mesh({"data": 2, "tensor": 4}),
        in_specs=(nnx.get_partition_spec(state), SHARDED),
        out_specs=SHARDED,
    )
    arguments = state, jnp.asarray(random(4, 8, FEATURES))
    widths = {
        name: Counter(e.outvars[0].aval.shape[-1] for e in equations(run, arguments, name))
        for name in ("all_gather", "reduce_scatter")
    }
    assert widths == {name: {FEATURES: 1, RANK: 1} for name in widths}


def test_a_kernel_in_another_dtype_is_computed_with_in_that_of_the_call(make_mesh: MeshFactory):
    bf16 = jnp.bfloat16
    options: Any = {"dtype": bf16, "lora_dtype": bf16, "param_dtype": bf16}
    layer = with_lora(FEATURES, HIDDEN, rngs=nnx.Rngs(0), **options)
    layer.lora.lora_b[...] = random(RANK, HIDDEN)
    x = jnp.asarray(random(2, 8, FEATURES))
    expected = layer(x)
    model = parallelize(nnx.List([layer]), {"0": Column()}, mesh=make_mesh({"tensor": 4}))
    actual: Any = model[0]  # pyright: ignore[reportIndexIssue]
    y = actual(x)
    assert y.dtype == expected.dtype == bf16
    # Sums of two roundings to 8 bits of numbers up to 8.
    np.testing.assert_allclose(np.float32(y), np.float32(expected), atol=0.07)


def linear_general(rngs: nnx.Rngs) -> nnx.LoRA:
    base = nnx.LinearGeneral(4, (2, 4), rngs=rngs)
    return nnx.LoRA(4, 2, 8, base_module=base, rngs=rngs)


def convolution(rngs: nnx.Rngs) -> nnx.LoRA:
    return nnx.LoRA(4, 2, 8, base_module=nnx.Conv(4, 8, (3,), rngs=rngs), rngs=rngs)


@pytest.mark.parametrize(
    ("layer", "plan", "sentence"),
    [
        (lambda rngs: nnx.LoRA(4, 2, 8, rngs=rngs), "0", "'0' is an nnx.LoRA without a base"),
        (convolution, "0", "'0.base_module' is a Conv, defined in flax.nnx.nn.linear"),
        (linear_general, "0", "'0' has an adapter of 4 input and 8 output features"),
        (
            lambda rngs: with_lora(4, 8, rngs=rngs, dtype=jnp.bfloat16),
            "0",
            "'0' computes with lora_dtype=None and parameters in float32 beside a linear layer"
            " with dtype=bfloat16",
        ),
        (
            lambda rngs: with_lora(4, 8, rngs=rngs, lora_promote_dtype=lambda a, dtype: a),
            "0",
            "'0' has lora_promote_dtype=",
        ),
        (lambda rngs: with_lora(4, 8, rngs=rngs, precision="highest"), "0", "precision='highest'"),
        (
            lambda rngs: wrapped(4, 8, rngs=rngs),
            "0.base_module",
            "'0.base_module' is a part of '0', a layer with an adapter",
        ),
        (lambda rngs: with_lora(4, 8, rngs=rngs), "*.lora", "'0.lora' is a part of '0'"),
    ],
)
def test_adapters_that_cannot_be_collective_are_refused(layer: Any, plan: str, sentence: str):
    model = nnx.List([layer(nnx.Rngs(0))])
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parallelize(model, {plan: Column()})


@pytest.mark.parametrize("length", [1, 5])
def test_the_gradient_of_what_is_not_gathered_is_summed(
    length: int, make_mesh: MeshFactory
) -> None:
    """A sequence that the axis does not divide, as one token of decoding."""
    x = random(2, length, FEATURES)
    expected = unsharded_outcome(FeedForward(), x)
    model = parallelize(FeedForward(), PLAN, mesh=make_mesh({"tensor": 4}))
    graph, state = nnx.split(model)

    def loss(x: jax.Array) -> jax.Array:
        y = nnx.merge(graph, state)(x)
        return jnp.sum(y * np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape))

    assert_close(jax.jit(jax.grad(loss))(x), expected[-1])
