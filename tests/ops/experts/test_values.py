"""Values and all gradients of `expert_mlp` beside a dense loop in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collective_matmul.ops.experts.backends import BACKENDS
from collective_matmul.ops.experts.grouped.backends import GROUPED_BACKENDS
from tests.conftest import MeshFactory
from tests.covering import covering
from tests.ops.experts.reference import Case, reference

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

DEVICES = (1, 2, 3, 5, 8)


def case_of(axes: dict[str, int], implementation: Any = "xla", grouped: Any = "xla", **attributes):
    """A case. Pallas' interpreter cannot run where `shard_map` checks types."""
    return Case(axes, implementation, grouped, **({"check_vma": grouped == "xla"} | attributes))


RECOMPUTED_RELU = {"recompute_hidden": True, "activation": "relu"}
#: Each value of every factor is in a line; that of our kernels in `test_routings_share_a_program`.
QUICK = [
    case_of({"expert": 1}, None, None, choices=1),
    case_of({"expert": 2}, "xla", choices=3, local_experts=1),
    case_of({"expert": 2}, "ring_direct", dtype="bfloat16", choices=8, local_experts=5),
    case_of({"expert": 3}, "xla", options={"recompute_hidden": True, "activation": "gelu"}),
    case_of({"expert": 8}, "ring_two_way", tokens=1, local_experts=1, choices=1),
    case_of({"expert": 2}, "ring", dtype="float16", routing="last", width=5, hidden=7),
    case_of({"expert": 3}, "ring_direct", routing="first", options=RECOMPUTED_RELU),
]

FACTORS: list[Any] = [
    DEVICES,
    list(BACKENDS),
    [name for name in GROUPED_BACKENDS if name != "mosaic"],  # On GPUs: tests/gpu.
    ["float32", "bfloat16", "float16"],
    [(1, 3, 1, True), (2, 1, 3, False), (8, 4, 2, True)],
]


def pairs() -> list[Case]:
    """Cases that hold each pair of values of all factors.

    Pallas' interpreter takes seconds for each kernel of each device: its cases are on few devices.
    """
    every = [c for c in itertools.product(*FACTORS) if c[2] == "xla" or c[0] <= 3]
    chosen = covering(every, lambda case: {str(at): value for at, value in enumerate(case)})
    return [
        case_of(
            {"expert": devices},
            implementation,
            grouped,
            dtype=dtype,
            choices=choices,
            local_experts=local,
            tokens=tokens,
            options={"recompute_hidden": recompute},
        )
        for devices, implementation, grouped, dtype, (choices, local, tokens, recompute) in chosen
    ]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_values_and_gradients(case: Case, make_mesh: MeshFactory) -> None:
    case.check(make_mesh)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", pairs(), ids=str)
def test_values_and_gradients_of_all_backends(case: Case, make_mesh: MeshFactory) -> None:
    case.check(make_mesh)


def cases_by_axes() -> list[Any]:
    """Experts over several axes, hidden features over one, shards of weights over another.

    A few are quick. The exhaustive ones hold each pair of axes, implementation, and dimension that
    is sharded.
    """
    meshes = [
        {"a": 2, "b": 2},
        {"a": 2, "b": 3},
        {"hidden": 3},
        {"expert": 2, "hidden": 2},
        {"a": 2, "b": 2, "hidden": 2},
    ]
    sharded = [{"expert": 2, "fsdp": 2}, {"fsdp": 2}, {"expert": 2, "hidden": 2, "fsdp": 2}]
    cases = [case_of(mesh, name) for mesh in meshes for name in BACKENDS]
    for mesh, dimension, name in itertools.product(sharded, (0, 1, 2), BACKENDS):
        # Sizes that all axes divide.
        options = {"weight_dimension": dimension}
        cases.append(case_of(mesh, name, hidden=8, options=options))
    quick = {
        ("ring", 2, 2, None),
        ("xla", 3, None),
        ("ring", 2, 2, 0),
        ("xla", 2, 2, 1),
        ("ring_direct", 2, 2, 2, 2),
    }

    def key(case: Case) -> tuple:
        dimension = case.options.get("weight_dimension")
        return (case.implementation, *case.axes.values(), dimension)

    def factors(case: Case) -> dict[str, Any]:
        implementation, *_, dimension = key(case)
        axes = tuple(case.axes.items())
        return {"axes": axes, "implementation": implementation, "dimension": dimension}

    found = [case for case in cases if key(case) in quick]
    assert len({key(case) for case in found}) == len(quick)
    others = [case for case in covering(cases, factors) if case not in found]
    marks = pytest.mark.exhaustive
    return [
        *(pytest.param(case, id=str(case)) for case in found),
        *(pytest.param(case, id=str(case), marks=marks) for case in others),
    ]


