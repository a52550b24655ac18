"""Sites run as often as the loops, calls and checkpoints around them say, and `explain` says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import explain, overlap
from collective_matmul.explain import Explanation
from collective_matmul.rewrite import find_sites
from tests.dispatch.sites import H200
from tests.explained import WIDE
from tests.reference import AXIS
from tests.rewrite.programs import loss_of

MESH = AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Auto,))
EXPLICIT = AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Explicit,))
ARGUMENTS = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 4), (4, 6), (6, 4))]
SPECS = P(AXIS), P(None, AXIS), P(AXIS)
#: A function of activations and two weights, which returns activations.
Layer = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def manual(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    hidden = jnp.tanh(lax.all_gather(x, AXIS, tiled=True) @ up)
    return x + jnp.sin(lax.psum_scatter(hidden @ down, AXIS, tiled=True))


def by_types(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    hidden = jnp.tanh(jax.sharding.reshard(x, P()) @ up)
    return x + jnp.sin(jnp.dot(hidden, down, out_sharding=P(AXIS)))


def scanned(layer: Layer, steps: int) -> Layer:
    def fun(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (layer(x, up, down), None), x, None, steps)[0]

    return fun


def unrolled(layer: Layer, steps: int) -> Layer:
    def fun(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        for _ in range(steps):
            x = layer(x, up, down)
        return x

    return fun


def either(layer: Layer, _: int) -> Layer:
    def fun(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return lax.cond(True, layer, lambda x, *_: jnp.tanh(x), x, up, down)

    return fun


#: What is put around a layer, with a number of steps.
AROUND: dict[str, Callable[[Layer, int], Layer]] = {
    "scan": scanned,
    "unrolled": unrolled,
    "either": either,
    "jit": lambda layer, _: jax.jit(layer),
    "checkpoint": lambda layer, _: jax.checkpoint(layer),
    "checkpoint of dots": lambda layer, _: jax.checkpoint(
        layer, policy=jax.checkpoint_policies.dots_saveable
    ),
}
#: The innermost first. Programs of several parts execute one after the other.
PARTS = st.lists(
    st.lists(st.tuples(st.sampled_from([*AROUND]), st.integers(2, 3)), max_size=4),
    min_size=1,
    max_size=2,
)
Parts = list[list[tuple[str, int]]]


def program_of(layer: Layer, parts: Parts, is_gradient: bool) -> Callable:
    def body(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        for part in parts:
            fun = layer
            for name, steps in part:
                fun = AROUND[name](fun, steps)
            x = fun(x, up, down)
        return x

    fun: Callable = body
    if layer is manual:
        fun = jax.shard_map(body, mesh=MESH, in_specs=SPECS, out_specs=P(AXIS))
    return jax.grad(loss_of(fun), (0, 1, 2)) if is_gradient else fun


def ops(explanation: Explanation) -> Counter:
    """The runs of ops, by place and shapes; of what is a site, whether it was replaced or not."""
    names = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    found: Counter = Counter()
    for line, runs in explanation.runs.items():
        found[line.source, line.op, line.shapes] += runs * (line.op in names)
    return +found


def executed(jaxpr: Jaxpr, runs: int = 1) -> int:
    """How many gathers and sums a program executes."""
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        total += runs * name.startswith(("all_gather", "reduce_scatter", "psum"))
        total += sum(executed(each, runs * params.get("length", 1)) for each in bodies(params))
    return total


def bodies(params: dict[str, Any]) -> list[Jaxpr]:
    return [getattr(each, "jaxpr", each) for each in jaxprs_in_params(params)]


#: Three layers that are computed again, one after the other; and in a loop in a loop.
CHECKPOINTED: Parts = [[("checkpoint", 0), ("unrolled", 3)]]
NESTED: Parts = [[("checkpoint", 0), ("scan", 2), ("jit", 0), ("scan", 3)], [("either", 0)]]


@example(CHECKPOINTED, True)
@example(NESTED, True)
@example(NESTED, False)
@given(PARTS, st.booleans())
def test_ops_run_as_often_as_those_that_overlap_puts_there(parts: Parts, is_gradient: bool):
    fun = program_of(manual, parts, is_gradient)
    plain = explain(fun)(*ARGUMENTS)
    assert ops(plain) == ops(explain(overlap(fun))(*ARGUMENTS))
    assert sum(ops(plain).values()) == sum(site.runs for site in plain.plain if site.replaced)


@example(CHECKPOINTED, True)
@example(NESTED, True)
@given(PARTS, st.booleans())
def test_sites_run_as_often_as_their_equations(parts: Parts, is_gradient: bool):
    fun = program_of(manual, parts, is_gradient)
    found = find_sites(fun)(*ARGUMENTS)
    assert sum(site.runs for site in found) == executed(jax.make_jaxpr(fun)(*ARGUMENTS).jaxpr)


@example(CHECKPOINTED, True)
@example(NESTED, True)
@given(PARTS, st.booleans())
def test_ops_over_explicit_axes_run_as_often_as_those_of_overlap(parts: Parts, is_gradient: bool):
    fun = program_of(by_types, parts, is_gradient)
    with jax.sharding.use_abstract_mesh(EXPLICIT):
        arguments = [
            jax.ShapeDtypeStruct(
                each.shape, each.dtype, sharding=jax.sharding.NamedSharding(EXPLICIT, spec)
            )
            for each, spec in zip(ARGUMENTS, SPECS, strict=True)
        ]
        plain, overlapped = (explain(each)(*arguments) for each in (fun, overlap(fun)))
    assert ops(plain) == ops(overlapped)
    assert ops(plain).total() > 1


def test_an_op_that_gathers_its_weight_counts_once() -> None:
    """Both gathers are sites, and one line of the table."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        whole = lax.all_gather(w, "fsdp", tiled=True)
        return jnp.tanh(lax.all_gather(x, AXIS, tiled=True) @ whole)[: x.shape[0]], None

    auto = (AxisType.Auto, AxisType.Auto)
    mesh = AbstractMesh((2, 4), ("fsdp", AXIS), axis_types=auto, abstract_device=H200)
    fun = jax.shard_map(
        lambda x, ws: lax.scan(layer, x, ws)[0],
        mesh=mesh,
        in_specs=(P(AXIS), P(None, "fsdp")),
        out_specs=P(AXIS),
        check_vma=False,
    )
    shapes = (8192, 4096), (3, 4096, 4096)
    arguments = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    plain, overlapped = (explain(each)(*arguments) for each in (fun, overlap(fun)))
    assert ops(plain) == ops(overlapped)
    assert [*ops(plain).values()] == [3]
    assert "fsdp" in plain.table(WIDE)
    counted = "2 plain gathers and sums: 2 sites, 6 runs (require counts the sites); pass the"
    assert counted in plain.table(WIDE)
    assert "3 runs of collective matmuls" in overlapped.table(WIDE)


