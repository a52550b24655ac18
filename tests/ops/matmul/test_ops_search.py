"""A search for calls whose results or gradients differ from the unsharded computation.

Each case is one program, results and both gradients together. Where exhaustive tests are selected,
programs are compiled too, and the search is longer. Nearly all the time goes there. So
sizes are tiny, and the search is split into functions that two workers can share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import MeshFactory
from tests.reference import AXIS, PORTABLE, Case, assert_close, poisoned_results
from tests.rewrite.simulator import simulated, simulated_or_compiled

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 3)
columns = st.lists(sizes, min_size=1, max_size=2).map(tuple)


@pytest.fixture(autouse=True, scope="module")
def _poisoned() -> Iterator[None]:
    with poisoned_results():
        yield


@st.composite
def calls(
    draw: Callable, op: str, *, weights: tuple[int, int] = (1, 1), mean: bool = False
) -> Case:
    """A call of `op` whose sizes fit; `weights` bounds how many there are."""
    devices = draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    implementation = draw(st.sampled_from([None, *PORTABLE]))
    leading = draw(st.lists(sizes, min_size=1, max_size=3))
    dimension = draw(st.integers(0, len(leading) - 1))
    # Each shard has one row to three. An all-reduce of "xla" takes any number of rows.
    if op != "matmul_all_reduce" or implementation not in (None, "xla"):
        leading[dimension] *= devices
    contracted = draw(sizes)
    shapes = draw(st.lists(columns, min_size=weights[0], max_size=weights[1]))
    if op == "all_gather_matmul":
        shapes = [(first * devices, *rest) for first, *rest in shapes]
    else:
        contracted *= devices
    return Case(
        op,
        implementation,
        devices,
        tuple(leading),
        contracted,
        tuple(shapes),
        dimension - draw(st.sampled_from([0, len(leading) + 1])),
        draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        draw(st.booleans()),
        mean,
    )


def compare(case: Case, seed: int, run: Callable, make_mesh: MeshFactory) -> None:
    assert_close(case.compare(make_mesh({AXIS: case.devices}), seed, run))


@given(case=calls("all_gather_matmul"), seed=seeds)
def test_all_gather_matmul(case: Case, seed: int, make_mesh: MeshFactory) -> None:
    compare(case, seed, simulated, make_mesh)


@simulated_or_compiled
@given(case=calls("all_gather_matmul", weights=(2, 3)), seed=seeds)
def test_all_gather_matmul_of_several_weights(
    case: Case, seed: int, run: Callable, make_mesh: MeshFactory
) -> None:
    compare(case, seed, run, make_mesh)


@given(case=calls("matmul_reduce_scatter"), seed=seeds)
def test_matmul_reduce_scatter(case: Case, seed: int, make_mesh: MeshFactory) -> None:
    compare(case, seed, simulated, make_mesh)


@simulated_or_compiled
@given(case=calls("matmul_reduce_scatter", mean=True), seed=seeds)
def test_matmul_reduce_scatter_mean(
    case: Case, seed: int, run: Callable, make_mesh: MeshFactory
) -> None:
    compare(case, seed, run, make_mesh)


@given(case=calls("matmul_all_reduce"), seed=seeds)
def test_matmul_all_reduce(case: Case, seed: int, make_mesh: MeshFactory) -> None:
    compare(case, seed, simulated, make_mesh)
