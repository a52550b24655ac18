"""Changes of JSON files, as a search draws them."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

#: Values of other types and sizes than files have.
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**32, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, "", " ", "a",
    "</s>", "<unk>", "\ud800", "\u2581", "<0x0A>", "../x", "/etc/passwd", "x" * 5000, [], [[]], {},
    [0], ["</s>"], [None], [2**40], {"content": "</s>"}, {"content": 5}, {"a": {}},
    {"String": "(a+)+$"}, {"Regex": "(a+)+$"}, {"Regex": "("}, {"type": "Sequence"},
    {"type": "Prepend", "prepend": ""},
    {"type": "Strip", "content": "a", "start": 2**40, "stop": 0},
    {"type": "Metaspace", "replacement": "", "prepend_scheme": "first", "split": True},
    {"type": "Replace", "pattern": {"Regex": "a*"}, "content": "aa"},
    {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
    float("nan"), float("inf"),
]  # fmt: skip
#: Whole contents of a file.
CONTENTS = [
    b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{}" * 2, b"\0" * 100,
    b"[" * 100_000, b'{"a":' * 100_000, b'{"eos_token": "\\ud800"}', b'{"eos_token_id": 1e999}',
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
]  # fmt: skip
KINDS = ("folder", "pipe", "circle", "missing", "device")


@st.composite
def changed(draw: st.DrawFn, content: bytes) -> bytes:
    """Another content of a JSON file: one or two values of another kind, or other bytes."""
    how = draw(st.sampled_from(["value", "value", "value", "value", "bytes", "content"]))
    if how == "content":
        return draw(st.sampled_from(CONTENTS))
    if how == "bytes":
        place = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 8))
        return content[:place] + draw(st.binary(max_size=4)) + content[place + length :]
    value = json.loads(content)
    for _ in range(draw(st.integers(1, 2))):
        places = list(_places(value))
        if not places:
            break
        # Vocabularies have most places, and are alike.
        few = [place for place in places if len(place[0]) < 20] or places
        parent, key = draw(st.sampled_from(few if draw(st.booleans()) else places))
        if draw(st.integers(0, 4)) == 0:
            del parent[key]
        else:
            parent[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
    return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """The container and the key of each value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, (dict, list)):
            yield from _places(item)


def replace_by(path: Path, kind: str) -> None:
    """Puts something else than a file in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "circle":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