def test_sites_and_runs_of_a_loop_are_told_apart() -> None:
    """In the totals of `explain`, and in the error of what requires as many sites as there are
    runs."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = lax.psum_scatter(x @ w, AXIS, tiled=True)
        return jnp.tile(y, (2, 1)), lax.psum(y.sum(), AXIS)

    fun = jax.shard_map(
        lambda x, ws: lax.scan(layer, x, ws),
        mesh=MESH,
        in_specs=(P(None, AXIS), P(None, AXIS)),
        out_specs=(P(AXIS), P()),
        check_vma=False,
    )
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 4), (3, 4, 2))]
    table = explain(fun)(*arguments).table(WIDE)
    assert table.splitlines()[-1] == (
        "2 plain gathers and sums: 1 site, 3 runs (require counts the sites); pass the function to"
        " overlap to replace it; 1 left alone, 3 runs (explain(fun, verbose=True) lists it)"
    )
    with pytest.raises(ValueError, match="require=3: only 1 of 2 ") as error:
        jax.eval_shape(overlap(fun, require=3), *arguments)
    sentence, _, table = str(error.value).partition("\n\n")
    once = "(each counts once, however often a loop runs it)"
    assert sentence.endswith(f"replaced {once}; require 1, or change what is left alone:")
    assert [line[:11] for line in table.splitlines() if "×" in line] == ["3×    psum "]


def test_sites_of_calls_that_are_not_rewritten_count_their_loops() -> None:
    """The solver of a custom linear solve, such as that of an implicit layer."""

    def solved(x: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: Any) -> tuple[jax.Array, None]:
            return lax.psum(x, AXIS) / 2, None

        def solve(_: Callable, x: jax.Array) -> jax.Array:
            return lax.scan(step, x, None, 3)[0]

        return lax.custom_linear_solve(lambda x: x, x, solve, symmetric=True)

    fun = jax.shard_map(solved, mesh=MESH, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    found = find_sites(fun)(ARGUMENTS[0])
    assert {(site.runs, site.replaced) for site in found} == {(3, False)}
    assert "custom_linear_solve" in found[0].reason
