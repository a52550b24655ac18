"""Answers of tables about a site: its own entry, or those of sites that are nearly the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from collective_matmul.dispatch.contract import Prediction
from collective_matmul.dispatch.tables.lookup import Comparison, look_up
from collective_matmul.dispatch.tables.table import Entry, Table
from collective_matmul.operands.format import format_named
from collective_matmul.operands.sharded import WeightShards
from collective_matmul.ops.matmul.checks import RecipeName
from collective_matmul.ops.matmul.request import Einsum, Op, Site
from tests.dispatch.sites import BFLOAT16, site_of
from tests.dispatch.tables.example_tables import entry, layer, table_of
from tests.fp8_reference import SHIPPED_RECIPES
from tests.reference import AXIS

EINSUM = Einsum("sd,df->sf", (), accumulates=False)


ALL = ("ring", "ring_direct", "fused")


def look_up_in(
    site: Site, *entries: tuple[Site, Entry], backend: str = "ring"
) -> Comparison | None:
    return look_up(site, backend, [("a table", table_of(*entries))], ALL)


def test_its_own_entry_decides_whatever_is_near() -> None:
    found = look_up_in(
        layer(4096),
        (layer(4096), entry(xla=10, ring=8, compute_only=7)),
        (layer(4104), entry(xla=1, ring=2)),
    )
    assert found is not None
    assert (found.seconds, found.reference_seconds) == pytest.approx((8e-6, 10e-6))
    assert found.is_believed


def test_leading_dimensions_and_the_name_of_the_axis_do_not_matter() -> None:
    (x, w), *_ = layer(4096).operands
    shaped = Site("all_gather_matmul", (((2, x[0] // 2, x[1]), w),), BFLOAT16, "other", 4)
    prediction = look_up_in(shaped, (layer(4096), entry(xla=10, ring=8)))
    assert prediction is not None
    assert prediction.basis.startswith("measured")


def test_the_order_of_weights_does_not_matter() -> None:
    x, small, large = (512, 4096), (4096, 256), (4096, 1024)
    facts = ("all_gather_matmul", BFLOAT16, AXIS, 4)
    one, other = (
        Site(facts[0], tuple((x, w) for w in weights), *facts[1:])
        for weights in ((large, small, small), (small, large, small))
    )
    found = look_up(other, "ring", [("here", table_of((one, entry(xla=10.0, ring=8.0))))], ALL)
    assert found is not None
    assert found.basis == "measured (here)"


def test_what_the_program_may_not_use_hides_nothing_else() -> None:
    """Below the only entry, a gain of one backend proves nothing for any."""
    tables = [("here", table_of((layer(1024), entry(xla=200.0, ring=250.0, fused=150.0))))]
    assert look_up(layer(600), "fused", tables, ALL) is None
    assert look_up(layer(600), "ring", tables, ALL) is None
    found = look_up(layer(600), "ring", tables, ("ring",))
    assert found is not None and not found.is_believed


@pytest.mark.parametrize(("fused", "is_believed"), [(20.0, True), (49.0, False)])
def test_gains_and_losses_are_believed_however_short(fused: float, is_believed: bool) -> None:
    """No kernel waits for the host."""
    entries = [(layer(rows), entry(xla=45.0, ring=250.0, fused=fused)) for rows in (1024, 2048)]
    for rows in (1024, 1500, 2048):
        found = look_up_in(layer(rows), *entries, backend="fused")
        assert found is not None and found.is_believed == is_believed


@pytest.mark.parametrize(
    "other",
    [
        site_of("matmul_reduce_scatter", 4096, 4096, 14336),
        site_of("all_gather_matmul", 4096, 4096, 14336, devices=2),
        site_of("all_gather_matmul", 4096, 4096, 14336, keep_gathered=True),
        site_of("all_gather_matmul", 4096, 4096, 14336, co_gathered=(8, 8)),
        Site("all_gather_matmul", layer(4096).operands, np.dtype("float32"), AXIS, 4),
        site_of("all_gather_matmul", 4096, 4096, 14336, weight_shards=WeightShards("", 2, 0)),
    ],
)
def test_entries_of_another_kind_say_nothing(other: Site) -> None:
    assert look_up_in(layer(4096), (other, entry(xla=10, ring=1))) is None


@pytest.mark.parametrize("fp8", [None, *SHIPPED_RECIPES])
def test_entries_decide_about_their_own_recipe_alone(fp8: RecipeName | None) -> None:
    """Also those of a table that was saved and read again, and about sites near theirs."""
    written = table_of((replace(layer(4096), format=format_named(fp8)), entry(xla=12, ring=10)))
    tables = [("a table", Table.from_text(written.to_text()))]
    for other in (None, *SHIPPED_RECIPES):
        for rows in (4096, 6016):
            found = look_up(replace(layer(rows), format=format_named(other)), "ring", tables, ALL)
            assert (found is not None) == (other == fp8)


@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
@pytest.mark.parametrize(
    ("sizes", "is_near"),
    [((4096, 14592), True), ((4224, 14336), True), ((4112, 14336), False), ((4096, 14368), False)],
)
def test_entries_of_our_kernel_say_nothing_about_sizes_that_it_leaves_to_xla(
    sizes: tuple[int, int], is_near: bool, fp8: RecipeName
) -> None:
    """The kernel needs contracted sizes that are multiples of 128 in 8 bits, and columns of 64."""
    tables = [
        (
            "a table",
            table_of((replace(layer(4096), format=format_named(fp8)), entry(xla=12, ring=10))),
        )
    ]
    site = replace(site_of("all_gather_matmul", 4096, *sizes), format=format_named(fp8))
    assert (look_up(site, "ring", tables, ALL) is not None) == is_near


@pytest.mark.parametrize(
    ("op", "rows", "is_near"),
    [
        ("all_gather_matmul", 4128, True),
        ("all_gather_matmul", 4112, False),
        ("matmul_reduce_scatter", 4128, True),
        ("matmul_reduce_scatter", 4112, False),
        ("matmul_all_reduce", 4128, True),
        ("matmul_all_reduce", 4112, False),
    ],
)
def test_so_it_is_with_chunks_of_rows_that_it_leaves_to_xla(
    op: Op, rows: int, is_near: bool
) -> None:
    """Four devices have 8 rows more each, or 4."""
    entries = (
        replace(site_of(op, 4096, 4096, 14336), format=format_named("rowwise")),
        entry(xla=12, ring=10),
    )
    site = replace(site_of(op, rows, 4096, 14336), format=format_named("rowwise"))
    found = look_up(site, "ring", [("a table", table_of(entries))], ALL)
    assert (found is not None) == is_near


def test_between_two_entries_both_must_gain() -> None:
    gain, loss = entry(xla=12, ring=10), entry(xla=10, ring=12)
    for low, high, name in ((gain, gain, "ring"), (loss, gain, "xla"), (gain, loss, "xla")):
        prediction = look_up_in(layer(3000), (layer(2048), low), (layer(4096), high))
        assert prediction is not None
        assert ("ring" if prediction.is_believed else "xla") == name
        assert prediction.basis == "near what was measured (a table)"


@pytest.mark.parametrize(
    ("rows", "xla", "ring"), [(2048, 100, 80), (2896, 141.4, 123.3), (4096, 200, 190)]
)
def test_times_of_a_layer_are_interpolated(rows: int, xla: float, ring: float) -> None:
    """Half a doubling above 2048 rows, times are the geometric means of both ends'."""
    small, large = entry(xla=100, ring=80), entry(xla=200, ring=190)
    float16 = replace(layer(rows), dtype=np.dtype("float16"))
    prediction = look_up_in(float16, (layer(2048), small), (layer(4096), large))
    assert prediction is not None
    assert prediction.reference_seconds == pytest.approx(1e-6 * xla, rel=1e-3)
    assert prediction.seconds == pytest.approx(1e-6 * ring, rel=1e-3)


