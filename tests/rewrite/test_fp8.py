"""`overlap` with operands in 8 bits: sites are as the ops, or say why they keep their dtype."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, explain, matmul_reduce_scatter, overlap
from tests.conftest import MeshFactory
from tests.dispatch.sites import H200
from tests.explained import WIDE
from tests.fp8_reference import SHIPPED_RECIPES
from tests.hopper import needs_kernels
from tests.reference import AXIS
from tests.rewrite.blocks import gather, mlp, programs, scatter
from tests.rewrite.programs import (
    COLUMNS_OF_PRODUCT,
    Program,
    assert_same,
    gathering,
    gradients_of,
    results_and_gradients,
    scattering,
)


def of_ops(fp8: Any) -> Callable:
    """The feed-forward by the ops."""

    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        keywords: Any = {"fp8": fp8, "implementation": "ring"}
        hidden = all_gather_matmul(x, up, AXIS, gather_dimension=1, **keywords)
        return matmul_reduce_scatter(
            jax.nn.gelu(hidden), down, AXIS, scatter_dimension=1, **keywords
        )

    return block


def feed_forward(body: Callable, dtype: str = "bfloat16") -> Program:
    program, _ = programs(dtype)["mlp"]
    return replace(program, body=body)


def in_fp8(fun: Callable, fp8: Any, implementation: Any = "ring") -> Callable:
    return overlap(fun, fp8=fp8, implementation=implementation)


def assert_equal(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
def test_sites_compute_what_the_ops_do(fp8: str, make_mesh: MeshFactory) -> None:
    """Differentiated after `overlap`. Differentiated before, if gradients are quantized alike."""
    mesh, arguments = make_mesh({AXIS: 2}), feed_forward(mlp, "float32").arguments()
    plain, ops = (feed_forward(body).sharded(mesh) for body in (mlp, of_ops(fp8)))
    expected = jax.jit(gradients_of(ops, 3))(*arguments)
    assert_same(jax.jit(gradients_of(in_fp8(plain, fp8), 3))(*arguments), expected)
    if fp8 != "tensorwise":
        assert_same(jax.jit(in_fp8(gradients_of(plain, 3), fp8))(*arguments), expected)


def dtypes_of(fun: Callable, *arguments: Any) -> list[list[str]]:
    """The columns of dtypes and reasons in the table of a function."""
    head, *lines = explain(fun)(*arguments).table(WIDE).splitlines()
    if "dtypes" not in head:
        return []
    start, end = head.index("dtypes"), head.index("chosen")
    why = head.index("why")
    return [[line[start:end].strip(), line[why:]] for line in lines if "by overlap" in line]


SENT, SUMMED = "travels float8_e4m3fn + scales", "travels bfloat16"


@pytest.mark.parametrize(
    ("fp8", "multiplied", "kept"),
    [
        ("tensorwise", "float8_e4m3fn", None),
        ("rowwise", "float8_e4m3fn", " and bfloat16"),
        pytest.param("blockwise", "float32", " and bfloat16", marks=pytest.mark.needs("blockwise")),
    ],
)
def test_explain_names_dtypes(
    fp8: Any, multiplied: str, kept: str | None, make_mesh: MeshFactory
) -> None:
    program = feed_forward(mlp)
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    forward = [
        [f"{SENT}, multiplies {multiplied}", "requested"],
        [f"{SUMMED}, multiplies {multiplied}", "requested"],
    ]
    assert dtypes_of(in_fp8(fun, fp8), *arguments) == forward
    assert dtypes_of(in_fp8(fun, None), *arguments) == []
    gathers = [
        line
        for line in dtypes_of(in_fp8(gradients_of(fun, 3), fp8), *arguments)
        if "weight gradient" in line[0]
    ]
    text = f"{SENT}{kept}, multiplies {multiplied}; weight gradient bfloat16"
    if kept is None:
        text = f"{SUMMED}, multiplies bfloat16; weight gradient bfloat16"
    assert {line[0] for line in gathers} == {text}
    assert all(("not in fp8: the program uses" in line[1]) == (kept is None) for line in gathers)


@needs_kernels
def test_explain_names_8_bits_where_kernels_multiply_blocks() -> None:
    """XLA multiplies blocks in float32: without kernels, and where their sizes do not fit."""
    mesh = AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=H200)
    for features, multiplied in ((256, "float8_e4m3fn"), (192, "float32")):
        shapes = (2, 512, features), (features, 256), (256, features)
        arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        block = feed_forward(mlp).sharded(mesh, check_vma=False)
        gather, _ = dtypes_of(in_fp8(block, "blockwise"), *arguments)
        assert gather[0] == f"{SENT}, multiplies {multiplied}"


def test_explain_names_dtypes_of_gradients(make_mesh: MeshFactory) -> None:
    program = feed_forward(mlp)
    fun = gradients_of(in_fp8(program.sharded(make_mesh({AXIS: 2})), "tensorwise"), 3)
    gradient = "multiplies float8_e5m2 × float8_e4m3fn; weight gradient float8_e4m3fn × float8_e5m2"
    assert [line[0] for line in dtypes_of(fun, *program.arguments())][2:] == [
        f"travels float8_e5m2 + scales, {gradient}",
        f"{SUMMED} and float8_e4m3fn + scales, {gradient}",
    ]


def whole_sum(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    whole = gather(x)
    return whole @ w, 2 * whole


def detached(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Variant of `whole_sum` where the gathered array has no cotangent."""
    y, whole = whole_sum(x, w)
    return y, lax.stop_gradient(whole)


