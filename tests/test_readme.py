"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from collective_matmul.schedule import make_schedule

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_example_runs_and_gives_the_same_numbers(capsys):
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert float(capsys.readouterr().out) < 1e-5


@pytest.mark.parametrize("use", ["gather", "scatter"])
def test_the_drawings_are_those_of_the_schedules(use):
    assert f"{make_schedule(use, 'one_way', 4)}\n" in blocks("text")


def test_every_file_it_links_to_is_there():
    links = re.findall(r"\]\((?!https:)([^)]+)\)", README)
    assert links
    for link in links:
        assert (Path(__file__).parent.parent / link).exists(), link
