"""Fixtures of `tests.hopper`, for the tests in this folder."""

from tests.hopper import _for_hopper  # noqa: F401
