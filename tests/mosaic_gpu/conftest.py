"""Fixtures of `tests.hopper`, for the tests in this folder."""

from collections.abc import Iterator

import pytest

from tests.hopper import _for_hopper  # noqa: F401


@pytest.fixture
def _without_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """For tests whose interpreter detects races: it prints them, and goes on."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out
