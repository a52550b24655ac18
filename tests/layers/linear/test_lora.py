"""Adapters of linear layers equal the unsharded ones, and share the collective of their layer."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from collective_matmul import explain, quantize_frozen
from collective_matmul.dispatch.decision_table import line_of
from collective_matmul.layers import ColumnParallelLinear, Lora, RowParallelLinear
from tests.conftest import MeshFactory

BATCH, TOKENS, FEATURES, HIDDEN = 2, 24, 12, 48
LORA = Lora(rank=5, alpha=3.0)


class Layers(nnx.Module):
    """A column-parallel layer, then a row-parallel one."""

    def __init__(self, **options: Any):
        options = {"lora": LORA, "rngs": nnx.Rngs(0), **options}
        self.up = ColumnParallelLinear(FEATURES, (24, 2), **options)
        self.down = RowParallelLinear((24, 2), FEATURES, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.sin(self.up(x)))


def model(**options: Any) -> Layers:
    """Layers whose B is not zero, as it is at first."""
    layers = Layers(**options)
    for layer, seed in ((layers.up, 1), (layers.down, 2)):
        shape = layer.lora_b.shape
        layer.lora_b[...] = jax.random.normal(jax.random.key(seed), shape) / 8
    return layers


def parameters(layers: Layers) -> tuple[Any, Any, Any]:
    """The graph, the adapters' parameters and the others."""
    graph, adapters, others = nnx.split(layers, nnx.LoRAParam, ...)
    return graph, adapters, others


