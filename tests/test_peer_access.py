"""Which GPUs can address each other, by a driver that is not there."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from collective_matmul import peer_access
from collective_matmul.peer_access import no_peer_access_reason, pair_without_access

INVALID_DEVICE = 101  # CUDA_ERROR_INVALID_DEVICE


class Driver:
    """The part of NVIDIA's driver that is asked for: GPUs, and the ordered pairs without access."""

    def __init__(self, gpus: int, without: Collection[tuple[int, int]] = ()):
        self.gpus = gpus
        self.without = without

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 10 + number  # A handle is not a number.
        return 0 if number < self.gpus else INVALID_DEVICE

    def cuDeviceCanAccessPeer(self, answer: Any, device: ctypes.c_int, peer: ctypes.c_int) -> int:
        pair = device.value - 10, peer.value - 10
        answer._obj.value = pair not in self.without
        return 0


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was found out about this machine's GPUs is forgotten."""
    fresh = functools.cache(no_peer_access_reason.__wrapped__)
    monkeypatch.setattr(peer_access, "no_peer_access_reason", fresh)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that this process drives some GPUs, and what the driver says of them."""

    def patch(numbers: list[int], driver: Driver | None) -> None:
        devices = [SimpleNamespace(local_hardware_id=number) for number in numbers]
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "local_devices", lambda: devices)
        monkeypatch.setattr(peer_access, "cuda_driver", lambda: driver)

    return patch


def test_every_pair_is_asked_both_ways() -> None:
    assert pair_without_access(Driver(4), range(4)) is None
    for pair in [(0, 1), (1, 0), (3, 2)]:
        assert pair_without_access(Driver(4, {pair}), range(4)) == pair


def test_only_the_gpus_in_use_are_asked_about() -> None:
    assert pair_without_access(Driver(4, {(0, 1), (1, 0)}), [1, 3]) is None
    assert pair_without_access(Driver(4, {(3, 1)}), [1, 3]) == (3, 1)
    assert pair_without_access(Driver(4), [2]) is None


def test_an_error_of_the_driver_is_raised() -> None:
    with pytest.raises(RuntimeError, match="101"):
        pair_without_access(Driver(2), [0, 5])


def test_the_reason_names_the_gpus(pretend: Any) -> None:
    pretend([0, 2], Driver(4, {(2, 0)}))
    assert peer_access.no_peer_access_reason() == "GPU 2 cannot address the memory of GPU 0"


def test_no_reason_if_all_have_access_or_there_is_no_driver(pretend: Any) -> None:
    pretend([0, 1], Driver(2))
    assert peer_access.no_peer_access_reason() is None
    peer_access.no_peer_access_reason.cache_clear()
    pretend([0, 1], None)
    assert peer_access.no_peer_access_reason() is None


def test_no_reason_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_access, "cuda_driver", lambda: pytest.fail("asked"))
    assert peer_access.no_peer_access_reason() is None


def test_a_missing_library_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert peer_access.cuda_driver() is None
