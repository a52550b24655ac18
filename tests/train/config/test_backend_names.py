"""Names of backends that a configuration requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

import collective_matmul
from collective_matmul import UnknownBackendError
from train.config.checks import check
from train.config.config import MeshSizes
from train.config.presets import PRESETS


def test_an_unknown_name_is_answered_with_those_that_the_library_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the words of its error are."""

    def overlap(*args: object, **options: object) -> None:
        raise UnknownBackendError("in other words", ["near", "far"])

    monkeypatch.setattr(collective_matmul, "overlap", overlap)
    config = replace(PRESETS["debug"](), overlap="nearest")
    expected = r"^overlap='nearest': .* one or several of near, far, separated by commas$"
    with pytest.raises(ValueError, match=expected):
        check(config, MeshSizes())