def gradients(mesh: Any, x: jax.Array, weight: jax.Array, **options: Any) -> Any:
    """The result, and the gradients of x and of the adapters, on local shards."""
    graph, adapters, others = parameters(model(**options))
    of_adapters, of_others = map(nnx.get_partition_spec, (adapters, others))
    spec = P(None, "tensor", None)

    def local(adapters: Any, others: Any, x: jax.Array, weight: jax.Array) -> Any:
        def loss(adapters: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = nnx.merge(graph, adapters, others)(x)
            return jnp.sum(y * weight), y

        (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(adapters, x)
        return y, grads

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(of_adapters, of_others, spec, spec),
        out_specs=(spec, (of_adapters, spec)),
    )
    return jax.jit(run), (adapters, others, x, weight)


def reference(x: Any, weight: Any, layers: Layers) -> Any:
    """Computes what `gradients` does in float64, with gradients derived by hand."""
    wide = lambda a: np.asarray(a, np.float64)  # noqa: E731
    flat = lambda w, rows: wide(w).reshape(rows, -1)  # noqa: E731
    x, dy, scale = wide(x), wide(weight), LORA.scale
    w1, a1, b1 = flat(layers.up.kernel[...], FEATURES), *_ab(layers.up)
    w2, a2, b2 = flat(layers.down.kernel[...], HIDDEN), *_ab(layers.down)
    h = x @ w1 + scale * (x @ a1) @ b1
    z = np.sin(h)
    y = z @ w2 + scale * (z @ a2) @ b2
    rows = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    db2 = scale * rows(z @ a2).T @ rows(dy)
    da2 = scale * rows(z).T @ rows(dy @ b2.T)
    dh = (dy @ w2.T + scale * (dy @ b2.T) @ a2.T) * np.cos(h)
    db1 = scale * rows(x @ a1).T @ rows(dh)
    da1 = scale * rows(x).T @ rows(dh @ b1.T)
    dx = dh @ w1.T + scale * (dh @ b1.T) @ a1.T
    grads = {
        ("up", "lora_a"): da1,
        ("up", "lora_b"): db1,
        ("down", "lora_a"): da2,
        ("down", "lora_b"): db2,
    }
    return y, grads, dx


def _ab(layer: Any) -> tuple[Any, Any]:
    return np.asarray(layer.lora_a[...], np.float64), np.asarray(layer.lora_b[...], np.float64)


def random(seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (BATCH, TOKENS, FEATURES))


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("implementation", ["xla", "ring", "ring_direct"])
def test_the_gradients_are_those_of_the_unsharded_adapter(
    make_mesh: MeshFactory, devices: int, implementation: str
):
    x, weight = random(3), random(4)
    run, arguments = gradients(
        make_mesh({"tensor": devices}), x, weight, implementation=implementation
    )
    y, (adapters, dx) = run(*arguments)
    expected, of_adapters, expected_dx = reference(x, weight, model())
    # float32 sums of up to 48 products of numbers near 1, and then of 48 rows.
    close: Any = {"rtol": 1e-4, "atol": 1e-3}
    np.testing.assert_allclose(y, expected, **close)
    np.testing.assert_allclose(dx, expected_dx, **close)
    for path, leaf in nnx.to_flat_state(adapters):
        np.testing.assert_allclose(leaf[...], of_adapters[path], **close, err_msg=str(path))


def test_nothing_of_the_size_of_the_inputs_travels_twice(make_mesh: MeshFactory):
    run, arguments = gradients(make_mesh({"tensor": 2}), random(3), random(4), implementation="xla")
    # x, its gradient, and those of the results: [2, 24, 12] gathered and scattered once each way.
    gathered = [out for name, out in collectives(run, arguments) if name == "all_gather"]
    scattered = [out for name, out in collectives(run, arguments) if name == "reduce_scatter"]
    assert sorted(shape[-1] for shape in gathered) == [LORA.rank, LORA.rank, FEATURES, FEATURES]
    assert sorted(shape[-1] for shape in scattered) == [LORA.rank, LORA.rank, FEATURES, FEATURES]


@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_no_gradient_of_a_kernel_is_computed(make_mesh: MeshFactory, implementation: str):
    mesh = make_mesh({"tensor": 2})
    options = {"implementation": implementation}
    run, arguments = gradients(mesh, random(3), random(4), **options)
    # A product of every row contracts BATCH * TOKENS numbers; only those of adapters do.
    products = [eqn.outvars[0].aval.shape for eqn in equations(run, arguments, "dot_general")]
    kernels = {(FEATURES, HIDDEN // 2), (HIDDEN // 2, FEATURES)}
    assert products and not kernels & set(products)


def test_the_compiled_layers_have_no_collective_of_their_own_for_adapters(make_mesh: MeshFactory):
    # 20 tokens, not 24: a product of tokens then has no size of a kernel.
    x, weight = (jax.random.normal(jax.random.key(n), (BATCH, 20, FEATURES)) for n in (3, 4))
    run, arguments = gradients(make_mesh({"tensor": 2}), x, weight, implementation="xla")
    text = run.lower(*arguments).compile().as_text()
    found = re.findall(r" = (\S+|\(.*?\)) (dot|all-[\w-]+|reduce-scatter|custom-call)\(", text)
    widths = {
        kind: sorted(shape_of(types)[-1] for types, each in found if each == kind)
        for kind in ("all-gather", "reduce-scatter")
    }
    # One for each layer and pass, with what the adapter adds to it.
    assert widths == {kind: [LORA.rank] * 2 + [FEATURES] * 2 for kind in widths}
    # The gradients of the two parameters that every device has whole, summed at once.
    (summed,) = (types for types, kind in found if kind == "all-reduce")
    assert summed.count("f32") == 2 and all(str(size) in summed for size in (FEATURES, LORA.rank))
    products = [shape_of(types) for types, kind in found if kind in ("dot", "custom-call")]
    sizes = [math.prod(shape) for shape in products]
    assert sizes and FEATURES * HIDDEN // 2 not in sizes


def shape_of(types: str) -> tuple[int, ...]:
    """The shape of an array in the text of a program."""
    (sizes,) = re.findall(r"\[([\d,]*)\]", types.partition("{")[0])
    return tuple(map(int, sizes.split(",")))


def test_a_frozen_layer_has_the_gradient_of_x_alone(make_mesh: MeshFactory):
    mesh, spec = make_mesh({"tensor": 2}), P(None, "tensor", None)
    layer, trained = (
        ColumnParallelLinear(
            FEATURES, HIDDEN, frozen=frozen, implementation="ring", rngs=nnx.Rngs(0)
        )
        for frozen in (True, False)
    )

    def outcome(layer: Any) -> Any:
        graph, state = nnx.split(layer)

        def local(state: Any, x: jax.Array) -> Any:
            return jax.grad(lambda s, x: jnp.sum(jnp.sin(nnx.merge(graph, s)(x))), (0, 1))(state, x)

        specs = nnx.get_partition_spec(state), spec
        run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs))
        return run(state, random(3))

    (dkernel, dx), (_, expected) = outcome(layer), outcome(trained)
    np.testing.assert_array_equal(dx, expected)
    assert not np.any(dkernel["kernel"][...])


@pytest.mark.parametrize("fp8", ["rowwise", "blockwise", "tensorwise"])
def test_a_frozen_kernel_in_8_bits_has_one_copy(make_mesh: MeshFactory, fp8: str):
    mesh, spec = make_mesh({"tensor": 2}), P(None, "tensor", None)
    layers: Any = [
        ColumnParallelLinear(
            256, 256, fp8=fp8, frozen=True, rngs=nnx.Rngs(0), implementation="ring"
        ),
        RowParallelLinear(256, 256, fp8=fp8, frozen=True, rngs=nnx.Rngs(1), implementation="ring"),
    ]
    x = jax.random.normal(jax.random.key(3), (1, 16, 256))
    # Columns of very different magnitude: a scale that is lost by a transposition shows.
    kernels = [layer.kernel[...] * jnp.logspace(-2, 0, 256)[None] for layer in layers]

    def local(x: jax.Array, ks: Any) -> Any:
        def model(x: jax.Array) -> jax.Array:
            for layer, kernel in zip(layers, ks, strict=True):
                parts: Any = nnx.split(layer)
                graph, state = parts
                made = quantize_frozen(kernel, fp8)
                assert made.backward is None
                state["kernel"] = state["kernel"].replace(made)
                x = nnx.merge(graph, state)(x)
            return x

        y, pull = jax.vjp(model, x)
        return y, *pull(jnp.ones_like(y) * x)

    specs = spec, [P(None, "tensor"), P("tensor", None)]
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(spec, spec))
    y, dx = jax.jit(run)(x, kernels)
    first, second = (np.asarray(k, np.float64) for k in kernels)
    wide = np.asarray(x, np.float64)
    for actual, expected in ((y, wide @ first @ second), (dx, wide @ second.T @ first.T)):
        # Numbers of 8 bits have 3 bits of mantissa: errors of up to 1/16 of four operands, summed
        # over 256 of random sign. Gradients of "tensorwise" have 2 bits, of twice the error.
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert error < (0.16 if fp8 == "tensorwise" else 0.08)


