"""A new backend is one class and one registration: all else follows from its answers.

Nothing of the library is changed here but by `register`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, explain, matmul_reduce_scatter, tune
from collective_matmul.dispatch import table_files
from collective_matmul.dispatch.contract import Prediction
from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.dispatch.selection import choose
from collective_matmul.operands.multiply import matmul, multiplied
from collective_matmul.ops.matmul.backend import MatmulBackend
from collective_matmul.ops.matmul.backends import BACKENDS, register, unregister
from collective_matmul.ops.matmul.request import Op, Site
from tests.conftest import MeshFactory
from tests.dispatch.sites import H200, site_of, tracing_for
from tests.dispatch.tables import measure_as
from tests.reference import AXIS, OPS


class Toy(MatmulBackend):
    """Gathers with a sum of padded shards, and claims to be fast with few rows."""

    name = "toy"

    def all_gather_matmul(self, request, x, ws) -> Any:
        dimension, axis_name = request.shard_dimension, request.axis_name
        devices, me = lax.axis_size(axis_name), lax.axis_index(axis_name)

        def gather(array: jax.Array) -> jax.Array:
            shape = list(array.shape)
            shape[dimension] *= devices
            start = me * array.shape[dimension]
            empty = lax.full(shape, 0, array.dtype)
            padded = lax.dynamic_update_slice_in_dim(empty, array, start, dimension)
            return lax.psum(padded, axis_name)

        whole = jax.tree.map(gather, x)
        ys = tuple(matmul(multiplied(whole), w, request.transpose_w) for w in ws)
        return ys, whole if request.keep_gathered else None

    def matmul_reduce_scatter(self, request, xs, ws, co_gathered=None) -> Any:
        raise AssertionError("unsupported_reason says that it cannot")

    def matmul_all_reduce(self, request, xs, ws) -> jax.Array:
        return lax.psum(sum(map(matmul, xs, ws)), request.axis_name)

    def unsupported_reason(self, site: Site) -> str | None:
        return "toys do not scatter" if site.op == "matmul_reduce_scatter" else None

    def predict(self, site: Site) -> Prediction | None:
        reference = BACKENDS["xla"].predict(site)
        return reference and Prediction(reference.seconds / 2, 0.5, "a toy's hope")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register(Toy())
    yield
    unregister("toy")


@pytest.fixture
def gather(make_mesh: MeshFactory) -> Any:
    def make(implementation: str | Sequence[str] | None) -> Any:
        return jax.shard_map(
            lambda x, w: all_gather_matmul(x, w, AXIS, implementation=implementation),
            mesh=make_mesh({AXIS: 2}),
            in_specs=(P(AXIS), P(None, AXIS)),
            out_specs=P(None, AXIS),
            check_vma=False,
        )

    return make


X, W = np.ones((4, 8), np.float32), np.ones((8, 6), np.float32)


def test_it_is_requested_by_name(gather: Any) -> None:
    y = jax.jit(gather("toy"))(X, W)
    np.testing.assert_allclose(y, X @ W, rtol=1e-6)
    (decision,) = explain(gather("toy"))(X, W).decisions
    assert (decision.implementation, decision.reason) == ("toy", "requested")


def test_its_refusals_are_errors_or_fallbacks(make_mesh: MeshFactory) -> None:
    def scatter(implementation: str | Sequence[str]) -> Any:
        fun = jax.shard_map(
            lambda x, w: matmul_reduce_scatter(x, w, AXIS, implementation=implementation),
            mesh=make_mesh({AXIS: 2}),
            in_specs=(P(None, AXIS), P(AXIS)),
            out_specs=P(AXIS),
        )
        return explain(fun)(X, W)

    with pytest.raises(ValueError, match=r"^implementation='toy': toys do not scatter; "):
        scatter("toy")
    (decision,) = scatter(["toy", "ring"]).decisions
    assert decision.implementation == "ring"
    assert "toy is not possible: toys do not scatter" in decision.reason


def test_it_is_chosen_and_explained_where_it_should_win(
    gather: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = type(BACKENDS["xla"])
    monkeypatch.setattr(reference, "predict", lambda self, site: Prediction(2e-6, 0.0, "a guess"))
    explanation = explain(gather(None))(X, W)
    (decision,) = explanation.decisions
    assert (decision.implementation, decision.seconds) == ("toy", pytest.approx(1e-6))
    assert "2 µs xla, 1 µs toy" in str(explanation)


@pytest.mark.parametrize(("op", "named"), [(OPS[0], True), ("matmul_reduce_scatter", False)])
def test_an_imprecise_prediction_is_named_beside_measurements_where_it_can(
    op: Op, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Toy, "predicts_precisely", False)
    measure_as(monkeypatch, {"xla": 2e-6, "ring": 3e-6})
    with tracing_for(H200), record_decisions() as decisions:
        assert choose(site_of(op, 1024, 4096, 4096)).name == "xla"
    assert ("toy was not measured here" in decisions[0].reason) == named


def test_it_is_tuned(gather: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVE_MATMUL_CACHE_DIR", str(tmp_path))
    options = {"groups": 1, "seconds_per_group": 1e-4}
    table = tune(gather(None), X, W, implementations=["toy"], **options)
    (entry,) = table.entries.values()
    assert set(entry.seconds) == {"xla", "toy", "compute_only"}
    kind = jax.devices()[0].device_kind
    (site,) = table.entries
    faster = {**entry.seconds, "toy": entry.seconds["xla"] / 2}
    path = table_files.cache_path(kind)
    assert path is not None
    table_files.save(path, kind, {site: type(entry)(faster, entry.run)})
    assert explain(gather(None))(X, W).decisions[0].implementation == "toy"


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^backend.name='toy': it is taken"):
        register(Toy())
