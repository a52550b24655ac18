"""Paths with ``~``."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from models.paths import expanded


def test_the_home_directory_takes_the_place_of_a_tilde(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/run/1") == tmp_path / "run" / "1"
    assert expanded("run/~") == Path("run/~")


def test_a_user_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ValueError, match=r"'~/run': this machine knows no home directory for '~'"):
        expanded("~/run")


def test_another_user_who_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"no home directory for '~nobody-of-this-name'"):
        expanded("~nobody-of-this-name/run")
