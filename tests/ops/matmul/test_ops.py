"""The ops compared with the unsharded computation: every op, implementation, gradient and dtype.

Results and gradients come out of one program. `Case.bounds` derives how far from the
reference each element may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import MeshFactory
from tests.covering import cover, pairwise
from tests.reference import (
    AXIS,
    OPS,
    PORTABLE,
    Case,
    Comparison,
    assert_close,
    poisoned_results,
    reference,
)
from tests.rewrite.simulator import simulated_or_compiled

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

every_op = pytest.mark.parametrize("op", OPS)
every_implementation = pytest.mark.parametrize("implementation", PORTABLE)

# D = 3 tells a hop forward from one back, and divides no power of two.
# Shards of 3 rows have halves of different sizes.
PRODUCT = [
    Case(op, implementation, 3, ((9, 2), (2, 9))[dimension], 6, ((6,),), dimension, dtype, vma)
    for op in OPS
    for implementation in (None, *PORTABLE)
    for dimension in ((0, 1) if op != "matmul_all_reduce" else (0,))
    for dtype in ("float32", "bfloat16", "float16")
    for vma in (True, False)
]
CASES = cover(
    PRODUCT,
    lambda case: {
        name: getattr(case, name)
        for name in ("op", "implementation", "dimension", "dtype", "check_vma")
    },
    ids=str,
)


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[list[tuple[int, ...]]]:
    with poisoned_results() as shapes:
        yield shapes


@pytest.fixture(scope="module", params=CASES)
def comparison(request: pytest.FixtureRequest, make_mesh: MeshFactory) -> Comparison:
    return request.param.compare(make_mesh({AXIS: request.param.devices}))


def test_forward(comparison: Comparison) -> None:
    assert_close(comparison, "ys")


def test_gradients(comparison: Comparison) -> None:
    assert_close(comparison, "dx", "dws")


@pairwise(op=OPS, implementation=PORTABLE, devices=[1, 2, 4, 5, 8])
@simulated_or_compiled
def test_axis_sizes(
    op: str, implementation: str, devices: int, run: Callable, make_mesh: MeshFactory
) -> None:
    case = Case(op, implementation, devices, (2 * devices,), devices, ((devices,),))
    assert_close(case.compare(make_mesh({AXIS: devices}), run=run))


@every_op
@every_implementation
@simulated_or_compiled
def test_shards_of_one_row(
    op: str, implementation: str, run: Callable, make_mesh: MeshFactory
) -> None:
    """A row cannot be halved, so two_way sends all of it one way."""
    assert_close(
        Case(op, implementation, 3, (3,), 3, ((3,),)).compare(make_mesh({AXIS: 3}), run=run)
    )


@every_implementation
@pytest.mark.parametrize("check_vma", [True, False])
@simulated_or_compiled
def test_several_weights_share_a_gather(
    implementation: str, check_vma: bool, run: Callable, make_mesh: MeshFactory
) -> None:
    columns = ((3,), (6, 2), (3, 1, 2))
    case = Case(
        "all_gather_matmul", implementation, 3, (2, 6, 2), 4, columns, 1, check_vma=check_vma
    )
    assert_close(case.compare(make_mesh({AXIS: 3}), run=run))


@every_op
@every_implementation
@simulated_or_compiled
def test_dimensions_before_and_after(
    op: str, implementation: str, run: Callable, make_mesh: MeshFactory
) -> None:
    """Batch dimensions on both sides of the sharded one, which is counted from the back."""
    case = Case(op, implementation, 3, (2, 2, 6, 1), 6, ((3, 2),), -3)
    assert_close(case.compare(make_mesh({AXIS: 3}), run=run))


@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@simulated_or_compiled
def test_mean(implementation: str, dtype: str, run: Callable, make_mesh: MeshFactory) -> None:
    case = Case(
        "matmul_reduce_scatter", implementation, 3, (9,), 6, ((5,),), dtype=dtype, mean=True
    )
    assert_close(case.compare(make_mesh({AXIS: 3}), run=run))


def balanced(*shape: int) -> np.ndarray:
    """Ones, twos and threes: each half of the last dimension has a mean of two, few parts have.

    A half of 4096 sums to 8192, which every dtype can represent. The sums on the way need up to 13
    bits; bfloat16 has 8 and float16 has 11, where ones alone would stall at 256 and at 2048.
    """
    generator = np.random.default_rng(0)
    quarters = generator.integers(1, 4, (*shape[:-1], 2, shape[-1] // 4))
    halves = generator.permuted(np.concatenate([quarters, 4 - quarters], -1), axis=-1)
    return halves.reshape(shape)


@pairwise(
    op=["all_gather_matmul", "matmul_reduce_scatter"],
    implementation=["xla", "ring"],
    dtype=["bfloat16", "float16"],
    contraction=["y", "dx", "dw"],
)
def test_matmuls_accumulate_in_float32(
    op: str, implementation: str, dtype: str, contraction: str, make_mesh: MeshFactory
) -> None:
    """The contraction of y, dx or dw is long, and the result is exact."""
    rows, contracted, columns, long = 8, 8, 8, 8192
    if contraction == "y":
        contracted, x, dy = long, balanced(rows, long), np.ones((rows, columns))
    elif contraction == "dx":
        columns, x, dy = long, np.ones((rows, contracted)), balanced(rows, long)
    else:
        rows, x, dy = long, balanced(contracted, long).T, np.ones((long, columns))
    w = np.ones((contracted, columns))
    case = Case(op, implementation, 2, (rows,), contracted, ((columns,),), dtype=dtype)
    x, w, dy = (array.astype(jnp.dtype(dtype)) for array in (x, w, dy))
    actual = case.run(make_mesh({AXIS: 2}), (x, [w], [dy]))
    jax.tree.map(np.testing.assert_array_equal, actual, reference(x, [w], [dy]))


@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_shares_of_several_weights_are_added_in_float32(
    implementation: str, make_mesh: MeshFactory
) -> None:
    """bfloat16 has no 257, so that 256 + 1 + 1 would be 256 if it were rounded on the way."""
    case = Case("all_gather_matmul", implementation, 1, (1,), 1, ((1,),) * 3, dtype="bfloat16")
    one = np.ones((1, 1), jnp.bfloat16)
    outcome = case.run(make_mesh({AXIS: 1}), (one, [256 * one, one, one], [one, one, one]))
    assert outcome.dx == 258


def test_results_start_as_nan(poisoned: list[tuple[int, ...]], make_mesh: MeshFactory) -> None:
    """Without this the suite could not tell a chunk that is never written from one of zeros."""
    poisoned.clear()
    case = Case("all_gather_matmul", "ring", 2, (8,), 4, ((10,),))
    assert_close(case.compare(make_mesh({AXIS: 2})))
    gathered_product, chunk_of_dx, gathered_operand = (8, 5), (4, 4), (8, 4)
    assert poisoned == [gathered_product, chunk_of_dx, chunk_of_dx, gathered_operand]


def test_without_jit(make_mesh: MeshFactory) -> None:
    case = Case("all_gather_matmul", "ring", 2, (4,), 2, ((2,),))
    x, (w,), _ = case.arrays()
    (y,) = case.sharded(make_mesh({AXIS: 2}))(jnp.asarray(x), (jnp.asarray(w),))
    np.testing.assert_allclose(y, x @ w, rtol=1e-6)  # Sums of two products.


@pairwise(op=OPS, implementation=[None, *PORTABLE], x=[(2, 4, 0), (0, 4, 6)], vma=[True, False])
def test_empty_operands(
    op: str, implementation: str | None, x: tuple, vma: bool, make_mesh: MeshFactory
) -> None:
    """Sums of no terms are zero. XLA has no collectives of empty arrays."""
    dimension = 0 if op == "matmul_all_reduce" else 1
    case = Case(op, implementation, 2, x[:2], x[2], ((4,),), dimension, check_vma=vma)
    outcome = case.run(make_mesh({AXIS: 2}), case.arrays())
    jax.tree.map(np.testing.assert_array_equal, outcome, reference(*case.arrays()))
