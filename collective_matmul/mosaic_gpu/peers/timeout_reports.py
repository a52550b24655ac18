"""Reports of kernels that have waited too long for a peer, and the thread that logs them.

A kernel cannot print: with a function call in it, ptxas makes all its wgmmas wait for each other
(C7510). So it stores its report in pinned host memory, and ends the program some seconds later.
Meanwhile a thread of this process finds the report.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from collective_matmul.log import warn_once

#: The environment variable that says how many seconds kernels wait for a peer.
TIMEOUT_VARIABLE = "COLLECTIVE_MATMUL_PEER_TIMEOUT"

_DEFAULT_SECONDS = 60.0

#: What a kernel stores; `written` is not zero when the other fields are there.
RECORD = np.dtype([("written", "u4"), ("expected", "i4"), ("seen", "i4"), ("text", "S116")])

_fields: Any = RECORD.fields
#: Byte offsets of the fields.
OFFSETS: dict[str, int] = {name: offset for name, (_, offset, *_) in _fields.items()}

_INTERVAL_SECONDS = 1.0
#: Seconds from a kernel's report to the end of the program. The first report is found after one
#: interval. Reports of other devices, which have waited nearly as long, are collected for another.
LINGER_SECONDS = 3


class _Place(NamedTuple):
    """A record: the device that writes it, the array that it is stored in, and a view of it."""

    device: Any
    array: jax.Array
    record: np.ndarray


# Never freed: workspaces hold their addresses.
_places: list[_Place] = []


def timeout_seconds() -> float:
    """Returns after how many seconds a wait ends the program; 0 if it waits for ever.

    That is the environment variable COLLECTIVE_MATMUL_PEER_TIMEOUT, or else 60. It takes effect for
    kernels that are traced afterwards.

    Raises:
      ValueError: if the variable is not a number of seconds.
    """
    text = os.environ.get(TIMEOUT_VARIABLE) or str(_DEFAULT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 1e9:
        raise ValueError(
            f"{TIMEOUT_VARIABLE}={text!r}: expected seconds from 0 to 1e9, such as 60; 0 makes"
            " kernels wait for their peers for ever"
        )
    return seconds


def allocate(device: Any) -> int:
    """Returns the address of a record in host memory that a device can write to."""
    sharding = SingleDeviceSharding(device, memory_kind="pinned_host")
    array = jax.device_put(np.zeros(RECORD.itemsize, np.uint8), sharding)
    pointer = array.block_until_ready().unsafe_buffer_pointer()
    memory: Any = (ctypes.c_char * RECORD.itemsize).from_address(pointer)
    _places.append(_Place(device, array, np.frombuffer(memory, RECORD)))
    _start_to_watch()
    return pointer


def _message(places: Sequence[_Place]) -> str:
    """Returns what is logged about records."""
    waits = (
        f"{place.device}: {record['text'].decode()}; it found {record['seen']} instead of"
        f" {record['expected']}"
        for place in places
        for record in place.record
        if record["written"]
    )
    return (
        "kernels wait for peers in vain, and end the program with CUDA_ERROR_ILLEGAL_ADDRESS."
        f" {'. '.join(waits)}. Either devices have launched other programs or in another order, or"
        f" a device that is not named here has failed or is late. {TIMEOUT_VARIABLE} sets the"
        " seconds; 0 waits for ever"
    )


@functools.cache
def _start_to_watch() -> None:
    stop = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(stop, _places), name="peer timeouts", daemon=True
    )
    thread.start()

    # JAX frees the memory at the exit too, but later: it was registered before.
    @atexit.register
    def _() -> None:
        stop.set()
        thread.join()


def _watch(stop: threading.Event, places: Sequence[_Place]) -> None:
    """Logs the first reports, with those that follow soon. Nothing runs on the devices after."""
    while not stop.wait(_INTERVAL_SECONDS):
        if any(place.record["written"].any() for place in list(places)):
            stop.wait(_INTERVAL_SECONDS)
            warn_once(_message(list(places)))
            return
