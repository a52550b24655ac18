"""Documents in one sequence compute what each computes alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models.attention import causal_attention

from models import attention, rotary
from models.documents import Documents, locate_documents
from tests.models import reference
from tests.models.test_attention import SHAPES
from tests.models.test_llama import (
    BATCH,
    SEQUENCE,
    TOLERANCE,
    model_functions,
    random_params,
    random_tokens,
    sharded_loss_and_grads,
)
from train.mesh import BATCH_AXES

# One document, and documents of one token at the begin, in the middle and at the end. Each length
# is another program of the reference.
LENGTHS = np.array([[8, 0, 0, 0], [3, 5, 0, 0], [1, 3, 1, 3], [5, 1, 1, 1]], np.int32)

located = jax.jit(locate_documents, static_argnums=1)


def test_tokens_know_their_document_and_their_position_in_it():
    documents = located(LENGTHS, SEQUENCE)
    np.testing.assert_array_equal(documents.ids[1], [0, 0, 0, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(documents.positions[1], [0, 1, 2, 0, 1, 2, 3, 4])
    np.testing.assert_array_equal(documents.ids[2], [0, 1, 1, 1, 2, 3, 3, 3])
    np.testing.assert_array_equal(documents.positions[2], [0, 0, 1, 2, 0, 0, 1, 2])
    np.testing.assert_array_equal(documents.positions[0], range(8))


def losses_of_documents_alone(model, params, tokens, targets) -> jax.Array:
    """The sum of the losses of all documents, each computed in a sequence of its own.

    Those of one length are the sequences of a batch.
    """
    total = jnp.zeros(())
    starts = np.cumsum(LENGTHS, axis=1) - LENGTHS
    for length in set(LENGTHS[LENGTHS > 0].tolist()):
        places = [(row, starts[row, i]) for row, i in np.argwhere(length == LENGTHS)]
        alone = (
            np.stack([array[row, start : start + length] for row, start in places])
            for array in (tokens, targets)
        )
        total += jnp.sum(reference.loss(model, params, *alone))
    return total


@pytest.fixture(scope="module")
def expected():
    model, _ = model_functions()

    def mean_loss(params):
        return losses_of_documents_alone(model, params, *random_tokens()) / (BATCH * SEQUENCE)

    _, functions = model_functions()
    return jax.jit(jax.value_and_grad(mean_loss))(random_params(functions))


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((2, 4), dict(overlap="ring", remat="full")),
        ((1, 2), dict(overlap="rewrite", remat="dots")),
        pytest.param((4, 1), dict(overlap="auto"), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_those_of_each_document_alone(expected, make_mesh, sizes, changes):
    _, functions = model_functions(**changes)
    mesh = make_mesh({"data": sizes[0], "fsdp": 1, "tensor": sizes[1]})
    loss_and_grads = sharded_loss_and_grads(functions, mesh)
    loss, grads = loss_and_grads(random_params(functions), *random_tokens(), LENGTHS)
    np.testing.assert_allclose(loss, expected[0], **TOLERANCE)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected[1][name], **TOLERANCE, err_msg=name)
    # The lengths matter: another loss with one document in each sequence.
    one = np.broadcast_to(LENGTHS[0], LENGTHS.shape)
    whole, _ = loss_and_grads(random_params(functions), *random_tokens(), one)
    assert abs(float(whole) - float(loss)) > 1e-2


def test_positions_restart_in_the_model(make_mesh, monkeypatch: pytest.MonkeyPatch):
    """Attention depends on distances alone, so only the positions themselves show it."""
    _, functions = model_functions(overlap="xla")
    shapes = []

    def rotate(x, frequencies, positions=None):
        shapes.append(None if positions is None else positions.shape)
        return x

    monkeypatch.setattr(rotary, "rotate", rotate)
    batch = (*random_tokens(), LENGTHS)
    mesh = make_mesh({"data": 1, "fsdp": 1, "tensor": 2})
    sharded_loss_and_grads(functions, mesh).trace(functions.abstract_params, *batch)
    assert set(shapes) == {(BATCH, SEQUENCE)}


def test_a_document_does_not_see_the_tokens_of_another(make_mesh):
    """Not even in the last bit, in half precision too."""
    _, functions = model_functions(overlap="xla")
    params, (tokens, _) = random_params(functions), random_tokens()
    other = tokens.copy()
    other[1, 3:] = (other[1, 3:] + 7) % 24

    def logits(params, tokens, lengths):
        return functions.merge(params)(tokens, lengths)

    run = jax.jit(
        jax.shard_map(
            logits,
            mesh=make_mesh({"data": 1, "fsdp": 1, "tensor": 2}),
            in_specs=(functions.specs, P(BATCH_AXES), P(BATCH_AXES)),
            out_specs=P(BATCH_AXES, None, "tensor"),
        )
    )
    one, two = (np.asarray(run(params, t, LENGTHS)) for t in (tokens, other))
    np.testing.assert_array_equal(one[1, :3], two[1, :3])
    assert (one[1, 3:] != two[1, 3:]).any(axis=1).all()
    swapped = tokens.copy()
    swapped[1, :3] = other[1, :3] = (tokens[1, :3] + 5) % 24
    three = np.asarray(run(params, swapped, LENGTHS))
    np.testing.assert_array_equal(one[1, 3:], three[1, 3:])


def test_one_document_is_the_whole_sequence(make_mesh):
    _, functions = model_functions(overlap="xla")
    params, batch = random_params(functions), random_tokens()
    mesh = make_mesh({"data": 1, "fsdp": 1, "tensor": 2})
    loss_and_grads = sharded_loss_and_grads(functions, mesh)
    loss = jax.jit(lambda *arguments: loss_and_grads(*arguments)[0])
    whole = np.full((BATCH, 1), SEQUENCE, np.int32)
    # The mask leaves every score as it is; the order of fused sums may differ.
    np.testing.assert_allclose(loss(params, *batch, whole), loss(params, *batch), rtol=1e-6)


# Attention


def test_traces_for_gpus_compute_the_same_values(monkeypatch: pytest.MonkeyPatch):
    keys = jax.random.split(jax.random.key(0), 4)
    *heads, cotangent = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, (*SHAPES, SHAPES[0]), strict=True)
    )
    lengths = np.array([[100, 156, 0], [1, 250, 5]], np.int32)
    documents = located(lengths, SHAPES[0][1])

    def values() -> list[jax.Array]:
        # A function of its own each time, so that it is traced again.
        def compute(*heads: jax.Array) -> list[jax.Array]:
            attend = functools.partial(causal_attention, documents=documents)
            attended, transpose = jax.vjp(attend, *heads)
            return [attended, *transpose(cotangent)]

        return jax.jit(compute)(*heads)

    expected = values()
    monkeypatch.setattr(attention, "_for_gpus", lambda: True)
    for actual, value in zip(values(), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(value))


def packed_as_cudnn(query, key, value, starts, lengths):
    """What `packed_attention` promises, by a mask; rows and gradients not written are NaN."""
    blocks, block = query.shape[:2]
    absolute = (starts + jnp.arange(blocks)[:, None] * block).reshape(-1)
    spans = jnp.where(lengths > 0, lengths, 0).reshape(-1)
    index = jnp.arange(blocks * block)[:, None]
    inside = (index >= absolute[None]) & (index < (absolute + spans)[None])
    written = inside.any(axis=1)[None, :, None, None]
    ids = jnp.where(inside.any(axis=1), jnp.argmax(inside, axis=1), -1)
    mask = (ids[:, None] == ids[None])[None, None]

    @jax.custom_vjp
    def unwritten(x):
        return x

    unwritten.defvjp(lambda x: (x, None), lambda _, c: (jnp.where(written, c, jnp.nan),))
    flat = (unwritten(x.reshape(1, -1, *x.shape[2:])) for x in (query, key, value))
    out = jax.nn.dot_product_attention(*flat, mask=mask, is_causal=True, implementation="xla")
    return jnp.where(written, out, jnp.nan).reshape(query.shape)


def random_lengths(rng: np.random.Generator, sequence: int, kind: str) -> list[int]:
    """Lengths of documents that fill a sequence."""
    draw = {
        "short": lambda: rng.integers(1, 12),
        "mixed": lambda: int(2 ** rng.uniform(0, 9)),
        "edges": lambda: rng.choice([8, 9, 64, 65]),
        "one": lambda: sequence,
    }[kind]
    lengths: list[int] = []
    while sum(lengths) < sequence:
        lengths.append(int(draw()))
    lengths[-1] -= sum(lengths) - sequence
    return lengths


def values(attend, shapes) -> list[jax.Array]:
    """The result and the gradients of an attention."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]

    @jax.jit
    def compute(heads, cotangent):
        attended, transpose = jax.vjp(attend, *heads)
        return [attended, *transpose(cotangent)]

    return compute(heads, jax.random.normal(keys[3], shapes[0]))


