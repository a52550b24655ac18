"""Times that the fused kernels are predicted to take, against the table that ships."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import jax
import pytest

from collective_matmul.dispatch.assessment import assess
from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.dispatch.selection import choose
from collective_matmul.dispatch.tables import table_files
from collective_matmul.hardware import HOPPER
from collective_matmul.ops.matmul.backends import BACKENDS
from collective_matmul.ops.matmul.fused import backend as fused
from collective_matmul.ops.matmul.matmul_cost import matmul_seconds
from collective_matmul.ops.matmul.request import Op, Site
from collective_matmul.peer_access import peer_kernels_allowed
from tests.dispatch.sites import H200, site_of, tracing_for
from tests.reference import OPS


@pytest.fixture(autouse=True)
def _on_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    with tracing_for(H200):
        yield


#: Launches that the host prepares take at least this, which the model does not describe. The table
#: has them on 4 devices, and on 2 where one-shot collectives were not measured beside them.
SHORT = 70e-6


def fused_seconds(site: Site) -> float:
    prediction = BACKENDS["fused"].predict(site)
    assert prediction is not None
    return prediction.seconds


def test_the_table_that_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing slower than XLA is predicted to win, and most of all gains are predicted."""
    ((_, table),) = table_files.known("NVIDIA H200")
    monkeypatch.setattr(table_files, "known", lambda kind: [])
    gained = possible = 0.0
    for site, entry in table.entries.items():
        with peer_kernels_allowed(True):
            assessments = assess(site)
        seconds = {name: entry.seconds[name] for name in {*BACKENDS} & entry.seconds.keys()}
        by_the_host = site.axis_size > 2 or "one_shot" not in seconds
        if "fused" in seconds and by_the_host and fused._kernel_seconds(site) < SHORT:
            del seconds["fused"]
        seconds.pop("one_shot", None)
        believed = {
            name: each.comparison.seconds
            for name, each in assessments.by_name.items()
            if name in seconds and each.comparison and each.comparison.is_believed
        }
        chosen = min(believed, key=believed.__getitem__, default="xla")
        assert seconds[chosen] < 1.01 * seconds["xla"], site
        gained += math.log(seconds["xla"] / seconds[chosen])
        possible += math.log(seconds["xla"] / min(seconds.values()))
        predicted = assessments.seconds("fused")
        if "fused" in seconds and predicted is not None:
            # Sums of few rows take up to 40 % less than predicted; why was not looked into.
            few_sums = site.op == "matmul_reduce_scatter" and site.rows < 512
            most = 1.65 if few_sums else 1.42
            assert 0.68 < predicted / seconds["fused"] < most, site
    assert gained > 0.7 * possible


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_takes_longer_than_planned(op: Op) -> None:
    site = site_of(op, 8192, 16384, 4096)
    planned = fused.SLOWDOWN * fused._kernel_seconds(site)
    assert fused_seconds(site) == pytest.approx(planned + fused.START_SECONDS)


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_is_no_faster_than_it_sends(op: Op) -> None:
    """Next to nothing to multiply."""
    sizes = (8192, 512) if op == "all_gather_matmul" else (512, 8192)
    site = site_of(op, 1 << 16, *sizes)
    sending = site.bytes_communicated / HOPPER.link_bytes
    assert fused_seconds(site) >= sending + fused.START_SECONDS


def test_what_is_co_gathered_is_gathered_before_and_its_weight_gradient_after() -> None:
    """The weight gradient is as large as the matmul, which is not divided."""
    site = site_of("matmul_reduce_scatter", 8192, 14336, 4096)
    co_gathering = replace(site, co_gathered=(2048, 4096))
    gathered = 3 * 2048 * 4096 * 2 / HOPPER.link_bytes
    matmul = matmul_seconds(3584, 8192, 4096)
    more = fused_seconds(co_gathering) - fused_seconds(site)
    assert more == pytest.approx(HOPPER.collective_seconds + gathered + matmul)


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize(("columns", "possible"), [(14336, True), (14352, False)])
def test_it_is_asked_of_kernels_that_may_be(
    allowed: bool, columns: int, possible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """14352 columns over 8 are no multiple of 32."""
    monkeypatch.setattr(table_files, "known", lambda kind: [])
    site: Site = site_of("matmul_reduce_scatter", 2048, 4096, columns, devices=8)
    with record_decisions() as decisions, peer_kernels_allowed(allowed):
        chosen = choose(site, None)
    assert (chosen.name == "fused") == (allowed and possible)
    assert ("fused" in decisions[0].reason) == (allowed and possible)
