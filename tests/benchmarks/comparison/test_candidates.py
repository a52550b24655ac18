"""The candidates of benchmarks."""

from __future__ import annotations

import jax
import pytest

from benchmarks.comparison import candidates
from collective_matmul.peer_access import peer_kernels_disallowed_reason
from tests.conftest import MeshFactory
from tests.reference import AXIS


def test_the_librarys_candidates_are_repeated_with_each_recipe() -> None:
    chosen = ("baseline", "xla", "auto", "rewrite", "explicit", "rewrite_jit", "compute_only")
    assert candidates.with_fp8(chosen, ()) == chosen
    assert candidates.with_fp8(chosen, ("rowwise", "blockwise"))[len(chosen) :] == (
        *("xla_fp8_rowwise", "auto_fp8_rowwise"),
        *("rewrite_fp8_rowwise", "rewrite_jit_fp8_rowwise"),
        *("xla_fp8_blockwise", "auto_fp8_blockwise"),
        *("rewrite_fp8_blockwise", "rewrite_jit_fp8_blockwise"),
    )


@pytest.mark.parametrize(
    "name",
    [
        *("auto", "auto_fused", "auto_fused_fp8_rowwise", "xla", "ring"),
        pytest.param("fused", marks=pytest.mark.needs("fused")),
        *("rewrite", "explicit", "rewrite_jit"),
    ],
)
def test_fused_kernels_may_be_in_programs_that_are_named_for_them(
    name: str, make_mesh: MeshFactory
) -> None:
    traced: list[str | None] = []
    compiler = candidates.COMPILERS[candidates.make(name, make_mesh({AXIS: 2})).compiler]
    compiler(lambda x: traced.append(peer_kernels_disallowed_reason()) or x).lower(
        jax.ShapeDtypeStruct((), "float32")
    )
    assert (traced == [None]) == ("fused" in name)