@pytest.mark.parametrize("name", ["xla", "ring"])
def test_models_say_how_times_change_between_entries(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They predict half of what was measured at one end, and all of it at the other.

    Where only one of both backends has a model, both times are interpolated without one.
    """
    predicted = {2048: 50e-6, 2896: 150e-6, 4096: 200e-6}

    def predict(site: Site) -> Prediction:
        return Prediction(predicted[site.product_rows], 0.0, "a model")

    sites = {rows: layer(rows) for rows in predicted}
    small, large = entry(xla=100, ring=100), entry(xla=200, ring=200)
    for patched, seconds in (("ring", 100e-6), ("xla", 150e-6)):
        monkeypatch.setattr(sites[2048].backends[patched], "predict", predict)
        found = look_up_in(sites[2896], (sites[2048], small), (sites[4096], large))
        assert found is not None
        time = found.seconds if name == "ring" else found.reference_seconds
        assert time == pytest.approx(seconds * 2**0.5, rel=1e-3)


def test_the_smaller_gain_counts_if_it_is_a_loss() -> None:
    small, large = entry(xla=100, ring=125), entry(xla=200, ring=50)
    prediction = look_up_in(layer(3072), (layer(2048), small), (layer(4096), large))
    assert prediction is not None and prediction.gain == pytest.approx(0.8)


@pytest.mark.parametrize(("more", "gain"), [(8192, 1.125**0.5), (9216, None)])
def test_how_far_apart_interpolated_entries_may_be(more: int, gain: float | None) -> None:
    """Only the larger one is near, and gains there: alone it says nothing of fewer rows."""
    entries = (layer(1024), entry(xla=9, ring=9)), (layer(more), entry(xla=9, ring=8))
    prediction = look_up_in(layer(int((1024 * more) ** 0.5) // 8 * 8), *entries)
    assert (prediction.gain if prediction else None) == (gain and pytest.approx(gain, rel=1e-2))


def test_entries_of_another_layer_are_not_interpolated() -> None:
    """The near ones must agree, and the smaller gain counts."""
    prediction = look_up_in(
        layer(3072),
        (layer(2048, columns=14848), entry(xla=100, ring=80)),
        (layer(4096, columns=14848), entry(xla=200, ring=190)),
    )
    assert prediction is not None and prediction.gain == pytest.approx(200 / 190)


def test_a_gain_is_believed_of_larger_sites_only() -> None:
    gain, loss = entry(xla=12, ring=10), entry(xla=10, ring=12)
    above = look_up_in(layer(6000), (layer(4096), gain))
    assert above is not None
    assert above.is_believed
    assert look_up_in(layer(3000), (layer(4096), gain)) is None
    below = look_up_in(layer(3000), (layer(4096), loss))
    assert below is not None
    assert not below.is_believed


def test_one_fused_weight_is_as_several_of_one_gather() -> None:
    x = (1024, 4096)
    split = Site("all_gather_matmul", ((x, (4096, 1792)), (x, (4096, 1792))), BFLOAT16, AXIS, 4)
    prediction = look_up_in(layer(4096), (split, entry(xla=12, ring=10)))
    assert prediction is not None
    assert prediction.seconds == pytest.approx(10e-6)


def test_of_two_tables_with_a_near_entry_the_better_one_is_asked() -> None:
    mine, other = (table_of((layer(4096), entry(xla=12, ring=ring))) for ring in (10, 14))
    for first, name in ((mine, "ring"), (other, "xla")):
        second = other if first is mine else mine
        both = [("the first", first), ("the second", second)]
        prediction = look_up(layer(4100), "ring", both, ALL)
        assert prediction is not None
        assert prediction.basis == "near what was measured (the first)"
        assert ("ring" if prediction.is_believed else "xla") == name


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
    found = look_up_in(site, (layer(4096), entry(xla=12, ring=10)))
    assert (found is not None) == near


def test_entries_without_a_backend_are_not_its_neighbours() -> None:
    found = look_up_in(
        layer(3000), (layer(2048), entry(xla=12, new=1)), (layer(4096), entry(xla=10, ring=12))
    )
    assert found is not None and found.gain == pytest.approx(10 / 12)
    few = (layer(1024), entry(xla=100, fused=80, compute_only=70))
    assert look_up_in(layer(1024), few) is None
    assert look_up_in(layer(1024), few, backend="fused") is not None


def test_a_comparison_keeps_its_gain_over_another_reference() -> None:
    found = Comparison(2e-6, 3e-6, 0.15, "cost model")
    scaled = found.with_reference(6e-6)
    assert (scaled.seconds, scaled.reference_seconds) == pytest.approx((4e-6, 6e-6))
    assert (scaled.gain, scaled.relative_error) == pytest.approx((1.5, 0.15))
    assert scaled.basis == "cost model"


@pytest.mark.parametrize(("error", "is_believed"), [(0.09, True), (0.11, False)])
def test_a_gain_must_exceed_the_error(error: float, is_believed: bool) -> None:
    assert Comparison(1.0, 1.1, error, "").is_believed == is_believed