@pytest.mark.parametrize("case", cases_by_axes())
def test_axes(case: Case, make_mesh: MeshFactory) -> None:
    """Matrices have a dtype of their own where they are shards; this one is that of tokens."""
    case.check(make_mesh)


def test_shards_of_another_dtype_are_multiplied_in_that_of_the_tokens(
    make_mesh: MeshFactory,
) -> None:
    """Gradients have the dtype of the shards; else all is as with bfloat16 matrices."""
    case = case_of({"expert": 2, "fsdp": 2}, "ring", dtype="bfloat16", hidden=8)
    arrays = case.arrays()
    ws = {name: getattr(arrays, name) for name in ("w_gate", "w_up", "w_down")}
    wide = arrays._replace(**{name: w.astype(np.float32) for name, w in ws.items()})
    program = jax.jit(case.program(make_mesh(dict(case.axes))))
    narrow, made = program(arrays), program(wide)
    for name, value in made._asdict().items():
        assert value.dtype == ("bfloat16" if name in ("y", "dx") else "float32"), name
        other = np.asarray(narrow._asdict()[name], np.float32)
        # The narrow gradient is rounded when it is scattered: half a unit of its last place in
        # each of the two terms, and once in their sum.
        size = np.abs(other).max()
        np.testing.assert_allclose(np.asarray(value, np.float32), other, atol=size * 2.0**-7)


ROUTINGS = ("none", "beyond", "first", "last", "distinct")


@pytest.mark.parametrize(
    ("implementation", "grouped"),
    [
        ("ring", "triton"),
        pytest.param("ring_two_way", "xla", marks=pytest.mark.exhaustive),
        pytest.param("xla", "triton", marks=pytest.mark.exhaustive),
        pytest.param("xla", "xla", marks=pytest.mark.exhaustive),
        pytest.param("ring_two_way", "triton", marks=pytest.mark.exhaustive),
    ],
)
def test_routings_share_a_program(
    implementation: str, grouped: str, make_mesh: MeshFactory
) -> None:
    """All tokens to one expert, tokens of no expert, experts without tokens: shapes are static."""
    case = case_of({"expert": 2}, implementation, grouped, tokens=2)
    # In the newest jax, what was traced before the first interpreted kernel is traced again.
    case.check(make_mesh)
    program: Any = jax.jit(case.program(make_mesh({"expert": 2})))
    for routing in ROUTINGS:
        outcome = replace(case, routing=routing).check(make_mesh, run=lambda _: program)
        if routing in ("none", "beyond"):
            assert not any(np.any(np.asarray(part)) for part in outcome)
    assert program._cache_size() == 1


