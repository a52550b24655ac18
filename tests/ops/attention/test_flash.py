"""FlashAttention-3: what its library is given, by a function of XLA in its place."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import dot_product_attention
from collective_matmul.jaxprs import scratch_bytes
from collective_matmul.ops.attention import flash_attention
from collective_matmul.ops.attention.choice import KERNELS
from collective_matmul.ops.attention.request import AttentionRequest
from collective_matmul.ops.attention.segments import Segments
from collective_matmul.ops.attention.xla_attention import XlaAttention
from tests.ops.attention.reference import AttentionCase

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
XLA: Any = XlaAttention()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package can execute everything here, for all that tracing needs."""
    for reason in ("unsupported_reason", "missing_reason"):
        monkeypatch.setattr(type(KERNELS["flash3"]), reason, lambda *_: None)
    jax.clear_caches()
    yield
    jax.clear_caches()


def library(name: str, results: Any, **_: Any) -> Any:
    """Computes what the library's function of this name does, from its interface alone."""
    forward, packed = name.endswith("fwd"), "varlen" in name

    def call(*operands: Any, **attributes: Any) -> Any:
        assert type(attributes["softmax_scale"]) is np.float64
        assert type(attributes["window_size_left"]) is np.int64
        arrays, segments = list(operands), None
        if packed:
            *arrays, starts, _ = operands
            assert attributes["max_seqlen"] == attributes["max_seqlen_k"] == 24
            assert starts.dtype == jnp.int32
            tokens = jnp.arange(arrays[0].shape[0])
            ids = jnp.searchsorted(starts, tokens, side="right").astype(jnp.int32)
            segments = Segments(ids[None], jnp.zeros((1, 2), jnp.int32), ())
            arrays = [x[None] for x in arrays]
        *given, last = arrays
        dy, *given = (None, *given) if forward else given
        q, k, v = (*given, last) if forward else given[:3]
        assert q.shape[-1] % 8 == 0
        left, causal = int(attributes["window_size_left"]), attributes["is_causal"]
        assert int(attributes["window_size_right"]) == (0 if causal else -1)
        request = AttentionRequest.of(
            q,
            k,
            causal=causal,
            window=None if left < 0 else left + 1,
            scale=float(attributes["softmax_scale"]),
            segments=None if segments is None else 2,
        )
        if forward:
            out, statistics = XLA.forward(q, k, v, segments, request)
            found = [x[0] for x in (out, statistics)] if packed else [out, statistics]
        else:
            found = list(XLA.backward(q, k, v, given[3], last, dy, segments, request))
            found = [x[0] for x in found] if packed else found
        found += [jnp.full(r.shape, jnp.nan, r.dtype) for r in results[len(found) :]]
        assert [x.shape for x in found] == [r.shape for r in results]
        return [x.astype(r.dtype) for x, r in zip(found, results, strict=True)]

    return call


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": 12},
        {"window": 5},
        {"causal": False},
        {"more_keys": 6},
        {"segments": True},
        {"segments": True, "window": 5, "sinks": True},
        {"segments": True, "causal": False, "groups": 4},
    ],
    ids=str,
)
def test_values_and_gradients(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.ffi, "ffi_call", library)
    case = AttentionCase(implementation="flash3", **options)
    case.check(case.run())


@pytest.mark.parametrize("segments", [False, True])
def test_it_is_traced_and_lowered_without_gpus(segments: bool) -> None:
    """Nor with the package. Results vary over the axes of the operands, as `check_vma` wants.

    Scratch memory counts.
    """
    case = AttentionCase(256, 4, 64, "bfloat16", segments=segments, implementation="flash3")
    operands, cotangent = case.arrays()
    ids = np.zeros((2, 256), np.int32) if segments else None
    mesh = AbstractMesh((2,), ("data",), (AxisType.Auto,), abstract_device=H100)
    rows = P("data")

    def both(operands: Any, ids: Any, cotangent: Any) -> Any:
        out, pullback = jax.vjp(lambda *x: case.attend(*x, ids=ids), *operands)
        return out, pullback(cotangent)[:3]

    fun = jax.shard_map(both, mesh=mesh, in_specs=([rows] * 3 + [P()], rows, rows), out_specs=rows)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (operands, ids, cotangent)
    )
    text = str(jax.make_jaxpr(fun)(*shapes))
    assert text.count("ffi_call[") == 2
    parts = 4 if segments else 1  # Of one sequence on each device.
    assert f"f32[{8 * (256 + 128 * (parts + 1))}]" in text


def test_reasons_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(version: str, found: dict[str, str]) -> str | None:
        def look_up(name: str) -> str:
            if name not in found:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name]

        numbers = tuple(map(int, version.split(".")))
        monkeypatch.setattr(jax, "__version__", version)
        monkeypatch.setattr(jax, "__version_info__", numbers)
        monkeypatch.setattr(importlib.metadata, "version", look_up)
        monkeypatch.setattr(flash_attention.importlib.util, "find_spec", lambda name: found or None)
        return flash_attention.missing_reason.__wrapped__()

    here = {"dew-flash-attn-cu13": "0.3.6"}
    assert "needs jax 0.11.2 or newer, and this is 0.10.2" in str(reason("0.10.2", here))
    assert "pip install '.[flash]' in the repository" in str(reason("0.12.0", {}))
    other = reason("0.12.0", {"dew-flash-attn-cu12": "0.4.0"})
    assert other == "it needs dew-flash-attn-cu12 0.3.6, and 0.4.0 is installed"
    assert reason("0.12.0", here) is None


@pytest.mark.parametrize(
    ("device", "dtype", "size", "sentence"),
    [
        (H100, "bfloat16", 256, None),
        (H100, "bfloat16", 288, "heads of up to 256, not 288"),
        (H100, "float32", 64, "it takes bfloat16 and float16, not float32"),
        (
            AbstractDevice("NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu"),
            "bfloat16",
            64,
            "it runs on Hopper GPUs, and this is NVIDIA A100",
        ),
    ],
)
def test_what_it_takes(device: Any, dtype: str, size: int, sentence: str | None) -> None:
    query = jax.ShapeDtypeStruct((1, 128, 4, size), dtype)
    request = AttentionRequest.of(query, query, causal=True, window=None, scale=None, segments=None)
    mesh = AbstractMesh((1,), ("tensor",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        reason = KERNELS["flash3"].unsupported_reason(request)
    assert (reason is None) if sentence is None else (sentence in str(reason))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("key_value_heads", "keys"), [(2, 2 * 24 * 2 * 16), (8, 0)])
def test_the_sums_that_the_backward_allocates_are_known(key_value_heads: int, keys: int) -> None:
    """Float32 gradients of queries, and of keys and values that several query heads share."""
    shapes = [(1, 24, heads, 16) for heads in (8, key_value_heads, key_value_heads)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def loss(*arrays: jax.Array) -> jax.Array:
        out = dot_product_attention(*arrays, implementation="flash3")
        return out.astype(jnp.float32).sum()

    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=H100)
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arguments).jaxpr
    assert scratch_bytes(jaxpr) == 4 * (24 * 8 * 16 + keys)
