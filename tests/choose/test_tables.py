"""Tables: their files, which of them speak for a device, and what they say of a site."""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import stat
from importlib import resources
from pathlib import Path

import jax
import numpy as np
import pytest

from collective_matmul.choose import decision, tables
from collective_matmul.choose.site import Site
from collective_matmul.choose.tables import Entry, Run, Table, cache_path, files, look_up
from collective_matmul.log import say_once
from tests.choose.sites import BFLOAT16, site_of
from tests.reference import AXIS

RUN = Run("2026-11-21", "0.11.2", "4 × NVIDIA H200")
KIND = "NVIDIA H200"


def entry(run: Run = RUN, **microseconds: float) -> Entry:
    return Entry({name: 1e-6 * value for name, value in microseconds.items()}, run)


def table_of(*entries: tuple[Site, Entry]) -> Table:
    return Table(KIND, {site.flat: entry for site, entry in entries})


def layer(rows: int, columns: int = 14336) -> Site:
    return site_of("all_gather_matmul", rows, 4096, columns)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of the user's table for KIND, not there yet."""
    monkeypatch.setenv("COLLECTIVE_MATMUL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "say_once", functools.cache(say_once.__wrapped__))
    return cache_path(KIND)


@pytest.fixture
def nothing_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_shipped", lambda kind: None)


# Files.


def some_sites() -> list[Site]:
    x = (6, 4)
    return [
        Site("all_gather_matmul", ((x, (4, 5)), (x, (4, 7))), BFLOAT16, AXIS, 3),
        Site("all_gather_matmul", (((2, 3, 4), (4, 5)),), BFLOAT16, AXIS, 2, keep_gathered=True),
        Site("matmul_reduce_scatter", ((x, (4, 5)),), BFLOAT16, AXIS, 3, rider=(1, 2, 5)),
        Site("matmul_all_reduce", ((x, (4, 5)),), np.dtype("float32"), AXIS, 2),
    ]


def test_a_table_is_read_as_it_was_written() -> None:
    other = Run("2027-01-01", "0.12.0", "2 × NVIDIA H200")
    runs = [RUN, other, RUN, other]
    written = table_of(
        *((s, entry(run, bulk=123.4, ring=0.5)) for s, run in zip(some_sites(), runs, strict=True))
    )
    read = Table.read(written.text())
    assert read.device_kind == KIND
    assert set(read.entries) == {site.flat for site in some_sites()}
    for site, found in read.entries.items():
        assert found.run == written.entries[site].run
        assert found.seconds == pytest.approx(written.entries[site].seconds)
    assert read.text() == written.text()


def test_one_line_for_each_entry_in_an_order_of_its_own() -> None:
    entries = [(site, entry(bulk=10.0)) for site in some_sites()]
    text = table_of(*entries).text()
    assert text == table_of(*reversed(entries)).text()
    assert len(text.splitlines()) == 1 + len(entries)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not enough values"),
        ("{", "Expecting"),
        ("[]\n", "TypeError"),
        ('{"format": 2}\n', "its format is 2, expected 1"),
        ('{"format": 1, "device_kind": "x", "runs": []}\n{"op": "f"}\n', "KeyError"),
    ],
)
def test_a_text_that_is_no_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Table.read(text)


def test_times_that_cannot_be_are_refused() -> None:
    text = table_of((layer(512), entry(bulk=10.0))).text()
    for broken in (text.replace("10.0", "0.0"), text.replace('"bulk"', '"ring"')):
        with pytest.raises(ValueError, match=r"not above zero|KeyError: 'bulk'"):
            Table.read(broken)


