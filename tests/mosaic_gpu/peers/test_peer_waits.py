"""Waits for peers that take too long: when that is, and what is reported."""

from __future__ import annotations

import re
import threading
from typing import Any

import jax
import numpy as np
import pytest

from collective_matmul.mosaic_gpu.peers import peer_waits, timeout_reports
from collective_matmul.mosaic_gpu.peers.peer_memory import Address
from collective_matmul.mosaic_gpu.peers.peer_waits import Awaited
from collective_matmul.mosaic_gpu.peers.timeout_reports import (
    OFFSETS,
    TIMEOUT_VARIABLE,
    timeout_seconds,
)
from tests.gpu.peer_waits import WAITS, Wait, program
from tests.hopper import needs_kernels

Patch = pytest.MonkeyPatch

_STORE = re.compile(r"st\.relaxed\.sys\.global\.b32 \[record \+ (\d+)\], (\S+);")
AWAITED = Awaited("matmul_scatter", "partial products of peers", Address(0, 0, 0))


@needs_kernels
@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize("seconds", ["60", "0"])
@pytest.mark.parametrize("wait", WAITS)
def test_every_wait_lowers(wait: Wait, seconds: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, seconds)
    program(wait, comes=True).trace().lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(("text", "seconds"), [(None, 60), ("", 60), ("2.5", 2.5), ("0", 0)])
def test_seconds(text: str | None, seconds: float, monkeypatch: Patch) -> None:
    monkeypatch.delenv(TIMEOUT_VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    assert timeout_seconds() == seconds


@pytest.mark.parametrize("text", ["a minute", "-1", "inf", "nan"])
def test_what_is_no_number_of_seconds_is_refused(text: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    with pytest.raises(ValueError, match=rf"{TIMEOUT_VARIABLE}='{text}': expected seconds"):
        timeout_seconds()


def test_a_loop_without_limit_has_no_clock() -> None:
    text, limited = (peer_waits._poll_text("", AWAITED, seconds) for seconds in (0, 2.5))
    assert "globaltimer" not in text and "globaltimer" in limited
    assert "setp.lt.s64 p, now, 2500000000;" in limited


@pytest.fixture
def places(monkeypatch: Patch) -> list[Any]:
    """The records of this test alone, which no thread watches."""
    monkeypatch.setattr(timeout_reports, "_places", [])
    monkeypatch.setattr(timeout_reports, "_start_to_watch", lambda: None)
    monkeypatch.setattr(timeout_reports, "_INTERVAL_SECONDS", 0.01)
    for device in jax.devices()[:2]:
        timeout_reports.allocate(device)
    return timeout_reports._places


def test_what_a_kernel_stores_is_logged(
    places: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    ptx = peer_waits._poll_text("", AWAITED, 1234.5)
    memory = places[1].record.view(np.uint32)
    for offset, value in _STORE.findall(ptx):
        # All else has been stored, and can be seen, before the record is marked as written.
        last = f"fence.acq_rel.sys;\nst.relaxed.sys.global.b32 [record + {offset}], {value};" in ptx
        assert last == (int(offset) == OFFSETS["written"])
        memory[int(offset) // 4] = {"$1": 7, "seen": 3}.get(value) or int(value)
    timeout_reports._watch(threading.Event(), places)
    (record,) = caplog.records
    assert (
        f"{places[1].device}: {AWAITED.kernel} waited 1234.5 s for {AWAITED.what}; it found 3"
        " instead of 7. "
    ) in record.getMessage()
    assert f"{places[0].device}: " not in record.getMessage()


def test_nothing_is_logged_of_kernels_that_do_not_wait_in_vain(
    places: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=timeout_reports._watch, args=(stop, places))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    stop.set()
    thread.join()
    assert not caplog.records
