"""Attention and its gradients equal those in float64, for every mask, dtype and number of heads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import (
    ATTENTION_CHECKPOINT_NAME,
    dot_product_attention,
    segments_of_ids,
    segments_of_lengths,
)
from collective_matmul.ops.attention.attend import attention_backward, attention_forward
from collective_matmul.ops.attention.request import AttentionRequest
from collective_matmul.ops.attention.xla_attention import XlaAttention
from tests.conftest import MeshFactory
from tests.covering import pairwise
from tests.ops.attention.reference import Attended, AttentionCase

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")


@pairwise(
    groups=[1, 4, 8],
    size=[8, 12],
    queries=[24, 29],
    mask=["causal", "all", "window", "more keys"],
    segments=[False, True],
    sinks=[False, True],
    dtype=["float32", "bfloat16", "float16"],
)
def test_values_and_gradients(
    groups: int, size: int, queries: int, mask: str, segments: bool, sinks: bool, dtype: str
) -> None:
    if mask == "more keys" and segments:
        pytest.skip("segments are of queries and keys")
    case = AttentionCase(
        queries,
        groups,
        size,
        dtype,
        causal=mask != "all",
        window=7 if mask == "window" else None,
        segments=segments,
        sinks=sinks,
        more_keys=5 if mask == "more keys" else 0,
        key_value_heads=1,
    )
    case.check(case.run())


def test_a_scale_of_its_own() -> None:
    case = AttentionCase(scale=0.7)
    case.check(case.run())


def test_double_precision() -> None:
    with jax.enable_x64(True):
        case = AttentionCase(dtype="float64", segments=True, sinks=True, window=9)
        case.check(case.run())


def test_scores_of_half_precision_are_wide() -> None:
    (query, key, value, _), _ = AttentionCase(dtype="bfloat16").arrays()
    text = str(jax.make_jaxpr(dot_product_attention)(query, key, value))
    assert "preferred_element_type=float32" in text


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(make_mesh: MeshFactory, check_vma: bool) -> None:
    """Sinks differ by device of the tensor axis alone, so their gradient is summed over data."""
    case = AttentionCase(segments=True, sinks=True)
    mesh = make_mesh({"data": 2, "tensor": 2})
    heads, rows = P("data", None, "tensor"), P("data")
    specs = [heads, heads, heads, P("tensor")], rows, heads

    def both(operands: Any, ids: Any, cotangent: Any) -> Attended:
        out, pullback = jax.vjp(lambda *x: case.attend(*x, ids=ids), *operands)
        gradients = pullback(cotangent)
        if not check_vma:
            gradients = (*gradients[:3], jax.lax.psum(gradients[3], "data"))
        return Attended(out, *gradients)

    mapped = jax.shard_map(
        both,
        mesh=mesh,
        in_specs=specs,
        out_specs=Attended(heads, heads, heads, heads, P("tensor")),
        check_vma=check_vma,
    )
    case.check(case.run(jit=lambda _: jax.jit(mapped)))


def test_over_explicit_axes() -> None:
    case = AttentionCase(segments=True, sinks=True)
    mesh = jax.make_mesh(
        (2, 2), ("data", "tensor"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4]
    )

    def jit(both: Any) -> Any:
        def placed(operands: Any, ids: Any, cotangent: Any) -> Any:
            def place(x: Any, *spec: Any) -> jax.Array:
                return jax.device_put(x, NamedSharding(mesh, P(*spec)))

            *heads, sinks = operands
            operands = [place(x, "data", None, "tensor") for x in heads] + [place(sinks, "tensor")]
            return jax.jit(both)(
                operands, place(ids, "data"), place(cotangent, "data", None, "tensor")
            )

        return placed

    with jax.set_mesh(mesh):
        case.check(case.run(jit=jit))


def test_nothing_is_attended_again_under_a_policy_that_saves_it() -> None:
    saved = jax.checkpoint_policies.save_only_these_names(ATTENTION_CHECKPOINT_NAME)
    everything = jax.checkpoint_policies.everything_saveable
    assert exponentials_of(saved) == exponentials_of(everything) < exponentials_of(None)


def exponentials_of(policy: Any) -> int:
    """The exponentials in a program of attention's gradients: of each forward and backward."""
    (query, key, value, _), _ = AttentionCase().arrays()
    attend = jax.checkpoint(lambda *heads: dot_product_attention(*heads), policy=policy)
    loss = jax.value_and_grad(lambda *heads: attend(*heads).sum(), (0, 1, 2))
    text = jax.jit(loss).trace(query, key, value).lower().as_text()
    return text.count("stablehlo.exponential")


