"""`overlap` of programs over Explicit mesh axes: sites and their reasons, values, gradients, types.

Sums of a few float32 products in another order, and their gradients, are compared within the
tolerances of `tests.rewrite.programs`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import explain
from collective_matmul.rewrite import find_sites
from tests.rewrite import explicit_fsdp, explicit_programs
from tests.rewrite.explicit_programs import (
    HIDDEN,
    ROWS,
    UP,
    ExplicitForm,
    explicit_mesh,
    mlp,
)
from tests.rewrite.programs import assert_same, counts, gradients_of, ring, sites

FORMS = explicit_programs.FORMS | explicit_fsdp.FORMS
NEAR_MISSES = explicit_programs.NEAR_MISSES | explicit_fsdp.NEAR_MISSES
#: Each is a part of another form, or one that differs in what gathers: sites of all are counted by
#: default, and values are exhaustive.
PARTS_OF_OTHERS = (
    "mlp",
    "llama_block",
    "fsdp",
    "fsdp_by_types",
    "fsdp_alone_by_types",
    "fsdp_axis_by_types",
)
FILES = ("explicit_programs.py", "explicit_fsdp.py")


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        yield mesh


def value_and_gradients(form: ExplicitForm) -> Callable:
    def both(*arguments: Any) -> tuple:
        return form.fun(*arguments), gradients_of(form.fun, len(arguments))(*arguments)

    return both


@pytest.mark.parametrize(
    "form",
    [
        *(pytest.param(form, id=name) for name, form in FORMS.items()),
        *(pytest.param(form, id=f"not {name}") for name, form in NEAR_MISSES.items()),
    ],
)
def test_sites_are_replaced_or_left_alone_with_a_reason(form: ExplicitForm) -> None:
    with jax.set_mesh(form.mesh):
        arguments = form.arguments(form.mesh)
        found = sites(form.fun, *arguments)
        in_program = counts(ring(form.fun), *arguments)
    assert sum(site.replaced for site in found) == form.replaced, found
    assert all(site.source and site.source.file.endswith(FILES) for site in found)
    left = [re.sub(r"py:\d+", "py", site.reason) for site in found if not site.replaced]
    if form.reason:
        assert any(form.reason in reason for reason in left), left
        assert form.replaced or "shard_map" not in in_program
    else:
        assert len(left) == form.alone[0]


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_sites_too(name: str) -> None:
    form = FORMS[name]
    gradients = gradients_of(form.fun, len(form.operands))
    with jax.set_mesh(form.mesh):
        found = sites(gradients, *form.arguments(form.mesh))
    replaced = [site for site in found if site.replaced]
    assert (len(replaced), len(found) - len(replaced)) == (form.with_gradients, form.alone[1])


@pytest.mark.parametrize(
    "form",
    [
        *(
            pytest.param(
                form, id=name, marks=pytest.mark.exhaustive if name in PARTS_OF_OTHERS else ()
            )
            for name, form in FORMS.items()
        ),
        *(
            pytest.param(form, id=f"not {name}", marks=pytest.mark.exhaustive)
            for name, form in NEAR_MISSES.items()
            if form.replaced
        ),
    ],
)
def test_values_gradients_and_types_stay_the_same(form: ExplicitForm) -> None:
    """Differentiated before and after `overlap`."""
    after = ExplicitForm(ring(form.fun), form.operands, 0, 0)
    funs = [value_and_gradients(form), ring(value_and_gradients(form)), value_and_gradients(after)]
    with jax.set_mesh(form.mesh):
        arguments = form.arguments(form.mesh)
        expected, *others = jax.jit(lambda *args: [fun(*args) for fun in funs])(*arguments)
    for actual in others:
        assert_same(actual, expected)
        types = jax.tree.map(jax.typeof, actual), jax.tree.map(jax.typeof, expected)
        assert types[0] == types[1]


@pytest.mark.parametrize("name", ["fsdp", "fsdp_by_types", "fsdp_rounded", "fsdp_axis"])
def test_weights_are_gathered_in_the_loop_of_their_matmul(name: str) -> None:
    """With XLA, which hides nothing, the compiler gathers each weight once for all its matmuls."""
    form = FORMS[name]
    gradients = gradients_of(form.fun, len(form.operands))
    with jax.set_mesh(form.mesh):
        arguments = form.arguments(form.mesh)
        in_loops = counts(ring(form.fun), *arguments)
        xla = find_sites(gradients, implementation="xla")(*arguments)
        found = sites(gradients, *arguments)
    assert in_loops["all_gather"] == in_loops["reshard"] == 0
    assert not any(site.kept for site in found)
    tensor = [s.decision.site.weight_shards for s in found if s.decision and s.axes == ("tensor",)]
    assert len(tensor) == 4 and None not in tensor
    assert sum(site.replaced for site in xla) == form.with_gradients
    assert sum(site.kept for site in xla) >= 4


@pytest.mark.parametrize("name", ["mlp", "all_reduced", "whole_used_elsewhere", "layers"])
def test_an_axis_of_one_device_is_manual_too(name: str) -> None:
    """Kernels that need all axes manual are possible then."""
    form, mesh = FORMS[name], explicit_mesh((1, 2))
    with jax.set_mesh(mesh):
        arguments = form.arguments(mesh)
        program = str(jax.make_jaxpr(ring(form.fun))(*arguments))
        after = ExplicitForm(ring(form.fun), form.operands, 0, 0)
        funs = [value_and_gradients(form), value_and_gradients(after)]
        actual, expected = jax.jit(lambda *args: [fun(*args) for fun in funs])(*arguments)
    manual = re.findall(r"newly_manual_axes=frozenset\((.*?)\)", program)
    assert manual and all("data" in axes and "tensor" in axes for axes in manual)
    assert_same(actual, expected)


def test_a_program_with_both_shard_map_and_explicit_axes(mesh: Mesh) -> None:
    """A gather in each, and one sum of both products."""
    form = FORMS["mlp"]
    inside = jax.shard_map(
        lambda x, w: jax.lax.all_gather(x, "tensor", axis=1, tiled=True) @ w,
        mesh=mesh,
        in_specs=(ROWS, UP),
        out_specs=HIDDEN,
    )

    def both(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return mlp(x, up, down) + jnp.dot(inside(x, up), down, out_sharding=ROWS)

    arguments = form.arguments(mesh)
    assert [site.replaced for site in sites(both, *arguments)] == [True] * 3
    expected, actual = jax.jit(lambda *args: [both(*args), ring(both)(*args)])(*arguments)
    assert_same(actual, expected)


def test_the_batch_stays_on_its_devices(mesh: Mesh) -> None:
    """The compiler would gather it for rings in a shard_map that leaves its axis to it."""
    text = jax.jit(ring(mlp)).lower(*FORMS["mlp"].arguments(mesh)).compile().as_text()
    assert text is not None and "collective-permute" in text
    assert "all-gather" not in text


def test_terms_of_a_sum_may_differ_over_another_axis(mesh: Mesh) -> None:
    whole, rows = P(None, "tensor"), P("data", "tensor")

    def added(h: jax.Array, other: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(h, w, out_sharding=rows) + jnp.dot(other, w, out_sharding=whole)

    numbers = jnp.cos(jnp.arange(64.0)).reshape(8, 8)
    arguments = [
        jax.device_put(numbers, NamedSharding(mesh, spec)) for spec in (rows, whole, P("tensor"))
    ]
    assert_same(jax.jit(ring(added))(*arguments), jax.jit(added)(*arguments))


def test_types_name_the_mesh() -> None:
    """Without `jax.set_mesh`."""
    mesh, form = explicit_mesh(), NEAR_MISSES["summed_in_float32"]._replace(dtype="float32")
    rows = NamedSharding(mesh, ROWS)

    def scattered(h: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(h, w, out_sharding=rows)

    arguments = form.arguments(mesh)
    expected = jax.jit(scattered)(*arguments)
    actual = jax.jit(ring(scattered, require=1))(*arguments)
    assert_same(actual, expected)
    assert jax.typeof(actual) == jax.typeof(expected)


def test_explain_counts_the_steps_of_loops(mesh: Mesh) -> None:
    form = FORMS["layers"]
    explanation = explain(form.fun)(*form.arguments(mesh))
    assert list(explanation.runs.values()) == [2, 2]
    counted = "2 plain gathers and sums: 2 sites, 4 runs (require counts the sites); pass the"
    assert counted in str(explanation)
