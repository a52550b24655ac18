"""The kernels of attention on a GPU compute what float64 does, and repeat their results."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul import dot_product_attention, segments_of_lengths
from collective_matmul.ops.attention.choice import unsupported_reason
from collective_matmul.ops.attention.request import AttentionRequest
from tests.covering import pairwise
from tests.ops.attention.reference import AttentionCase

pytestmark = pytest.mark.gpu


def skip_where_refused(case: AttentionCase) -> None:
    """Skips a case that its kernel cannot execute here, with the reason."""
    assert case.implementation is not None
    (query, key, *_), _ = case.arrays()
    request = AttentionRequest.of(
        query,
        key,
        causal=case.causal,
        window=case.window,
        scale=None,
        segments=4 if case.segments else None,
    )
    if reason := unsupported_reason(case.implementation, request):
        pytest.skip(f"{case.implementation}: {reason}")


@pairwise(
    kernel=["flash3", "cudnn", "xla"],
    groups=[1, 4, 8],
    size=[64, 80, 128, 256],
    queries=[256, 333, 517],
    mask=["causal", "all", "window", "more keys"],
    segments=[False, True],
    sinks=[False, True],
    dtype=["bfloat16", "float16"],
)
def test_values_and_gradients(
    kernel: str,
    groups: int,
    size: int,
    queries: int,
    mask: str,
    segments: bool,
    sinks: bool,
    dtype: str,
) -> None:
    if mask == "more keys" and segments:
        pytest.skip("segments are of queries and keys")
    case = AttentionCase(
        queries,
        groups,
        size,
        dtype,
        causal=mask != "all",
        window=70 if mask == "window" else None,
        segments=segments,
        sinks=sinks,
        more_keys=90 if mask == "more keys" else 0,
        key_value_heads=1 if groups > 1 else 2,
        implementation=kernel,
    )
    skip_where_refused(case)
    case.check(case.run())


@pytest.mark.parametrize("kernel", ["flash3", "cudnn"])
@pytest.mark.parametrize("count", [1, 7, 64, 200, 1024])
def test_many_segments(kernel: str, count: int) -> None:
    """Results and gradients as by XLA in float32; segments of one token and long ones."""
    tokens, rng = 1024, np.random.default_rng(0)
    cuts = np.sort(rng.choice(tokens - 1, count - 1, replace=False)) + 1
    lengths = np.diff([0, *cuts.tolist(), tokens]).astype(np.int32)
    lengths = np.stack([lengths, lengths[::-1]])
    case = AttentionCase(tokens, 4, 128, "bfloat16", implementation=kernel)
    skip_where_refused(case)
    operands, cotangent = case.arrays()

    def run(kernel: str, dtype: Any) -> Any:
        @jax.jit
        def both(*heads: Any) -> Any:
            segments = segments_of_lengths(jnp.asarray(lengths), tokens)

            def attend(*heads: Any) -> jax.Array:
                return dot_product_attention(*heads, segment_ids=segments, implementation=kernel)

            out, pullback = jax.vjp(attend, *heads)
            return out, *pullback(jnp.asarray(cotangent, dtype))

        with jax.default_matmul_precision("highest"):
            return both(*(jnp.asarray(x, dtype) for x in operands[:3]))

    for actual, wanted in zip(run(kernel, jnp.bfloat16), run("xla", jnp.float32), strict=True):
        error = jnp.abs(actual.astype(jnp.float32) - wanted)
        # Three roundings to bfloat16, each relative to the largest number of its kind. Gradients
        # of segments of one token are differences of numbers of about 1, and zero.
        assert float(jnp.max(error)) < 3 * 2**-8 * max(1.0, float(jnp.max(jnp.abs(wanted))))


@pytest.mark.parametrize("kernel", ["flash3", "cudnn"])
@pytest.mark.parametrize("segments", [False, True])
def test_the_forward_repeats_bit_for_bit(kernel: str, segments: bool) -> None:
    """Gradients of queries do not: their terms are added in no fixed order."""
    case = AttentionCase(1024, 4, 128, "bfloat16", segments=segments, implementation=kernel)
    skip_where_refused(case)
    operands, _ = case.arrays()
    ids = case.ids()
    run = jax.jit(lambda *operands: case.attend(*operands, ids=ids))
    first = np.asarray(run(*operands))
    for _ in range(50):
        np.testing.assert_array_equal(np.asarray(run(*operands)), first)


def test_a_choice_runs(caplog: pytest.LogCaptureFixture) -> None:
    case = dataclasses.replace(AttentionCase(512, 4, 128, "bfloat16"), implementation=None)
    case.check(case.run())