def test_an_expert_that_a_token_has_twice_counts_twice(make_mesh: MeshFactory) -> None:
    case = case_of({"expert": 2}, "ring", tokens=2)
    program = jax.jit(case.program(make_mesh({"expert": 2})))
    arrays = replace(case, routing="first").arrays()
    twice = program(arrays)
    half = arrays.weights.sum(1, keepdims=True) * np.array([[1, 0]], np.float32)
    once = program(arrays._replace(weights=half))
    # Two products with weights that add up to one: a few roundings of float32.
    np.testing.assert_allclose(twice.y, once.y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ids_dtype", ["int8", "uint8", "uint32", "int16"])
@pytest.mark.exhaustive
def test_ids_of_any_whole_dtype(ids_dtype: str, make_mesh: MeshFactory) -> None:
    case = case_of({"expert": 2}, "ring", routing="distinct")
    arrays = case.arrays()
    program = jax.jit(case.sharded(make_mesh({"expert": 2})))
    expected = program(*arrays[:-1])
    # The largest number stands for no expert, also where int32 does not hold it.
    other = arrays._replace(ids=np.where(arrays.ids == 1, np.iinfo(ids_dtype).max, arrays.ids))
    none = arrays._replace(ids=np.where(arrays.ids == 1, -1, arrays.ids))
    np.testing.assert_array_equal(
        program(*arrays._replace(ids=arrays.ids.astype(ids_dtype))[:-1]), expected
    )
    np.testing.assert_array_equal(
        program(*other._replace(ids=other.ids.astype(ids_dtype))[:-1]), program(*none[:-1])
    )


def test_weights_of_a_narrow_dtype_have_gradients_in_it(make_mesh: MeshFactory) -> None:
    case = case_of({"expert": 2}, "ring", dtype="bfloat16", tokens=2)
    arrays = case.arrays()
    narrow = arrays._replace(weights=arrays.weights.astype(arrays.x.dtype))
    outcome = jax.jit(case.program(make_mesh({"expert": 2})))(narrow)
    assert outcome.dweights.dtype == "bfloat16"
    assert outcome.y.dtype == "bfloat16"


@pytest.mark.parametrize(
    "implementation", [pytest.param("xla", marks=pytest.mark.exhaustive), "ring_direct"]
)
def test_repeats_are_equal_bit_for_bit(implementation: str, make_mesh: MeshFactory) -> None:
    case = case_of({"expert": 3}, implementation, dtype="bfloat16", tokens=4)
    program = jax.jit(case.program(make_mesh({"expert": 3})))
    first, *others = (program(case.arrays()) for _ in range(3))
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_no_tokens(make_mesh: MeshFactory) -> None:
    case = case_of({"expert": 2}, "ring", tokens=0)
    outcome = jax.jit(case.program(make_mesh({"expert": 2})))(case.arrays())
    assert outcome.y.shape == (0, case.width)
    assert not np.any(np.asarray(outcome.dw_gate))


@pytest.mark.exhaustive
@pytest.mark.parametrize("implementation", BACKENDS)
def test_float64(implementation: str, make_mesh: MeshFactory) -> None:
    """The router's weights are computed with in float64 too."""
    with jax.enable_x64(True):
        case_of({"expert": 3}, implementation, dtype="float64").check(make_mesh)


@pytest.mark.exhaustive
def test_float64_with_weights_of_float32(make_mesh: MeshFactory) -> None:
    """Their gradient has their dtype."""
    with jax.enable_x64(True):
        case = case_of({"expert": 3}, "ring", dtype="float64")
        arrays = case.arrays()
        narrow = arrays._replace(weights=arrays.weights.astype(np.float32))
        outcome = jax.jit(case.program(make_mesh({"expert": 3})))(narrow)
        assert outcome.dweights.dtype == np.float32
        np.testing.assert_allclose(outcome.y, reference(narrow)[0].y, rtol=1e-12, atol=1e-12)


CASES = st.builds(
    case_of,
    st.sampled_from([{"expert": d} for d in DEVICES] + [{"a": 2, "b": 2}, {"a": 2, "hidden": 2}]),
    st.sampled_from([None, *BACKENDS]),
    st.just("xla"),
    tokens=st.integers(1, 7),
    width=st.integers(1, 9),
    hidden=st.sampled_from([2, 4, 10]),
    local_experts=st.integers(1, 5),
    choices=st.integers(1, 8),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    routing=st.sampled_from(["random", "first", "last"]),
    options=st.fixed_dictionaries({"recompute_hidden": st.booleans()}),
)


@pytest.mark.exhaustive
@given(case=CASES, seed=st.integers(0, 100))
def test_any_shapes(case: Case, seed: int, make_mesh: MeshFactory) -> None:
    case.check(make_mesh, seed=seed)
