"""`overlap` as a transformation: combined with others and with itself, and its refusals."""

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
from jax.sharding import PartitionSpec as P

import collective_matmul
from collective_matmul import all_gather_matmul, explain, overlap, overlap_jit
from collective_matmul.log import warn_once
from collective_matmul.rewrite import find_sites
from collective_matmul.rewrite.replace import site_choice
from tests.conftest import MeshFactory
from tests.reference import AXIS
from tests.rewrite.blocks import mlp, programs
from tests.rewrite.forms import FORMS
from tests.rewrite.programs import (
    COLUMNS,
    ROWS,
    Program,
    assert_same,
    collectives,
    counts,
    gathering,
    gradients_of,
    loss_of,
    ring,
    sites,
)

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

xla_and_ring = pytest.mark.parametrize("implementation", ["xla", "ring"])


@pytest.fixture
def block(make_mesh: MeshFactory) -> tuple[Callable, list[np.ndarray]]:
    program, _ = programs()["mlp"]
    return program.sharded(make_mesh({AXIS: 2})), program.arguments()


@xla_and_ring
def test_overlap_of_overlap_changes_nothing(implementation: str, block: tuple) -> None:
    """Also for gradients, before or after. The gathers of the xla backend are not sites again."""
    fun, arguments = block
    once = overlap(fun, implementation=implementation)
    for rewritten in (once, gradients_of(once, 3)):
        assert find_sites(rewritten)(*arguments) == []
        again = overlap(rewritten, implementation="ring")
        assert counts(again, *arguments) == counts(rewritten, *arguments)


@xla_and_ring
def test_ops_in_the_program_are_left_alone(implementation: str, make_mesh: MeshFactory) -> None:
    program = Program(
        lambda x, w: all_gather_matmul(
            x, w, AXIS, gather_dimension=1, implementation=implementation
        ),
        [(2, 4, 4), (4, 6)],
        [ROWS, COLUMNS],
        P(None, None, AXIS),
    )
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    for used in (fun, gradients_of(fun, 2)):
        assert sites(used, *arguments) == []
        assert counts(ring(used), *arguments) == counts(used, *arguments)


def overlap_of_vmap(fun: Callable, xs: Any, *weights: Any) -> Any:
    return ring(jax.vmap(fun, (0, None, None)))(xs, *weights)


def vmap_of_overlap(fun: Callable, xs: Any, *weights: Any) -> Any:
    return jax.vmap(ring(fun), (0, None, None))(xs, *weights)


@pytest.mark.parametrize("vmapped", [overlap_of_vmap, vmap_of_overlap])
def test_vmap_inside_and_outside_of_overlap(vmapped: Callable, block: tuple) -> None:
    fun, (x, *weights) = block
    xs = np.stack([x, 2 * x, -x])
    assert collectives(lambda *args: vmapped(fun, *args), xs, *weights) == {}

    def both(xs: Any, *weights: Any) -> tuple:
        return vmapped(fun, xs, *weights), jax.vmap(fun, (0, None, None))(xs, *weights)

    assert_same(*jax.jit(both)(xs, *weights))


def test_vmap_over_weights_is_replaced_by_an_einsum(make_mesh: MeshFactory) -> None:
    """A matmul with a batch of weights has batch dimensions."""
    program = FORMS["gather: plain"].program
    fun, (x, w) = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    fun, arguments = jax.vmap(fun), (np.stack([x, -x]), np.stack([w, 2 * w]))
    assert [site.replaced for site in sites(fun, *arguments)] == [True]
    assert_same(jax.jit(ring(fun))(*arguments), jax.jit(fun)(*arguments))


def test_arguments_of_any_type_are_passed_on(block: tuple) -> None:
    """Includes other types than arrays, keywords, pytrees, and traced closures."""
    fun, (x, up, down) = block

    def scaled(x: Any, weights: Any, name: str, *, scale: Any, count: int) -> Any:
        assert (name, count) == ("name", 2) and isinstance(count, int)
        return {"y": [scale * fun(x, *weights)] * count, "none": None}

    def call(x: Any) -> Any:
        return ring(scaled)(x, (up, down), "name", scale=2.0, count=2)

    result = jax.jit(call)(x)
    assert result["none"] is None
    assert_same(result["y"], [2 * jax.jit(fun)(x, up, down)] * 2)

    def closing_over(x: Any, up: Any) -> Any:
        return loss_of(ring(lambda x: fun(x, up, down)))(x)

    expected = jax.grad(lambda x, up: loss_of(fun)(x, up, down), (0, 1))
    assert_same(jax.jit(jax.grad(closing_over, (0, 1)))(x, up), jax.jit(expected)(x, up))


def test_overlap_runs_without_jit(make_mesh: MeshFactory) -> None:
    """Includes a ring that keeps the gathered array for another use."""

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        whole = lax.all_gather(x, AXIS, axis=1, tiled=True)
        return jax.numpy.tanh(whole).sum() * (whole @ w)

    program = gathering(body)
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    assert_same(ring(fun, require=1)(*arguments), jax.jit(fun)(*arguments))


