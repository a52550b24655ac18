"""Expert ops in 8 bits: what they send and say, how they are measured, and what models promise."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice

from collective_matmul import explain
from collective_matmul.dispatch.contract import UnregisteredError
from collective_matmul.dispatch.registry import OPS
from collective_matmul.dispatch.selection import choose
from collective_matmul.operands.format import FORMATS, PLAIN
from collective_matmul.operands.grouped import as_array
from collective_matmul.ops.experts import expert_cost
from collective_matmul.ops.experts.grouped.backends import GROUPED_BACKENDS
from collective_matmul.ops.experts.grouped.measured_program import GroupedRepetitions
from collective_matmul.ops.experts.grouped.request import GroupedRequest
from collective_matmul.ops.experts.measured_program import ExpertRepetitions
from collective_matmul.ops.experts.request import ExpertRequest
from collective_matmul.ops.experts.ring import RINGS
from tests.conftest import MeshFactory
from tests.dispatch.sites import H200, tracing_for
from tests.ops.experts.rounded_reference import case_of, recipes
from tests.ops.experts.test_structure import bytes_of, traced

A100 = AbstractDevice("NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu")
SIZES: Any = {"tokens": 6, "width": 7, "hidden": 11, "local_experts": 2, "choices": 2}


@recipes()
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("devices", [3, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_bytes_that_permutes_send_are_those_of_the_requests(
    fp8: str, ring: str, devices: int, make_mesh: MeshFactory
) -> None:
    """Tokens are one byte for each number, and scales."""
    case = case_of(fp8, {"expert": devices}, ring, dtype="bfloat16", **SIZES)
    found, requests = traced(case, make_mesh)
    permutes = [e for e in found if e.primitive.name == "ppermute"]
    expected = sum(requests[way].bytes_communicated for way in ("forward", "backward"))
    assert sum(map(bytes_of, permutes)) == expected
    sent = [e.invars[0].aval for e in permutes]
    packed = [aval for aval in sent if aval.dtype == jnp.uint8]
    parts = 2 if ring == "ring_two_way" else 1
    packs = FORMATS[fp8].packs_gradients
    # Tokens forward; in the backward, tokens and gradients, unless weight gradients need arrays.
    assert sum(aval.shape[0] for aval in packed) == 6 * (devices - 1) * (3 if packs else 1)
    assert {aval.shape[1] for aval in packed} == {7 + 128}
    assert {request.fp8 for request in requests.values()} == {fp8}
    arrays = [aval for aval in sent if aval.dtype == jnp.bfloat16]
    results = 2 if packs else 4
    assert len(arrays) <= parts * (devices - 1) * results
    assert sum(aval.shape[0] for aval in arrays) == 6 * (devices - 1) * results
    assert {aval.shape[1] for aval in arrays} == {7}


@recipes()
def test_bytes_of_a_wide_token_are_half_of_those_of_bfloat16(fp8: str) -> None:
    plain = ExpertRequest(64, 4096, 64, 8, 2, np.dtype(jnp.bfloat16), (), 4, 4)
    request = replace(plain, format=FORMATS[fp8])
    rows = 64 * (4096 + 128)  # One scale or 32 of them are a unit of 128 bytes.
    assert request.bytes_of_tokens == rows
    routing = 8 * 64 * 2
    assert request.bytes_communicated == 3 * (rows + 64 * 4096 * 2 + routing)
    backward = replace(request, direction="backward")
    ways = 2 * rows if request.format.packs_gradients else 2 * 64 * 4096 * 2
    assert backward.bytes_communicated == 3 * (ways + 64 * 4096 * 2 + routing // 2)


@recipes()
def test_explain_says_what_travels_and_what_is_multiplied(fp8: str, make_mesh: MeshFactory) -> None:
    case = case_of(fp8, {"expert": 2}, None, grouped=None, dtype="bfloat16", tokens=4)
    text = explain(case.program(make_mesh({"expert": 2})))(case.arrays()).table(1000)
    passes = [line for line in text.splitlines() if "experts of" in line]
    assert all(f"over expert=2, fp8 {fp8}" in line for line in passes)
    travels = {
        "the backward pass decides" in line: re.findall("travels .*? xla", line)[0]
        for line in passes
    }
    forward, backward = travels[True], travels[False]
    stored = FORMATS[fp8]
    assert "travels float8_e4m3fn + scales and bfloat16 " in forward
    if stored.packs_gradients:
        gradients = stored.wire_dtype("bfloat16", backward=True)
        assert f"float8_e4m3fn + scales and {gradients} and bfloat16 " in backward
    else:
        assert "travels bfloat16 " in backward
    products = [line for line in text.splitlines() if " groups, fp8" in line]
    assert all("multiplies bfloat16 " in line for line in products)
    weights = [line for line in text.splitlines() if "]ᵀ " in line]
    assert weights
    assert all((f"fp8 {fp8}" in line) == stored.packs_gradients for line in weights)


def _ratio(plain: ExpertRequest, fp8: str) -> float:
    """Predicted seconds of computing in 8 bits, relative to arrays."""
    in_8_bits = replace(plain, format=FORMATS[fp8])
    return expert_cost.compute_seconds(in_8_bits) / expert_cost.compute_seconds(plain)


@recipes()
def test_models_predict_products_and_conversions(fp8: str) -> None:
    """With the kernels of Hopper GPUs, products are faster, and operands are converted. Others
    multiply arrays, which operands become first."""
    plain = ExpertRequest(16384, 2048, 768, 128, 8, np.dtype(jnp.bfloat16), (), 2, 2)
    few, many = replace(plain, tokens=2048), replace(plain, tokens=65536)
    for direction in ("forward", "backward"):
        own = replace(plain, direction=direction)
        request = replace(own, format=FORMATS[fp8])
        with tracing_for(H200):
            assert _ratio(replace(many, direction=direction), fp8) < 0.96
            # Conversions of weights do not depend on the tokens.
            assert _ratio(replace(few, direction=direction), fp8) > 1
            assert request.communication_seconds <= own.communication_seconds
            # As for arrays: many tokens travel under the products.
            assert choose(request).name == "ring_direct"
        with tracing_for(A100):
            assert _ratio(own, fp8) > 1
    grouped = GroupedRequest("grouped_matmul", 4096, 2048, 64, 64, 4, np.dtype(jnp.bfloat16))
    with tracing_for(H200):
        modelled = [b for b in GROUPED_BACKENDS.values() if b.predict(grouped) is not None]
        assert {"xla", "triton"} <= {backend.name for backend in modelled}
        for backend in modelled:
            times = [
                backend.predict(replace(grouped, format=stored)) for stored in (PLAIN, FORMATS[fp8])
            ]
            assert times[0] is not None
            assert times[1] is not None
            assert times[0].seconds < times[1].seconds


FORWARD = ExpertRequest(4, 6, 5, 4, 2, np.dtype("float32"), (), axis_size=2, expert_devices=2)
GROUPED = GroupedRequest(
    "grouped_matmul",
    all_rows=9,
    used_rows=7,
    contracted=4,
    columns=5,
    groups=3,
    dtype=np.dtype("float32"),
)


@recipes()
def test_tables_tell_formats_apart(fp8: str) -> None:
    for plain in (FORWARD, replace(FORWARD, direction="backward"), GROUPED):
        request = replace(plain, format=FORMATS[fp8])
        fields = request.flat.fields()
        assert fields["fp8"] == fp8
        assert "fp8" not in plain.flat.fields()
        assert OPS[request.op].request_of(fields) == request.flat != plain.flat
        assert request.kind != plain.kind
        with pytest.raises(UnregisteredError):
            OPS[request.op].request_of({**fields, "fp8": "of another program"})
    gradient = replace(GROUPED, format=FORMATS[fp8], of_gradient=True)
    assert OPS[gradient.op].request_of(gradient.flat.fields()) == gradient.flat


def filled(repetitions: Any) -> Any:
    generator = np.random.default_rng(0)
    plain = jax.tree.map(
        lambda leaf: generator.standard_normal(leaf.shape).astype(leaf.dtype),
        repetitions.plain_operands("xla"),
    )
    return jax.jit(repetitions.prepare)(plain)


@pytest.mark.parametrize(
    ("fp8", "direction"),
    [
        ("tensorwise", "backward"),
        ("rowwise", "forward"),
        pytest.param("rowwise", "backward", marks=pytest.mark.exhaustive),
        pytest.param("tensorwise", "forward", marks=pytest.mark.exhaustive),
    ],
)
def test_passes_are_measured_in_the_format(fp8: str, direction: Any) -> None:
    request = replace(FORWARD, format=FORMATS[fp8], direction=direction, keeps_hidden=False)
    measured = ExpertRepetitions(request, jax.devices())
    measured.repetitions = 1
    operands = filled(measured)
    described = measured.operands("ring")
    shape_of = lambda leaf: (leaf.shape, leaf.dtype)  # noqa: E731
    assert jax.tree.map(shape_of, described) == jax.tree.map(shape_of, operands)
    text = jax.jit(measured.program("ring")).lower(described).as_text()
    rows = sum("collective_permute" in line and "ui8>" in line for line in text.splitlines())
    assert rows == (
        2
        if direction == "backward" and FORMATS[fp8].packs_gradients
        else int(direction == "forward")
    )
    jax.block_until_ready(jax.jit(measured.program("ring"))(operands))


@recipes()
@pytest.mark.parametrize("op", ["grouped_matmul", "grouped_weight_gradient"])
def test_grouped_matmuls_are_measured_with_what_makes_arrays(fp8: str, op: Any) -> None:
    request = replace(GROUPED, op=op, format=FORMATS[fp8])
    measured = GroupedRepetitions(request, jax.devices())
    measured.repetitions = 1
    operands = filled(measured)
    ((result, _),) = jax.jit(measured.program("xla"))(operands)
    plain = GroupedRepetitions(replace(request, format=PLAIN), jax.devices())
    plain.repetitions = 1
    arrays = operands._replace(
        xs=[as_array(x, np.float32) for x in operands.xs],
        weights=[[as_array(w, np.float32) for w in ws] for ws in operands.weights],
    )
    ((wanted, _),) = jax.jit(plain.program("xla"))(arrays)
    used = slice(None) if op == "grouped_weight_gradient" else slice(request.used_rows)
    np.testing.assert_array_equal(result[used], wanted[used])


def test_refusals(make_mesh: MeshFactory) -> None:
    program = case_of("e4m3", {"expert": 2}).sharded(make_mesh({"expert": 2}))
    arrays = case_of("rowwise", {"expert": 2}).arrays()[:-1]
    with pytest.raises(ValueError, match=r"^fp8='e4m3': expected None .* registered format: 'tens"):
        jax.eval_shape(program, *arrays)
    with jax.enable_x64(True):
        case = case_of("rowwise", {"expert": 2}, dtype="float64")
        with pytest.raises(TypeError, match=r"^x: float64 with fp8='rowwise', whose scales are"):
            jax.eval_shape(case.sharded(make_mesh({"expert": 2})), *case.arrays()[:-1])