def test_backward_with_the_log_sum_exp_of_more_keys() -> None:
    """Gradients of two halves of the keys, each given results of all, are those of the whole."""
    kernel, case = XlaAttention(), AttentionCase(causal=False)
    (query, key, value, _), cotangent = case.arrays()

    def request(keys: Any) -> AttentionRequest:
        return AttentionRequest.of(
            query, keys, causal=False, window=None, scale=None, segments=None
        )

    out, total = attention_forward(kernel, query, key, value, None, None, request(key))
    halves: Any = [
        attention_backward(kernel, query, k, v, None, None, out, total, cotangent, request(k))
        for k, v in zip(jnp.split(key, 2, 1), jnp.split(value, 2, 1), strict=True)
    ]
    dquery = halves[0][0] + halves[1][0]
    dkey, dvalue = (jnp.concatenate([half[i] for half in halves], 1) for i in (1, 2))
    case.check(Attended(out, dquery, dkey, dvalue, np.zeros(case.heads, np.float32)))


def test_a_query_that_sees_nothing_has_zeros() -> None:
    """Chunks of a sharded sequence can have one: more queries than keys, aligned to the last."""
    kernel = XlaAttention()
    (query, key, value, _), cotangent = AttentionCase().arrays()
    key, value = key[:, :20], value[:, :20]
    request = AttentionRequest.of(query, key, causal=True, window=None, scale=None, segments=None)
    out, total = kernel.forward(query, key, value, None, request)
    assert np.all(np.asarray(out)[:, :4] == 0) and np.all(np.isneginf(total[:, :, :4]))
    gradients = kernel.backward(query, key, value, out, total, cotangent, None, request)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    assert np.all(np.asarray(gradients[0])[:, :4] == 0)


def test_segments_are_those_of_ids() -> None:
    ids = np.array([[2, 2, 5, 9, 9], [0, 0, 0, 0, 0]], np.int32)
    segments = jax.jit(segments_of_ids, static_argnums=1)(ids, 4)
    np.testing.assert_array_equal(segments.ids, [[0, 0, 1, 2, 2], [0] * 5])
    np.testing.assert_array_equal(segments.lengths, [[2, 1, 2, 0], [5, 0, 0, 0]])
    np.testing.assert_array_equal(segments.offsets, [0, 2, 3, 5, 5, 10, 10, 10, 10])


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    windowed, whole = AttentionCase(window=24), AttentionCase()
    np.testing.assert_array_equal(windowed.run().out, whole.run().out)


def test_vmap_over_calls() -> None:
    case = AttentionCase()
    (query, key, value, _), _ = case.arrays()
    mapped = jax.vmap(lambda q: dot_product_attention(q[None], key[:1], value[:1])[0])(query)
    alone = dot_product_attention(query, *(jnp.repeat(x[:1], 2, 0) for x in (key, value)))
    np.testing.assert_allclose(mapped, alone, rtol=1e-6, atol=1e-6)  # Another order of sums.


def test_more_segments_than_announced_are_joined_to_the_last() -> None:
    ids = np.array([[0, 1, 1, 2, 3, 0]], np.int32)
    segments = jax.jit(segments_of_ids, static_argnums=1)(ids, 3)
    np.testing.assert_array_equal(segments.ids, [[0, 1, 1, 2, 2, 2]])
    np.testing.assert_array_equal(segments.offsets, [0, 1, 3, 6])
    lengths = np.array([[2, 1], [5, 4]], np.int32)
    cut = jax.jit(segments_of_lengths, static_argnums=1)(lengths, 6)
    np.testing.assert_array_equal(cut.lengths, [[2, 4], [5, 1]])
    np.testing.assert_array_equal(cut.ids, [[0, 0, 1, 1, 1, 1], [0] * 5 + [1]])


