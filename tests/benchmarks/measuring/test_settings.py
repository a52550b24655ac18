"""Settings that benchmarks give JAX before it looks for devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.measuring import settings
from benchmarks.measuring.settings import Settings, choose_platform
from models import simulated_devices

FLAG = "--xla_force_host_platform_device_count=2"


@pytest.mark.parametrize(
    ("asked", "configured", "flags", "simulated"),
    [
        (0, -1, "", 4),  # One device would have nothing to communicate with.
        (2, -1, "", 2),
        (0, 8, "", 8),
        (2, 8, "", 8),
        (8, 4, "", 8),
        (0, -1, FLAG, -1),
        (4, -1, FLAG, 4),
    ],
)
def test_devices_are_simulated_unless_the_user_has_configured_a_number(
    monkeypatch: pytest.MonkeyPatch, asked: int, configured: int, flags: str, simulated: int
) -> None:
    values: dict[str, Any] = {"jax_num_cpu_devices": configured}
    config = SimpleNamespace(values=values, update=values.__setitem__)
    for module in (settings, simulated_devices):
        monkeypatch.setattr(module, "jax", SimpleNamespace(config=config))
    monkeypatch.setenv("XLA_FLAGS", flags)
    choose_platform(Settings(platform="cpu", devices=asked))
    assert values == {"jax_platforms": "cpu", "jax_num_cpu_devices": simulated}


def test_gpus_are_left_to_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "jax", None)
    choose_platform(Settings(platform="gpu"))
