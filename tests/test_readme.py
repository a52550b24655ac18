"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from collective_matmul.backends.ring.schedule import make_schedule

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def run(example: str, names: dict[str, Any]) -> None:
    exec(compile(example, "README.md", "exec"), names)


def test_wrapped_layers_give_the_same_numbers(capsys):
    run(blocks("python")[0], {})
    assert float(capsys.readouterr().out) < 1e-5


def test_the_ops_and_the_rewrite_give_the_same_numbers_and_are_explained(capsys):
    names: dict[str, Any] = {}
    run(blocks("python")[1], names)
    x, w_in, w_out = map(np.asarray, names["args"])
    expected = jax.nn.gelu(x @ w_in) @ w_out
    for result in (names["y"], names["same"]):
        # Sums of 256 products of float32, in another order.
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)
    assert "measured (table of NVIDIA H200)" in capsys.readouterr().out


@pytest.mark.parametrize("use", ["gather", "scatter"])
def test_the_drawings_are_those_of_the_schedules(use):
    assert f"{make_schedule(use, 'one_way', 4)}\n" in blocks("text")


def test_every_file_it_links_to_is_there():
    links = re.findall(r"\]\((?!https:)([^)]+)\)", README)
    assert links
    for link in links:
        assert (Path(__file__).parent.parent / link).exists(), link
