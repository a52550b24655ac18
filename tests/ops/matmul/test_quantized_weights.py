"""Weights that are quantized before the ops that multiply them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collective_matmul import (
    Quantized,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    prequantize,
)
from collective_matmul.layers import (
    AttentionProjection,
    ColumnParallelLinear,
    GatedFeedForward,
    RowParallelLinear,
    prequantize_kernels,
    shared_gather,
)
from tests.conftest import MeshFactory
from tests.fp8_reference import SHIPPED_RECIPES
from tests.reference import AXIS

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

#: Blocks of 128 divide neither. Columns of two dimensions, as heads have them.
K, COLUMNS, BACK = 136, ((64,), (8, 4)), (64, 136)
SPECS = P(None, AXIS), (P(None, AXIS), P(None, AXIS)), P(AXIS)
Weights = tuple[tuple[Any, ...], Any]


def drawn(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


@functools.cache
def arrays() -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
    ws = tuple(drawn(K, *columns, seed=i) for i, columns in enumerate(COLUMNS))
    return drawn(2, 16, K, seed=2), ws, drawn(*BACK, seed=3)


def results(x: jax.Array, ws: Any, back: Any, fp8: Any, **options: Any) -> tuple[jax.Array, ...]:
    """The results of all three ops, with two weights that share a gather."""
    options |= {"fp8": fp8}
    ring: Any = {"implementation": "ring", **options}
    y, z = all_gather_matmul(x, ws, AXIS, gather_dimension=1, **ring)
    h = y * jnp.tile(z.reshape(*z.shape[:2], -1), 2)
    scattered = matmul_reduce_scatter(h, back, AXIS, scatter_dimension=1, **ring)
    return scattered, matmul_all_reduce(h, back, AXIS, **options)


def outcome(prepare: Callable[..., Weights], fp8: str, make_mesh: MeshFactory, vma: bool) -> Any:
    """Results and gradients of weights that `prepare` makes before, outside of the gradient."""

    def both(x: jax.Array, ws: Any, back: Any) -> Any:
        before = prepare(ws, back)

        def differentiated(x: jax.Array, ws: Any, back: Any) -> Any:
            ws, back = jax.tree.map(with_array, (ws, back), before)
            return results(x, ws, back, fp8)

        ys, transpose = jax.vjp(differentiated, x, ws, back)
        return ys, transpose(jax.tree.map(jnp.cos, ys))

    fun = jax.shard_map(
        both,
        mesh=make_mesh({AXIS: 4}),
        in_specs=SPECS,
        out_specs=((P(None, AXIS), P()), SPECS),
        check_vma=vma,
    )
    return jax.jit(fun)(*arrays())


def with_array(array: jax.Array, before: Any) -> Any:
    return before.with_array(array) if isinstance(before, Quantized) else array


@pytest.mark.parametrize(("fp8", "vma"), [(name, name != "tensorwise") for name in SHIPPED_RECIPES])
def test_results_and_gradients_are_those_of_arrays(
    fp8: Any, vma: bool, make_mesh: MeshFactory
) -> None:
    """Bit for bit: scales and roundings are the same, wherever they are computed. The transpose of
    one weight has its copies, but their forward is the other's backward."""

    def quantized(ws: Any, back: Any) -> Weights:
        return prequantize(ws, fp8), prequantize(back.T, fp8).T

    expected = outcome(lambda *arrays: arrays, fp8, make_mesh, vma)
    actual = outcome(quantized, fp8, make_mesh, vma)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


#: How the second axis shards kernels of the gather and of the scatter, and x, by the dimension.
SHARDED = {
    0: (P("fsdp", AXIS), P((AXIS, "fsdp"))),
    1: (P(None, (AXIS, "fsdp")), P(AXIS, "fsdp")),
}


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
def test_shards_have_the_copies_of_the_whole(
    fp8: Any, dimension: Any, make_mesh: MeshFactory
) -> None:
    """Bit for bit. Blocks of 128 divide no shard: one has parts of two blocks."""
    ws = [drawn(4 * 68, 4 * 36, seed=0), drawn(4 * 68, 4 * 9, 2, seed=1) * 8]
    spec = P("fsdp") if dimension == 0 else P(None, "fsdp")

    def of_shards(ws: Any) -> Any:
        options: Any = {"weight_axis_name": "fsdp", "weight_dimension": dimension}
        whole = [w.gathered(dimension) for w in prequantize(ws, fp8, **options)]
        assert [w.shape for w in whole] == [(4 * 68, 4 * 36), (4 * 68, 4 * 9, 2)]
        return [(w.forward, w.backward) for w in whole]

    mesh = make_mesh({"fsdp": 4})
    fun = jax.shard_map(of_shards, mesh=mesh, in_specs=(spec,), out_specs=P(), check_vma=False)
    expected = [(w.forward, w.backward) for w in jax.jit(lambda ws: prequantize(ws, fp8))(ws)]
    jax.tree.map(np.testing.assert_array_equal, jax.jit(fun)(ws), expected)


