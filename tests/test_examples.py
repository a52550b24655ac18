"""The examples of the tutorials run, and print what their pages show."""

from __future__ import annotations

import doctest
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = DOCS / "examples"


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs a file as a program without arguments, and returns its names."""
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(path)])
    return runpy.run_path(str(path), run_name="__main__")


def check_shown(page: str, printed: str) -> None:
    """Each text block of a tutorial is in what its program printed; "..." stands for anything."""
    text = (DOCS / "tutorials" / f"{page}.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert shown
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output("".join(shown), printed, options), printed


@pytest.mark.parametrize("name", ["nnx_model", "linen_model"])
def test_a_model_learns_and_a_resumed_run_is_the_same(name, monkeypatch, capsys):
    names = run(name, monkeypatch)
    assert names["losses"] == sorted(names["losses"], reverse=True)
    assert names["resumed"] == names["losses"][-1]
    check_shown(name.removesuffix("_model"), capsys.readouterr().out)


def test_plain_code_learns_with_its_own_numbers(monkeypatch, capsys):
    names = run("plain_jax", monkeypatch)
    printed = capsys.readouterr().out
    check_shown("plain_jax", printed)
    first = re.search(r"^loss (\S+), of the plain code (\S+)$", printed, re.M)
    assert first is not None and first[1] == first[2]
    assert names["value"] < names["expected"]


def test_a_hugging_face_model_learns_and_answers(monkeypatch, capsys):
    run("fine_tuning", monkeypatch)
    printed = capsys.readouterr().out
    losses = re.search(r"loss (\S+) → (\S+);", printed)
    assert losses is not None and float(losses[2]) < 0.8 * float(losses[1])
    assert printed.count("adapters of") == 1
    check_shown("fine_tuning", printed)


def test_every_prompt_is_answered(monkeypatch, capsys):
    run("serving", monkeypatch)
    answers = re.findall(r"^prompt \d:((?: \d+)*)$", capsys.readouterr().out, re.M)
    lengths = [len(answer.split()) for answer in answers]
    assert len(lengths) == 6 and np.all(np.array(lengths) <= 12) and max(lengths) == 12


def test_every_example_is_tested():
    tested = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{path.stem}"' in tested for path in EXAMPLES.glob("*.py"))