def test_sites_are_required_of_a_function_without_collectives(make_mesh: MeshFactory) -> None:
    fun = jax.shard_map(jnp.sin, mesh=make_mesh({AXIS: 2}), in_specs=P(AXIS), out_specs=P(AXIS))
    with pytest.raises(ValueError, match="require=1: the function has no gathers and no sums"):
        overlap(fun, require=1)(np.ones(4, "float32"))
    assert overlap(fun, require=0)(np.ones(4, "float32")).shape == (4,)


@pytest.mark.parametrize("transform", [overlap, overlap_jit, explain])
def test_what_is_no_function_is_refused_at_once(transform: Callable) -> None:
    with pytest.raises(TypeError, match="fun=3: expected a function"):
        transform(3)


def test_fewer_sites_than_required_are_refused_with_a_table(
    block: tuple, make_mesh: MeshFactory
) -> None:
    fun, arguments = block
    assert jax.eval_shape(overlap(fun, require=2), *arguments).shape == arguments[0].shape
    program = FORMS["scatter: bias before"].program
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    with pytest.raises(ValueError, match="require=1: only 0 ") as error:
        overlap(fun, require=1)(*arguments)
    message = " ".join(str(error.value).split())
    assert all(
        text in message
        for text in ("forms.py", "reduce_scatter", "float32 [2,4,4] over tensor", "left alone")
    )
    assert "something is added to its matmul" in message


def test_where_every_site_is_replaced_no_table_follows(block: tuple) -> None:
    fun, arguments = block
    with pytest.raises(ValueError, match=r"only 2 of 2 .* require at most 2$"):
        overlap(fun, require=3)(*arguments)


@pytest.mark.parametrize(
    "keywords", [{"require": -1}, {"require": 1.5}, {"require": True}, {"implementation": "x"}]
)
def test_invalid_keywords_are_refused(keywords: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(keywords))):
        overlap(mlp, **keywords)


def test_sites_are_found_from_shapes_alone(block: tuple) -> None:
    fun, arguments = block
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
    gather, scatter = find_sites(fun)(*shapes)
    assert (gather.kind, scatter.kind) == ("all_gather", "reduce_scatter")
    assert gather.decision is not None and gather.decision.site.source == gather.source
    assert gather.decision.implementation == "xla"
    assert gather.shapes == "float32 [2,2,8] over tensor"


def test_a_site_that_would_only_gain_transposes_is_left_alone(make_mesh: MeshFactory) -> None:
    """If the xla backend is chosen, a site that would need transposes stays as it is."""
    program = Program(
        lambda x, w: x @ lax.all_gather(w, AXIS, axis=1, tiled=True),
        [(4, 6), (6, 4)],
        [P(AXIS), COLUMNS],
        P(AXIS),
    )
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    (site,) = find_sites(fun)(*arguments)
    assert site.kept and site.reason.startswith("arrays would be transposed without gain")
    assert [site.replaced for site in sites(fun, *arguments)] == [True]
    assert_same(jax.jit(ring(fun))(*arguments), jax.jit(fun)(*arguments))


def test_contracting_the_gathered_dimension_after_a_reshape_is_left_alone(
    make_mesh: MeshFactory,
) -> None:
    """Also if a reshape merges dimensions and appends one of size 1."""
    program = gathering(
        lambda x, w: jax.numpy.einsum(
            "rko,rn->kon", lax.all_gather(x, AXIS, axis=1, tiled=True).reshape(8, 4, 1), w
        ),
        (8, 6),
        out_specs=P(None, None, AXIS),
    )
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    (site,) = sites(fun, *arguments)
    assert site.reason.startswith("its matmul contracts the gathered dimension")


