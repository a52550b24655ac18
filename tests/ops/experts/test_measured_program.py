"""The programs that expert passes and grouped matmuls are measured in, and tables of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul import explain, tune
from collective_matmul.dispatch import repetitions as repeating
from collective_matmul.dispatch.registry import OPS
from collective_matmul.dispatch.tables.table import COMPUTE_ONLY, Table
from collective_matmul.dispatch.tables.table_files import cache_path
from collective_matmul.ops.experts.grouped.measured_program import (
    GroupedRepetitions,
    balanced_sizes,
)
from collective_matmul.ops.experts.grouped.request import GroupedOp, GroupedRequest
from collective_matmul.ops.experts.measured_program import ExpertRepetitions, balanced_ids
from collective_matmul.ops.experts.request import OP, ExpertRequest
from collective_matmul.tuning import tune as tuning
from collective_matmul.tuning.timing import Timing
from tests.conftest import MeshFactory
from tests.ops.experts.reference import Arrays, Case, Outcome, reference

FLOAT32 = np.dtype("float32")
FORWARD = ExpertRequest(4, 6, 5, 4, 2, FLOAT32, (), axis_size=2, expert_devices=2)
REQUESTS = {
    "forward": FORWARD,
    "backward": dataclasses.replace(FORWARD, direction="backward"),
    "recomputed": dataclasses.replace(FORWARD, direction="backward", keeps_hidden=False),
    "hidden features divided": dataclasses.replace(FORWARD, axis_size=4),
}
every_request = pytest.mark.parametrize("name", REQUESTS)


def filled(repetitions: Any, implementation: str = "xla") -> Any:
    """Operands of a program, prepared."""
    generator = np.random.default_rng(0)
    plain = jax.tree.map(
        lambda leaf: generator.standard_normal(leaf.shape).astype(leaf.dtype),
        repetitions.plain_operands(implementation),
    )
    return jax.jit(repetitions.prepare)(plain)


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(8, 2, 4), (7, 3, 5), (2, 8, 3)])
def test_ids_are_balanced_and_random(tokens: int, choices: int, experts: int) -> None:
    numbers = np.random.default_rng(0).standard_normal(tokens).astype(np.float32)
    ids = np.asarray(balanced_ids(jnp.asarray(numbers), choices, experts))
    counts = np.bincount(ids.ravel(), minlength=experts)
    assert counts.max() - counts.min() <= 1
    if choices <= experts:
        assert all(len(set(row)) == choices for row in ids)
    other = balanced_ids(jnp.asarray(numbers[::-1]), choices, experts)
    np.testing.assert_array_equal(other, ids[::-1])


def exact(name: str, operands: Any, ws: Any) -> Outcome:
    request = REQUESTS[name]
    dy = operands.x if operands.dy is None else operands.dy
    arrays = [operands.x, operands.ids, operands.router, *ws, dy]
    divided = request.axis_size // request.expert_devices
    if divided > 1:
        # Devices of one group of experts follow each other: their parts of f are joined.
        parts = [np.split(np.asarray(w), request.axis_size) for w in ws]
        for i, axis in enumerate((2, 2, 1)):
            groups = range(0, request.axis_size, divided)
            joined = [np.concatenate(parts[i][g : g + divided], axis) for g in groups]
            arrays[3 + i] = np.concatenate(joined)
    return reference(Arrays(*map(np.asarray, arrays)))[0]


@pytest.mark.parametrize(
    ("name", "backend"),
    [("forward", "xla"), ("recomputed", "ring"), ("hidden features divided", "ring_direct")],
)
def test_every_repetition_is_the_pass_with_weights_of_its_own(name: str, backend: str) -> None:
    measured = ExpertRepetitions(REQUESTS[name], jax.devices())
    measured.repetitions = 2
    operands = filled(measured)
    results = jax.jit(measured.program(backend))(operands)
    assert len(results) == 2
    # A few dozen roundings of float32, in values of size 10 to 100.
    close: Any = {"rtol": 1e-4, "atol": 1e-3}
    for (waited_for, more), ws in zip(results, operands.weights, strict=True):
        expected = exact(name, operands, ws)
        if REQUESTS[name].direction == "forward":
            np.testing.assert_allclose(waited_for, expected.y, **close)
        else:
            np.testing.assert_allclose(waited_for[0], expected.dx, **close)
            np.testing.assert_allclose(waited_for[1], expected.dweights, **close)
            for gradient, wanted in zip(more, expected[3:], strict=True):
                np.testing.assert_allclose(gradient, wanted, **close)


def products(measured: Any, implementation: str) -> list[str]:
    described = measured.operands(implementation)
    return jax.jit(measured.program(implementation)).lower(described).as_text().splitlines()


@every_request
def test_the_bound_has_the_products_and_no_communication(name: str) -> None:
    measured = ExpertRepetitions(REQUESTS[name], jax.devices())
    measured.repetitions = 2
    text = {way: products(measured, way) for way in ("xla", COMPUTE_ONLY, "ring")}
    count = {way: sum("ragged_dot" in line for line in lines) for way, lines in text.items()}
    assert count[COMPUTE_ONLY] == count["xla"]
    words = ("all_gather", "reduce_scatter", "collective_permute", "all_reduce")
    assert not any(word in line for line in text[COMPUTE_ONLY] for word in words)
    assert any("all_gather" in line for line in text["xla"])
    assert any("collective_permute" in line for line in text["ring"])


@every_request
def test_requests_are_read_from_tables(name: str) -> None:
    flat = REQUESTS[name].flat
    assert OPS[OP].request_of(flat.fields()) == flat
    assert OPS[OP].has_bound


GROUPED = GroupedRequest(
    "grouped_matmul", all_rows=9, used_rows=7, contracted=4, columns=5, groups=3, dtype=FLOAT32
)


@pytest.mark.parametrize(
    ("op", "pairs", "transposed"),
    [
        ("grouped_matmul", 1, False),
        ("grouped_matmul", 2, True),
        ("grouped_weight_gradient", 1, False),
    ],
)
def test_grouped_matmuls_are_measured(op: GroupedOp, pairs: int, transposed: bool) -> None:
    request = dataclasses.replace(GROUPED, op=op, pairs=pairs, transposed=transposed)
    assert OPS[op].request_of(request.flat.fields()) == request.flat
    measured = GroupedRepetitions(request, jax.devices())
    measured.repetitions = 2
    operands = filled(measured)
    results = jax.jit(measured.program("xla"))(operands)
    sizes = np.asarray(balanced_sizes(request))
    assert sizes.sum() == 7
    assert sizes.max() - sizes.min() <= 1
    group = np.repeat(np.arange(3), sizes)
    order = np.asarray(operands.order)
    assert sorted(order) == list(range(9))
    for (result, _), ws in zip(results, operands.weights, strict=True):
        xs = [np.asarray(x, np.float64) for x in operands.xs]
        rows = [(x[order] if pairs == 1 else x)[:7] for x in xs]
        ws = [np.asarray(w, np.float64) for w in ws]
        # Sums of at most 8 products of size 1, in float32.
        close: Any = {"rtol": 1e-5, "atol": 1e-5}
        if op == "grouped_weight_gradient":
            expected = np.zeros((3, 4, 5))
            for row in range(7):
                expected[group[row]] += np.outer(rows[0][row], ws[0][row])
            np.testing.assert_allclose(result, expected, **close)
        else:
            ws = [w.swapaxes(1, 2) if transposed else w for w in ws]
            expected = sum(
                np.einsum("mk,mkn->mn", x, w[group]) for x, w in zip(rows, ws, strict=True)
            )
            np.testing.assert_allclose(result[:7], expected, **close)


def ring_is_fastest(candidates: Mapping, *, groups: int, seconds_per_group: float = 1.0) -> dict:
    """Stands in for `measure`: each runs once."""
    del groups, seconds_per_group
    jax.block_until_ready([run() for run in candidates.values()])
    return {name: Timing((1.0 if name == "ring" else 2.0,)) for name in candidates}


def test_what_is_tuned_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_mesh: MeshFactory
) -> None:
    """Users give the function: both passes of its expert layers, and their grouped matmuls."""
    monkeypatch.setenv("COLLECTIVE_MATMUL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "measure", ring_is_fastest)
    monkeypatch.setattr(repeating, "_REPETITIONS", (2, 2))
    case = Case({"expert": 2}, None, None, tokens=2)
    program, arrays = case.program(make_mesh({"expert": 2})), case.arrays()
    before = explain(program)(arrays).decisions
    assert {d.implementation for d in before} == {"xla"}
    kinds = {(d.site.op, d.site.direction) for d in before}
    ways = ("forward", "backward")
    assert kinds == {(OP, way) for way in ways} | {("grouped_matmul", way) for way in ways} | {
        ("grouped_weight_gradient", "backward")
    }
    # Requests of a kind are measured alike, as `test_grouped_matmuls_are_measured` does.
    measured = ((OP, "forward"), (OP, "backward"), ("grouped_matmul", "forward"))
    requests = {(d.site.op, d.site.direction): d.site for d in before}
    requests = {kind: requests[kind] for kind in measured}
    table = tune(requests.values(), implementations=["ring"])
    path = cache_path(jax.devices()[0].device_kind)
    assert path is not None
    assert Table.from_text(path.read_text("utf-8")).entries.keys() == table.entries.keys()
    assert set(table.entries) == {request.flat for request in requests.values()}
    for request, entry in table.entries.items():
        names = {"xla", "ring", COMPUTE_ONLY} if request.op == OP else {"xla"}
        assert set(entry.seconds) == names
    after = explain(program)(arrays).decisions
    chosen = {d.site.direction: d for d in after if d.site.op == OP}
    assert {way: d.implementation for way, d in chosen.items()} == dict.fromkeys(ways, "ring")
    assert chosen["backward"].reason.startswith("measured (your table): ")
