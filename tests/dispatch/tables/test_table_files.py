"""Tables: their text, their files, and which of them speak for a device."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import itertools
import logging
import os
import pwd
from importlib import resources
from pathlib import Path

import jax
import numpy as np
import pytest

from collective_matmul import data
from collective_matmul.data import Run
from collective_matmul.dispatch import selection
from collective_matmul.dispatch.tables import table_files
from collective_matmul.dispatch.tables.lookup import look_up
from collective_matmul.dispatch.tables.table import Table
from collective_matmul.dispatch.tables.table_files import cache_path
from collective_matmul.log import warn_once
from collective_matmul.operands.format import format_named
from collective_matmul.operands.sharded import WeightShards
from collective_matmul.ops.matmul.request import Einsum, Site
from tests.dispatch.sites import BFLOAT16, site_of
from tests.dispatch.tables.example_tables import KIND, RUN, entry, layer, table_of
from tests.fp8_reference import SHIPPED_RECIPES
from tests.reference import AXIS


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of the user's table for KIND, not there yet."""
    monkeypatch.setenv("COLLECTIVE_MATMUL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(table_files, "warn_once", functools.cache(warn_once.__wrapped__))
    path = cache_path(KIND)
    assert path is not None
    return path


@pytest.fixture
def nothing_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "_shipped", lambda kind: None)


FP8 = (None, *SHIPPED_RECIPES)


def some_sites() -> list[Site]:
    x = (6, 4)
    return [
        Site("all_gather_matmul", ((x, (4, 5)), (x, (4, 7))), BFLOAT16, AXIS, 3),
        Site("all_gather_matmul", (((2, 3, 4), (4, 5)),), BFLOAT16, AXIS, 2, keep_gathered=True),
        Site("matmul_reduce_scatter", ((x, (4, 5)),), BFLOAT16, AXIS, 3, co_gathered=(1, 2, 5)),
        Site("matmul_all_reduce", ((x, (4, 5)),), np.dtype("float32"), AXIS, 2),
        *(
            Site("matmul_all_reduce", ((x, (4, 5)),), BFLOAT16, AXIS, 2, format=format_named(fp8))
            for fp8 in FP8
        ),
        Site(
            "matmul_reduce_scatter",
            ((x, (4, 5)),),
            BFLOAT16,
            AXIS,
            3,
            co_gathered=(1, 2, 5),
            format=format_named("tensorwise"),
        ),
    ]


def test_a_table_is_read_as_it_was_written() -> None:
    other = Run("2027-01-01", "0.12.0", "2 × NVIDIA H200")
    runs = itertools.cycle([RUN, other])
    written = table_of(
        *((s, entry(run, xla=123.4, ring=0.5)) for s, run in zip(some_sites(), runs, strict=False))
    )
    read = Table.from_text(written.to_text())
    assert read.device_kind == KIND
    assert set(read.entries) == {site.flat for site in some_sites()}
    for site, found in read.entries.items():
        assert found.run == written.entries[site].run
        assert found.seconds == pytest.approx(written.entries[site].seconds)
    assert read.to_text() == written.to_text()


def test_one_line_for_each_entry_in_an_order_of_its_own() -> None:
    entries = [(site, entry(xla=10.0)) for site in some_sites()]
    text = table_of(*entries).to_text()
    assert text == table_of(*reversed(entries)).to_text()
    assert len(text.splitlines()) == 1 + len(entries)


def test_a_site_that_records_cannot_describe_is_refused() -> None:
    """The site would be read again as another one: a matmul, or one of whole weights."""
    for attribute in (
        {"einsum": Einsum("sd,sf->df", ((8, 8), (8, 8)), True)},
        {"weight_shards": WeightShards("fsdp", 2, 0)},
    ):
        site = dataclasses.replace(layer(512), **attribute)
        with pytest.raises(ValueError, match="expected a matmul of whole dimensions and whole w"):
            table_of((site, entry(xla=10.0))).to_text()


def test_entries_in_a_format_that_is_not_registered_are_kept(tmp_path: Path) -> None:
    site = dataclasses.replace(layer(512), format=format_named("rowwise"))
    text = table_of((site, entry(xla=10.0))).to_text().replace("rowwise", "columnwise")
    path = tmp_path / "table.jsonl"
    path.write_text(text, encoding="utf-8")
    saved = table_files.save(path, KIND, {layer(1024).flat: entry(xla=9.0)})
    assert [*saved.entries] == [layer(1024).flat]
    (kept,) = text.splitlines()[1:]
    assert kept in path.read_text(encoding="utf-8").splitlines()
    assert not [*tmp_path.glob("*damaged*")]
    registered = path.read_text(encoding="utf-8").replace("columnwise", "rowwise")
    assert [*Table.from_text(registered).entries] == [layer(1024).flat, site.flat]


@pytest.mark.parametrize("name", ['["rowwise"]', "1", "{}"])
def test_other_values_name_no_format(name: str) -> None:
    site = dataclasses.replace(layer(512), format=format_named("rowwise"))
    text = table_of((site, entry(xla=10.0))).to_text()
    with pytest.raises(ValueError, match="no name of a format: "):
        Table.from_text(text.replace('"rowwise"', name))


