"""`expert_mlp` with operands in 8 bits: values, gradients, what travels, and what it says of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul import explain
from collective_matmul.dispatch.contract import UnregisteredError
from collective_matmul.dispatch.registry import OPS
from collective_matmul.dispatch.selection import choose
from collective_matmul.operands.format import (
    FORMATS,
    PLAIN,
    format_named,
    register_format,
    unregister_format,
)
from collective_matmul.operands.grouped import as_array, matrix_stacks, separate_rows
from collective_matmul.operands.recipes.recipe import Recipe
from collective_matmul.ops.experts import expert_cost
from collective_matmul.ops.experts.backends import BACKENDS
from collective_matmul.ops.experts.grouped.backends import GROUPED_BACKENDS
from collective_matmul.ops.experts.grouped.measurement import GroupedRepetitions
from collective_matmul.ops.experts.grouped.request import GroupedRequest
from collective_matmul.ops.experts.grouped.xla import XlaGrouped
from collective_matmul.ops.experts.measurement import ExpertRepetitions
from collective_matmul.ops.experts.request import OP, ExpertRequest
from collective_matmul.ops.experts.ring import RINGS
from tests.conftest import MeshFactory
from tests.dispatch.sites import H200, tracing_for
from tests.operands.test_toy_format import NAME as INTEGERS
from tests.operands.test_toy_format import Int8Rows
from tests.ops.experts.reference import Case, reference
from tests.ops.experts.rounded_reference import RULES, Numbers, Rule, check
from tests.ops.experts.test_structure import bytes_of, traced

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

RECIPES = tuple(RULES)
every_recipe = pytest.mark.parametrize("fp8", RECIPES)
#: Scales of rows and of columns, which no two operands have in common; to the nearest integer.
INTEGER_RULE = Rule(
    joint=False, numbers=Numbers(np.rint, 127.0), gradient_numbers=Numbers(np.rint, 127.0)
)


def case_of(fp8: str, axes: dict[str, int], implementation: Any = "xla", **attributes: Any) -> Case:
    """A case, of more than one block of 128 numbers if its sizes say so."""
    grouped = attributes.get("grouped", "xla")
    options = {"fp8": fp8, **attributes.pop("options", {})}
    made = {"check_vma": grouped == "xla", "width": 16, "hidden": 24} | attributes
    return Case(axes, implementation, options=options, **made)


RECOMPUTED: Any = {"recompute_hidden": True, "activation": "gelu"}
QUICK = [
    case_of("rowwise", {"expert": 2}, "ring_direct", dtype="bfloat16", choices=8, local_experts=5),
    case_of("rowwise", {"expert": 3}, "exchange", options=RECOMPUTED, tokens=4),
    case_of("tensorwise", {"expert": 3}, "ring", options=RECOMPUTED),
    case_of("tensorwise", {"expert": 8}, "ring_two_way", tokens=2, choices=1, local_experts=1),
    case_of("blockwise", {"expert": 2}, "ring", width=144, hidden=136, local_experts=1),
    case_of("blockwise", {"expert": 1}, None, choices=1, tokens=1),
    case_of("rowwise", {"expert": 2, "hidden": 2}, "xla", dtype="float16"),
    case_of("tensorwise", {"a": 2, "hidden": 3}, "exchange"),
]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case}-{case.options['fp8']}")
def test_values_and_gradients(case: Case, make_mesh: MeshFactory) -> None:
    check(case, make_mesh, jax.jit, RULES[case.options["fp8"]])


def product() -> list[Any]:
    factors = (
        RECIPES,
        (1, 2, 3, 5, 8),
        BACKENDS,
        GROUPED_BACKENDS,
        ("float32", "bfloat16", "float16"),
        (False, True),
    )
    sizes = itertools.cycle([(1, 3, 1), (2, 1, 3), (8, 4, 2)])
    return [
        case_of(
            fp8,
            {"expert": devices},
            name,
            grouped=grouped,
            dtype=dtype,
            choices=choices,
            local_experts=local,
            tokens=tokens,
            options={"recompute_hidden": recompute},
        )
        for (fp8, devices, name, grouped, dtype, recompute), (choices, local, tokens) in zip(
            itertools.product(*factors), sizes, strict=False
        )
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", product(), ids=lambda case: f"{case}-{case.options['fp8']}")
def test_values_and_gradients_of_all_backends(case: Case, make_mesh: MeshFactory) -> None:
    check(case, make_mesh, jax.jit, RULES[case.options["fp8"]])


@pytest.mark.parametrize(
    "fp8", ["rowwise", pytest.param("tensorwise", marks=pytest.mark.exhaustive)]
)
def test_routings_share_a_program(fp8: str, make_mesh: MeshFactory) -> None:
    """Experts without tokens, all tokens to one, tokens of none; with our kernels."""
    case = case_of(fp8, {"expert": 2}, "ring", grouped="triton", tokens=2)
    check(case, make_mesh, jax.jit, RULES[fp8])
    program: Any = jax.jit(case.program(make_mesh({"expert": 2})))
    for routing in ("none", "beyond", "first", "last", "distinct"):
        routed = replace(case, routing=routing)
        outcome = check(routed, make_mesh, lambda _: program, RULES[fp8])
        if routing in ("none", "beyond"):
            assert not any(np.any(np.asarray(part)) for part in outcome)
    assert program._cache_size() == 1


@pytest.mark.parametrize(
    ("fp8", "implementation"),
    [
        ("tensorwise", "ring_two_way"),
        *(
            pytest.param(fp8, name, marks=pytest.mark.exhaustive)
            for fp8, name in itertools.product(RECIPES, BACKENDS)
        ),
    ],
)
def test_other_tokens_change_no_bit(fp8: str, implementation: str, make_mesh: MeshFactory) -> None:
    """A scale is that of a token, or of a pair's row, alone: no one else's large numbers count."""
    case = case_of(fp8, {"expert": 2}, implementation, tokens=4)
    program = jax.jit(case.program(make_mesh({"expert": 2})))
    arrays = case.arrays()
    large = np.where(np.arange(8)[:, None] == 3, np.float32(1), np.float32(1e4))
    before = program(arrays)
    after = program(arrays._replace(x=arrays.x * large, dy=arrays.dy * large))
    for name in ("y", "dx", "dweights"):
        own, other = (np.asarray(getattr(outcome, name))[3] for outcome in (before, after))
        np.testing.assert_array_equal(own, other, err_msg=name)


@pytest.mark.parametrize(
    "fp8", ["tensorwise", pytest.param("blockwise", marks=pytest.mark.exhaustive)]
)
def test_repeats_are_equal_bit_for_bit(fp8: str, make_mesh: MeshFactory) -> None:
    case = case_of(fp8, {"expert": 3}, "ring_direct", dtype="bfloat16", tokens=4)
    program = jax.jit(case.program(make_mesh({"expert": 3})))
    first, *others = (program(case.arrays()) for _ in range(3))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    ("fp8", "dimension", "implementation"),
    [
        ("rowwise", 2, "ring"),
        ("blockwise", 0, "xla"),
        *(
            pytest.param(fp8, dimension, name, marks=pytest.mark.exhaustive)
            for fp8, dimension, name in itertools.product(RECIPES, (0, 1, 2), ("xla", "ring"))
        ),
    ],
)
def test_shards_of_weights_have_the_values_of_the_whole(
    fp8: str, dimension: int, implementation: str, make_mesh: MeshFactory
) -> None:
    case = case_of(
        fp8,
        {"expert": 2, "fsdp": 2},
        implementation,
        options={"weight_dimension": dimension},
        tokens=2,
    )
    check(case, make_mesh, jax.jit, RULES[fp8])


def test_gradients_of_what_was_rounded_are_near_those_of_what_was_not(
    make_mesh: MeshFactory,
) -> None:
    """Each factor is off by 2⁻⁴, of e4m3's three bits of mantissa, or 2⁻³ of e5m2, if scales use
    the whole range. A term of y has five such factors: x and w of G and of U, where the activation
    passes on at most 1.2 of an error, and A and w. Of a gradient there are at most eleven: DY and
    w, twice those of G and U, DG and w. Sums of errors are below those of magnitudes."""
    for fp8 in RECIPES:
        case = case_of(fp8, {"expert": 2}, "xla", tokens=3)
        arrays = case.arrays()
        outcome = jax.jit(case.program(make_mesh({"expert": 2})))(arrays)
        exact, size = reference(arrays)
        for name, value, wanted, magnitude in zip(
            outcome._fields, outcome, exact, size, strict=True
        ):
            factors = 6 if name == "y" else 13
            relative = (1 + 2.0**-3) ** factors - 1
            off = abs(np.asarray(value, np.float64) - wanted)
            assert (off <= relative * magnitude).all(), (fp8, name)
            assert off.max() > 1e-3 * abs(wanted).max(), "nothing is rounded"


SIZES: Any = {"tokens": 6, "width": 7, "hidden": 11, "local_experts": 2, "choices": 2}


@every_recipe
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("devices", [2, pytest.param(5, marks=pytest.mark.exhaustive)])
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


@every_recipe
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


@every_recipe
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


@every_recipe
def test_models_promise_no_faster_products(fp8: str) -> None:
    """Fewer bytes, more passes: as a ring hides what it sends, 8 bits are slower until there are
    kernels for them."""
    plain = ExpertRequest(16384, 2048, 768, 128, 8, np.dtype(jnp.bfloat16), (), 2, 2)
    for direction in ("forward", "backward"):
        own = replace(plain, direction=direction)
        request = replace(own, format=FORMATS[fp8])
        with tracing_for(H200):
            assert expert_cost.compute_seconds(request) > expert_cost.compute_seconds(own)
            assert request.communication_seconds <= own.communication_seconds
            # As for arrays: many tokens travel under the products.
            assert choose(request).name == "ring_direct"
    grouped = GroupedRequest("grouped_matmul", 4096, 2048, 64, 64, 4, np.dtype(jnp.bfloat16))
    with tracing_for(H200):
        for backend in GROUPED_BACKENDS.values():
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


@every_recipe
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


@every_recipe
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


@pytest.fixture
def _integers() -> Iterator[None]:
    register_format(Int8Rows())
    yield
    unregister_format(INTEGERS)


@pytest.mark.usefixtures("_integers")
@pytest.mark.parametrize(
    "implementation", ["ring", pytest.param("exchange", marks=pytest.mark.exhaustive)]
)
def test_a_format_of_a_user_needs_nothing_more(implementation: str, make_mesh: MeshFactory) -> None:
    case = case_of(INTEGERS, {"expert": 2}, implementation, tokens=4)
    check(case, make_mesh, jax.jit, INTEGER_RULE)
    text = str(explain(case.program(make_mesh({"expert": 2})))(case.arrays()))
    assert "travels int8 + scales and float32" in text


class _MultipliesTheFormat(XlaGrouped):
    """Stands in for kernels for 8 bits: takes operands as they are stored."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, Any]] = []

    def operand(self, request: GroupedRequest, stored: Any) -> Any:
        self.seen.append((request.of_gradient, stored))
        return stored

    def matmul(self, request: Any, pairs: Any, *args: Any, **options: Any) -> jax.Array:
        arrays = [(as_array(x, request.dtype), as_array(w, request.dtype)) for x, w in pairs]
        return super().matmul(request, arrays, *args, **options)

    def weight_gradient(self, request: Any, parts: Any, added_to: Any = None) -> jax.Array:
        arrays = [
            part._replace(
                left=as_array(part.left, request.dtype), right=as_array(part.right, request.dtype)
            )
            for part in parts
        ]
        return super().weight_gradient(request, arrays, added_to)


