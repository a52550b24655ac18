"""Folders made to attack, and links that must work."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.hugging_face import ModelFolder
from tests.models.hugging_face.tiny_folders import FIRST, FOLDERS, INDEX, SECOND
from tests.models.hugging_face.watched_folders import GENERATION, check, shards, use


def in_json(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        shards(folder)
        value = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(change(value)))

    return write


def with_text(name: str, text: str | bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        shards(folder)
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        (folder / name).write_bytes(data)

    return write


def in_place_of(name: str, put: Callable[[Path], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        shards(folder)
        (folder / name).unlink()
        put(folder / name)

    return write


def linked(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(path.parent / target)


def in_file(place: Any) -> Callable[[Path], None]:
    """An index by which a file is anything."""
    return in_json(INDEX, lambda index: {"weight_map": {**index["weight_map"], "x": place}})


def header(text: str, size: int | None = None) -> Callable[[Path], None]:
    data = text.encode()
    length = len(data) if size is None else size
    return with_text(FIRST, length.to_bytes(8, "little") + data)


OUTSIDE = "../outside/model.safetensors"
ATTACKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "step up": (in_file(OUTSIDE), "'../outside/model.safetensors' is no name of a file"),
    "step up later": (in_file(f"weights/../{OUTSIDE}"), "is no name of a file in the folder"),
    "absolute": (in_file("/etc/hostname.safetensors"), "is no name of a file in the folder"),
    "another kind": (in_file("/etc/passwd"), "expected the name of a safetensors file"),
    "pickled": (in_file("pytorch_model.bin"), "expected the name of a safetensors file"),
    "empty name": (in_file(""), "expected the name of a safetensors file"),
    "number": (in_file(3), "is 3; expected the name of a safetensors file"),
    "list": (in_file([FIRST]), "expected the name of a safetensors file"),
    "null": (in_file(None), "is None; expected the name"),
    "zero byte": (in_file("\0.safetensors"), r"'\\x00.safetensors' is no name"),
    "surrogate": (in_file("\ud800.safetensors"), r"'\\ud800.safetensors' is no name"),
    "line": (in_file("a\nb.safetensors"), r"'a\\nb.safetensors' is no name"),
    "long name": (in_file("x" * 5000 + ".safetensors"), "cannot be read .File name too long."),
    "through a file": (in_file("config.json/x.safetensors"), "cannot be read|is missing"),
    "map is a list": (in_json(INDEX, lambda index: {"weight_map": [1]}), "has no weight_map"),
    "index is a list": (in_json(INDEX, lambda index: [index]), "index.json is not a JSON object"),
    "index is deep": (with_text(INDEX, "[" * 10**6), "nested too deeply"),
    "config is deep": (with_text("config.json", '{"a":' * 10**5), "nested too deeply"),
    "config is rather deep": (
        with_text("config.json", '{"a":' * 101 + "1" + "}" * 101),
        "config.json cannot be read .nested too deeply",
    ),
    "config is large": (with_text("config.json", " " * (2**24 + 1)), "expected at most 16777216"),
    "byte-order mark": (with_text("config.json", "\ufeff{}"), "config.json cannot be read .*BOM"),
    "not UTF-8": (with_text("config.json", b"\xff\xfe{}"), "config.json cannot be read"),
    "not a number": (with_text("config.json", '{"rms_norm_eps": NaN}'), "NaN is no number"),
    "infinite": (with_text("config.json", '{"rope_theta": -Infinity}'), "-Infinity is no number"),
    "long number": (with_text("config.json", '{"vocab_size": 1' + "0" * 9999 + "}"), "digits"),
    "twice": (
        with_text("config.json", '{"model_type": "llama", "vocab_size": 1, "vocab_size": 2}'),
        "key 'vocab_size' is there twice, with two values",
    ),
    "surrogates": (with_text("config.json", '{"model_type": "\\ud800"}'), r"model_type='\\ud800'"),
    "tokens": (with_text(GENERATION, '{"eos_token_id": "2"}'), "eos_token_id='2': expected an"),
    "nested tokens": (
        with_text(GENERATION, '{"eos_token_id": [[2]]}'),
        "eos_token_id=.*: expected",
    ),
    "generation is a list": (with_text(GENERATION, "[]"), "config.json is not a JSON object"),
    "generation is cut off": (with_text(GENERATION, '{"eos'), "generation_config.json cannot be"),
    "FIFO of weights": (in_place_of(FIRST, os.mkfifo), "00001-of-00002.safetensors is a pipe"),
    "FIFO of the config": (in_place_of("config.json", os.mkfifo), "config.json is a pipe"),
    "FIFO of the index": (in_place_of(INDEX, os.mkfifo), "index.json is a pipe"),
    "FIFO of generation": (in_place_of(GENERATION, os.mkfifo), "generation_config.json is a pipe"),
    "folder of weights": (in_place_of(FIRST, Path.mkdir), "is a directory; expected a file"),
    "folder of the config": (in_place_of("config.json", Path.mkdir), "config.json is a directory"),
    "device": (
        in_place_of("config.json", lambda path: path.symlink_to("/dev/zero")),
        "config.json is a link to /dev/zero, outside the folder",
    ),
    "link of the config": (
        in_place_of("config.json", linked("../outside/config.json")),
        "config.json is a link to .*/outside/config.json, outside the folder; put the file itself",
    ),
    "link of weights": (in_place_of(SECOND, linked(OUTSIDE)), "outside the folder"),
    "link of generation": (in_place_of(GENERATION, linked("../outside/config.json")), "outside"),
    "link of a folder": (
        lambda folder: (
            in_file("below/model.safetensors")(folder),
            (folder / "below").symlink_to(folder.parent / "outside"),
        ),
        "below/model.safetensors is a link to .*, outside the folder",
    ),
    "circle of links": (in_place_of(FIRST, linked(FIRST)), "cannot be read .Too many levels"),
    "broken link": (in_place_of(FIRST, linked("nothing")), "00001-of-00002.safetensors is missing"),
    "no header": (with_text(FIRST, b""), "is not a whole safetensors file"),
    "long header": (header("{}", 2**63), "header of 9223372036854775808 bytes; expected at most"),
    "header past the end": (header("{}", 2**20), "is not a whole safetensors file"),
    "header is a list": (header("[]"), "is not a whole safetensors file"),
    "header names a dtype": (
        header(
            '{"a": {"dtype": "' + "\\u001b\\n" * 99 + '", "shape": [], "data_offsets": [0, 0]}}'
        ),
        "is not a whole safetensors file",
    ),
    "shape past the end": (
        header('{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'),
        "is not a whole safetensors file",
    ),
    "shape overflows": (
        header(
            '{"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}}'
        ),
        "is not a whole safetensors file",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_folder_that_attacks_is_a_sentence(name):
    change, expected = ATTACKS[name]
    assert re.search(expected, check(change))


def cache(folder: Path, *, large_files_apart: bool) -> Path:
    """A snapshot as Hugging Face's cache holds it: every file is a link to a blob."""
    repository = folder / "models--some--model"
    snapshot = repository / "snapshots" / "0123abc"
    shards(snapshot)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        file.rename(blob)
        file.symlink_to(Path("../../blobs") / blob.name)
        if large_files_apart:
            common = folder / "blobs" / f"{number:02x}" / blob.name
            common.parent.mkdir(parents=True)
            blob.rename(common)
            blob.symlink_to(Path("../../blobs") / f"{number:02x}" / blob.name)
    return snapshot


