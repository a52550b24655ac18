"""The sharded Llama equals an independent one without parallelism."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from models.config import LlamaConfig, RotaryScaling
from models.layers import rotary
from models.llama import Llama
from tests.models import reference
from train.config.config import ONE_DEVICE, Config
from train.parallel.mesh import BATCH_AXES, make_abstract_mesh
from train.parallel.model import ModelFunctions

SMALL = LlamaConfig(
    vocabulary_size=24,
    num_layers=2,
    features=16,
    hidden_features=24,
    num_heads=8,
    num_key_value_heads=4,
    head_dim=4,
    # Short enough for all three branches of the scaling.
    rotary_scaling=RotaryScaling(factor=8.0, original_context=16),
)
BATCH, SEQUENCE = 4, 8

# Both sides are float32. The order of sums of at most a hundred terms of order one differs, by
# about 1e-6 each, through two blocks.
TOLERANCE: dict[str, Any] = dict(rtol=2e-4, atol=2e-5)


def model_functions(**changes) -> tuple[LlamaConfig, ModelFunctions]:
    of_model = {f.name for f in dataclasses.fields(SMALL)} & changes.keys()
    model = dataclasses.replace(SMALL, **{name: changes.pop(name) for name in of_model})
    return model, ModelFunctions(Config(model=model, compute_dtype="float32", **changes))


def random_params(functions: ModelFunctions) -> dict[str, np.ndarray]:
    """Parameters that are larger than the initial ones, so that every part of the model matters."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.normal(size=leaf.shape) * 0.4 + ("scale" in name)).astype(np.float32)
        for name, leaf in functions.abstract_params.items()
    }


def random_tokens() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, SMALL.vocabulary_size, size=(2, BATCH, SEQUENCE), dtype=np.int32)
    return tokens[0], tokens[1]


def sharded_loss_and_grads(functions: ModelFunctions, mesh):
    """A function that returns the mean loss and the gradients, global, from one shard_map."""

    def local(params, tokens, targets, *document_lengths):
        def loss(params):
            losses = functions.merge(params).loss(tokens, targets, *document_lengths)
            total = jnp.sum(losses)
            return jax.lax.psum(total, BATCH_AXES) / (BATCH * SEQUENCE)

        return jax.value_and_grad(loss)(params)

    @jax.jit
    def sharded(params, *batch):
        specs = functions.specs, *[P(BATCH_AXES) for _ in batch]
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), functions.specs))(
            params, *batch
        )

    return sharded


@cache
def unsharded_loss_and_grads(model: LlamaConfig) -> Any:
    """A function that returns the mean loss and the gradients of the reference."""
    _, functions = model_functions(tied_head=model.tied_head)

    def loss(params):
        return jnp.mean(reference.loss(model, params, *random_tokens()))

    return jax.jit(jax.value_and_grad(loss))(random_params(functions))


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        # tests/models/families/test_families.py has models on rings of 4 devices.
        pytest.param((1, 4), dict(overlap="ring"), marks=pytest.mark.exhaustive),
        ((2, 4), dict(overlap="xla", remat="dots")),
        ((2, 2), dict(overlap="ring", remat="full")),
        ((1, 2), dict(overlap="ring", tied_head=True, remat="dots")),
        ((2, 2), dict(overlap="ring", remat="projections")),
        ((1, 1), dict(overlap="auto")),
        ((2, 2), dict(overlap="rewrite", tied_head=True, remat="dots")),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_those_of_the_unsharded_model(make_mesh, sizes, changes):
    model, functions = model_functions(**changes)
    mesh = make_mesh({"data": sizes[0], "fsdp": 1, "tensor": sizes[1]})
    sharded = sharded_loss_and_grads(functions, mesh)
    loss, grads = sharded(random_params(functions), *random_tokens())

    expected, expected_grads = unsharded_loss_and_grads(model)
    np.testing.assert_allclose(loss, expected, **TOLERANCE)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected_grads[name], **TOLERANCE, err_msg=name)


@pytest.mark.parametrize("changes", [{}, {"tied_head": True}, {"projection_bias": True}], ids=str)
def test_plain_layers_have_the_parameters_of_the_collective_ones(changes):
    _, plain = model_functions(overlap="rewrite", **changes)
    _, collective = model_functions(overlap="ring", **changes)
    assert plain.abstract_params == collective.abstract_params
    assert plain.specs == collective.specs
    initial, expected = jax.jit(plain.init)(), jax.jit(collective.init)()
    for name in expected:
        np.testing.assert_array_equal(initial[name], expected[name], err_msg=name)