def test_damage_beside_a_format_that_is_not_registered_is_found() -> None:
    site = dataclasses.replace(layer(512), format=format_named("rowwise"))
    text = table_of((site, entry(xla=10.0))).to_text().replace("rowwise", "columnwise")
    with pytest.raises(ValueError, match="the size 0"):
        Table.from_text(text.replace('"devices": 4', '"devices": 0'))


def test_a_table_may_have_weights_in_any_order() -> None:
    x, small, large = (512, 4096), (4096, 256), (4096, 1024)
    site = Site("all_gather_matmul", ((x, small), (x, large)), BFLOAT16, "", 4)
    read = Table.from_text(Table(KIND, {site: entry(xla=10.0)}).to_text())
    assert [*read.entries] == [site.flat]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not enough values"),
        ("{", "Expecting"),
        ("[]\n", "TypeError"),
        ('{"format": 3}\n', "its format is 3, expected 2"),
        ('{"format": 2, "measures": "x", "device_kind": "x", "runs": []}\n', "it measures 'x'"),
        ('{"format": 1, "device_kind": "x", "runs": []}\n{"op": "f"}\n', "KeyError"),
    ],
)
def test_a_text_that_is_no_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Table.from_text(text)


def test_times_that_cannot_be_are_refused() -> None:
    text = table_of((layer(512), entry(xla=10.0))).to_text()
    for broken in (text.replace("10.0", "0.0"), text.replace('"xla"', '"ring"')):
        with pytest.raises(ValueError, match=r"not above zero|KeyError: 'xla'"):
            Table.from_text(broken)


