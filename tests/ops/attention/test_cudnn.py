"""cuDNN's attention: traced as for a GPU, and with a function in its place that keeps as much."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import _compat, dot_product_attention, segments_of_lengths
from collective_matmul.ops.attention import cudnn_attention, cudnn_packs
from collective_matmul.ops.attention.choice import KERNELS
from collective_matmul.ops.attention.request import AttentionRequest
from collective_matmul.ops.attention.segments import SEGMENTS_OF_ONE_PACK, Segments, segments_of_ids
from collective_matmul.ops.attention.xla_attention import XlaAttention
from tests.ops.attention.reference import Attended, AttentionCase

H200 = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
XLA: Any = XlaAttention()


@pytest.fixture
def traced_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with cuDNN can be traced and lowered, as on a machine with H200."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_compat.cudnn, "check_cudnn_version", lambda: 91_000)


def in_mesh_of(device: AbstractDevice, fun: Any) -> Any:
    mesh = AbstractMesh((1,), ("tensor",), (AxisType.Auto,), abstract_device=device)
    return jax.shard_map(fun, mesh=mesh, in_specs=P(), out_specs=P())


def shapes(tokens: int, dtype: Any = jnp.bfloat16) -> list[jax.ShapeDtypeStruct]:
    query, key = (2, tokens, 8, 64), (2, tokens, 2, 64)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in (query, key, key, query)]


def results_and_gradients(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
    attend = functools.partial(dot_product_attention, implementation="cudnn")
    out, pullback = jax.vjp(attend, query, key, value)
    return out, *pullback(cotangent)


@pytest.mark.usefixtures("traced_for_gpus")
@pytest.mark.parametrize("tokens", [256, 200])
def test_the_backward_gets_what_the_forward_returned(tokens: int) -> None:
    """One call of each kernel is used. Lengths that do not suit cuDNN are padded."""
    fun = in_mesh_of(H200, results_and_gradients)
    jaxpr = jax.make_jaxpr(fun)(*shapes(tokens)).jaxpr
    calls = {"fwd": [], "bwd": []}

    def visit(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            for kind, found in calls.items():
                if equation.primitive.name == f"dot_product_attention_{kind}_wrapper":
                    found.append(equation)
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jaxpr)
    assert len(calls["fwd"]) == 2 and len(calls["bwd"]) == 1  # The second is not used.
    (backward,) = calls["bwd"]
    traced_again = {v for v in calls["fwd"][1].outvars}
    assert traced_again.isdisjoint(v for v in backward.invars if not hasattr(v, "val"))
    padded = 256
    assert backward.invars[0].aval.shape == (2, padded, 8, 64)
    statistics = [v.aval for v in backward.invars if v.aval.shape == (2, 8, padded)]
    assert [s.dtype for s in statistics] == [jnp.float32]


def test_a_trace_without_gpus_has_the_arrays_of_the_kernels() -> None:
    traced = jax.make_jaxpr(in_mesh_of(H200, results_and_gradients))(*shapes(256))
    text = str(traced)
    assert text.count("ffi_call[") == 2
    assert "f32[2,8,256]" in text and "f32[2,8,256,256]" not in text
    # cuDNN supports half precision only.
    with pytest.raises(ValueError, match="it takes bfloat16 and float16, not float32"):
        jax.make_jaxpr(in_mesh_of(H200, results_and_gradients))(*shapes(256, jnp.float32))


# What cuDNN computes, by XLA


def fake_attention(query: Any, key: Any, value: Any, *, mask: Any = None, **options: Any) -> Any:
    """`jax.nn.dot_product_attention`, with a rule that keeps what cuDNN's keeps.

    Gradients are NaN where cuDNN's are.
    """
    window = options["local_window_size"]
    request = AttentionRequest.of(
        query,
        key,
        causal=options["is_causal"],
        window=None if window is None else window[0] + 1,
        scale=options["scale"],
        segments=None,
    )
    ids = None
    if mask is not None:  # The first token that each attends to names its segment.
        ids = jnp.argmax(mask[:, 0], axis=-1).astype(jnp.int32)
    segments = None if ids is None else Segments(ids, jnp.zeros((len(ids), 2), jnp.int32), ())
    return keeping(
        lambda *x: XLA.forward(*x, segments, request),
        lambda *x: XLA.backward(*x, segments, request),
        jnp.nan if query.shape[1] % 128 else 0,
    )(query, key, value)


def keeping(forward: Any, backward: Any, poison: Any) -> Any:
    attend = jax.custom_vjp(lambda *heads: forward(*heads)[0])

    def keep(*heads: Any) -> Any:
        out, statistics = forward(*heads)
        return out, (*heads, statistics, out)

    def gradients(residuals: Any, cotangent: Any) -> Any:
        *heads, statistics, out = residuals
        return tuple(g + poison for g in backward(*heads, out, statistics, cotangent))

    attend.defvjp(keep, gradients)
    return attend


def fake_packed(query: Any, key: Any, value: Any, starts: Any, lengths: Any, scale: float) -> Any:
    """`packed_attention` by XLA: statistics by place, and NaN in what it does not write."""
    blocks, size, heads, _ = query.shape
    tokens = blocks * size
    # Segments are moved to the front of all places.
    order = jnp.argsort(lengths.reshape(-1) <= 0, stable=True)
    absolute = (starts + jnp.arange(blocks)[:, None] * size).reshape(-1)[order]
    spans = jnp.where(lengths > 0, lengths, 0).reshape(-1)[order]
    index = jnp.arange(tokens)[:, None]
    inside = (index >= absolute[None]) & (index < (absolute + spans)[None])
    written = inside.any(axis=1)
    ids = jnp.where(written, jnp.argmax(inside, axis=1), -1)[None].astype(jnp.int32)
    segments = Segments(ids, jnp.zeros((1, 2), jnp.int32), ())
    flat = [x.reshape(1, tokens, *x.shape[2:]) for x in (query, key, value)]
    request = AttentionRequest.of(
        flat[0], flat[1], causal=True, window=None, scale=scale, segments=2
    )
    rows = jnp.clip(absolute[:, None] + jnp.arange(size)[None], 0, tokens - 1)
    in_place = jnp.arange(size)[None] < spans[:, None]

    def unwritten(x: Any, like: Any) -> Any:
        return jnp.where(written[None, :, None, None], x, jnp.nan).reshape(like.shape)

    def forward(*heads: Any) -> Any:
        out, statistics = XLA.forward(
            *(x.reshape(flat[0].shape[:2] + x.shape[2:]) for x in heads), segments, request
        )
        by_place = jnp.where(in_place[:, None], jnp.swapaxes(statistics[0].T[rows], 1, 2), jnp.nan)
        return unwritten(out, heads[0]), by_place

    def backward(q: Any, k: Any, v: Any, out: Any, by_place: Any, cotangent: Any) -> Any:
        assert by_place.shape == (absolute.size, heads, size)
        place = jnp.where(in_place, rows, tokens).reshape(-1)
        values = jnp.swapaxes(by_place, 1, 2).reshape(-1, heads)
        statistics = jnp.zeros((tokens, heads)).at[place].set(values, mode="drop").T[None]
        arrays = [x.reshape(1, tokens, *x.shape[2:]) for x in (q, k, v, out, cotangent)]
        arrays = [jnp.where(written[None, :, None, None], x, 0) for x in arrays]
        *operands, dy = arrays
        found = XLA.backward(*operands, statistics, dy, segments, request)
        return tuple(unwritten(g, like) for g, like in zip(found, (q, k, v), strict=True))

    return keeping(forward, backward, 0)(query, key, value)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cuDNN's kernels by XLA, in float32."""

    class Device:
        compute_capability = "9.0"

    monkeypatch.setattr(jax.nn, "dot_product_attention", fake_attention)
    monkeypatch.setattr(cudnn_packs, "packed_attention", fake_packed)
    monkeypatch.setattr(cudnn_attention, "_is_here", lambda: True)
    monkeypatch.setattr(jax, "local_devices", lambda: [Device])
    monkeypatch.setattr(type(KERNELS["cudnn"]), "unsupported_reason", lambda *_: None)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize(
    ("queries", "options"),
    [
        # Each number of queries, and each of the others, by default.
        pytest.param(
            queries,
            options,
            marks=() if (queries == 128) == ("causal" in options) else pytest.mark.exhaustive,
        )
        for queries in (128, 150)
        for options in (
            {},
            {"window": 9},
            {"segments": True},
            {"segments": True, "window": 9},
            {"causal": False},
            {"causal": False, "segments": True},
            {"segments": True, "sinks": True},
        )
    ],
    ids=str,
)
def test_values_and_gradients(queries: int, options: dict[str, Any]) -> None:
    case = AttentionCase(queries, size=8, implementation="cudnn", **options)
    case.check(case.run())


