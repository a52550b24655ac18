"""`context_attention` under vmap, scan, 64-bit types, over several axes; and what it refuses."""

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
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import context_attention, explain, matmul_reduce_scatter
from tests.conftest import MeshFactory
from tests.dispatch.sites import H200
from tests.ops.attention.context.reference import AXIS, ContextCase

QUERY, KEY = jnp.zeros((1, 4, 4, 8)), jnp.zeros((1, 4, 2, 8))

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "other axis": ({"axis_name": "tensor"}, NameError, "no axis 'tensor' here"),
    "axis of another type": ({"axis_name": 1}, TypeError, "axis_name=1: expected the name"),
    "queries of three dimensions": (
        {"q": QUERY[0]},
        ValueError,
        r"q of shape \(4, 4, 8\): expected \[batch, this device's tokens, heads, head size\]",
    ),
    "keys of other tokens": (
        {"k": KEY[:, :2], "v": KEY[:, :2]},
        ValueError,
        "q of 4 tokens and k of 2: expected this device's part of one sequence",
    ),
    "heads that do not divide": (
        {"k": jnp.zeros((1, 4, 3, 8)), "v": jnp.zeros((1, 4, 3, 8))},
        ValueError,
        "key of 3 heads: expected a divisor of the query's 4",
    ),
    "keys of another dtype": ({"k": KEY.astype(jnp.bfloat16)}, TypeError, "key of dtype bfloat16"),
    "a layout that there is not": (
        {"layout": "striped"},
        ValueError,
        "layout='striped': expected 'zigzag' or 'contiguous'",
    ),
    "an odd number of tokens": (
        {"q": QUERY[:, :3], "k": KEY[:, :3], "v": KEY[:, :3]},
        ValueError,
        "layout='zigzag' with 3 tokens on a device: expected an even number",
    ),
    "a window of all tokens": (
        {"window": 3, "causal": False},
        ValueError,
        "window=3 with causal=False: expected a positive number of tokens and causal=True",
    ),
    "a window of nothing": ({"window": 0}, ValueError, "window=0 with causal=True"),
    "causal of another type": ({"causal": 1}, TypeError, "causal=1: expected True or False"),
    "a scale that is computed": (
        {"scale": jnp.ones(())},
        ValueError,
        "scale=.*: expected",
    ),
    "segments without their number": (
        {"segment_ids": jnp.zeros((1, 4), jnp.int32)},
        ValueError,
        "max_segments=None: expected the largest number of segments",
    ),
    "a number without segments": (
        {"max_segments": 3},
        ValueError,
        "max_segments=3: expected segment_ids too",
    ),
    "segments of the whole sequence": (
        {"segment_ids": jnp.zeros((1, 8), jnp.int32), "max_segments": 3},
        ValueError,
        r"segment_ids of shape \(1, 8\)",
    ),
    "a backend that there is not": (
        {"implementation": "striped"},
        ValueError,
        "implementation='striped': expected None",
    ),
    "heads that Ulysses cannot divide": (
        {"k": KEY[:, :, :1], "v": KEY[:, :, :1], "implementation": "ulysses"},
        ValueError,
        "it divides key and value heads over devices, and there are 1 for 2 devices",
    ),
    "a kernel that there is not": (
        {"attention_implementation": "triton"},
        ValueError,
        "attention_implementation='triton': expected None",
    ),
    "a kernel that cannot": (
        {"attention_implementation": "cudnn", "implementation": "gather"},
        ValueError,
        "cudnn.*it runs on NVIDIA GPUs",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_by_a_sentence(name: str, make_mesh: MeshFactory) -> None:
    changes, error, text = BAD[name]
    arguments: dict[str, Any] = {"q": QUERY, "k": KEY, "v": KEY, "axis_name": AXIS} | changes
    mesh = make_mesh({AXIS: 2})

    def local() -> jax.Array:
        return context_attention(**arguments)

    with pytest.raises(error, match=text):
        jax.eval_shape(
            jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P(AXIS), check_vma=False)
        )


def test_an_axis_tuple_is_one_sequence_in_the_order_of_the_mesh(make_mesh: MeshFactory) -> None:
    case = ContextCase(devices=4, queries=16, implementation="gather")
    (query, key, value, _), _ = case.arrays()
    order = case.order
    expected = case.expected()[0].out
    mesh = make_mesh({"outer": 2, "inner": 2})
    spec = P(None, ("outer", "inner"))

    def attend(axes: tuple[str, ...]) -> Any:
        return jax.shard_map(
            lambda q, k, v: context_attention(q, k, v, axes, implementation="gather"),
            mesh=mesh,
            in_specs=(spec,) * 3,
            out_specs=spec,
        )

    arrays = [x[:, order] for x in (query, key, value)]
    found = jax.jit(attend(("outer", "inner")))(*arrays)
    # Float32, heads of 16 and 16 tokens: some hundred roundings.
    np.testing.assert_allclose(found, expected[:, order], atol=2e-5)
    with pytest.raises(ValueError, match=r"expected axes in the order of the mesh"):
        jax.eval_shape(attend(("inner", "outer")), *arrays)