@pytest.mark.parametrize(("fp8", "gathers"), [("rowwise", True), ("tensorwise", False)])
def test_only_scales_of_columns_are_gathered(
    fp8: Any, gathers: bool, make_mesh: MeshFactory
) -> None:
    def scales(w: jax.Array) -> jax.Array:
        options: Any = {"weight_axis_name": "fsdp", "weight_dimension": 1}
        return prequantize(w, fp8, **options).forward.scales

    spec = P(None, "fsdp")
    mesh = make_mesh({"fsdp": 4})
    fun = jax.shard_map(scales, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    assert ("all_gather" in str(jax.make_jaxpr(fun)(drawn(8, 16, seed=0)))) == gathers


@pytest.mark.parametrize(
    ("fp8", "dimension", "vma"),
    [
        ("rowwise", 0, True),
        ("tensorwise", 1, True),
        pytest.param("blockwise", 0, False, marks=pytest.mark.needs("blockwise")),
    ],
)
def test_shards_have_the_results_and_gradients_of_arrays(
    fp8: Any, dimension: Any, vma: bool, make_mesh: MeshFactory
) -> None:
    """Bit for bit, and gradients of float32 shards have that dtype."""
    options: Any = {"weight_axis_name": "fsdp", "weight_dimension": dimension}
    up, down = SHARDED[dimension]
    x, ws, back = arrays()
    wide = jax.tree.map(lambda w: w.astype("float32"), (ws, back))

    def both(x: jax.Array, ws: Any, back: Any) -> Any:
        cast = jax.tree.map(lambda w: w.astype("bfloat16"), (ws, back))
        quantized = [prequantize(w, fp8, **options) for w in cast]

        def outcome(before: Any) -> Any:
            def differentiated(x: jax.Array, ws: Any, back: Any) -> Any:
                ws, back = jax.tree.map(with_array, (ws, back), before)
                return results(x, ws, back, fp8, **options)

            ys, transpose = jax.vjp(differentiated, x, ws, back)
            return ys, transpose(jax.tree.map(jnp.cos, ys))

        return outcome((ws, back)), outcome(tuple(quantized))

    specs = P("fsdp", AXIS), (up, up), down
    outcome = (P("fsdp", AXIS), P("fsdp")), specs
    mesh = make_mesh({"fsdp": 2, AXIS: 2})
    fun = jax.shard_map(
        both, mesh=mesh, in_specs=specs, out_specs=(outcome, outcome), check_vma=vma
    )
    expected, actual = jax.jit(fun)(x, *wide)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert {dw.dtype for dw in jax.tree.leaves(actual[1][1:])} == {jnp.dtype("float32")}


def test_the_copies_are_multiplied_and_the_array_is_not_read(make_mesh: MeshFactory) -> None:
    """In both passes: with copies of other weights, results and dx are those of the others."""
    x, w, _ = arrays()

    def both(x: jax.Array, w: jax.Array, copied: jax.Array) -> Any:
        prepared = prequantize(copied, "rowwise").with_array(w)
        op = functools.partial(all_gather_matmul, axis_name=AXIS, gather_dimension=1, fp8="rowwise")
        y, transpose = jax.vjp(lambda x: op(x, prepared), x)
        return y, transpose(y)

    specs, y = (P(None, AXIS), P(None, AXIS), P(None, AXIS)), P(None, None, AXIS)
    mesh = make_mesh({AXIS: 2})
    fun = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=(y, (P(None, AXIS),))))
    first, other = w[0], -2 * w[0]
    stale, fresh, own = fun(x, other, first), fun(x, first, first), fun(x, other, other)
    jax.tree.map(np.testing.assert_array_equal, stale, fresh)
    np.testing.assert_array_equal(own[0], -2 * fresh[0])  # Powers of two do not round.