@every_recipe
def test_a_backend_may_multiply_what_is_stored(
    fp8: str, make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and matrices reach it in 8 bits, and the values are those of the fallback."""
    case = case_of(fp8, {"expert": 1}, "xla", tokens=4)
    wanted = jax.jit(case.program(make_mesh({"expert": 1})))(case.arrays())
    backend = _MultipliesTheFormat()
    monkeypatch.setitem(GROUPED_BACKENDS._backends, "xla", backend)
    actual = jax.jit(case.program(make_mesh({"expert": 1})))(case.arrays())
    for value, other in zip(wanted, actual, strict=True):
        np.testing.assert_array_equal(value, other)
    stored = [operand for _, operand in backend.seen if not isinstance(operand, jax.Array)]
    # Forward: three matrices, rows of tokens and of activations. Backward: three matrices, DY, and
    # both of hidden gradients; X and DY for weight gradients where they are in the format.
    assert len(stored) == 5 + 6 + (2 if FORMATS[fp8].packs_gradients else 0)


@every_recipe
def test_numbers_that_are_not_finite_stay_in_their_token(fp8: str, make_mesh: MeshFactory) -> None:
    case = case_of(fp8, {"expert": 2}, "ring", routing="distinct")
    arrays = case.arrays()
    program = jax.jit(case.sharded(make_mesh({"expert": 2})))
    spoiled = arrays.x.copy()
    spoiled[1, 2], spoiled[4, 3] = np.inf, np.nan
    y = np.asarray(program(*arrays._replace(x=spoiled)[:-1]))
    assert np.isnan(y[[1, 4]]).all()
    others = [0, 2, 3, 5]
    np.testing.assert_array_equal(y[others], np.asarray(program(*arrays[:-1]))[others])


def test_the_largest_number_of_float16_stays_finite() -> None:
    x = np.full((1, 8), 65504, np.float16)
    for fp8 in RECIPES:
        (rows,) = separate_rows(FORMATS[fp8], [jnp.asarray(x)])
        np.testing.assert_allclose(as_array(rows, np.float16), x, rtol=2.0**-4)
        (stack,) = matrix_stacks(FORMATS[fp8], [jnp.asarray(x)[None]])
        np.testing.assert_allclose(as_array(stack, np.float16)[0], x, rtol=2.0**-4)


def test_refusals(make_mesh: MeshFactory) -> None:
    program = case_of("e4m3", {"expert": 2}).sharded(make_mesh({"expert": 2}))
    arrays = case_of("rowwise", {"expert": 2}).arrays()[:-1]
    with pytest.raises(ValueError, match=r"^fp8='e4m3': expected None .* registered format: 'tens"):
        jax.eval_shape(program, *arrays)
    with jax.enable_x64(True):
        case = case_of("rowwise", {"expert": 2}, dtype="float64")
        with pytest.raises(TypeError, match=r"^x: float64 with fp8='rowwise', whose scales are"):
            jax.eval_shape(case.sharded(make_mesh({"expert": 2})), *case.arrays()[:-1])


def test_recipes_are_all_here() -> None:
    assert {name for name in FORMATS if isinstance(FORMATS[name], Recipe)} == set(RECIPES)
    assert format_named(None) == PLAIN
    assert OP in OPS
