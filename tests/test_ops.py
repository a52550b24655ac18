"""The ops compared with the unsharded computation: every op, implementation, gradient and dtype.

Results and gradients come out of one compiled program. `Case.bounds` derives how far from the
reference each element may be.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul.implementations import IMPLEMENTATIONS
from tests.conftest import MeshFactory
from tests.reference import AXIS, OPS, Case, Comparison, assert_close, poisoned_results, reference

every_op = pytest.mark.parametrize("op", OPS)
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

# D = 3 tells a hop forward from one back, and divides no power of two.
# Shards of 3 rows have halves of different sizes.
CASES = [
    Case(op, implementation, 3, ((9, 2), (2, 9))[dimension], 6, ((6,),), dimension, dtype, vma)
    for op in OPS
    for implementation in (None, *IMPLEMENTATIONS)
    for dimension in ((0, 1) if op != "matmul_all_reduce" else (0,))
    for dtype in ("float32", "bfloat16", "float16")
    for vma in (True, False)
]


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[list[tuple[int, ...]]]:
    with poisoned_results() as shapes:
        yield shapes


@pytest.fixture(scope="module", params=CASES, ids=str)
def comparison(request: pytest.FixtureRequest, make_mesh: MeshFactory) -> Comparison:
    return request.param.compare(make_mesh({AXIS: request.param.devices}))


def test_forward(comparison: Comparison) -> None:
    assert_close(comparison, "ys")


def test_gradients(comparison: Comparison) -> None:
    assert_close(comparison, "dx", "dws")


@every_op
@every_implementation
@pytest.mark.parametrize("devices", [1, 2, 4, 5, 8])
def test_axis_sizes(op: str, implementation: str, devices: int, make_mesh: MeshFactory) -> None:
    case = Case(op, implementation, devices, (2 * devices,), devices, ((devices,),))
    assert_close(case.compare(make_mesh({AXIS: devices})))


@every_op
@every_implementation
def test_shards_of_one_row(op: str, implementation: str, make_mesh: MeshFactory) -> None:
    """A row cannot be halved, so two_way sends all of it one way."""
    assert_close(Case(op, implementation, 3, (3,), 3, ((3,),)).compare(make_mesh({AXIS: 3})))


@every_implementation
@pytest.mark.parametrize("check_vma", [True, False])
def test_several_weights_share_a_gather(
    implementation: str, check_vma: bool, make_mesh: MeshFactory
) -> None:
    columns = ((3,), (6, 2), (3, 1, 2))
    case = Case(
        "all_gather_matmul", implementation, 3, (2, 6, 2), 4, columns, 1, check_vma=check_vma
    )
    assert_close(case.compare(make_mesh({AXIS: 3})))


@every_op
@every_implementation
def test_dimensions_before_and_after(op: str, implementation: str, make_mesh: MeshFactory) -> None:
    """Batch dimensions on both sides of the sharded one, which is counted from the back."""
    case = Case(op, implementation, 3, (2, 2, 6, 1), 6, ((3, 2),), -3)
    assert_close(case.compare(make_mesh({AXIS: 3})))


@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mean(implementation: str, dtype: str, make_mesh: MeshFactory) -> None:
    case = Case(
        "matmul_reduce_scatter", implementation, 3, (9,), 6, ((5,),), dtype=dtype, mean=True
    )
    assert_close(case.compare(make_mesh({AXIS: 3})))


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("implementation", ["bulk", "ring"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("long", ["contracted", "columns", "rows"])
def test_matmuls_accumulate_in_float32(
    op: str, implementation: str, dtype: str, long: str, make_mesh: MeshFactory
) -> None:
    """Sums of 8192 ones: exact in every dtype, but bfloat16 stops counting at 256, float16 at 2048.

    K is the contraction of y, N that of dx, and the rows that of dw.
    """
    sizes = {"contracted": 4, "columns": 2, "rows": 8, long: 8192}
    columns = ((sizes["columns"],),)
    case = Case(op, implementation, 2, (sizes["rows"],), sizes["contracted"], columns, dtype=dtype)
    ones = jax.tree.map(np.ones_like, case.arrays())
    actual, expected = case.run(make_mesh({AXIS: 2}), ones), reference(*ones)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_results_start_as_nan(poisoned: list[tuple[int, ...]], make_mesh: MeshFactory) -> None:
    """Without this the suite could not tell a chunk that is never written from one of zeros."""
    poisoned.clear()
    case = Case("all_gather_matmul", "ring", 2, (8,), 4, ((10,),))
    assert_close(case.compare(make_mesh({AXIS: 2})))
    gathered_product, gathered_rider = (8, 5), (8, 4)
    assert poisoned == [gathered_product, gathered_rider]


def test_without_jit(make_mesh: MeshFactory) -> None:
    case = Case("all_gather_matmul", "ring", 2, (4,), 2, ((2,),))
    x, (w,), _ = case.arrays()
    (y,) = case.sharded(make_mesh({AXIS: 2}))(jnp.asarray(x), (jnp.asarray(w),))
    np.testing.assert_allclose(y, x @ w, rtol=1e-6)  # Sums of two products.
