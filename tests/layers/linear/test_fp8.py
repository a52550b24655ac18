"""Layers and `parallelize` with operands in 8 bits: the ops get the recipe of the layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, explain, matmul_reduce_scatter
from collective_matmul.layers import (
    Column,
    ColumnParallelLinear,
    GatedFeedForward,
    Heads,
    Row,
    RowParallelLinear,
)
from collective_matmul.layers.parallelize.parallelize import parallelize
from tests.conftest import MeshFactory
from tests.fp8_reference import SHIPPED_RECIPES
from tests.layers.reference import (
    SHARDED,
    assert_close,
    outcome,
    pure,
    random,
    result_and_gradients,
)

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

FEATURES, HIDDEN = 12, 16
X = random(4, 8, FEATURES)


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({"data": 2, "tensor": 4})


class Parallel(nnx.Module):
    """A feed-forward of our layers."""

    def __init__(self, **options: Any):
        options = dict(rngs=nnx.Rngs(0), implementation="ring", **options)
        self.up = ColumnParallelLinear(FEATURES, HIDDEN, **options)
        self.down = RowParallelLinear(HIDDEN, FEATURES, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class Plain(nnx.Module):
    """The feed-forward of `Parallel`, of Flax's layers."""

    def __init__(self):
        options: Any = dict(rngs=nnx.Rngs(0), use_bias=False)
        self.up = nnx.Linear(FEATURES, HIDDEN, **options)
        self.down = nnx.Linear(HIDDEN, FEATURES, **options)

    __call__ = Parallel.__call__


class PlainLinen(linen.Module):
    """The feed-forward of `Parallel`, of linen's layers."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = linen.Dense(HIDDEN, name="up", use_bias=False)(x)
        return linen.Dense(FEATURES, name="down", use_bias=False)(jax.nn.gelu(hidden))


@cache
def outcome_of_ops(mesh: Mesh, up_fp8: Any, down_fp8: Any) -> Any:
    """The result and the gradients of both kernels and of x, by the ops."""
    kernels = pure(nnx.state(Parallel()))

    def block(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        options: Any = {"implementation": "ring"}
        hidden = all_gather_matmul(x, up, "tensor", gather_dimension=1, fp8=up_fp8, **options)
        hidden = jax.nn.gelu(hidden)
        options["scatter_dimension"] = 1
        return matmul_reduce_scatter(hidden, down, "tensor", fp8=down_fp8, **options)

    specs = P(None, "tensor"), P("tensor"), SHARDED
    sharded = jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=SHARDED)
    return result_and_gradients(sharded, kernels["up"]["kernel"], kernels["down"]["kernel"], X)


def by_kernel(outcome: tuple[Any, Any, Any]) -> Any:
    y, gradients, by_x = outcome
    return y, gradients["up"]["kernel"], gradients["down"]["kernel"], by_x


# Explicit axes are the ops' business, which are tested with them.
@pytest.mark.parametrize(
    ("fp8", "context"),
    [
        # Each recipe, and each context, by default.
        pytest.param(
            fp8,
            context,
            marks=() if (context == "local") == (fp8 == "rowwise") else pytest.mark.exhaustive,
        )
        for fp8 in SHIPPED_RECIPES
        for context in ("auto", "local")
    ],
)
def test_layers_equal_the_ops(fp8: str, context: str, make_mesh: MeshFactory) -> None:
    """An automatic axis does not divide the arrays that have one scale."""
    mesh, whole = (make_mesh({"data": data, "tensor": 4}) for data in (2, 1))
    actual = by_kernel(outcome(Parallel(fp8=fp8), X, context, mesh))
    assert_close(actual, outcome_of_ops(whole if context == "auto" else mesh, fp8, fp8))


def test_parallelize_gives_each_layer_the_recipe_of_its_style(mesh: Mesh) -> None:
    model = parallelize(
        Plain(), {"u*": Column(fp8="rowwise"), "down": Row()}, implementation="ring"
    )
    expected = outcome_of_ops(mesh, "rowwise", None)
    kernels = {name: Parallel() for name in ("up", "down")}
    for name, layer in kernels.items():
        getattr(model, name).kernel[...] = getattr(layer, name).kernel[...]
    assert_close(by_kernel(outcome(model, X, "local", mesh)), expected)


def recipes(fun: Callable, *arguments: Any) -> Iterator[tuple[str, Any]]:
    for decision in explain(fun)(*arguments).decisions:
        yield decision.site.op, decision.site.fp8


def test_parallelize_gives_linen_layers_the_recipe_of_their_style(make_mesh: MeshFactory) -> None:
    variables = PlainLinen().init(jax.random.key(0), X)
    plan = {"up": Column(fp8="rowwise"), "down": Row(fp8="tensorwise")}
    model = parallelize(PlainLinen(), plan, mesh=make_mesh({"tensor": 4}))
    assert [*recipes(model.apply, variables, X)] == [
        ("all_gather_matmul", "rowwise"),
        ("matmul_reduce_scatter", "tensorwise"),
    ]


@pytest.mark.filterwarnings("ignore:The inputs_kv arg:DeprecationWarning")
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_parallelize_gives_attention_the_recipe_of_its_style(
    kind: str, make_mesh: MeshFactory
) -> None:
    """All four layers: query, key and value share one gather."""
    mesh, style = make_mesh({"tensor": 4}), {"attention": Heads(fp8="rowwise")}
    if kind == "nnx":
        options: Any = dict(decode=False, rngs=nnx.Rngs(0))
        model = nnx.Dict(attention=nnx.MultiHeadAttention(4, FEATURES, **options))
        parallelize(model, style, mesh=mesh)
        found = recipes(lambda x: model.attention(x), X)
    else:
        module = LinenAttention()
        variables = module.init(jax.random.key(0), X)
        found = recipes(parallelize(module, style, mesh=mesh).apply, variables, X)
    *gathers, scatter = found
    assert {*gathers} == {("all_gather_matmul", "rowwise")}
    assert scatter == ("matmul_reduce_scatter", "rowwise")


class LinenAttention(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.MultiHeadDotProductAttention(num_heads=4, name="attention")(x)


def test_layers_inside_a_layer_have_its_recipe() -> None:
    model = GatedFeedForward(FEATURES, HIDDEN, rngs=nnx.Rngs(0), fp8="rowwise")
    assert {layer.fp8 for layer in (model.gate, model.up, model.down)} == {"rowwise"}


@pytest.mark.parametrize(
    "construct",
    [
        lambda fp8: Column(fp8=fp8),
        lambda fp8: Row(fp8=fp8),
        lambda fp8: Heads(fp8=fp8),
        lambda fp8: Parallel(fp8=fp8),
    ],
)
def test_unknown_recipes_are_refused(construct: Callable) -> None:
    for wrong in ("mxfp8", True):
        with pytest.raises(ValueError, match=rf"fp8={wrong!r}: expected None .*'rowwise'"):
            construct(wrong)
