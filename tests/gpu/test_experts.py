"""Experts on GPUs: kernels compute what float64 does, and repeat their results bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from tests.conftest import MeshFactory, skip_without
from tests.hopper import skip_without_hopper
from tests.ops.experts.reference import Case
from tests.ops.experts.rounded_reference import RULES, check
from tests.ops.experts.test_prequantize_experts import Frozen, QuantizedBefore

pytestmark = pytest.mark.gpu


def case_of(devices: int, implementation: Any, **attributes: Any) -> Case:
    sizes: dict[str, Any] = {"tokens": 37, "width": 72, "hidden": 40, "local_experts": 3}
    sizes |= {"choices": 2, "dtype": "bfloat16"} | attributes
    axes = {"expert": devices}
    return Case(axes, implementation, "triton", **sizes)


CASES = [
    case_of(1, None),
    case_of(2, "xla"),
    case_of(2, "ring_direct"),
    case_of(2, "ring_direct", dtype="float32"),
    case_of(2, "ring_direct", dtype="float16", routing="first"),
    case_of(2, "ring_direct", check_vma=False, width=512, options={"recompute_hidden": True}),
    case_of(2, "ring_two_way", choices=8, local_experts=5),
    case_of(2, "ring", width=64, hidden=4096, tokens=130),
    case_of(2, "ring_direct", routing="none"),
    case_of(2, None, width=256, hidden=256, tokens=300, routing="distinct"),
    replace(case_of(1, None, width=128, hidden=192, tokens=300, local_experts=5), grouped="mosaic"),
    replace(case_of(2, "ring_direct", width=192, hidden=320, tokens=36), grouped="mosaic"),
    replace(case_of(2, "ring_direct", width=256, hidden=256, tokens=304), grouped=None),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_gradients_and_repeats(case: Case, make_mesh: MeshFactory) -> None:
    skip_without(case.axes["expert"])
    if jax.default_backend() == "cpu":  # A rehearsal: Pallas' interpreter cannot check types.
        case = replace(case, grouped="xla")
    if case.grouped == "mosaic":
        skip_without_hopper()
    first = case.check(make_mesh)
    again = jax.jit(case.program(make_mesh(dict(case.axes))))(case.arrays())
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


ROUNDED = [
    case_of(2, implementation, options={"fp8": fp8, "recompute_hidden": recompute}, **sizes)
    for fp8, implementation, recompute, sizes in (
        ("rowwise", "ring_direct", False, {}),
        ("tensorwise", "ring_direct", True, {"width": 512}),
        ("blockwise", "ring_two_way", True, {"width": 136, "hidden": 264}),
        ("tensorwise", "exchange", False, {"choices": 1}),
    )
] + [
    replace(
        case_of(2, "ring_direct", options={"fp8": fp8}, width=256, hidden=256, tokens=304),
        grouped=grouped,
    )
    for fp8 in ("rowwise", "tensorwise", "blockwise")
    for grouped in ("mosaic", None)
]


@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: f"{case}-{case.options['fp8']}")
def test_operands_in_8_bits(case: Case, make_mesh: MeshFactory) -> None:
    """XLA for GPUs drops roundings that it sees widened: none of these."""
    skip_without(case.axes["expert"])
    if jax.default_backend() == "cpu":
        case = replace(case, grouped="xla")
    if case.grouped == "mosaic":
        skip_without_hopper()
    first = check(case, make_mesh, jax.jit, RULES[case.options["fp8"]])
    again = jax.jit(case.program(make_mesh(dict(case.axes))))(case.arrays())
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("fp8", list(RULES))
def test_weights_that_were_quantized_before(fp8: str, make_mesh: MeshFactory) -> None:
    """Results and gradients are those of arrays; frozen weights have none."""
    skip_without(2)
    sizes: dict[str, Any] = {"width": 256, "hidden": 384, "tokens": 304}
    case = replace(case_of(2, "ring_direct", options={"fp8": fp8}, **sizes), grouped=None)
    if jax.default_backend() == "cpu":
        case = replace(case, grouped="xla")
    mesh = make_mesh(dict(case.axes))
    wanted = jax.jit(case.program(mesh))(case.arrays())
    for kind, names in ((QuantizedBefore, wanted._fields), (Frozen, ("y", "dx", "dweights"))):
        actual = jax.jit(kind.of(case).program(mesh))(case.arrays())
        for name in names:
            value, other = (np.asarray(getattr(each, name)) for each in (actual, wanted))
            np.testing.assert_array_equal(value, other, err_msg=name)
