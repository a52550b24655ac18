"""Sites inside calls, loops, branches and functions with custom gradients, at any depth."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, jaxprs_in_params
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.conftest import MeshFactory
from tests.reference import AXIS
from tests.rewrite.programs import (
    COLUMNS,
    CONTRACTED,
    ROWS,
    Program,
    assert_same,
    collectives,
    counts,
    gradients_of,
    ring,
    sites,
)
from tests.rewrite.simulator import simulated_or_compiled

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({AXIS: 2})


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    whole = lax.all_gather(x, AXIS, axis=1, tiled=True)
    return lax.psum_scatter(jnp.tanh(whole @ up) @ down, AXIS, scatter_dimension=1, tiled=True)


def scanned(x, up, down):
    def layer(x, scale):
        return x + mlp(x, up * scale, down), None

    return lax.scan(layer, x, jnp.array([1.0, 2.0, 3.0], x.dtype), unroll=1, reverse=True)[0]


def repeated(x, up, down):
    def layer(state):
        step, x = state
        return step + 1, mlp(x, up, down)

    return lax.while_loop(lambda state: state[0] < 2, layer, (0, x))[1]


def branched(x, up, down):
    return lax.cond(up[0, 0] > -1e9, lambda x: mlp(x, up, down), lambda x: 2 * x, x)


@jax.custom_vjp
def custom(x, up, down):
    return mlp(x, up, down)


def _custom_forward(x, up, down):
    return mlp(x, up, down), (x, up, down)


def _custom_backward(residuals, dy):
    return jax.vjp(mlp, *residuals)[1](dy)


custom.defvjp(_custom_forward, _custom_backward)


@jax.custom_jvp
def custom_forward_mode(x, up, down):
    return mlp(x, up, down)


@custom_forward_mode.defjvp
def _custom_jvp(primals, tangents):
    return jax.jvp(mlp, primals, tangents)


gather = jax.jit(lambda x: lax.all_gather(x, AXIS, axis=1, tiled=True))
scatter = jax.jit(lambda y: lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True))
multiply = jax.jit(jnp.matmul)


def jitted_gather(x, up, down):
    return scatter(jnp.tanh(gather(x) @ up) @ down)


def jitted_matmul(x, up, down):
    whole = lax.all_gather(x, AXIS, axis=1, tiled=True)
    y = multiply(jnp.tanh(multiply(whole, up)), down)
    return lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)


def jitted_both(x, up, down):
    twice = jax.jit(lambda x, w: multiply(jax.jit(gather)(x), w))
    return scatter(multiply(jnp.tanh(twice(x, up)), down)) + scatter(multiply(twice(x, up), down))


def twice_nested(x, up, down):
    return jax.jit(jax.checkpoint(scanned))(x, up, down) + jax.checkpoint(jax.jit(custom))(
        x, up, down
    )


def checkpointed_matmuls(x, up, down):
    whole = lax.all_gather(x, AXIS, axis=1, tiled=True)
    y = jax.checkpoint(lambda whole: jnp.tanh(jnp.tanh(whole @ up) @ up.T @ up) @ down)(whole)
    return lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)


NESTED: dict[str, tuple[Callable, int]] = {
    "jit": (jax.jit(mlp), 2),
    "checkpoint": (jax.checkpoint(mlp), 2),
    "matmuls in a checkpoint": (checkpointed_matmuls, 2),
    "checkpoint, dots": (
        functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)(mlp),
        2,
    ),
    "scan": (scanned, 2),
    "while": (repeated, 2),
    "cond": (branched, 2),
    "custom_vjp": (custom, 2),
    "custom_jvp": (custom_forward_mode, 2),
    "jitted gather and scatter": (jitted_gather, 2),
    "jitted matmuls": (jitted_matmul, 2),
    "jitted both": (jitted_both, 4),
    "all": (twice_nested, 4),
}


def program_of(body: Callable) -> Program:
    return Program(body, [(2, 4, 6), (6, 4), (4, 6)], [ROWS, COLUMNS, CONTRACTED], P(None, AXIS))


every_nested = pytest.mark.parametrize("name", NESTED)


@every_nested
def test_sites_inside_calls_loops_and_branches_are_replaced(name: str, mesh: Mesh) -> None:
    body, expected = NESTED[name]
    program = program_of(body)
    fun, arguments = program.sharded(mesh), program.arguments()
    found = sites(fun, *arguments)
    assert [site.replaced for site in found] == [True] * expected, found
    assert collectives(ring(fun), *arguments) == {}
    assert_same(jax.jit(ring(fun))(*arguments), jax.jit(fun)(*arguments))


@pytest.mark.parametrize("name", [name for name in NESTED if name not in ("while", "custom_jvp")])
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@simulated_or_compiled
def test_gradients_of_overlap_and_overlap_of_gradients_agree(
    name: str, check_vma: bool, run: Callable, mesh: Mesh
) -> None:
    """Both agree with the gradients of the function itself."""
    program = program_of(NESTED[name][0])
    fun, arguments = program.sharded(mesh, check_vma), program.arguments()
    gradients = gradients_of(fun, 3)
    after, before = gradients_of(ring(fun), 3), ring(gradients)
    assert collectives(after, *arguments) == {}
    assert collectives(before, *arguments) == {}
    results = run(lambda *args: [fun(*args) for fun in (gradients, after, before)])(*arguments)
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def _gathered_outside(inside: Callable) -> Callable:
    """A body in which `inside` gets the gathered array from outside."""

    def body(x, up, down):
        return inside(lax.all_gather(x, AXIS, axis=1, tiled=True), up)

    return body


def _scans(whole, up):
    return lax.scan(lambda _, w: (_, whole @ w), 0.0, up[None])[1][0]


def _repeats(whole, up):
    return lax.fori_loop(
        0, 2, lambda _, y: y + whole @ up, jnp.zeros((2, 4, up.shape[1]), up.dtype)
    )


def _branches(whole, up):
    return lax.cond(
        up[0, 0] > 0, jnp.matmul, lambda whole, up: whole[..., : up.shape[1]], whole, up
    )


@jax.custom_vjp
def _with_gradients(whole, up):
    return whole @ up


_with_gradients.defvjp(lambda x, w: (x @ w, (x, w)), lambda xw, dy: (dy @ xw[1].T, xw[1]))


@jax.custom_jvp
def _with_tangents(whole, up):
    return whole @ up


_with_tangents.defjvps(lambda dx, y, x, w: dx @ w, lambda dw, y, x, w: x @ dw)


def _keeps(whole, up):
    return jax.checkpoint(jnp.matmul)(whole, up) * jnp.mean(whole)


def _solves(x, up, down):
    """The matrix of a linear solver is a function, which must stay linear."""

    def product(v):
        return lax.all_gather(v, AXIS, axis=1, tiled=True)[:, : v.shape[1]] @ jnp.eye(
            6, dtype=v.dtype
        )

    return lax.custom_linear_solve(product, x, lambda _, b: b, lambda _, b: b)


_A_LOOP, _ITS_OWN = ", which would gather in every step", "a function with gradients of its"
BORDERS: dict[str, tuple[Callable, str]] = {
    "scan": (_gathered_outside(_scans), _A_LOOP),
    "while": (_gathered_outside(_repeats), _A_LOOP),
    "cond": (_gathered_outside(_branches), ", which may not be taken"),
    "custom_vjp": (_gathered_outside(_with_gradients), _ITS_OWN),
    "custom_jvp": (_gathered_outside(_with_tangents), _ITS_OWN),
    "checkpoint": (_gathered_outside(_keeps), "the gathered array"),
    "linear solver": (_solves, "which overlap does not rewrite"),
}


@pytest.mark.parametrize("name", BORDERS)
def test_gathers_that_would_cross_a_border_are_left_alone(name: str, mesh: Mesh) -> None:
    body, reason = BORDERS[name]
    program = program_of(body)
    fun, arguments = program.sharded(mesh, check_vma=False), program.arguments()
    found = sites(fun, *arguments)
    assert found and all(reason in site.reason for site in found), found
    assert counts(ring(fun), *arguments) == counts(fun, *arguments)


def _equations_inside(jaxpr: Any) -> list[JaxprEqn]:
    """The equations of the body of the shard_map, which `overlap` may have put into a call."""
    (equation,) = getattr(jaxpr, "jaxpr", jaxpr).eqns
    (inner,) = jaxprs_in_params(equation.params)
    return inner.eqns if equation.primitive.name == "shard_map" else _equations_inside(inner)


def test_equations_without_a_site_are_unchanged(mesh: Mesh) -> None:
    """Their jaxprs are the same; an equation with a site differs in its jaxpr only."""

    def body(x, up, down):
        y = jax.jit(jnp.sin)(x)
        y = lax.scan(lambda y, scale: (y * scale, None), y, jnp.arange(3, dtype=y.dtype), unroll=3)[
            0
        ]
        return jax.jit(mlp)(y, up, down)

    program = program_of(body)
    arguments = program.arguments()
    plain = jax.make_jaxpr(program.sharded(mesh))(*arguments)
    rewritten = jax.make_jaxpr(ring(program.sharded(mesh)))(*arguments)
    for before, after in zip(*map(_equations_inside, (plain, rewritten)), strict=True):
        assert before.primitive is after.primitive
        assert before.source_info.traceback is not None
        assert str(before.source_info.name_stack) == str(after.source_info.name_stack)
        if before.primitive.name != "jit" or before.params["name"] != "mlp":
            assert str(before) == str(after)
        same = set(before.params) - {"jaxpr"}
        assert all(str(before.params[name]) == str(after.params[name]) for name in same)


def test_a_call_is_inlined_only_if_that_adds_a_site(mesh: Mesh) -> None:
    def body(x, up, down):
        return jax.jit(jnp.sin)(lax.all_gather(x, AXIS, axis=1, tiled=True))

    program = Program(body, [(2, 4, 6), (6, 4), (4, 6)], [ROWS, COLUMNS, CONTRACTED], P(AXIS))
    fun, arguments = program.sharded(mesh), program.arguments()
    (site,) = sites(fun, *arguments)
    assert re.match(r"sin\(\) at test_rewriter.py:\d+ uses the gathered array; ", site.reason)
    assert "name=sin" in str(jax.make_jaxpr(ring(fun))(*arguments))
    assert counts(ring(fun), *arguments) == counts(fun, *arguments)


def test_name_scopes_and_checkpoint_names_are_kept(mesh: Mesh) -> None:
    def body(x, up, down):
        with jax.named_scope("block"):
            return checkpoint_name(mlp(x, up, down), "out")

    program = program_of(body)
    fun, arguments = ring(program.sharded(mesh)), program.arguments()
    assert counts(fun, *arguments)["name"] == 1
    text = jax.jit(fun).lower(*arguments).as_text(debug_info=True)
    assert "block/collective_matmul.overlap" in text
    assert "test_rewriter.py" in text


def test_effects_are_kept(mesh: Mesh) -> None:
    """Includes effects on the gathered array, which the ring keeps."""

    def body(x, up, down):
        whole = lax.all_gather(x, AXIS, axis=1, tiled=True)
        jax.debug.callback(lambda mean: None, jnp.mean(whole))
        return lax.psum_scatter(whole @ up @ down, AXIS, scatter_dimension=1, tiled=True)

    program = program_of(body)
    fun, arguments = program.sharded(mesh), program.arguments()
    plain, rewritten = (jax.make_jaxpr(f)(*arguments) for f in (fun, ring(fun, require=2)))
    assert plain.effects == rewritten.effects != set()
    assert counts(ring(fun), *arguments)["debug_callback"] == 1


def test_sites_in_nested_shard_maps_are_replaced(make_mesh: MeshFactory) -> None:
    """The outer shard_map is over the data, the inner one over the tensor axis."""
    mesh = make_mesh({"data": 2, AXIS: 2})

    def outer(x, up, down):
        inner = jax.shard_map(
            mlp,
            in_specs=(ROWS, COLUMNS, CONTRACTED),
            out_specs=P(None, AXIS),
            axis_names={AXIS},
        )
        return inner(x, up, down)

    fun = jax.shard_map(
        outer, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), axis_names={"data"}
    )
    arguments = program_of(mlp).arguments()
    assert [site.replaced for site in sites(jax.jit(fun), *arguments)] == [True, True]
    assert_same(jax.jit(ring(fun))(*arguments), jax.jit(fun)(*arguments))


def test_collectives_outside_of_shard_map_are_not_reported(mesh: Mesh) -> None:
    """Axes of vmap are not devices."""
    fun = jax.vmap(lambda x, w: lax.all_gather(x, "i") @ w, axis_name="i")
    assert sites(fun, np.ones((2, 3), np.float32), np.ones((2, 3, 2), np.float32)) == []