@pytest.mark.usefixtures("faked")
def test_padding_is_no_part_of_the_only_segment() -> None:
    case = AttentionCase(150, size=8, implementation="cudnn", causal=False)
    (query, key, value, _), _ = case.arrays()
    ids: Any = np.zeros((2, 150), np.int32)
    attend = functools.partial(
        dot_product_attention, causal=False, max_segments=2, implementation="cudnn"
    )
    out = jax.jit(attend)(query, key, value, segment_ids=ids)
    np.testing.assert_allclose(out, case.run().out, rtol=1e-5, atol=1e-5)


def random_lengths(rng: np.random.Generator, sequence: int, kind: str) -> list[int]:
    """Lengths of segments that fill a sequence."""
    draw = {
        "short": lambda: rng.integers(1, 12),
        "mixed": lambda: int(2 ** rng.uniform(0, 9)),
        "edges": lambda: rng.choice([8, 9, 64, 65]),
        "one": lambda: sequence,
    }[kind]
    lengths: list[int] = []
    while sum(lengths) < sequence:
        lengths.append(int(draw()))
    lengths[-1] -= sum(lengths) - sequence
    return lengths


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize(
    ("kinds", "largest_grid"),
    [
        (("one", "mixed"), 2**16 - 1),
        (("edges", "short"), 512),
        pytest.param(("one", "mixed"), 512, marks=pytest.mark.exhaustive),
        pytest.param(("edges", "short"), 2**16 - 1, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_packs_hold_every_segment_once(
    kinds: tuple[str, str], largest_grid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 tokens are cut into blocks of 512, 64 and 8. A small grid takes one sequence a call."""
    sequence, rng = 512, np.random.default_rng(0)
    lists = [random_lengths(rng, sequence, kind) for kind in kinds]
    lengths = np.zeros((2, max(map(len, lists))), np.int32)
    for row, spans in zip(lengths, lists, strict=True):
        row[: len(spans)] = spans
    segments = jax.jit(segments_of_lengths, static_argnums=1)(lengths, sequence)
    assert entered(segments, 2 * sequence) == [
        (row * sequence + start, length)
        for row, spans in enumerate(lists)
        for start, length in zip(np.cumsum([0, *spans[:-1]]).tolist(), spans, strict=True)
    ]
    # cuDNN's workspace is proportional to this.
    assert all(pack.starts.shape[1] <= 16 for pack in segments.packs)
    assert np.all(sum(pack.members.astype(int) for pack in segments.packs) == 1)
    again = jax.jit(segments_of_ids, static_argnums=1)(segments.ids * 5, segments.most)
    jax.tree.map(np.testing.assert_array_equal, again, segments)

    monkeypatch.setattr(cudnn_packs, "_LARGEST_GRID", largest_grid)
    case = AttentionCase(sequence, size=8)
    operands, cotangent = case.arrays()

    def run(name: str) -> Attended:
        def attend(*heads: Any) -> jax.Array:
            query, key, value = heads
            return dot_product_attention(
                query, key, value, segment_ids=segments, implementation=name
            )

        @jax.jit
        def both(query: Any, key: Any, value: Any) -> Any:
            out, pullback = jax.vjp(attend, query, key, value)
            dquery, dkey, dvalue = pullback(cotangent)
            return Attended(out, dquery, dkey, dvalue, None)

        return both(*operands[:3])

    # Both are float32 sums of at most 512 terms, in another order.
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(compare, run("cudnn"), run("xla"))


def entered(segments: Segments, tokens: int) -> list[tuple[int, int]]:
    """Start and length of every segment that is in a pack, after a check of its place."""
    found = []
    for pack in segments.packs:
        block = tokens // len(pack.starts)
        starts, lengths = np.asarray(pack.starts), np.asarray(pack.lengths)
        used = lengths > 0
        assert (starts[~used] == -1).all() and (lengths[~used] == -1).all()
        assert (starts[used] < block).all() and (lengths <= block).all()
        assert not (np.diff(used.astype(int)) > 0).any()
        first = (starts + np.arange(len(starts))[:, None] * block)[used]
        assert (np.diff(first) > 0).all()
        found += zip(first.tolist(), lengths[used].tolist(), strict=True)
    return sorted(found)


@pytest.mark.usefixtures("faked")
def test_more_segments_than_a_grid_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_packs, "_LARGEST_GRID", 100)
    heads = jnp.zeros((1, 512, 1, 8))

    def attend(lengths: Any) -> jax.Array:
        segments = segments_of_lengths(lengths, 512)
        return dot_product_attention(
            heads, heads, heads, segment_ids=segments, implementation="cudnn"
        )

    sentence = f"512 tokens with more than {SEGMENTS_OF_ONE_PACK} segments: .* shorter"
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(attend, jax.ShapeDtypeStruct((1, 128), jnp.int32))
