"""The number of simulated devices: that of a flag, of the user's environment, or a default."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from models import simulated_devices
from models.simulated_devices import simulate_devices

FLAG = "--xla_force_host_platform_device_count=2"


@pytest.mark.parametrize(
    ("asked", "configured", "flags", "simulated"),
    [
        (None, -1, "", 8),
        (3, -1, "", 3),
        (None, -1, FLAG, -1),  # XLA reads its flags where JAX has no number.
        (3, -1, FLAG, 3),
        (2, -1, FLAG, -1),  # JAX may have made them already.
        (None, 4, "", 4),
        (3, 4, "", 3),
    ],
)
def test_the_number_of_the_environment_counts_unless_a_flag_names_one(
    monkeypatch: pytest.MonkeyPatch,
    asked: int | None,
    configured: int,
    flags: str,
    simulated: int,
) -> None:
    values: dict[str, Any] = {"jax_num_cpu_devices": configured}
    config = SimpleNamespace(values=values, update=values.__setitem__)
    monkeypatch.setattr(simulated_devices, "jax", SimpleNamespace(config=config))
    monkeypatch.setenv("XLA_FLAGS", flags)
    simulate_devices("cpu_devices", asked, default=8)
    assert values == {"jax_num_cpu_devices": simulated}


@pytest.mark.parametrize("count", [0, 1025])
def test_a_number_that_cannot_be_simulated_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"^cpu_devices={count}: expected at least 1 and at most"):
        simulate_devices("cpu_devices", count, default=8)