@pytest.mark.parametrize("spec", [P(None, "data"), P(None, None, None, "data")], ids=str)
def test_over_explicit_axes_tokens_and_sizes_are_whole(spec: P) -> None:
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:2])
    (query, key, value, _), _ = AttentionCase().arrays()
    with jax.set_mesh(mesh):
        heads = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (query, key, value)]
        with pytest.raises(ValueError, match="sharded alike, and along batch and heads only"):
            dot_product_attention(*heads)


HEADS = {"query": (2, 8, 4, 16), "key": (2, 8, 2, 16), "value": (2, 8, 2, 16)}


@pytest.mark.parametrize(
    ("shapes", "options", "sentence"),
    [
        ({"query": (8, 4, 16)}, {}, r"query of shape \(8, 4, 16\): expected \[batch"),
        ({"value": (2, 8, 1, 16)}, {}, "expected keys and values of one shape"),
        ({"key": (2, 8, 3, 16), "value": (2, 8, 3, 16)}, {}, "key of 3 heads: expected a divisor"),
        ({"key": (2, 6, 2, 16), "value": (2, 6, 2, 16)}, {}, "8 queries and 6 keys"),
        ({}, {"window": 0}, "window=0 with causal=True"),
        ({}, {"window": 2.5}, "window=2.5 with causal=True"),
        ({}, {"scale": float("nan")}, "scale=nan: expected a finite number"),
        ({}, {"max_segments": 4}, "max_segments=4: expected segment_ids as an array too"),
        ({"query": (2, 0, 4, 16)}, {}, "none of them 0"),
        ({}, {"implementation": ()}, r"implementation=\(\): expected None, or names among"),
        ({}, {"segment_ids": np.zeros((2, 8), np.int32), "max_segments": 2.0}, "a whole number"),
        ({}, {"window": 4, "causal": False}, "window=4 with causal=False"),
        ({}, {"segment_ids": np.zeros((2, 7), np.int32)}, r"segment_ids of shape \(2, 7\)"),
        ({}, {"segment_ids": np.zeros((2, 8), np.int32)}, "max_segments=None: expected"),
        ({}, {"sinks": np.zeros(2)}, r"sinks of shape \(2,\): expected an array \[4\]"),
        (
            {},
            {"implementation": "flash"},
            "'flash': expected None, or names among 'flash3'",
        ),
        ({}, {"implementation": "cudnn"}, "it runs on NVIDIA GPUs, and this is cpu"),
        ({}, {"implementation": ("flash3", "cudnn")}, "pass .*'xla'"),
    ],
)
def test_refusals(shapes: dict, options: dict, sentence: str) -> None:
    heads: Any = [np.zeros(shape, np.float32) for shape in (HEADS | shapes).values()]
    with pytest.raises(ValueError, match=sentence):
        dot_product_attention(*heads, **options)


def test_dtypes_are_refused() -> None:
    heads: Any = (np.zeros(shape, np.float32) for shape in HEADS.values())
    query, key, value = heads
    with pytest.raises(TypeError, match="query of dtype float8_e4m3fn: expected one of bfloat16"):
        dot_product_attention(*(x.astype(jnp.float8_e4m3fn) for x in (query, key, value)))
    with pytest.raises(TypeError, match="segment_ids of dtype float32: expected integers"):
        ids = jnp.zeros((2, 8), jnp.float32)
        dot_product_attention(query, key, value, segment_ids=ids, max_segments=2)
    with pytest.raises(TypeError, match="key of dtype bfloat16: expected one of"):
        dot_product_attention(query, key.astype(jnp.bfloat16), value)


def test_a_planted_mistake_is_found() -> None:
    case = AttentionCase()
    found = case.run()
    wrong = dataclasses.replace(case, window=20).run()
    case.check(found)
    with pytest.raises(AssertionError, match="out"):
        case.check(wrong)
