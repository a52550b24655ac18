"""The memory that XLA may allocate, and whether a run fits into it."""

from __future__ import annotations

import os

import pytest

from train.memory.device_memory import (
    FRACTION,
    GPUS,
    VARIABLES,
    describe_memory,
    fit,
    memory_fraction,
    memory_limit,
    set_memory_fraction,
    verdict,
)


@pytest.mark.parametrize(
    ("statistics", "sentence"),
    [
        ({"bytes_limit": 1000}, "fits into the 1,000 bytes that JAX may use of NVIDIA X: 100 are"),
        ({"bytes_limit": 930}, "may not fit into the 930 bytes that JAX may use of NVIDIA X: 30 "),
        ({"bytes_limit": 800}, "does not fit into the 800 bytes that JAX may use of NVIDIA X,"),
        ({}, "how much memory JAX may use of NVIDIA X is not known"),
        (None, "how much memory JAX may use of NVIDIA X is not known"),
    ],
)  # fmt: skip
def test_the_verdict_is_about_the_memory_of_the_device(
    statistics: dict[str, int] | None, sentence: str
) -> None:
    class Device:
        device_kind = "NVIDIA X"

        def memory_stats(self) -> dict[str, int] | None:
            return statistics

    limit, whose = memory_limit(Device())
    assert verdict(900, limit, whose).startswith(sentence)
    assert limit is None or sentence.startswith(f"{fit(900, limit)} into ")


def test_the_fraction_of_memory_is_set_where_the_user_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Device:
        device_kind = "NVIDIA X"

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 700}

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert memory_fraction() == FRACTION  # Of a dry run in a process that sets none.
    set_memory_fraction()
    assert os.environ[VARIABLES[0]] == str(FRACTION)
    assert not os.environ.get(VARIABLES[1])  # JAX refuses both.
    monkeypatch.delenv(VARIABLES[0])
    monkeypatch.setenv(VARIABLES[1], "0.7")
    set_memory_fraction()
    assert VARIABLES[0] not in os.environ
    assert memory_fraction() == 0.7
    assert GPUS["H100"].memory == 56 * 10**9
    (line,) = describe_memory(Device())
    assert line == (
        "memory: JAX may use 700 bytes of each device, 70% of it (XLA_CLIENT_MEM_FRACTION)"
    )
    monkeypatch.setenv(VARIABLES[1], "most")
    with pytest.raises(ValueError, match="XLA_CLIENT_MEM_FRACTION='most': expected a number"):
        memory_fraction()