def test_a_forward_alone_needs_no_copy_for_the_backward(make_mesh: MeshFactory) -> None:
    """XLA crashed on reductions that nothing used, if they called a function."""

    def forward(x: jax.Array, ws: Any, back: Any) -> Any:
        return results(x, prequantize(ws, "rowwise"), prequantize(back, "rowwise"), "rowwise")

    out_specs = P(None, AXIS), P()
    mesh = make_mesh({AXIS: 2})
    fun = jax.shard_map(forward, mesh=mesh, in_specs=SPECS, out_specs=out_specs)
    y, total = jax.jit(fun)(*arrays())
    np.testing.assert_array_equal(y, total)


def refused(make_mesh: MeshFactory, prepare: Callable[[Any], Any], **keywords: Any) -> str:
    """The error of the gather with the weights that `prepare` makes of its two."""
    x, ws, _ = arrays()
    keywords = {"fp8": "rowwise", "gather_dimension": 1, **keywords}
    fun = jax.shard_map(
        lambda x, ws: all_gather_matmul(x, prepare(ws), AXIS, **keywords),
        mesh=make_mesh({AXIS: 2, "fsdp": 2}),
        in_specs=SPECS[:2],
        out_specs=P(None, None, AXIS),
    )
    with pytest.raises(ValueError) as error:
        jax.eval_shape(fun, x, ws)
    return str(error.value)


def test_copies_that_do_not_fit_are_refused(make_mesh: MeshFactory) -> None:
    refuse = functools.partial(refused, make_mesh)
    message = refuse(lambda ws: [prequantize(w, "rowwise") for w in ws])
    assert "2 of 2 weights are quantized, as numbers 0 of 1, 0 of 1" in message
    assert "quantize the weights of this op together" in message
    assert "1 of 2" in refuse(lambda ws: (prequantize(ws, "rowwise")[0], ws[1]))
    assert "1 of 2, 0 of 2" in refuse(lambda ws: prequantize(ws, "rowwise")[::-1])
    message = refuse(lambda ws: prequantize(ws, "rowwise"), fp8="tensorwise")
    assert message.startswith("fp8='tensorwise': w is quantized by 'rowwise'")
    assert "pass fp8='rowwise'" in refuse(lambda ws: prequantize(ws, "rowwise"), fp8=None)
    message = refuse(lambda ws: prequantize(ws[0], "rowwise").with_array(ws[0][1:]))
    assert "its copies are of bfloat16 (136, 32)" in message
    message = refuse(lambda ws: prequantize(ws[0].astype("float32"), "rowwise").astype("bfloat16"))
    assert "its copies are of float32" in message
    message = refuse(lambda ws: prequantize(ws[0], "rowwise"), weight_axis_name="fsdp")
    assert "as whole weights, and the op has shards, K of w over fsdp=2; expected" in message
    shard: Any = functools.partial(prequantize, fp8="rowwise", weight_axis_name="fsdp")
    assert "as shards, K of w over fsdp=2, and the op has whole" in refuse(lambda ws: shard(ws[0]))
    message = refuse(lambda ws: shard(ws[0]), weight_axis_name="fsdp", weight_dimension=1)
    assert "shards, K of w over fsdp=2, and the op has shards, N of w over fsdp=2" in message
    message = refuse(lambda ws: shard(ws[0].astype("float32")), weight_axis_name="fsdp")
    assert "w: bfloat16 (136, 32), and its copies are of float32" in message
    assert "expected a shard to gather" in refuse(
        lambda ws: prequantize(ws[0], "rowwise").gathered(0)
    )
    assert "quantized together with 1 others" in refuse(lambda ws: prequantize(ws, "rowwise")[0].T)


