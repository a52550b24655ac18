"""The command line of snapshots; see `tests.snapshot`."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from tests.snapshot.comparison import report
from tests.snapshot.library import set_up

SECTIONS = ("kernels", "jaxprs", "memory", "decisions")


def main() -> None:
    """Writes a snapshot, or compares two."""
    parser = argparse.ArgumentParser(prog="python -m tests.snapshot", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="records what the library does now")
    writing.add_argument("file", type=Path)
    writing.add_argument("--only", action="append", choices=SECTIONS, help="one kind of facts")
    writing.add_argument(
        "--known", type=Path, help="an earlier snapshot: its programs are not compiled again"
    )
    comparing = commands.add_parser("compare", help="prints what differs, and fails if anything")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="PRIMITIVE",
        help="a primitive whose number does not matter",
    )
    arguments = parser.parse_args()
    if arguments.command == "write":
        _write(arguments.file, arguments.only or SECTIONS, arguments.known)
    else:
        text, is_equal = report(_read(arguments.old), _read(arguments.new), arguments.without)
        print(text)
        sys.exit(0 if is_equal else 1)


def _write(file: Path, sections: tuple[str, ...], known: Path | None) -> None:
    """Writes a snapshot of some sections, and how long each took to the standard error."""
    set_up()
    # Tracing makes millions of objects that live long.
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)
    snapshot: dict[str, Any] = {"about": {"jax": jax.__version__}}
    earlier = _read(known) if known else {}
    if earlier.get("about") != snapshot["about"]:
        earlier = {}  # Another compiler.
    makers: Mapping[str, Callable[[], Any]] = {
        "kernels": _kernels,
        "jaxprs": _jaxprs,
        "memory": lambda: _memory(earlier.get("memory", {})),
        "decisions": _decisions,
    }
    for section in sections:
        started = time.monotonic()
        snapshot[section] = makers[section]()
        taken = time.monotonic() - started
        print(f"{section}: {len(snapshot[section])} entries, {taken:.0f} s", file=sys.stderr)
    text = json.dumps(snapshot, indent=0, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


# Imported when they are needed: the memory's needs the CUDA build and what trainers need.
def _kernels() -> dict[str, Any]:
    from tests.snapshot import kernels

    return kernels.snapshot()


def _jaxprs() -> dict[str, Any]:
    from tests.snapshot import jaxprs

    return jaxprs.snapshot()


def _memory(known: Mapping[str, Any]) -> dict[str, Any]:
    from tests.snapshot import memory

    return memory.snapshot(known)


def _decisions() -> dict[str, Any]:
    from tests.snapshot import decisions

    return decisions.snapshot()


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
