"""Attention over a sequence on several GPUs computes what float64 does, and may repeat its bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest

from collective_matmul.ops.attention.flash_attention import missing_reason
from tests.conftest import MeshFactory, skip_without
from tests.ops.attention.context.reference import ContextCase

pytestmark = pytest.mark.gpu


def case_of(
    devices: int, implementation: Any, kernel: Any = None, **attributes: Any
) -> ContextCase:
    sizes: dict[str, Any] = {"queries": 24 * 2 * devices, "groups": 4, "size": 64}
    sizes |= {"dtype": "bfloat16", "key_value_heads": 4} | attributes
    return ContextCase(devices=devices, implementation=implementation, kernel=kernel, **sizes)


MASKS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"segments": True},
    {"window": 37},
    {"window": 37, "segments": True},
    {"layout": "contiguous"},
    {"layout": "contiguous", "window": 100},
    {"causal": False, "segments": True},
]
CASES = [
    *(case_of(2, "gather", "flash3", **mask) for mask in MASKS),
    *(case_of(4, "gather", "flash3", **mask) for mask in MASKS),
    case_of(2, "gather", "flash3", queries=1024, size=128, dtype="float16"),
    case_of(2, "gather", "cudnn"),
    case_of(2, "gather", "cudnn", queries=1024, size=128),
    case_of(2, "gather", "cudnn", layout="contiguous"),
    case_of(2, "ring", "flash3"),
    case_of(2, "ring", "cudnn", queries=1024),
    case_of(4, "ring", "flash3", causal=False),
    *(case_of(2, "ulysses", "flash3", **mask) for mask in MASKS[:5]),
    *(case_of(2, "ulysses", "cudnn", **mask) for mask in ({}, {"segments": True, "queries": 512})),
    case_of(2, "xla"),
    case_of(2, None, dtype="float32"),
    *(case_of(2, None, queries=512, **mask) for mask in MASKS),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: ContextCase, make_mesh: MeshFactory) -> None:
    skip_without(case.devices)
    if jax.default_backend() == "cpu":  # A rehearsal: there is no other kernel.
        small: dict[str, Any] = {"queries": 6 * case.devices, "size": 8, "dtype": "float32"}
        case = replace(case, kernel=None, groups=1, **small)
    if case.kernel == "flash3" and (reason := missing_reason()):
        pytest.skip(reason)
    case.check_on(make_mesh)


@pytest.mark.parametrize("implementation", ["gather", "ring", "ulysses", "xla"])
def test_repeats_are_equal_bit_for_bit(implementation: str, make_mesh: MeshFactory) -> None:
    """By cuDNN and XLA. FlashAttention-3 adds a query's gradient in no fixed order."""
    skip_without(2)
    kernel = None if jax.default_backend() == "cpu" else "cudnn"
    queries = 16 if jax.default_backend() == "cpu" else 512
    kernel = None if implementation == "xla" else kernel
    case_of(2, implementation, kernel, queries=queries).check_on(make_mesh, repeats=True)