def test_a_write_that_fails_leaves_the_old_table(cache: Path, monkeypatch) -> None:
    files.save(cache, KIND, {layer(512).flat: entry(bulk=10.0)})
    before = cache.read_text()
    monkeypatch.setattr(Table, "text", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        files.save(cache, KIND, {layer(512).flat: entry(bulk=20.0)})
    assert cache.read_text() == before
    assert list(cache.parent.iterdir()) == [cache]


def test_others_may_read_a_table(cache: Path) -> None:
    files.save(cache, KIND, {})
    assert stat.S_IMODE(cache.stat().st_mode) == 0o644


def test_nobody_else_saves_between_reading_and_writing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_locked() -> bool:
        handle = os.open(cache.parent, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    locked = []

    def noting(call):
        return lambda *args: (locked.append(is_locked()), call(*args))[1]

    monkeypatch.setattr(files, "read_users", noting(files.read_users))
    monkeypatch.setattr(Table, "write", noting(Table.write))
    files.save(cache, KIND, {layer(512).flat: entry(bulk=10.0)})
    assert locked == [True, True]
    assert not is_locked()


def test_saving_keeps_what_is_there(cache: Path) -> None:
    old, new = layer(512).flat, layer(1024).flat
    files.save(cache, KIND, {old: entry(bulk=10.0)})
    files.save(cache, KIND, {new: entry(bulk=20.0)})
    replaced = files.save(cache, KIND, {old: entry(bulk=30.0)})
    read = Table.read(cache.read_text())
    assert {s: e.seconds["bulk"] for s, e in read.entries.items()} == {
        old: pytest.approx(30e-6),
        new: pytest.approx(20e-6),
    }
    assert set(replaced.entries) == {old, new}


# Which tables speak.


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLLECTIVE_MATMUL_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_path("NVIDIA H200") == tmp_path / "own" / "h200.jsonl"
    monkeypatch.delenv("COLLECTIVE_MATMUL_CACHE_DIR")
    assert cache_path("cpu") == tmp_path / "xdg" / "collective_matmul" / "cpu.jsonl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    kind = "NVIDIA H100 80GB HBM3"
    expected = tmp_path / "home" / ".cache" / "collective_matmul" / "h100-80gb-hbm3.jsonl"
    assert cache_path(kind) == expected


def test_nothing_is_known_of_a_device_that_was_not_measured(cache: Path) -> None:
    assert tables.known("NVIDIA A100-SXM4-40GB") == []


def test_the_users_table_comes_before_the_one_that_ships(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, shipped_only = layer(4096), layer(8192)
    ships = table_of((both, entry(bulk=10, ring=5)), (shipped_only, entry(bulk=20, ring=8)))
    monkeypatch.setattr(files, "_shipped", lambda kind: ships if kind == KIND else None)
    files.save(cache, KIND, {both.flat: entry(bulk=9.0, ring=99.0)})

    prediction = look_up(both, tables.known(KIND))
    assert prediction is not None
    assert (prediction.basis, prediction.fastest({"ring"})) == ("measured (your table)", "bulk")
    prediction = look_up(shipped_only, tables.known(KIND))
    assert prediction is not None
    assert prediction.basis == "measured (table of NVIDIA H200)"
    assert prediction.fastest({"ring"}) == "ring"


def test_an_h100_is_decided_for_by_the_table_of_h200_and_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ships = table_of((layer(4096), entry(bulk=10, ring=5)))
    monkeypatch.setattr(files, "_shipped", lambda kind: ships if kind == KIND else None)
    prediction = look_up(layer(4096), tables.known("NVIDIA H100 80GB HBM3"))
    assert prediction is not None
    assert "table of NVIDIA H200: the same chip and links" in prediction.basis
    assert tables.known("NVIDIA H100 PCIe") == []


def test_tables_that_ship_can_be_read() -> None:
    shipped = [f for f in resources.files(tables).iterdir() if f.name.endswith(".jsonl")]
    for file in shipped:
        table = Table.read(file.read_text(encoding="utf-8"))
        assert files.file_name(table.device_kind) == file.name
        assert file.read_text(encoding="utf-8") == table.text()


def test_a_damaged_table_is_ignored_and_named_once(
    cache: Path, nothing_ships: None, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text("{ no table")
    for _ in range(2):
        assert tables.known(KIND) == []
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.message.startswith(f"{cache} is ignored")
    assert cache.read_text() == "{ no table"


def test_saving_keeps_damaged_tables_beside_the_new_one(cache: Path) -> None:
    cache.parent.mkdir()
    for number in (1, 2):
        cache.write_text(f"damaged {number}")
        files.save(cache, KIND, {layer(512).flat: entry(bulk=10.0)})
        assert cache.with_name(f"h200.jsonl.damaged-{number}").read_text() == f"damaged {number}"
    assert len(Table.read(cache.read_text()).entries) == 1


def test_a_table_that_changes_is_read_again(cache: Path, nothing_ships: None) -> None:
    for rows in (512, 1024):
        files.save(cache, KIND, {layer(rows).flat: entry(bulk=10.0)})
        ((_, table),) = tables.known(KIND)
        assert layer(rows).flat in table.entries


# What they say of a site.


def says(site: Site, *entries: tuple[Site, Entry]) -> tables.Prediction | None:
    return look_up(site, [("a table", table_of(*entries))])


def test_its_own_entry_decides_whatever_is_near() -> None:
    prediction = says(
        layer(4096), (layer(4096), entry(bulk=10, ring=8, ceiling=7)), (layer(4104), entry(bulk=1))
    )
    assert prediction is not None
    assert prediction.seconds == pytest.approx({"bulk": 10e-6, "ring": 8e-6})
    assert prediction.fastest({"ring", "ceiling"}) == "ring"


def test_leading_dimensions_and_the_name_of_the_axis_do_not_matter() -> None:
    (x, w), *_ = layer(4096).operands
    shaped = Site("all_gather_matmul", (((2, x[0] // 2, x[1]), w),), BFLOAT16, "other", 4)
    prediction = says(shaped, (layer(4096), entry(bulk=10, ring=8)))
    assert prediction is not None
    assert prediction.basis.startswith("measured")


def test_the_order_of_weights_does_not_matter() -> None:
    x, small, large = (512, 4096), (4096, 256), (4096, 1024)
    facts = ("all_gather_matmul", BFLOAT16, AXIS, 4)
    one, other = (
        Site(facts[0], tuple((x, w) for w in weights), *facts[1:])
        for weights in ((large, small, small), (small, large, small))
    )
    found = look_up(other, [("here", table_of((one, entry(bulk=10.0, ring=8.0))))])
    assert found is not None
    assert found.basis == "measured (here)"


def test_a_table_may_have_weights_in_any_order() -> None:
    x, small, large = (512, 4096), (4096, 256), (4096, 1024)
    site = Site("all_gather_matmul", ((x, small), (x, large)), BFLOAT16, "", 4)
    read = Table.read(Table(KIND, {site: entry(bulk=10.0)}).text())
    assert [*read.entries] == [site.flat]


def test_what_is_left_out_hides_nothing_else() -> None:
    """Below the only entry, a gain of its own would tell nothing of smaller sites."""
    entries = [(layer(1024), entry(bulk=200.0, ring=250.0, fused=150.0))]
    tables_ = [("here", table_of(*entries))]
    assert look_up(layer(600), tables_) is None
    found = look_up(layer(600), tables_, left_out=("fused",))
    assert found is not None and set(found.seconds) == {"bulk", "ring"}


@pytest.mark.parametrize(("fused", "believed"), [(99.0, False), (101.0, True)])
def test_what_the_host_takes_to_launch_is_no_gain(fused: float, believed: bool) -> None:
    entries = [(layer(rows), entry(bulk=200.0, ring=250.0, fused=fused)) for rows in (1024, 2048)]
    for rows in (1024, 1500, 2048):
        found = look_up(layer(rows), [("here", table_of(*entries))])
        assert found is not None
        assert ("fused" in found.seconds) == believed
        assert "ring" in found.seconds


@pytest.mark.parametrize(
    "other",
    [
        site_of("matmul_reduce_scatter", 4096, 4096, 14336),
        site_of("all_gather_matmul", 4096, 4096, 14336, devices=2),
        site_of("all_gather_matmul", 4096, 4096, 14336, keep_gathered=True),
        site_of("all_gather_matmul", 4096, 4096, 14336, rider=(8, 8)),
        Site("all_gather_matmul", layer(4096).operands, np.dtype("float32"), AXIS, 4),
    ],
)
def test_entries_of_another_kind_say_nothing(other: Site) -> None:
    assert says(layer(4096), (other, entry(bulk=10, ring=1))) is None


def test_between_two_entries_both_must_gain() -> None:
    gain, loss = entry(bulk=12, ring=10), entry(bulk=10, ring=12)
    for low, high, name in ((gain, gain, "ring"), (loss, gain, "bulk"), (gain, loss, "bulk")):
        prediction = says(layer(3000), (layer(2048), low), (layer(4096), high))
        assert prediction is not None
        assert prediction.fastest({"ring"}) == name
        assert prediction.basis == "near what was measured (a table)"


def test_the_smaller_gain_is_predicted() -> None:
    prediction = says(
        layer(3072),
        (layer(2048), entry(bulk=100, ring=80)),
        (layer(4096), entry(bulk=200, ring=190)),
    )
    assert prediction is not None
    # 4096 rows are nearer than 2048: bulk takes three quarters of its time there.
    assert prediction.seconds == pytest.approx({"bulk": 150e-6, "ring": 150e-6 * 0.95})


def test_a_gain_is_believed_of_larger_sites_only() -> None:
    gain, loss = entry(bulk=12, ring=10), entry(bulk=10, ring=12)
    above = says(layer(6000), (layer(4096), gain))
    assert above is not None
    assert above.fastest({"ring"}) == "ring"
    assert says(layer(3000), (layer(4096), gain)) is None
    below = says(layer(3000), (layer(4096), loss))
    assert below is not None
    assert below.fastest({"ring"}) == "bulk"


def test_one_fused_weight_is_as_several_of_one_gather() -> None:
    x = (1024, 4096)
    split = Site("all_gather_matmul", ((x, (4096, 1792)), (x, (4096, 1792))), BFLOAT16, AXIS, 4)
    prediction = says(layer(4096), (split, entry(bulk=12, ring=10)))
    assert prediction is not None
    assert prediction.seconds == pytest.approx({"bulk": 12e-6, "ring": 10e-6})


def test_of_two_tables_with_a_near_entry_the_better_one_is_asked() -> None:
    mine, other = (table_of((layer(4096), entry(bulk=12, ring=ring))) for ring in (10, 14))
    for first, name in ((mine, "ring"), (other, "bulk")):
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
    ],
)
def test_how_near_is_near(site: Site, near: bool) -> None:
    found = says(site, (layer(4096), entry(bulk=12, ring=10)))
    assert (found is not None) == near


def test_implementations_that_one_neighbour_lacks_are_left_out() -> None:
    prediction = says(
        layer(3000), (layer(2048), entry(bulk=12, new=1)), (layer(4096), entry(bulk=12, ring=10))
    )
    assert prediction is not None
    assert set(prediction.seconds) == {"bulk"}


def test_the_users_table_decides_on_a_cpu(cache: Path) -> None:
    site = site_of("all_gather_matmul", 8, 4, 4)
    assert decision.choose(site, None) == "bulk"
    kind = jax.devices()[0].device_kind
    files.save(cache_path(kind), kind, {site.flat: entry(bulk=12, ring_two_way=10)})
    assert decision.choose(site, None) == "ring_two_way"