@pytest.mark.parametrize(
    "implementation", [pytest.param("gather", marks=pytest.mark.exhaustive), "ulysses"]
)
def test_vmap_is_another_batch(implementation: str, make_mesh: MeshFactory) -> None:
    case = ContextCase(devices=2, queries=8, implementation=implementation, segments=True)

    def mapped(both: Callable) -> Callable:
        """Maps over sequences, each of which is a batch of one."""
        one = jax.vmap(lambda *arrays: both(*jax.tree.map(lambda x: x[None], arrays)))
        return jax.jit(lambda *arrays: jax.tree.map(lambda x: x[:, 0], one(*arrays)))

    (found,) = case.run_on(make_mesh, jit=mapped)
    case.check(found)


def test_layers_of_a_scan_under_checkpoint(make_mesh: MeshFactory) -> None:
    case = ContextCase(devices=2, queries=8, implementation="ring", groups=1)
    (query, key, value, _), cotangent = case.arrays()
    attend, order = case.sharded(make_mesh), case.order
    factors = np.array([0.5, 0.25], np.float32)

    def gradient(attend: Callable, layers: Callable, *arrays: Any) -> Any:
        x, key, value, cotangent = arrays

        def layer(x: Any, factor: Any) -> tuple[Any, None]:
            return x + factor * attend(x, key, value), None

        return jax.grad(lambda x: (layers(layer, x) * cotangent).sum())(x)

    def scanned(layer: Callable, x: Any) -> Any:
        return lax.scan(jax.checkpoint(layer), x, factors)[0]

    def unrolled(layer: Callable, x: Any) -> Any:
        return functools.reduce(lambda x, factor: layer(x, factor)[0], factors, x)

    arrays = query, key, value, cotangent
    parts = functools.partial(gradient, lambda *x: attend(*x, None), scanned)
    found = jax.jit(parts)(*(x[:, order] for x in arrays))
    dense = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    expected = jax.jit(functools.partial(gradient, dense, unrolled))(*arrays)
    # Sums of float32 in another order: a few roundings.
    np.testing.assert_allclose(found, expected[:, order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("gather", "float64"), ("ring", "bfloat16"), ("ulysses", "bfloat16"), ("xla", "float64")],
)
def test_64_bit_types(implementation: str, dtype: str, make_mesh: MeshFactory) -> None:
    """Programs of no other type are traced. One of them runs."""
    case = ContextCase(
        devices=2, queries=8, implementation=implementation, dtype=dtype, segments=True
    )
    with jax.enable_x64(True):
        if (implementation, dtype) == ("gather", "float64"):
            case.check_on(make_mesh)
            return
        operands, cotangent = case.arrays()
        attend = case.sharded(make_mesh)

        def both(*operands: Any) -> Any:
            out, pullback = jax.vjp(lambda *x: attend(*x, case.ids()), *operands)
            return out, pullback(cotangent)

        for result in jax.tree.leaves(jax.eval_shape(both, *operands[:3])):
            assert result.dtype == dtype


def test_forward_mode_and_second_derivatives_are_refused(make_mesh: MeshFactory) -> None:
    case = ContextCase(devices=2, queries=8, implementation="gather")
    (query, key, value, _), _ = case.arrays()
    attend = case.sharded(make_mesh)

    def loss(x: Any) -> jax.Array:
        return (attend(x, key, value, None) ** 2).sum()

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda x: jax.jvp(loss, (x,), (x,))).lower(query)
    with pytest.raises(TypeError, match="second derivatives of context_attention"):
        jax.eval_shape(jax.grad(lambda x: jax.grad(loss)(x).sum()), query)


def test_empty_batches_are_empty(make_mesh: MeshFactory) -> None:
    case = ContextCase(devices=2, queries=8, batch=0)
    (query, key, value, _), _ = case.arrays()
    assert jax.jit(case.sharded(make_mesh))(query, key, value, None).shape == query.shape


def test_explain_shows_both_passes(make_mesh: MeshFactory) -> None:
    case = ContextCase(devices=2, queries=8)
    (query, key, value, _), _ = case.arrays()
    attend = case.sharded(make_mesh)
    grad = jax.grad(lambda x: attend(x, key, value, None).sum())
    text = str(explain(grad)(query))
    assert text.count("float32 2×4 tokens, 4/2 heads of 16, causal, zigzag over context=2") == 2
    assert "backward  context_attention  xla" in text


def test_totals_of_attention_are_not_among_those_of_matmuls() -> None:
    """The reference stores all scores: its time says nothing of what a backend hides."""

    def block(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return context_attention(x, x, x, AXIS), matmul_reduce_scatter(w, w, AXIS)

    mesh = AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=H200)
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 16384, 8, 128), (8192, 8192))
    )
    rows = P(None, AXIS)
    function = jax.shard_map(
        block, mesh=mesh, in_specs=(rows, P()), out_specs=(rows, P(AXIS)), check_vma=False
    )
    explained = explain(function, peer_kernels=False)(x, w)
    text = explained.table(200)
    for op, decision in zip(
        ("context_attention", "collective matmuls"), explained.decisions, strict=True
    ):
        total = re.search(
            rf"^1 run of {op}; of 1 the times are predicted: (\S+) ms, (\S+) ms", text, re.M
        )
        assert total is not None, text
        seconds = decision.seconds, decision.reference_seconds
        assert [float(each) for each in total.groups()] == [
            pytest.approx(1e3 * (each or 0), abs=5e-3) for each in seconds
        ]
    assert text.count("with xla, which stores all scores (") == 1
    assert text.count("are hidden under matmuls") == 1