@pytest.mark.parametrize(
    ("body", "fp8"),
    [*itertools.product((whole_sum, detached), [n for n in SHIPPED_RECIPES if n != "tensorwise"])],
)
def test_a_gathered_array_with_other_users_keeps_its_numbers(
    body: Callable, fp8: Any, make_mesh: MeshFactory
) -> None:
    """The array travels beside the message. Its cotangent counts: gradients are not in 8 bits."""
    program = gathering(body, out_specs=(COLUMNS_OF_PRODUCT,) * 2, dtype="bfloat16")
    plain, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    rewritten, ops = in_fp8(plain, fp8), overlap(plain, implementation="ring")
    run = jax.jit(lambda *a: results_and_gradients(lambda f: f, (plain, rewritten, ops), *a))
    (exact, exact_gradients), (results, gradients), (_, expected) = run(*arguments)
    assert_equal(results[1], exact[1])
    # Rounding to 8 bits is off by at most 1/16 of each factor.
    bound = 0.14 * abs(np.float32(arguments[0])).max() * abs(np.float32(arguments[1])).sum(0).max()
    assert 0 < abs(np.float32(results[0]) - np.float32(exact[0])).max() < bound
    assert_equal(gradients, expected)
    assert_same(gradients, exact_gradients, "bfloat16")


def test_explain_says_why_such_gradients_keep_their_dtype(make_mesh: MeshFactory) -> None:
    program = gathering(detached, out_specs=(COLUMNS_OF_PRODUCT,) * 2, dtype="bfloat16")
    fun = in_fp8(program.sharded(make_mesh({AXIS: 2})), "rowwise")
    forward, backward = dtypes_of(gradients_of(fun, 2), *program.arguments())
    multiplied = "multiplies float8_e4m3fn; weight gradient bfloat16"
    assert forward == [f"{SENT} and bfloat16, {multiplied}", "requested"]
    assert backward[0] == f"{SUMMED}, multiplies bfloat16"
    assert backward[1].startswith("not in fp8: the program uses the gathered array elsewhere too")


