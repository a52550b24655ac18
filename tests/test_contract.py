"""Code that chooses, records, measures and explains is written against requests and backends alone.

`collective_matmul.dispatch.contract` is all that it knows of an op. Files are parsed, not imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_tree import Place, SourceTree
from tests.test_conventions import REPOSITORY

LIBRARY = "collective_matmul"
#: Files and folders that know no op and no storage of operands.
GENERIC = ("dispatch", "tuning", "explain")
#: Parts of the matmuls that know no storage of operands.
WORDLESS = ("gradients", "request", "xla", "ring")
#: Where ops and their operands are.
OPS = ("operands", "ops")
#: Words of storages, also within names.
WORDS = re.compile(r"fp8|recipe|scale|Quantized|Scaled", re.ASCII)


def generic_modules(tree: SourceTree) -> Iterator[tuple[str, str]]:
    """Name and path of each generic module."""
    for module in tree.below(LIBRARY):
        if module.name.split(".")[1:2] and module.name.split(".")[1] in GENERIC:
            yield module.name, module.path


def imported_ops(tree: SourceTree) -> list[str]:
    """Imports of ops by generic modules, also inside functions."""
    names = {name for name, _ in generic_modules(tree)}
    modules = [module for module in tree.below(LIBRARY) if module.name in names]
    return [
        f"{module.path}:{place.line}: {place.text}"
        for module in modules
        for place in module.imports(tree.names)
        if _room(place) in OPS
    ]


def _room(place: Place) -> str:
    return place.text.removeprefix(f"{LIBRARY}.").partition(".")[0]


def wordless_modules(tree: SourceTree) -> Iterator[str]:
    """Paths of generic modules, and of the parts of matmuls that know no storage."""
    yield from (path for _, path in generic_modules(tree))
    for module in tree.below(LIBRARY):
        parts = module.name.split(".")
        if parts[1:3] == ["ops", "matmul"] and parts[3:4] and parts[3] in WORDLESS:
            yield module.path


def words_of_storages(tree: SourceTree) -> list[str]:
    """Lines of such modules, comments included, that have a word of a storage."""
    return [
        f"{path}:{number}: {line.strip()}"
        for path in wordless_modules(tree)
        for number, line in enumerate((tree.root / path).read_text("utf-8").splitlines(), 1)
        if WORDS.search(line)
    ]


def test_the_generic_files_are_there() -> None:
    found = {name for name, _ in generic_modules(REPOSITORY)}
    assert {"dispatch.contract", "dispatch.selection", "dispatch.tables.table", "tuning.tune"} <= {
        name.removeprefix(f"{LIBRARY}.") for name in found
    }
    assert f"{LIBRARY}.explain" in found


def test_they_import_no_op() -> None:
    assert not imported_ops(REPOSITORY)


def test_they_know_no_storage() -> None:
    assert not words_of_storages(REPOSITORY)


@pytest.mark.parametrize("folder", ["dispatch", "tuning"])
def test_planted_mistakes_are_found(folder: str, tmp_path: Path) -> None:
    files = {
        f"{LIBRARY}/__init__.py": "",
        f"{LIBRARY}/operands/__init__.py": "recipe = 1",
        f"{LIBRARY}/ops/__init__.py": "",
        f"{LIBRARY}/ops/matmul.py": "",
        f"{LIBRARY}/explain.py": f"from {LIBRARY} import operands",
        f"{LIBRARY}/{folder}/trial.py": (
            f"def f():\n    from {LIBRARY}.ops import matmul\n"
            "\n\n# One Quantized weight.\nfp8_dtype = 1\n"
        ),
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    tree = SourceTree(tmp_path, REPOSITORY.folders)
    assert sorted(line.rpartition(": ")[2] for line in imported_ops(tree)) == [
        f"{LIBRARY}.operands",
        f"{LIBRARY}.ops.matmul",
    ]
    assert [line.split(":")[1] for line in words_of_storages(tree)] == ["5", "6"]
