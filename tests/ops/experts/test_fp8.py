"""Values and gradients of `expert_mlp` in 8 bits, beside a reference that rounds by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from collective_matmul import explain
from collective_matmul.operands.format import FORMATS, register_format, unregister_format
from collective_matmul.operands.grouped import as_array, matrix_stacks, separate_rows
from collective_matmul.ops.experts.backends import BACKENDS
from collective_matmul.ops.experts.grouped.backends import GROUPED_BACKENDS
from collective_matmul.ops.experts.grouped.request import GroupedRequest
from collective_matmul.ops.experts.grouped.xla import XlaGrouped
from tests.conftest import MeshFactory
from tests.covering import covering
from tests.operands.test_toy_format import NAME as INTEGERS
from tests.operands.test_toy_format import Int8Rows
from tests.ops.experts.reference import Case, reference
from tests.ops.experts.rounded_reference import (
    RULES,
    Numbers,
    Rule,
    case_of,
    check,
    recipe,
    recipes,
)

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

#: To the nearest integer; operands of a sum have scales of their own.
TO_INTEGERS = Numbers(np.rint, 127.0)
INTEGER_RULE = Rule(joint=False, numbers=TO_INTEGERS, gradient_numbers=TO_INTEGERS)

RECOMPUTED: Any = {"recompute_hidden": True, "activation": "gelu"}
EXHAUSTIVE = (pytest.mark.exhaustive,)


def parameter(case: Case, *marks: Any) -> Any:
    name = case.options["fp8"]
    return pytest.param(case, id=f"{case}-{name}", marks=recipe(name, marks).marks)


QUICK = [
    case_of("rowwise", {"expert": 2}, "ring_direct", dtype="bfloat16", choices=8, local_experts=5),
    case_of("tensorwise", {"expert": 3}, "exchange", options=RECOMPUTED, tokens=4),
    # More than a block of 128 numbers.
    case_of("blockwise", {"expert": 2}, "ring", width=144, hidden=136, local_experts=1),
    case_of("blockwise", {"expert": 1}, None, choices=1, tokens=1),
    # Bounds of float32 are tight: in half precision, many numbers may round either way.
    case_of("rowwise", {"hidden": 2}, "xla"),
]
FURTHER = [
    case_of("tensorwise", {"expert": 8}, "ring_two_way", tokens=2, choices=1, local_experts=1),
    case_of("rowwise", {"a": 2, "b": 2, "hidden": 2}, "ring"),
    case_of("rowwise", {"expert": 2, "hidden": 2}, "ring_direct", dtype="float16"),
    case_of("tensorwise", {"a": 2, "hidden": 3}, "exchange"),
    case_of("blockwise", {"expert": 2, "hidden": 2}, "ring_direct", width=136, hidden=272),
]
CASES = [*map(parameter, QUICK), *(parameter(case, *EXHAUSTIVE) for case in FURTHER)]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: Case, make_mesh: MeshFactory) -> None:
    check(case, make_mesh, jax.jit, RULES[case.options["fp8"]])


def is_fast(case: dict[str, Any]) -> bool:
    """Kernels are interpreted on each device, for seconds: `test_routings_share_a_program` has two
    devices."""
    return case["grouped"] == "xla" or case["devices"] == 1


def pairs() -> list[Any]:
    """Cases that hold each pair of these settings."""
    factors: Any = {
        "fp8": tuple(RULES),
        # `test_values.py` has other sizes of a ring, which knows nothing of formats.
        "devices": (1, 3, 8),
        "implementation": tuple(BACKENDS),
        "grouped": [n for n in GROUPED_BACKENDS if n != "mosaic"],  # On GPUs: tests/gpu.
        "dtype": ("float32", "bfloat16", "float16"),
        "recompute": (False, True),
        "sizes": ((1, 3, 1), (2, 1, 3), (8, 4, 2)),  # Choices, local experts, tokens.
    }
    every = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    return [
        parameter(
            case_of(
                case["fp8"],
                {"expert": case["devices"]},
                case["implementation"],
                grouped=case["grouped"],
                dtype=case["dtype"],
                choices=case["sizes"][0],
                local_experts=case["sizes"][1],
                tokens=case["sizes"][2],
                options={"recompute_hidden": case["recompute"]},
            )
        )
        for case in covering([case for case in every if is_fast(case)], lambda case: case)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", pairs())
def test_values_and_gradients_of_all_backends(case: Case, make_mesh: MeshFactory) -> None:
    check(case, make_mesh, jax.jit, RULES[case.options["fp8"]])


@pytest.mark.parametrize(
    ("fp8", "grouped"),
    [
        recipe("rowwise", (), "xla"),
        recipe("blockwise", EXHAUSTIVE, "triton"),
    ],
)
def test_routings_share_a_program(fp8: str, grouped: str, make_mesh: MeshFactory) -> None:
    """Experts without tokens, all tokens to one, tokens of none."""
    case = case_of(fp8, {"expert": 2}, "ring", grouped=grouped, tokens=2)
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
        recipe("tensorwise", (), "xla"),
        *(
            recipe(fp8, EXHAUSTIVE, name)
            for fp8, name in zip(itertools.cycle(RULES), sorted(BACKENDS), strict=False)
        ),
    ],
)
def test_neither_repeats_nor_other_tokens_change_a_bit(
    fp8: str, implementation: str, make_mesh: MeshFactory
) -> None:
    """A scale is that of a token, or of a pair's row, alone: no one else's large numbers count."""
    case = case_of(fp8, {"expert": 2}, implementation, tokens=4)
    program = jax.jit(case.program(make_mesh({"expert": 2})))
    arrays = case.arrays()
    large = np.where(np.arange(8)[:, None] == 3, np.float32(1), np.float32(1e4))
    before, again = program(arrays), program(arrays)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, again))
    after = program(arrays._replace(x=arrays.x * large, dy=arrays.dy * large))
    for name in ("y", "dx", "dweights"):
        own, other = (np.asarray(getattr(outcome, name))[3] for outcome in (before, after))
        np.testing.assert_array_equal(own, other, err_msg=name)


@pytest.mark.parametrize(
    ("fp8", "dimension", "implementation"),
    [
        recipe("rowwise", (), 2, "ring"),
        *(
            recipe(fp8, EXHAUSTIVE, dimension, name)
            for fp8, dimension, name in covering(
                [*itertools.product(RULES, (0, 1, 2), ("xla", "ring"))],
                lambda case: dict(zip(("fp8", "dimension", "implementation"), case, strict=True)),
            )
            if (fp8, dimension, name) != ("rowwise", 2, "ring")
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


@recipes(quick=["rowwise"])
def test_results_are_near_those_of_what_was_not_rounded(fp8: str, make_mesh: MeshFactory) -> None:
    """An operand is off by at most 2⁻⁴ for e4m3, with three bits of mantissa, and 2⁻³ for e5m2.

    Below normal numbers, it is off by half of the least one, as scales see to it that the largest
    number of a row has the largest exponent: 2⁻¹⁰ of 448, and so 2⁻¹⁰ / 256 of that number. Rows
    here have 24 numbers of one size, so this is covered by the larger number of factors.

    A term of y has six rounded factors, x and w of G and of U, A, and w; an activation passes on at
    most 1.2 of a relative error of the magnitudes. One of a gradient has at most thirteen: DY and
    w, twice those of G and of U, DG and w. Errors of sums are below those of their magnitudes.
    """
    case = case_of(fp8, {"expert": 2}, "xla", tokens=3)
    arrays = case.arrays()
    outcome = jax.jit(case.program(make_mesh({"expert": 2})))(arrays)
    for name, value, wanted, size in zip(outcome._fields, outcome, *reference(arrays), strict=True):
        relative = (1 + 1.2 * 2.0**-3) ** (6 if name == "y" else 13) - 1
        off = abs(np.asarray(value, np.float64) - wanted)
        assert (off <= relative * size).all(), name
        assert off.max() > 1e-3 * abs(wanted).max(), f"{name}: nothing is rounded"


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


@recipes(quick=["tensorwise"])
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


@recipes(quick=["blockwise"])
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


@recipes()
def test_the_largest_number_of_float16_stays_finite(fp8: str) -> None:
    x = np.full((1, 8), 65504, np.float16)

    @jax.jit
    def stored(x: jax.Array) -> list[jax.Array]:
        operands = separate_rows(FORMATS[fp8], [x]) + matrix_stacks(FORMATS[fp8], [x[None]])
        return [as_array(operand, x.dtype) for operand in operands]

    rows, (matrix,) = stored(x)
    np.testing.assert_allclose(rows, x, rtol=2.0**-4)
    np.testing.assert_allclose(matrix, x, rtol=2.0**-4)