def test_dropout_is_of_the_input_of_adapters_in_training(make_mesh: MeshFactory):
    mesh = make_mesh({"tensor": 2})
    lora = Lora(rank=5, alpha=3.0, dropout=0.5)
    layers, without = model(lora=lora, mesh=mesh), model(mesh=mesh)
    nnx.update(without, nnx.state(layers, nnx.Param))
    x = random(3)
    with jax.set_mesh(mesh):
        first, second = nnx.jit(lambda layers, x: (layers(x), layers(x)))(layers, x)
        layers.eval()
        after, expected = nnx.jit(lambda one, other: (one(x), other(x)))(layers, without)
        np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-5)
    assert np.max(np.abs(first - second)) > 0.01


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"rank": 0}, "lora.rank=0"),
        ({"rank": 2, "alpha": 0.0}, "lora.alpha=0.0"),
        ({"rank": 2, "dropout": 1.0}, "lora.dropout=1.0"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], reason: str):
    with pytest.raises(ValueError, match=reason):
        Lora(**values)


def test_the_scale_of_rslora_is_of_the_root_of_the_rank():
    assert Lora(16, 8.0).scale == 0.5
    assert Lora(16, 8.0, rslora=True).scale == 2.0


@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_explain_counts_what_a_block_that_is_computed_again_needs(
    implementation: str, make_mesh: MeshFactory
):
    """The adapter of the last layer needs only the columns that travel beside the sum."""
    mesh = make_mesh({"tensor": 2})
    layers = nnx.List([model(mesh=mesh, implementation=implementation) for _ in range(2)])

    def loss(layers: nnx.List, x: jax.Array) -> jax.Array:
        for each in layers:
            x = nnx.remat(lambda each, x: each(x))(each, x)
        return jnp.sum(x**2)

    gradient = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))
    runs = {
        (decision.site.direction, decision.site.op): explained.runs[line_of(decision)]
        for explained in [explain(gradient)(layers, random(3))]
        for decision in explained.decisions
    }
    assert runs == {
        ("forward", "all_gather_matmul"): 2 + 2,
        ("forward", "matmul_reduce_scatter"): 2,
        ("backward", "all_gather_matmul"): 2,
        ("backward", "matmul_reduce_scatter"): 1,  # Nothing needs the gradient of the first x.
    }


def equations(run: Any, arguments: Any, name: str) -> list[Any]:
    """The equations of a primitive in the program, at any depth."""

    def inside(jaxpr: Any) -> Any:
        for eqn in jaxpr.eqns:
            yield eqn
            for sub in jaxprs_in_params(eqn.params):
                yield from inside(sub)

    return [e for e in inside(jax.make_jaxpr(run)(*arguments).jaxpr) if e.primitive.name == name]


def collectives(run: Any, arguments: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The gathers and scatters of the program, with the shapes of their results."""
    return [
        (name, eqn.outvars[0].aval.shape)
        for name in ("all_gather", "reduce_scatter")
        for eqn in equations(run, arguments, name)
    ]
