"""Contents of the programs: permutes and their bytes, rows of one visit, and no gathered array."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params

from collective_matmul import record_decisions
from collective_matmul.ops.experts.request import OP
from collective_matmul.ops.experts.ring import RINGS
from tests.conftest import MeshFactory
from tests.ops.experts.reference import Case

every_ring = pytest.mark.parametrize("ring", RINGS)
every_size = pytest.mark.parametrize(
    "devices", [2, 3, pytest.param(5, marks=pytest.mark.exhaustive)]
)
#: No two sizes, and no product of some, are equal.
SIZES: Any = {"tokens": 6, "width": 7, "hidden": 11, "local_experts": 2, "choices": 2}


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def traced(case: Case, make_mesh: MeshFactory) -> tuple[list[Any], dict[str, Any]]:
    """All equations of the op with its gradients, and its requests by direction."""
    with record_decisions() as decisions:
        program = case.program(make_mesh(dict(case.axes)))
        jaxpr = jax.make_jaxpr(program)(case.arrays())
    requests = {d.site.direction: d.site for d in decisions if d.site.op == OP}
    return list(equations(jaxpr.jaxpr)), requests


def bytes_of(equation: Any) -> int:
    (operand,) = equation.invars
    return operand.aval.size * np.dtype(operand.aval.dtype).itemsize


@every_ring
@every_size
@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        *(pytest.param(d, marks=pytest.mark.exhaustive) for d in ("float32", "float64")),
    ],
)
def test_bytes_that_permutes_send_are_those_of_the_requests(
    ring: str, devices: int, dtype: str, make_mesh: MeshFactory
) -> None:
    case = Case({"expert": devices}, ring, dtype=dtype, **SIZES)
    with jax.enable_x64(dtype == "float64"):
        found, requests = traced(case, make_mesh)
    permutes = [e for e in found if e.primitive.name == "ppermute"]
    expected = sum(requests[way].bytes_communicated for way in ("forward", "backward"))
    assert sum(map(bytes_of, permutes)) == expected
    # Routings, tokens and results forward; tokens, gradients, and both results backward. Halves
    # that travel two ways are permutes of their own.
    if ring != "ring_two_way":
        assert len(permutes) == (devices - 1) * (3 + 4)


@every_ring
def test_all_permutes_are_permutations(ring: str, make_mesh: MeshFactory) -> None:
    found, _ = traced(Case({"expert": 5}, ring, **SIZES), make_mesh)
    for equation in found:
        if equation.primitive.name == "ppermute":
            sources, targets = zip(*equation.params["perm"], strict=True)
            assert sorted(sources) == sorted(targets) == list(range(5))


@every_ring
def test_a_wide_last_result_goes_home_in_pieces(ring: str, make_mesh: MeshFactory) -> None:
    """Two permutes in place of one; the bytes are the same."""
    case = Case({"expert": 2}, ring, tokens=2, width=512, hidden=2)
    found, requests = traced(case, make_mesh)
    permutes = [e for e in found if e.primitive.name == "ppermute"]
    expected = sum(requests[way].bytes_communicated for way in ("forward", "backward"))
    assert sum(map(bytes_of, permutes)) == expected
    assert sum(e.invars[0].aval.shape[-1] == 256 for e in permutes) == 2


@every_ring
@pytest.mark.parametrize(
    ("recompute", "grouped"),
    [
        (True, "xla"),
        (False, "xla"),
        (True, "triton"),
        pytest.param(False, "triton", marks=pytest.mark.exhaustive),
    ],
)
def test_arrays_have_the_rows_of_one_visit(
    ring: str, recompute: bool, grouped: str, make_mesh: MeshFactory
) -> None:
    """No array of all tokens' features or hidden features exists, and nothing is gathered."""
    devices = 3
    options = {"recompute_hidden": recompute}
    case = Case(
        {"expert": devices}, ring, grouped, options=options, check_vma=grouped == "xla", **SIZES
    )
    found, _ = traced(case, make_mesh)
    names = {e.primitive.name for e in found}
    assert not names & {"all_gather", "all_to_all", "psum_scatter", "reduce_scatter", "psum"}
    inside = [e for e in found if e.primitive.name != "shard_map"]
    shapes = {v.aval.shape for e in inside for v in e.outvars if len(v.aval.shape) == 2}
    pairs = case.tokens * case.choices
    features = {case.width, case.hidden}
    rows = {shape[0] for shape in shapes if shape[1] in features}
    # The global arrays outside of `shard_map` have the tokens of all devices, and no pairs of them.
    assert pairs in rows or ring == "ring_two_way"
    assert max(rows) <= max(pairs, devices * case.tokens)
    assert devices * pairs not in rows


def test_the_reference_gathers_once_and_scatters_once(make_mesh: MeshFactory) -> None:
    """Forward: tokens, ids and weights are gathered. Backward: tokens and gradients again."""
    found, _ = traced(Case({"expert": 3}, "xla", **SIZES), make_mesh)
    count = lambda *names: sum(e.primitive.name in names for e in found)  # noqa: E731
    assert count("all_gather") == 3 + 2
    assert count("reduce_scatter", "psum_scatter") == 1 + 2
    assert count("ppermute") == 0


@every_ring
def test_shards_of_weights_travel_in_the_dtype_of_the_tokens(
    ring: str, make_mesh: MeshFactory
) -> None:
    case = Case({"expert": 2, "fsdp": 2}, ring, dtype="bfloat16", tokens=2, width=6, hidden=10)
    arrays = case.arrays()
    wide = arrays._replace(w_gate=arrays.w_gate.astype(np.float32))
    program = case.program(make_mesh(dict(case.axes)))
    found = list(equations(jax.make_jaxpr(program)(wide).jaxpr))
    permutes = [e for e in found if e.primitive.name == "ppermute" and "fsdp" in str(e.params)]
    shard = math.prod(case.matrix) // case.axes["expert"] // case.axes["fsdp"]
    sent = [e.invars[0].aval for e in permutes]
    assert sent
    assert {aval.size for aval in sent} == {shard}
    # Three matrices forward, three backward; and of the sums of three gradients.
    assert len(sent) == 3 + 3 + 3


def test_every_device_has_a_request_of_its_own_sizes(make_mesh: MeshFactory) -> None:
    case = Case({"a": 2, "b": 2, "hidden": 2}, "ring", **(SIZES | {"hidden": 12}))
    _, requests = traced(case, make_mesh)
    request = requests["forward"]
    assert (request.axis_size, request.expert_devices) == (8, 4)
    assert (request.hidden, request.experts, request.local_experts) == (6, 8, 2)
    assert request.axis_name == ("a", "b", "hidden")
    assert replace(request, direction="backward").flat == requests["backward"].flat
    for other in itertools.chain(requests.values()):
        assert type(request).from_fields(other.flat.fields()) == other.flat
