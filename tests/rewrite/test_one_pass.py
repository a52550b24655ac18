"""A second `overlap` finds nothing that the first one has missed."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul.rewrite import find_sites, overlap
from tests.conftest import MeshFactory
from tests.reference import AXIS
from tests.rewrite import blocks, test_dependencies, test_rewriter
from tests.rewrite.forms import FORMS
from tests.rewrite.programs import Program, gradients_of

PROGRAMS: dict[str, Program] = {
    **{name: form.program for name, form in FORMS.items()},
    **{name: program for name, (program, _) in blocks.programs().items()},
    **{name: test_rewriter.program_of(body) for name, (body, _) in test_rewriter.NESTED.items()},
    **{
        name: test_dependencies.sharded_by_rows(body)
        for name, (body, _) in test_dependencies.SHARED.items()
    },
}
#: Those that JAX can differentiate inside shard_map.
DIFFERENTIABLE = [name for name in PROGRAMS if name not in ("while", "custom_jvp")]


def found_by_a_second_pass(fun: Callable, *arguments: np.ndarray) -> list:
    found = []
    for implementation in ("ring", None):
        once = overlap(fun, implementation=implementation)
        again = find_sites(once, implementation=implementation)(*arguments)
        # A site that keeps its own equations is found as often as it is looked for.
        found += [site for site in again if site.replaced and not site.kept]
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_second_pass_finds_nothing(name: str, make_mesh: MeshFactory) -> None:
    program, mesh = PROGRAMS[name], make_mesh({AXIS: 2})
    arguments = program.arguments()
    for check_vma in (True, False):
        assert not found_by_a_second_pass(program.sharded(mesh, check_vma), *arguments)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_second_pass_finds_nothing_in_gradients(name: str, make_mesh: MeshFactory) -> None:
    program, mesh = PROGRAMS[name], make_mesh({AXIS: 2})
    arguments = program.arguments()
    inside = program.gradients().sharded(mesh, check_vma=False)
    outside = gradients_of(program.sharded(mesh), len(arguments))
    assert not found_by_a_second_pass(inside, *arguments)
    assert not found_by_a_second_pass(outside, *arguments)


# Weights that are sharded over the data too, as for fully sharded data parallelism, and gathered
# where they are used. x [B, S, M] has its batch sharded over the data, its sequence over the axis.


def whole_weight(w: jax.Array, dimension: int) -> jax.Array:
    return lax.all_gather(w, "data", axis=dimension, tiled=True)


def _up(x, up, down):
    return jnp.tanh(blocks.gather(x) @ whole_weight(up, 0)) * jnp.mean(down)


def _up_and_down(x, up, down):
    hidden = jnp.tanh(blocks.gather(x) @ whole_weight(up, 0))
    return blocks.scatter(hidden @ whole_weight(down, 1))


def _tied(x, up, down):
    """Uses a weight twice, as tied embeddings do."""
    w = whole_weight(up, 0)
    return blocks.scatter(jnp.tanh(blocks.gather(x) @ w) @ w.T) * jnp.mean(down)


def _low_rank(x, up, down):
    """Adds a product of two small matrices to a weight."""
    whole, w = blocks.gather(x), whole_weight(up, 0)
    first = whole @ (w + jnp.tanh(w[:, :2]) @ jnp.cos(w[:2]))
    return blocks.scatter(jnp.tanh(first) @ whole_weight(down, 1)) + jnp.mean(jnp.sin(whole))


def _from_rows(x, up, down):
    """The operand of the sum is not a product with a gathered array."""
    return blocks.scatter(jnp.sin(blocks.gather(x))[..., :3] @ whole_weight(down, 1)[:3])


FULLY_SHARDED = {
    "up": _up,
    "up and down": _up_and_down,
    "tied": _tied,
    "low rank": _low_rank,
    "from rows": _from_rows,
}


@pytest.mark.parametrize("order", [1, 2], ids=["gradients", "second order"])
@pytest.mark.parametrize("name", FULLY_SHARDED)
def test_a_second_pass_finds_nothing_with_fully_sharded_weights(
    name: str, order: int, make_mesh: MeshFactory
) -> None:
    fun = FULLY_SHARDED[name]
    for _ in range(order):
        fun = gradients_of(fun, 3)
    specs = P("data", AXIS), P("data", AXIS), P(AXIS, "data")
    mesh = make_mesh({"data": 2, AXIS: 2})
    program = Program(fun, [(2, 8, 4), (4, 6), (6, 4)], specs, specs)
    sharded, arguments = program.sharded(mesh, check_vma=False), program.arguments()
    assert any(site.replaced for site in find_sites(sharded, implementation="ring")(*arguments))
    assert not found_by_a_second_pass(sharded, *arguments)
