"""Documents in one sequence compute what each computes alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from models.layers import rotary
from models.layers.documents import locate_documents
from tests.models import reference
from tests.models.test_llama import (
    BATCH,
    SEQUENCE,
    TOLERANCE,
    model_functions,
    random_params,
    random_tokens,
    sharded_loss_and_grads,
)
from train.parallel.mesh import BATCH_AXES

# One document, and documents of one token at the begin, in the middle and at the end. Each length
# is another program of the reference.
LENGTHS = np.array([[8, 0, 0, 0], [3, 5, 0, 0], [1, 3, 1, 3], [5, 1, 1, 1]], np.int32)

located = jax.jit(locate_documents, static_argnums=1)


def test_tokens_know_their_document_and_their_position_in_it():
    documents = located(LENGTHS, SEQUENCE)
    np.testing.assert_array_equal(documents.segments.ids[1], [0, 0, 0, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(documents.positions[1], [0, 1, 2, 0, 1, 2, 3, 4])
    np.testing.assert_array_equal(documents.segments.ids[2], [0, 1, 1, 1, 2, 3, 3, 3])
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

    def rotate(x, frequencies, positions=None, *, factor):
        assert factor == 1
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
