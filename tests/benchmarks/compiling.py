"""Helpers of the tests of the benchmarks' programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from benchmarks.comparison import candidates
from benchmarks.comparison.candidates import Candidate
from benchmarks.comparison.compiling import trace
from benchmarks.comparison.operands import Operands, compile_maker
from benchmarks.comparison.programs import Program

#: One of each way to write a program whose numbers mean something.
COMPUTING = ("baseline", "windowed_einsum", "ring", "rewrite")


def compiled(
    build: Callable[[Operands, Candidate], Program], mesh: Mesh, name: str
) -> tuple[Any, tuple[Any, ...]]:
    """A candidate's executable in float32, and arrays for its arguments."""
    candidate = candidates.make(name, mesh, try_options=False)
    program = build(Operands(mesh, np.dtype("float32")), candidate)
    executable = trace(candidate, program).lowered.compile()
    return executable, compile_maker([program.arguments])().fill(program.arguments)


def assert_close(actual: Any, expected: Any) -> None:
    """Sums over about a hundred numbers in another order, in float32, differ by less."""
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def assert_whole_and_silent(bound: Any, baseline: Any, dots: int) -> None:
    """The compute-only bound communicates nothing and multiplies as much as the baseline."""
    text = bound.as_text()
    assert not any(word in text for word in ("all-gather", "reduce-scatter", "all-reduce"))
    assert text.count(" dot(") == dots == baseline.as_text().count(" dot(")
    flops = [program.cost_analysis()["flops"] for program in (bound, baseline)]
    # Adding up partial sums is not a matmul.
    np.testing.assert_allclose(*flops, rtol=0.05)
