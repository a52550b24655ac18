"""Files of tables with any content: each is a table, or is skipped with a sentence."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collective_matmul.dispatch.tables import table_files
from collective_matmul.dispatch.tables.lookup import look_up
from collective_matmul.dispatch.tables.table import Table
from collective_matmul.log import warn_once
from tests.dispatch.tables.example_tables import entry, layer, table_of

NESTED = "[" * 100_000
_DEEP: Any = functools.reduce(lambda inner, _: [inner], range(400), 0)
#: What JSON can hold, and more: Python's reader takes NaN and Infinity for numbers.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 10**400, 2**63, float("nan"), float("inf"), -float("inf"), 1e308]),
    st.floats(),
    st.text(max_size=5),
    st.just(_DEEP),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["op", "xla", "run"]), inner)
    ),
    max_leaves=5,
)
_TEXT = table_of((layer(512), entry(xla=9.0, ring=8.0))).to_text()
GOOD = [json.loads(line) for line in _TEXT.splitlines()]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths to everything within a JSON value."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


def replaced(value: Any, path: tuple, new: Callable[[Any], Any]) -> Any:
    if not path:
        return new(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def check(text: str) -> None:
    """The text is refused with a ValueError, or is a table with which one can work."""
    try:
        table = Table.from_text(text)
    except ValueError as error:
        assert str(error)
        return
    assert Table.from_text(table.to_text()).entries.keys() == table.entries.keys()
    look_up(layer(640), "ring", [("your table", table)], ["ring"])


@given(place=st.sampled_from(places(GOOD)), new=VALUES)
def test_any_value_in_any_place(place: tuple, new: Any) -> None:
    changed = replaced(GOOD, place, lambda _: new)
    lines = changed if isinstance(changed, list) else [changed]
    check("\n".join(json.dumps(line) for line in lines))


@given(st.lists(VALUES, max_size=3))
def test_any_lines(lines: list[Any]) -> None:
    check("\n".join(map(json.dumps, lines)))


@given(st.text() | st.sampled_from([NESTED, '{"format": 2, "runs": ' + NESTED, "1" * 5000]))
def test_any_text(text: str) -> None:
    check(text)


def dumped(lines: list[Any]) -> str:
    return "\n".join(map(json.dumps, lines))


@pytest.mark.parametrize(
    "content",
    [
        NESTED.encode(),
        json.dumps(GOOD[0]).encode() + b"\n" + NESTED.encode(),
        dumped(replaced(GOOD, (1, "problem", "devices"), lambda _: 1e400)).encode(),
        dumped(replaced(GOOD, (1, "microseconds", "xla"), lambda _: 10**400)).encode(),
        b"\xff\xfe\x00",
    ],
)
def test_a_damaged_file_is_skipped_with_one_sentence(
    content: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(table_files, "warn_once", functools.cache(warn_once.__wrapped__))
    path = tmp_path / "table.jsonl"
    path.write_bytes(content)
    for _ in range(2):
        assert table_files.read_users(path) is None
    (message,) = caplog.messages
    assert message.startswith(f"{path} is ignored, since it cannot be read as a table: ")
    assert len(message) < 400 + len(str(path))