def test_an_einsum_that_is_no_matmul_keeps_its_dtype(make_mesh: MeshFactory) -> None:
    def batched(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("bsd,bdf->bsf", gather(x), jnp.stack([w, w / 2]))

    program = gathering(batched, dtype="bfloat16")
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    ((dtypes, reason),) = dtypes_of(in_fp8(fun, "rowwise"), *arguments)
    assert dtypes == f"{SUMMED}, multiplies bfloat16"
    assert re.match(r"not in fp8: \w+,\w+->\w+ is not a matmul of whole dimensions; req", reason)
    expected = jax.jit(in_fp8(fun, None))(*arguments)
    assert_equal(jax.jit(in_fp8(fun, "rowwise"))(*arguments), expected)


def test_arrays_are_transposed_for_8_bits(make_mesh: MeshFactory) -> None:
    """Else such a site keeps its own equations, where the op would use the same collective."""
    program = gathering(lambda x, w: jnp.einsum("bsd,df->bfs", gather(x), w), dtype="bfloat16")
    program = replace(program, out_specs=P(None, AXIS))
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    for fp8, replaced in ((None, 0), ("rowwise", 1)):
        explanation = explain(in_fp8(fun, fp8, "xla"))(*arguments)
        assert len(explanation.decisions) == replaced, explanation
    exact, actual = (np.float32(jax.jit(f)(*arguments)) for f in (fun, in_fp8(fun, "rowwise")))
    assert 0 < abs(actual - exact).max() < 0.1 * abs(exact).max()


@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
def test_terms_of_a_sum_have_scales_in_common(fp8: str, make_mesh: MeshFactory) -> None:
    """A sum of two products is the product of operands side by side, and is quantized alike."""

    def sum_of_two(h: jax.Array, w: jax.Array) -> jax.Array:
        return scatter(h @ w + (3 * h) @ (w / 2))

    def joined(h: jax.Array, w: jax.Array) -> jax.Array:
        h, w = jnp.concatenate([h, 3 * h], -1), jnp.concatenate([w, w / 2])
        return matmul_reduce_scatter(h, w, AXIS, scatter_dimension=1, fp8=any_fp8)

    any_fp8: Any = fp8
    mesh = make_mesh({AXIS: 2})
    sums, one = (replace(scattering(body), dtype="float32") for body in (sum_of_two, joined))
    arguments = sums.arguments()
    expected = jax.jit(one.sharded(mesh))(*arguments)
    fun = overlap(sums.sharded(mesh), fp8=any_fp8, require=1)
    (decision,) = explain(fun)(*arguments).decisions
    assert len(decision.site.operands) == 2
    assert_same(jax.jit(fun)(*arguments), expected)


def test_rules_of_custom_gradients_are_rewritten_in_8_bits(make_mesh: MeshFactory) -> None:
    @jax.custom_vjp
    def up(x: jax.Array, w: jax.Array) -> jax.Array:
        return gather(x) @ w

    def backward(operands: Any, dy: jax.Array) -> Any:
        x, w = operands
        return scatter(dy @ w.T), jnp.einsum("bsd,bsf->df", gather(x), dy)

    up.defvjp(lambda x, w: (up(x, w), (x, w)), backward)
    program = gathering(up, dtype="bfloat16")
    fun = in_fp8(program.sharded(make_mesh({AXIS: 2})), "rowwise")
    decisions = explain(gradients_of(fun, 2))(*program.arguments()).decisions
    ops = [(decision.site.op, decision.site.fp8) for decision in decisions]
    assert ("all_gather_matmul", "rowwise") in ops
    assert ("matmul_reduce_scatter", "rowwise") in ops


@pytest.mark.parametrize("implementation", ["ring", "xla"])
@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
def test_sharded_weights_are_gathered_as_by_the_ops(
    fp8: Any, implementation: str, make_mesh: MeshFactory
) -> None:
    """In 8 bits, with the scales of the whole weight."""
    keywords: Any = {"weight_axis_name": "data", "weight_dimension": 1, "fp8": fp8}
    keywords["implementation"] = implementation

    def plain(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        up, down = (lax.all_gather(w, "data", axis=1, tiled=True) for w in (up, down))
        return mlp(x, up, down)

    def ops(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = all_gather_matmul(x, up, AXIS, gather_dimension=1, **keywords)
        return matmul_reduce_scatter(
            jax.nn.gelu(hidden), down, AXIS, scatter_dimension=1, **keywords
        )

    mesh, arguments = make_mesh({"data": 2, AXIS: 2}), feed_forward(mlp, "float32").arguments()
    rows = P("data", AXIS)
    specs: Any = {"in_specs": (rows, P(None, (AXIS, "data")), P(AXIS, "data")), "out_specs": rows}
    rewritten = in_fp8(jax.shard_map(plain, mesh=mesh, **specs), fp8, implementation)
    expected = jax.jit(gradients_of(jax.shard_map(ops, mesh=mesh, **specs), 3))(*arguments)
    assert_same(jax.jit(gradients_of(rewritten, 3))(*arguments), expected)
    decisions = explain(rewritten)(*arguments).decisions
    shards = [decision.site.gathered_shards for decision in decisions]
    assert [each and each.axis_name for each in shards] == ["data", "data"]


def recipes_of(fun: Callable, *arguments: Any) -> list[tuple[str, Any]]:
    """The ops of the sites and their recipes, in the order of the program."""
    decisions = explain(fun)(*arguments).decisions
    return [(decision.site.op, decision.site.fp8) for decision in decisions]


#: Recipes by scope; and those of the gathers in "layer" and "again", and of the scatters there.
SCOPES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"up": "rowwise"}, ["rowwise", "rowwise"], [None, None]),
    ({"layer": "blockwise", "down": None}, ["blockwise", None], [None, None]),
    (
        {"layer": "blockwise", "again": "rowwise"},
        ["blockwise", "rowwise"],
        ["blockwise", "rowwise"],
    ),
    ({"twice": "blockwise", "again": None}, ["blockwise", None], ["blockwise", None]),
]