@pytest.mark.parametrize("largest_grid", [2**16 - 1, 512])
@pytest.mark.parametrize("kinds", [("one", "mixed"), ("edges", "short")], ids=str)
def test_packs_hold_every_document_once(
    kinds: tuple[str, str], largest_grid: int, monkeypatch: pytest.MonkeyPatch
):
    """512 tokens are cut into blocks of 512, 64 and 8. A small grid takes one sequence a call."""
    sequence, rng = 512, np.random.default_rng(0)
    lists = [random_lengths(rng, sequence, kind) for kind in kinds]
    lengths = np.zeros((2, max(map(len, lists))), np.int32)
    for row, spans in zip(lengths, lists, strict=True):
        row[: len(spans)] = spans
    documents = located(lengths, sequence)
    assert entered(documents, 2 * sequence) == [
        (row * sequence + start, length)
        for row, spans in enumerate(lists)
        for start, length in zip(np.cumsum([0, *spans[:-1]]).tolist(), spans, strict=True)
    ]
    # cuDNN's workspace is proportional to this.
    assert all(pack.starts.shape[1] <= 16 for pack in documents.packs)
    assert np.all(sum(pack.members.astype(int) for pack in documents.packs) == 1)

    monkeypatch.setattr(attention, "packed_attention", packed_as_cudnn)
    monkeypatch.setattr(attention, "_LARGEST_GRID", largest_grid)
    shapes = (2, sequence, 4, 8), (2, sequence, 2, 8), (2, sequence, 2, 8)
    found = values(lambda q, k, v: attention._attend_in_packs(q, k, v, documents.packs), shapes)
    expected = values(lambda q, k, v: causal_attention(q, k, v, documents), shapes)
    for actual, value in zip(found, expected, strict=True):
        # Both are float32 sums of at most 512 terms, in another order.
        np.testing.assert_allclose(actual, value, rtol=1e-4, atol=1e-5)


def entered(documents: Documents, tokens: int) -> list[tuple[int, int]]:
    """Start and length of every document that is in a pack, after a check of its place."""
    found = []
    for pack in documents.packs:
        block = tokens // len(pack.starts)
        starts, lengths = np.asarray(pack.starts), np.asarray(pack.lengths)
        used = lengths > 0
        assert (starts[~used] == -1).all() and (lengths[~used] == -1).all()
        assert (starts[used] < block).all() and (lengths <= block).all()
        assert not (np.diff(used.astype(int)) > 0).any()
        first = (starts + np.arange(len(starts))[:, None] * block)[used]
        assert (np.diff(first) > 0).all()
        found += zip(first.tolist(), lengths[used].tolist(), strict=True)
    return sorted(found)


def test_more_documents_than_a_grid_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "_LARGEST_GRID", 100)
    documents = located(np.full((1, 128), 4, np.int32), 512)
    heads = jnp.zeros((1, 512, 1, 8))
    with pytest.raises(ValueError, match=r"512 tokens with more than 64 documents: .* shorter"):
        attention._attend_in_packs(heads, heads, heads, documents.packs)
