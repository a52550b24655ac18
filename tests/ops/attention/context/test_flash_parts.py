"""Operands that FlashAttention-3's library gets for parts; a function of XLA is in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.ops.attention import flash_attention
from collective_matmul.ops.attention.choice import KERNELS
from collective_matmul.ops.attention.kernel import Parts
from collective_matmul.ops.attention.request import AttentionRequest
from tests.conftest import MeshFactory
from tests.ops.attention.context.parts import PartsByXla
from tests.ops.attention.context.reference import ContextCase

BLOCK = 128


@pytest.fixture(autouse=True, scope="module")
def _installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attention, "missing_reason", lambda: None)
        patch.setattr(jax.ffi, "ffi_call", library)
        patch.setattr(type(KERNELS["flash3"]), "unsupported_reason", lambda *_: None)
        jax.clear_caches()
        yield
    jax.clear_caches()


def library(name: str, results: Any, **_: Any) -> Any:
    """Computes what the library's function of this name does, from its interface alone."""
    assert "varlen" in name

    def call(*operands: Any, **attributes: Any) -> Any:
        *arrays, query_offsets, key_offsets = operands
        assert query_offsets.dtype == key_offsets.dtype == jnp.int32
        parts = Parts(jnp.diff(query_offsets), jnp.diff(key_offsets))
        left, causal = int(attributes["window_size_left"]), attributes["is_causal"]
        assert int(attributes["window_size_right"]) == (0 if causal else -1)
        forward = name.endswith("fwd")
        query, key, value = arrays[:3] if forward else arrays[1:4]
        assert query.shape[-1] % 8 == 0
        request = AttentionRequest(
            batch=1,
            queries=int(attributes["max_seqlen"]),
            keys=int(attributes["max_seqlen_k"]),
            heads=query.shape[1],
            key_value_heads=key.shape[1],
            head_size=query.shape[2],
            dtype=np.dtype(query.dtype),
            causal=causal,
            window=None if left < 0 else left + 1,
            scale=float(attributes["softmax_scale"]),
        )
        kernel = PartsByXla()
        if forward:
            found = [*kernel.forward_of_parts(query, key, value, parts, request)]
        else:
            dy, out, statistics = arrays[0], arrays[4], arrays[5]
            kept = out, statistics, dy
            found = [*kernel.backward_of_parts(query, key, value, *kept, parts, request)]
            rows = len(query) + BLOCK * (len(query_offsets))
            assert results[3].shape == (request.heads * rows,)
        # A part that is longer than the attributes say would be computed in part.
        too_long = (parts.query_lengths > request.queries).any()
        too_long |= ((parts.key_lengths > request.keys) & (parts.query_lengths > 0)).any()
        found[0] = jnp.where(too_long, jnp.nan, found[0])
        found += [jnp.full(r.shape, jnp.nan, r.dtype) for r in results[len(found) :]]
        assert [x.shape for x in found] == [r.shape for r in results]
        return [x.astype(r.dtype) for x, r in zip(found, results, strict=True)]

    return call


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 5, "segments": True, "size": 12},
        pytest.param({"causal": False, "segments": True}, marks=pytest.mark.exhaustive),
        pytest.param({"window": 9, "layout": "contiguous"}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_values_and_gradients(options: dict[str, Any], make_mesh: MeshFactory) -> None:
    case = ContextCase(
        devices=3, queries=18, implementation="gather", kernel="flash3", check_vma=False, **options
    )
    case.check_on(make_mesh)