def test_a_write_that_fails_leaves_the_old_table(cache: Path, monkeypatch) -> None:
    table_files.save(cache, KIND, {layer(512).flat: entry(xla=10.0)})
    before = cache.read_text()
    monkeypatch.setattr(Table, "to_text", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        table_files.save(cache, KIND, {layer(512).flat: entry(xla=20.0)})
    assert cache.read_text() == before
    assert list(cache.parent.iterdir()) == [cache]


def test_a_table_has_the_mode_of_other_new_files(cache: Path, tmp_path: Path) -> None:
    table_files.save(cache, KIND, {})
    (tmp_path / "other").touch()
    assert cache.stat().st_mode == (tmp_path / "other").stat().st_mode


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

    monkeypatch.setattr(table_files, "read_users", noting(table_files.read_users))
    monkeypatch.setattr(Table, "write", noting(Table.write))
    table_files.save(cache, KIND, {layer(512).flat: entry(xla=10.0)})
    assert locked == [True, True]
    assert not is_locked()


def test_saving_keeps_what_is_there(cache: Path) -> None:
    old, new = layer(512).flat, layer(1024).flat
    table_files.save(cache, KIND, {old: entry(xla=10.0)})
    table_files.save(cache, KIND, {new: entry(xla=20.0)})
    replaced = table_files.save(cache, KIND, {old: entry(xla=30.0)})
    read = Table.from_text(cache.read_text())
    assert {s: e.seconds["xla"] for s, e in read.entries.items()} == {
        old: pytest.approx(30e-6),
        new: pytest.approx(20e-6),
    }
    assert set(replaced.entries) == {old, new}


def test_a_table_is_of_one_kind_of_device(cache: Path) -> None:
    table_files.save(cache, KIND, {layer(512).flat: entry(xla=10.0)})
    before = cache.read_text()
    message = f"^path='{cache}': a table of {KIND}, expected one of cpu; give another path"
    with pytest.raises(ValueError, match=message):
        table_files.save(cache, "cpu", {layer(1024).flat: entry(xla=10.0)})
    assert cache.read_text() == before


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
    assert table_files.known("NVIDIA A100-SXM4-40GB") == []


def test_the_users_table_comes_before_the_one_that_ships(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, shipped_only = layer(4096), layer(8192)
    ships = table_of((both, entry(xla=10, ring=5)), (shipped_only, entry(xla=20, ring=8)))
    monkeypatch.setattr(table_files, "_shipped", lambda kind: ships if kind == KIND else None)
    table_files.save(cache, KIND, {both.flat: entry(xla=9.0, ring=99.0)})

    prediction = look_up(both, "ring", table_files.known(KIND), ["ring"])
    assert prediction is not None
    assert (prediction.basis, prediction.is_believed) == ("measured (your table)", False)
    prediction = look_up(shipped_only, "ring", table_files.known(KIND), ["ring"])
    assert prediction is not None
    assert prediction.basis == "measured (table of NVIDIA H200)"
    assert prediction.is_believed


def test_an_h100_is_decided_for_by_the_table_of_h200_and_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ships = table_of((layer(4096), entry(xla=10, ring=5)))
    monkeypatch.setattr(table_files, "_shipped", lambda kind: ships if kind == KIND else None)
    prediction = look_up(layer(4096), "ring", table_files.known("NVIDIA H100 80GB HBM3"), ["ring"])
    assert prediction is not None
    assert "table of NVIDIA H200: the same chip and links" in prediction.basis
    assert table_files.known("NVIDIA H100 PCIe") == []


def test_tables_that_ship_are_in_their_own_format_and_folder() -> None:
    for folder in resources.files("collective_matmul.data").iterdir():
        file = folder.joinpath("backends.jsonl")
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            assert Table.from_text(text).to_text() == text
            assert data.folder_name(Table.from_text(text).device_kind) == folder.name


def test_a_table_of_the_older_format_is_read_and_saved_in_todays(cache: Path) -> None:
    old = (
        '{"format": 1, "device_kind": "NVIDIA H200", "runs": [{"date": "2026-11-21",'
        ' "jax": "0.11.2", "devices": "4 × NVIDIA H200"}]}\n'
        '{"op": "matmul_reduce_scatter", "devices": 4, "dtype": "bfloat16", "operands":'
        ' [[512, 64, 128]], "rider": [128, 128], "run": 0, "microseconds":'
        ' {"bulk": 12.0, "ring": 10.0, "ceiling": 8.0}}\n'
    )
    cache.parent.mkdir()
    cache.write_text(old)
    saved = table_files.save(cache, KIND, {layer(512).flat: entry(xla=10.0)})
    ((site, found), _) = sorted(saved.entries.items(), key=lambda item: item[0].co_gathered is None)
    assert site.co_gathered == (128, 128)
    assert found.seconds == pytest.approx({"xla": 12e-6, "ring": 10e-6, "compute_only": 8e-6})
    assert '"format": 2' in cache.read_text() and "bulk" not in cache.read_text()
    assert Table.from_text(cache.read_text()).entries == saved.entries


def test_a_damaged_table_is_ignored_and_named_once(
    cache: Path, nothing_ships: None, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text("{ no table")
    for _ in range(2):
        assert table_files.known(KIND) == []
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.message.startswith(f"{cache} is ignored")
    assert cache.read_text() == "{ no table"


def test_saving_keeps_damaged_tables_beside_the_new_one(cache: Path) -> None:
    cache.parent.mkdir()
    for number in (1, 2):
        cache.write_text(f"damaged {number}")
        table_files.save(cache, KIND, {layer(512).flat: entry(xla=10.0)})
        assert cache.with_name(f"h200.jsonl.damaged-{number}").read_text() == f"damaged {number}"
    assert len(Table.from_text(cache.read_text()).entries) == 1


def test_a_table_prints_as_one_line(cache: Path) -> None:
    saved = table_files.save(cache, KIND, {layer(512).flat: entry(xla=10.0)})
    for table in (saved, table_files.read_users(cache)):
        assert str(table) == f"table of NVIDIA H200: 1 entry, in {cache}"
        assert len(repr(table)) < 100 + len(str(cache))
    assert str(Table(KIND)) == "table of NVIDIA H200: 0 entries"


def test_a_table_that_changes_is_read_again(cache: Path, nothing_ships: None) -> None:
    for rows in (512, 1024):
        table_files.save(cache, KIND, {layer(rows).flat: entry(xla=10.0)})
        ((_, table),) = table_files.known(KIND)
        assert layer(rows).flat in table.entries


def test_the_users_table_decides_on_a_cpu(cache: Path) -> None:
    site = site_of("all_gather_matmul", 8, 4, 4)
    assert selection.choose(site).name == "xla"
    kind = jax.devices()[0].device_kind
    path = cache_path(kind)
    assert path is not None
    table_files.save(path, kind, {site.flat: entry(xla=12, ring_two_way=10)})
    assert selection.choose(site).name == "ring_two_way"


class TestWithoutAHomeDirectory:
    """Users in containers may have no home, and numbers that the machine has no names for."""

    @pytest.fixture(autouse=True)
    def _no_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unknown(user: int) -> None:
            raise KeyError(f"getpwuid(): uid not found: {user}")

        for name in ("COLLECTIVE_MATMUL_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", unknown)

    def test_there_is_no_table_of_the_user(self) -> None:
        assert cache_path(KIND) is None
        shipped = table_files.known("NVIDIA H200")
        assert [origin for origin, _ in shipped] == ["table of NVIDIA H200"]

    def test_a_table_cannot_be_saved(self) -> None:
        message = "path=None: this user has no home directory .* set COLLECTIVE_MATMUL_CACHE_DIR"
        with pytest.raises(ValueError, match=message):
            table_files.writable_path(KIND)

    def test_a_path_of_its_own_can(self, tmp_path: Path) -> None:
        path = tmp_path / "made" / "table.jsonl"
        assert table_files.writable_path(KIND, path) == path
        assert not list(path.parent.iterdir())


@pytest.mark.parametrize("home", ["/nonexistent/home", "/dev/null"])
def test_a_home_directory_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, home: str
) -> None:
    for name in ("COLLECTIVE_MATMUL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home)
    assert [origin for origin, _ in table_files.known("NVIDIA H200")] == ["table of NVIDIA H200"]
    assert not caplog.text


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "table.jsonl"
    with pytest.raises(ValueError, match=r"table.jsonl': the table cannot be written there \("):
        table_files.writable_path(KIND, path)