def test_rows_that_the_axis_does_not_divide_are_left_alone_by_rings_only(
    make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(site_choice, "warn_once", functools.cache(warn_once.__wrapped__))
    program = Program(
        lambda x, w: lax.psum(x @ w, AXIS), [(3, 4), (4, 6)], [P(None, AXIS), P(AXIS)], P()
    )
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    (site,) = sites(fun, *arguments)
    reason = "ring is not possible: 3 rows are not divisible by axis 'tensor' of size 2"
    assert not site.replaced and site.reason == reason
    assert [record.message for record in caplog.records] == [f"overlap leaves psum alone: {reason}"]
    for implementation in (None, "xla", ("ring", "xla")):
        (site,) = find_sites(fun, implementation=implementation)(*arguments)
        assert site.replaced


def test_collectives_over_several_axes_or_groups_are_left_alone(make_mesh: MeshFactory) -> None:
    mesh = make_mesh({"data": 2, AXIS: 2})
    x, w = np.ones((4, 2), np.float32), np.ones((2, 3), np.float32)

    def reason(body: Callable, **options: Any) -> str:
        fun = jax.shard_map(
            body, mesh=mesh, in_specs=(P(("data", AXIS)), P()), out_specs=P(AXIS), **options
        )
        (site,) = sites(fun, x, w)
        return site.reason

    def over_both(x, w):
        return lax.all_gather(x, ("data", AXIS), tiled=True) @ w

    def in_groups(x, w):
        groups = [[0], [1]]
        return lax.all_gather(x, AXIS, axis_index_groups=groups, tiled=True) @ w

    assert "over 2 axes" in reason(over_both, check_vma=False)
    assert "axis_index_groups" in reason(in_groups, check_vma=False)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_arrays_that_vary_over_another_axis_are_replaced(
    check_vma: bool, make_mesh: MeshFactory
) -> None:
    """Arrays are the same for all data groups until they are typed as varying."""

    def body(x: jax.Array, up: jax.Array, down: jax.Array, bias: jax.Array) -> jax.Array:
        whole, other = (lax.all_gather(y, AXIS, axis=1, tiled=True) for y in (x, -x))
        product = jax.numpy.tanh(lax.pcast(whole, "data", to="varying") @ up) * bias
        sums = lax.pcast(other @ up @ down, "data", to="varying")
        scattered = lax.psum_scatter(sums, AXIS, scatter_dimension=1, tiled=True)
        return scattered + jax.numpy.mean(product)

    fun = jax.shard_map(
        body,
        mesh=make_mesh({"data": 2, AXIS: 2}),
        in_specs=(P(None, AXIS), P(None, AXIS), P(AXIS), P("data", None, AXIS)),
        out_specs=P("data", AXIS),
        check_vma=check_vma,
    )
    shapes = [(2, 4, 6), (6, 4), (4, 6), (4, 1, 4)]
    generator = np.random.default_rng(0)
    arguments = [generator.standard_normal(shape, np.float32) for shape in shapes]
    assert [site.replaced for site in sites(fun, *arguments)] == [True] * 3
    actual, expected = (gradients_of(f, 4) for f in (ring(fun), fun))
    assert_same(*jax.jit(lambda *args: (actual(*args), expected(*args)))(*arguments))


def test_a_gather_to_invarying_is_left_alone(make_mesh: MeshFactory) -> None:
    """A ring's result would be typed as varying."""

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.all_gather(x, AXIS, axis=1, tiled=True, to="invarying") @ w

    program = gathering(body)
    (site,) = sites(program.sharded(make_mesh({AXIS: 2})), *program.arguments())
    assert site.reason == "its result is typed as the same on all devices (to='invarying')"


@pytest.mark.parametrize("constrained", ["batch", "gathered"])
def test_sharding_constraints_of_other_dimensions_are_kept(
    constrained: str, make_mesh: MeshFactory
) -> None:
    """A shard may not fit a constraint of the gathered dimension over an automatic axis."""
    spec = P("data", None, None) if constrained == "batch" else P(None, "data", None)

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        whole = lax.all_gather(x, AXIS, axis=1, tiled=True)
        return lax.with_sharding_constraint(whole, spec) @ w

    program = FORMS["gather: plain"].program
    fun = jax.shard_map(
        body,
        mesh=make_mesh({"data": 2, AXIS: 2}),
        in_specs=tuple(program.in_specs),
        out_specs=program.out_specs,
        axis_names={AXIS},
    )
    fun, arguments = jax.jit(fun), program.arguments()
    (site,) = sites(fun, *arguments)
    assert site.replaced == (constrained == "batch")
    assert site.replaced or "mixes the gathered dimension" in site.reason
    assert counts(ring(fun), *arguments)["sharding_constraint"] == 1
    assert_same(jax.jit(ring(fun))(*arguments), fun(*arguments))


def test_overlap_is_public() -> None:
    assert collective_matmul.overlap is overlap


@pytest.mark.parametrize("collective", ["psum", "psum_scatter"])
def test_a_summed_constant_beside_sites_keeps_its_value(
    collective: str, make_mesh: MeshFactory
) -> None:
    """The cotangent of a loss that is summed over the devices is such a constant."""

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            return lax.psum(jnp.sum(jnp.tanh(lax.all_gather(x, AXIS, tiled=True) @ w)), AXIS)

        ones = jnp.ones(4, x.dtype) if collective == "psum_scatter" else jnp.ones((), x.dtype)
        dx, dw = jax.grad(loss, (0, 1))(x, w)
        tiled = {"tiled": True} if collective == "psum_scatter" else {}
        return dx, dw * jnp.sum(getattr(lax, collective)(ones, AXIS, **tiled))

    specs = P(AXIS), P(None, AXIS)
    plain = jax.shard_map(
        body, mesh=make_mesh({AXIS: 4}), in_specs=specs, out_specs=specs, check_vma=False
    )
    draw = np.random.default_rng(0)
    x, w = (draw.standard_normal(shape).astype(np.float32) for shape in ((8, 6), (6, 8)))
    expected, actual = jax.jit(plain)(x, w), jax.jit(overlap(plain, require=2))(x, w)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_model_that_shows_nothing_is_named_in_few_words(caplog: pytest.LogCaptureFixture) -> None:
    class Model:
        def __call__(self, x: jax.Array) -> jax.Array:
            return 2 * x

        def __repr__(self) -> str:
            return "Model(\n" + "  layer\n" * 100 + ")"

    overlap(Model())(jnp.ones(2))
    (message,) = [each for each in caplog.messages if "changes nothing" in each]
    assert re.match(r"overlap changes nothing in Model\( layer .{,70} …: \S", message)