def test_logits_stay_sharded_over_the_vocabulary(make_mesh):
    model, functions = model_functions(overlap="ring")
    params, (tokens, _) = random_params(functions), random_tokens()
    shapes = []

    def local(params, tokens):
        logits = functions.merge(params)(tokens)
        shapes.append(logits.shape)
        return logits

    gathered = jax.jit(
        jax.shard_map(
            local,
            mesh=make_mesh({"data": 1, "fsdp": 1, "tensor": 4}),
            in_specs=(functions.specs, P(BATCH_AXES)),
            out_specs=P(BATCH_AXES, None, "tensor"),
        )
    )(params, tokens)
    assert shapes == [(BATCH, SEQUENCE, model.vocabulary_size // 4)]
    expected = jax.jit(lambda params: reference.logits(model, params, tokens))(params)
    np.testing.assert_allclose(gathered, expected, **TOLERANCE)


def test_no_array_of_the_step_holds_all_the_logits(make_mesh):
    """No intermediate of forward or backward has the vocabulary's full width."""
    _, functions = model_functions(overlap="ring")
    mesh = make_mesh({"data": 1, "fsdp": 1, "tensor": 4})
    loss_and_grads = sharded_loss_and_grads(functions, mesh)
    text = (
        loss_and_grads.lower(random_params(functions), *random_tokens()).compile().as_text() or ""
    )
    assert f"[{BATCH},{SEQUENCE},{SMALL.vocabulary_size // 4}]" in text
    assert f"[{BATCH},{SEQUENCE},{SMALL.vocabulary_size}]" not in text


def kept_by(fun, *shapes: tuple[int, ...]) -> list[tuple[str, int]]:
    """Dtypes and sizes of the larger arrays that a backward keeps of a function of bfloat16."""
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    kept = jax.eval_shape(lambda *xs: jax.tree.leaves(jax.vjp(fun, *xs)[1]), *operands)
    return sorted((leaf.dtype.name, leaf.size) for leaf in kept if leaf.size > SMALL.features)


def test_a_backward_keeps_no_elementwise_results(make_mesh):
    """A scan over blocks would store them, and an unrolled program computes them again for less."""
    model, functions = SMALL, ModelFunctions(Config(model=SMALL, overlap="xla"))
    params = {name: jnp.asarray(leaf) for name, leaf in random_params(functions).items()}
    block = functions.merge(params).layers[0]
    rows, x = BATCH * SEQUENCE, (BATCH, SEQUENCE, model.features)
    hidden = rows * model.hidden_features

    assert kept_by(block.attention_norm, x) == [
        ("bfloat16", rows * model.features),
        ("float32", rows),
    ]
    heads = (BATCH, SEQUENCE, model.num_heads, model.head_dim)
    assert kept_by(lambda q: rotary.rotate(q, rotary.frequencies(model)), heads) == []

    mesh, spec = make_mesh({"tensor": 1}), P(None, "tensor")
    feed_forward = jax.shard_map(block.feed_forward, mesh=mesh, in_specs=spec, out_specs=spec)
    of_activations = [kept for kept in kept_by(feed_forward, x) if kept[1] >= rows * model.features]
    # The operand of gate and up, their results, and the operand of down.
    assert of_activations == [("bfloat16", rows * model.features)] + 3 * [("bfloat16", hidden)]


def test_remat_dots_recomputes_less_than_full():
    """Counts the matmuls of forward and backward together, which include the recomputed ones."""

    def dots(remat: str) -> int:
        _, functions = model_functions(overlap="xla", remat=remat)
        step = sharded_loss_and_grads(functions, make_abstract_mesh(ONE_DEVICE))
        tokens = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32)
        text = step.trace(functions.abstract_params, tokens, tokens).lower().as_text()
        return text.count("stablehlo.dot_general")

    # Seven projections of one block, traced once and called by both; attention has two more.
    assert dots("none") == dots("dots") < dots("full")
    assert dots("full") - dots("dots") >= 6
    assert dots("projections") - dots("dots") == 2  # Gate and up.
    # The two matmuls of attention. Its backward computes their operands again.
    assert dots("full") - dots("attention") == 2


def test_unknown_remat_is_refused():
    from flax import nnx

    with pytest.raises(
        ValueError, match=r"remat='some': expected one of none, dots, projections, attention, full"
    ):
        Llama(SMALL, remat="some", rngs=nnx.Rngs(0))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"loss_chunk": 0}, "loss_chunk=0: expected at least 1 token, or None for all"),
        ({"fp8": "mxfp8"}, "fp8='mxfp8': expected None"),
        ({"fp8": "rowwise", "implementation": "plain"}, "fp8='rowwise': the layers of implementat"),
        (
            {"fp8": "rowwise", "fp8_layers": ("mlp",)},
            "fp8_layers='mlp': matches none of the",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], sentence: str):
    from flax import nnx

    with pytest.raises(ValueError, match=sentence):
        nnx.eval_shape(lambda: Llama(SMALL, rngs=nnx.Rngs(0), **options))
