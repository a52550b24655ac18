"""What tables say of a site: its own entry, or those of sites that are nearly the same."""

from __future__ import annotations

import numpy as np
import pytest

from collective_matmul.dispatch.lookup import Prediction, look_up
from collective_matmul.dispatch.table import Entry
from collective_matmul.site import Einsum, Site
from tests.dispatch.sites import BFLOAT16, site_of
from tests.dispatch.tables import entry, layer, table_of
from tests.reference import AXIS

EINSUM = Einsum("sd,df->sf", (), accumulates=False)


def says(site: Site, *entries: tuple[Site, Entry]) -> Prediction | None:
    return look_up(site, [("a table", table_of(*entries))])


def test_its_own_entry_decides_whatever_is_near() -> None:
    prediction = says(
        layer(4096),
        (layer(4096), entry(xla=10, ring=8, compute_only=7)),
        (layer(4104), entry(xla=1)),
    )
    assert prediction is not None
    assert prediction.seconds == pytest.approx({"xla": 10e-6, "ring": 8e-6})
    assert prediction.fastest({"ring", "compute_only"}) == "ring"


def test_leading_dimensions_and_the_name_of_the_axis_do_not_matter() -> None:
    (x, w), *_ = layer(4096).operands
    shaped = Site("all_gather_matmul", (((2, x[0] // 2, x[1]), w),), BFLOAT16, "other", 4)
    prediction = says(shaped, (layer(4096), entry(xla=10, ring=8)))
    assert prediction is not None
    assert prediction.basis.startswith("measured")


def test_the_order_of_weights_does_not_matter() -> None:
    x, small, large = (512, 4096), (4096, 256), (4096, 1024)
    facts = ("all_gather_matmul", BFLOAT16, AXIS, 4)
    one, other = (
        Site(facts[0], tuple((x, w) for w in weights), *facts[1:])
        for weights in ((large, small, small), (small, large, small))
    )
    found = look_up(other, [("here", table_of((one, entry(xla=10.0, ring=8.0))))])
    assert found is not None
    assert found.basis == "measured (here)"


def test_what_is_left_out_hides_nothing_else() -> None:
    """Below the only entry, a gain of its own would tell nothing of smaller sites."""
    entries = [(layer(1024), entry(xla=200.0, ring=250.0, fused=150.0))]
    tables_ = [("here", table_of(*entries))]
    assert look_up(layer(600), tables_) is None
    found = look_up(layer(600), tables_, left_out=("fused",))
    assert found is not None and set(found.seconds) == {"xla", "ring"}


@pytest.mark.parametrize(("fused", "fastest"), [(20.0, "fused"), (49.0, "xla")])
def test_gains_and_losses_are_believed_however_short(fused: float, fastest: str) -> None:
    """No kernel waits for the host."""
    entries = [(layer(rows), entry(xla=45.0, ring=250.0, fused=fused)) for rows in (1024, 2048)]
    for rows in (1024, 1500, 2048):
        found = look_up(layer(rows), [("here", table_of(*entries))])
        assert found is not None
        assert set(found.seconds) == {"xla", "ring", "fused"}
        assert found.fastest({"ring", "fused"}) == fastest


@pytest.mark.parametrize(
    "other",
    [
        site_of("matmul_reduce_scatter", 4096, 4096, 14336),
        site_of("all_gather_matmul", 4096, 4096, 14336, devices=2),
        site_of("all_gather_matmul", 4096, 4096, 14336, keep_gathered=True),
        site_of("all_gather_matmul", 4096, 4096, 14336, co_gathered=(8, 8)),
        Site("all_gather_matmul", layer(4096).operands, np.dtype("float32"), AXIS, 4),
    ],
)
def test_entries_of_another_kind_say_nothing(other: Site) -> None:
    assert says(layer(4096), (other, entry(xla=10, ring=1))) is None


def test_between_two_entries_both_must_gain() -> None:
    gain, loss = entry(xla=12, ring=10), entry(xla=10, ring=12)
    for low, high, name in ((gain, gain, "ring"), (loss, gain, "xla"), (gain, loss, "xla")):
        prediction = says(layer(3000), (layer(2048), low), (layer(4096), high))
        assert prediction is not None
        assert prediction.fastest({"ring"}) == name
        assert prediction.basis == "near what was measured (a table)"


def test_the_smaller_gain_is_predicted() -> None:
    prediction = says(
        layer(3072),
        (layer(2048), entry(xla=100, ring=80)),
        (layer(4096), entry(xla=200, ring=190)),
    )
    assert prediction is not None
    # 4096 rows are nearer than 2048: bulk takes three quarters of its time there.
    assert prediction.seconds == pytest.approx({"xla": 150e-6, "ring": 150e-6 * 0.95})


def test_a_gain_is_believed_of_larger_sites_only() -> None:
    gain, loss = entry(xla=12, ring=10), entry(xla=10, ring=12)
    above = says(layer(6000), (layer(4096), gain))
    assert above is not None
    assert above.fastest({"ring"}) == "ring"
    assert says(layer(3000), (layer(4096), gain)) is None
    below = says(layer(3000), (layer(4096), loss))
    assert below is not None
    assert below.fastest({"ring"}) == "xla"


def test_one_fused_weight_is_as_several_of_one_gather() -> None:
    x = (1024, 4096)
    split = Site("all_gather_matmul", ((x, (4096, 1792)), (x, (4096, 1792))), BFLOAT16, AXIS, 4)
    prediction = says(layer(4096), (split, entry(xla=12, ring=10)))
    assert prediction is not None
    assert prediction.seconds == pytest.approx({"xla": 12e-6, "ring": 10e-6})


def test_of_two_tables_with_a_near_entry_the_better_one_is_asked() -> None:
    mine, other = (table_of((layer(4096), entry(xla=12, ring=ring))) for ring in (10, 14))
    for first, name in ((mine, "ring"), (other, "xla")):
        second = other if first is mine else mine
        prediction = look_up(layer(4100), [("the first", first), ("the second", second)])
        assert prediction is not None
        assert prediction.basis == "near what was measured (the first)"
        assert prediction.fastest({"ring"}) == name


@pytest.mark.parametrize(
    ("site", "near"),
    [
        (layer(8192), True),
        (layer(8200), False),
        (layer(4096, columns=20000), True),
        (layer(4096, columns=21000), False),
        (site_of("all_gather_matmul", 4096, 5792, 14336), True),
        (site_of("all_gather_matmul", 4096, 5888, 14336), False),
        (site_of("all_gather_matmul", 4096, 4104, 14336), True),
        (site_of("all_gather_matmul", 4096, 4100, 14336), False),  # Rows of 8200 bytes.
        (site_of("all_gather_matmul", 4096, 4096, 14336, einsum=EINSUM), False),
    ],
)
def test_how_near_is_near(site: Site, near: bool) -> None:
    found = says(site, (layer(4096), entry(xla=12, ring=10)))
    assert (found is not None) == near


def test_implementations_that_one_neighbour_lacks_are_left_out() -> None:
    prediction = says(
        layer(3000), (layer(2048), entry(xla=12, new=1)), (layer(4096), entry(xla=12, ring=10))
    )
    assert prediction is not None
    assert set(prediction.seconds) == {"xla"}


def test_an_entry_without_anything_to_choose_says_nothing() -> None:
    few = (layer(1024), entry(xla=100, fused=80, compute_only=70))
    more = (layer(2048), entry(xla=200, ring=250, fused=150))
    at, near = ([("here", table_of(*entries))] for entries in ([few], [few, more]))
    assert look_up(layer(1024), at, left_out=("fused",)) is None
    found = look_up(layer(1500), near, left_out=("fused",))
    assert found is not None and found.fastest({"ring"}) == "xla"
    assert set(found.seconds) == {"xla", "ring"}
    assert look_up(layer(1024), at) is not None


def test_predictions_beside_each_other_keep_what_each_says() -> None:
    one = Prediction({"xla": 4e-6, "ring": 3e-6}, 0.02, "measured", {"ring": 0.3})
    seconds = {"xla": 2e-6, "ring": 1e-6, "new": 1e-6, "unsure": 1.9e-6}
    other = Prediction(seconds, 0.15, "cost model", {"new": 0.9, "xla": 0.5})
    both = one.beside(other)
    # As many times as long as the other's as bulk is.
    assert both.seconds == pytest.approx({"xla": 4e-6, "ring": 3e-6, "new": 2e-6, "unsure": 3.8e-6})
    assert (both.margin, both.basis) == (0.02, "measured")
    assert both.margins == {"ring": 0.3, "new": 0.9, "unsure": 0.15}
    assert both.fastest({"new", "ring", "unsure"}) == "new"
    assert both.fastest({"unsure"}) == "xla"
