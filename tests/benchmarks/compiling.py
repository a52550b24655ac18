"""What tests of the benchmarks' programs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from benchmarks import arrays, contenders
from benchmarks.compiling import trace
from benchmarks.contenders import Contender
from benchmarks.programs import Operands, Program

#: One of each way to write a program whose numbers mean something.
COMPUTING = ("baseline", "windowed", "ring", "rewrite")


def compiled(
    build: Callable[[Operands, Contender], Program], mesh: Mesh, name: str
) -> tuple[Any, tuple[Any, ...]]:
    """A contender's executable in float32, and arrays for its arguments."""
    contender = contenders.make(name, mesh, try_options=False)
    program = build(Operands(mesh, np.dtype("float32")), contender)
    options, jit = next(iter(contender.jits.items()))
    executable = trace(name, options, jit, program).lowered.compile()
    return executable, arrays.compile_maker([program.arguments])().fill(program.arguments)


def assert_close(actual: Any, expected: Any) -> None:
    """Within what sums over a hundred numbers or so in another order, in float32, differ by."""
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def assert_whole_and_silent(ceiling: Any, baseline: Any, dots: int) -> None:
    """The ceiling communicates nothing and multiplies as much as the baseline."""
    text = ceiling.as_text()
    assert not any(word in text for word in ("all-gather", "reduce-scatter", "all-reduce"))
    assert text.count(" dot(") == dots == baseline.as_text().count(" dot(")
    flops = [program.cost_analysis()["flops"] for program in (ceiling, baseline)]
    # Adding up partial sums is no matmul.
    np.testing.assert_allclose(*flops, rtol=0.05)