@pytest.mark.parametrize(
    ("w", "fp8", "error"),
    [
        (
            jnp.ones((2, 2)),
            None,
            "fp8=None: expected the name of a registered",
        ),
        (jnp.ones((2, 2)), "mxfp8", "fp8='mxfp8': expected None"),
        (jnp.ones(2), "rowwise", r"w: shape \(2,\); expected \[K, \*N\]"),
        ((), "rowwise", r"w=\(\): expected a weight"),
        (((1.0,),), "rowwise", "w: a tuple; expected an array"),
        ((jnp.ones((2, 2)), jnp.ones((2, 2), "bfloat16")), "rowwise", "w: bfloat16, the first is"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(w: Any, fp8: Any, error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        prequantize(w, fp8)


class Layers(nnx.Module):
    """Layers that share a gather, one that does not, and one without `fp8`."""

    def __init__(self):
        options: Any = {"rngs": nnx.Rngs(0), "dtype": jnp.bfloat16, "implementation": "ring"}
        fp8: Any = {"fp8": "rowwise", **options}
        self.projection = AttentionProjection(16, 8, 4, 4, **fp8)
        self.output = RowParallelLinear((8, 4), 16, use_bias=True, **fp8)
        self.feed_forward = GatedFeedForward(16, 32, **fp8)
        self.last = GatedFeedForward(16, 32, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = self.projection(x)
        x = self.output(query * jnp.tile(key + value, (1, 1, 2, 1)))
        return self.last(self.feed_forward(x))


def test_kernels_of_layers_that_share_a_gather_are_quantized_together(
    make_mesh: MeshFactory,
) -> None:
    graph, state = nnx.split(Layers())
    specs = nnx.get_partition_spec(state)

    def gradients(state: nnx.State, x: jax.Array) -> Any:
        def loss(state: nnx.State) -> jax.Array:
            return jnp.sum(jnp.sin(nnx.merge(graph, state)(x).astype("float32")))

        def arrays(gradients: nnx.State) -> nnx.State:
            return jax.tree.map(lambda g, _: getattr(g, "array", g), gradients, state, is_leaf=kind)

        quantized = prequantize_kernels(nnx.merge(graph, state))
        assert len(jax.tree.leaves(quantized)) == len(jax.tree.leaves(state)) + 4 * 7
        return jax.grad(loss)(state), arrays(jax.grad(loss)(quantized))

    def kind(leaf: Any) -> bool:
        return isinstance(leaf, Quantized)

    fun = jax.shard_map(
        gradients,
        mesh=make_mesh({"tensor": 4}),
        in_specs=(specs, P(None, "tensor")),
        out_specs=(specs, specs),
    )
    expected, actual = jax.jit(fun)(state, drawn(2, 8, 16, seed=0))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        (("fsdp", "tensor", None), (8, 4, 8)),
        ((None, ("tensor", "fsdp"), None), (16, 2, 8)),
        ((None, "tensor", "fsdp"), None),
        ((None, "tensor", None), (16, 4, 8)),
    ],
)
def test_kernels_are_shards_as_their_metadata_says(
    axes: Any, shape: tuple[int, ...] | None, make_mesh: MeshFactory
) -> None:
    """A shard of the first features is one of the matrix; that of others is not quantized."""
    layer = ColumnParallelLinear(16, (8, 8), fp8="rowwise", rngs=nnx.Rngs(0))
    layer.kernel.set_metadata(out_sharding=axes)
    graph, state = nnx.split(layer)

    def quantized(state: nnx.State) -> None:
        own: Any = prequantize_kernels(nnx.merge(graph, state), weight_axis_name="fsdp")
        kernel: Any = own["kernel"].get_value()
        assert isinstance(kernel, Quantized) == (shape is not None)
        if shape is None:
            return
        assert kernel.shape == shape
        assert kernel.forward.shape == (shape[0], shape[1] * shape[2])
        place = next((i for i, names in enumerate(axes) if "fsdp" in (names or ())), None)
        assert (kernel.shards and kernel.shards.dimension) == place
        if place is not None:
            assert kernel.gathered(place - 3).shape == (16, 4, 8)

    mesh = make_mesh({"fsdp": 2, "tensor": 2})
    fun = jax.shard_map(
        quantized, mesh=mesh, in_specs=(nnx.get_partition_spec(state),), out_specs=P()
    )
    jax.eval_shape(fun, state)


def test_layers_refuse_kernels_that_were_quantized_otherwise(make_mesh: MeshFactory) -> None:
    layers = GatedFeedForward(16, 32, fp8="rowwise", rngs=nnx.Rngs(0))

    def alone(layer: nnx.Module) -> Any:
        return nnx.merge(nnx.graphdef(layer), prequantize_kernels(layer))

    def shared(x: jax.Array) -> Any:
        return shared_gather(x, [alone(layers.gate), layers.up])

    mesh = make_mesh({"tensor": 1})
    fun = jax.shard_map(shared, mesh=mesh, in_specs=P(), out_specs=P(None, None, "tensor"))
    with pytest.raises(ValueError, match="1 of 2 weights are quantized, as numbers 0 of 1"):
        jax.eval_shape(fun, jnp.ones((2, 8, 16), jnp.float32))
    with (
        jax.set_mesh(make_mesh({"tensor": 2})),
        pytest.raises(ValueError, match=r"kernel: quantized, in a layer outside of a shard_map"),
    ):
        alone(layers.down)(jnp.ones((2, 8, 32), jnp.float32))


BATCH = 2, 3


def one(x: jax.Array, array: jax.Array, before: Quantized) -> jax.Array:
    """The loss of one member of a batch."""
    w = before.with_array(array)
    return jnp.sum(jnp.sin(all_gather_matmul(x, w, AXIS, fp8=before.fp8, implementation="ring")))


def in_loop(*operands: Any) -> jax.Array:
    def at(place: tuple[int, ...]) -> Any:
        return jax.tree.map(lambda array: array[place], operands)

    return jnp.stack([one(*at(place)) for place in np.ndindex(BATCH)])


def scanned(*operands: Any) -> jax.Array:
    return jax.lax.scan(lambda _, each: (None, one(*each)), None, operands)[1]


@pytest.mark.parametrize(
    "fp8",
    [
        "tensorwise",
        *(pytest.param(fp8, marks=pytest.mark.exhaustive) for fp8 in ("rowwise", "blockwise")),
    ],
)
def test_transforms_give_each_weight_its_own_gradient(fp8: Any, make_mesh: MeshFactory) -> None:
    """The batch has matrices and their arrays, or arrays alone, which share the matrices.

    Sums of up to 48 float32 terms are taken in another order, which is off by at most 3e-6.
    """
    once, twice = jax.vmap(one), jax.vmap(jax.vmap(one))
    transforms: dict[str, Callable] = {
        "vmap": twice,
        "vmap of jit": jax.vmap(jax.jit(once)),
        "vmap of checkpoint": jax.vmap(jax.checkpoint(once)),
        "checkpoint of vmap": jax.checkpoint(twice),
        "vmap of scan": jax.vmap(scanned),
        "scan of vmap": lambda *operands: jax.lax.scan(
            lambda _, each: (None, once(*each)), None, operands
        )[1],
    }

    def gradients(x: jax.Array, ws: jax.Array) -> Any:
        quantize = functools.partial(prequantize, fp8=fp8)
        before = jax.vmap(jax.vmap(quantize))(ws)

        def of(fun: Callable) -> Any:
            loss = lambda x, ws: jnp.sum(fun(x, ws, before))  # noqa: E731
            return jax.grad(loss, (0, 1))(x, ws)

        shared, w = quantize(ws[0, 0]), jnp.broadcast_to(ws[0, 0], ws.shape)
        per_weight = jax.vmap(jax.vmap(functools.partial(one, before=shared)))
        own = jax.grad(lambda ws: jnp.sum(per_weight(x, ws)))(w)
        same = jax.tree.map(lambda a: jnp.broadcast_to(a, (*BATCH, *a.shape)), shared)
        wanted = jax.grad(lambda ws: jnp.sum(in_loop(x, ws, same)))(w)
        return of(in_loop), tuple(map(of, transforms.values())), wanted, own

    x = np.random.default_rng(0).standard_normal((*BATCH, 8, 16)).astype(np.float32)
    ws = np.random.default_rng(1).standard_normal((*BATCH, 16, 48)).astype(np.float32)
    specs = P(None, None, AXIS), P(None, None, None, AXIS)
    fun = jax.shard_map(
        gradients,
        mesh=make_mesh({AXIS: 2}),
        in_specs=specs,
        out_specs=(specs, (specs,) * len(transforms), specs[1], specs[1]),
    )
    expected, actual, wanted, own = jax.jit(fun)(x, ws)
    for values in actual:
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), values, expected)
    np.testing.assert_allclose(own, wanted, atol=1e-5)