@pytest.mark.parametrize("large_files_apart", [False, True])
def test_the_links_of_the_cache_work(tmp_path, large_files_apart):
    use(cache(tmp_path, large_files_apart=large_files_apart))


def test_links_within_a_folder_and_to_a_folder_work(tmp_path):
    shards(tmp_path / "model")
    for name in (FIRST, "config.json"):
        (tmp_path / "model" / name).rename(tmp_path / "model" / f"real-{name}")
        (tmp_path / "model" / name).symlink_to(f"real-{name}")
    (tmp_path / "link").symlink_to("model")
    use(tmp_path / "link")


def test_a_snapshot_may_not_link_past_its_blobs(tmp_path):
    FOLDERS["whole"](tmp_path / "outside")
    snapshot = cache(tmp_path / "cache", large_files_apart=False)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "outside" / "config.json")
    with pytest.raises(ValueError, match=r"config.json is a link to .*, outside the folder"):
        ModelFolder(snapshot)


def test_a_folder_without_permission_is_a_sentence(tmp_path, monkeypatch):
    """No file is forbidden to root, so the answer of the operating system is made here."""
    shards(tmp_path / "model")

    def forbidden(path: Any, *arguments: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", forbidden)
    with pytest.raises(ValueError, match=r"config.json cannot be read .Permission denied."):
        ModelFolder(tmp_path / "model")