@pytest.mark.needs("blockwise")
@pytest.mark.parametrize(("scopes", "gathers", "scatters"), SCOPES, ids=str)
def test_scopes_have_recipes(
    scopes: Any, gathers: list, scatters: list, make_mesh: MeshFactory
) -> None:
    """The innermost counts. Names around a call count inside, of which there may be two."""

    @jax.jit
    def up(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("inside"):
            return jax.checkpoint(lambda x: jnp.tanh(gather(x) @ w))(x)

    def twice(x: jax.Array, w: jax.Array, down: jax.Array) -> jax.Array:
        with jax.named_scope("layer"):
            hidden = up(x, w)
            with jax.named_scope("down"):
                y = scatter(hidden @ down)
        with jax.named_scope("again"):
            return y + scatter(up(y, w) @ down)

    program = feed_forward(jax.jit(twice))
    fun, arguments = program.sharded(make_mesh({AXIS: 2})), program.arguments()
    expected = {
        *(("all_gather_matmul", recipe) for recipe in gathers),
        *(("matmul_reduce_scatter", recipe) for recipe in scatters),
    }
    assert {*recipes_of(in_fp8(fun, scopes), *arguments)} == expected
    # The scopes of gradients are those of what is differentiated.
    gradients = gradients_of(fun, 3)
    for backward in (gradients_of(in_fp8(fun, scopes), 3), in_fp8(gradients, scopes)):
        assert {recipe for _, recipe in recipes_of(backward, *arguments)} == {*gathers, *scatters}


def test_a_scope_that_does_not_exist_is_refused(make_mesh: MeshFactory) -> None:
    def named(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        with jax.named_scope("mlp"):
            return mlp(x, up, down)

    program = feed_forward(named)
    fun = program.sharded(make_mesh({AXIS: 2}))
    with pytest.raises(ValueError, match=r"fp8=.*: the program has no scope 'mpl'; .*'mlp'"):
        in_fp8(fun, {"mpl": "rowwise"})(*program.arguments())
    # JAX's own names in scopes of gradients, and names of values, are no scopes.
    gradients = gradients_of(fun, 3)
    with pytest.raises(ValueError, match=r"the program has no scope 'jvp'"):
        in_fp8(gradients, {"jvp": "rowwise"})(*program.arguments())

    def tagged(*arguments: jax.Array) -> jax.Array:
        return checkpoint_name(fun(*arguments), "tag")

    with pytest.raises(ValueError, match=r"the program has no scope 'tag'"):
        in_fp8(tagged, {"tag": "rowwise"})(*program.arguments())
    with pytest.raises(ValueError, match=r"'a/b' is not one name; expected that of a jax\.named_"):
        in_fp8(fun, {"a/b": "rowwise"})
    with pytest.raises(ValueError, match=r"fp8='mxfp8': expected None"):
        in_fp8(fun, {"mlp": "mxfp8"})


def test_an_unknown_recipe_is_refused() -> None:
    recipe: Any = "mxfp8"
    with pytest.raises(ValueError, match=r"fp8='mxfp8': expected None .*'rowwise'"):
        overlap(mlp, fp8=recipe)
