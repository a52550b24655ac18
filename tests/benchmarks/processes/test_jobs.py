"""Jobs of processes: answers, and the end of those that fail or are late."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.processes.jobs import JobError, ResidentJob


def answer(factor: int) -> Iterator[Any]:
    """Answers a request with a product; a string spoils the work of process 1."""
    given = yield jax.process_index(), jax.local_device_count(), jax.device_count()
    while True:
        if isinstance(given, str) and jax.process_index() == 1:
            raise ValueError(given)
        given = yield factor * given


def sleep() -> Iterator[Any]:
    yield time.sleep(600)


@pytest.mark.exhaustive
def test_processes_answer_until_one_fails() -> None:
    job = ResidentJob(answer, (3,), "cpu", devices=4, processes=2, seconds=60.0)
    assert str(job) == "2 processes"
    try:
        job.request()
        assert job.answers() == [(0, 2, 4), (1, 2, 4)]
        job.request(2)
        assert job.answers() == [6, 6]
        job.request("spoilt")
        with pytest.raises(JobError, match=r"^ValueError: spoilt$"):
            job.answers()
        job.request(2)
        with pytest.raises(JobError, match=r"^a process ended$"):
            job.answers()
    finally:
        job.end()


def test_one_that_is_late_is_ended() -> None:
    job = ResidentJob(sleep, (), "cpu", devices=1, processes=1, seconds=0.1)
    job.request()
    with pytest.raises(JobError, match=r"^no answer within 0\.1 seconds$"):
        job.answers()
    with pytest.raises(JobError, match=r"^a process ended$"):
        job.answers()


def benchmark_that_fails() -> None:
    """A benchmark that asks two connected processes, and fails before it ends their job."""
    job = ResidentJob(answer, (3,), "cpu", devices=2, processes=2, seconds=60.0)
    job.request()
    job.answers()
    raise SystemExit(7)


@pytest.mark.exhaustive
def test_a_benchmark_that_fails_ends() -> None:
    """Python ends the processes by SIGTERM, which JAX must not catch, and waits for them."""
    benchmark = multiprocessing.get_context("spawn").Process(target=benchmark_that_fails)
    benchmark.start()
    try:
        benchmark.join(60.0)
        assert benchmark.exitcode == 7
    finally:
        benchmark.kill()


def benchmark_that_is_killed(connection: Any) -> None:
    """A benchmark that is killed while a process of its job waits for ever."""
    job = ResidentJob(sleep, (), "cpu", devices=1, processes=1, seconds=20.0)
    job.request()
    connection.send([process.pid for process in job._started])
    time.sleep(5.0)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.exhaustive
def test_a_process_ends_that_waits_for_ever_when_its_benchmark_is_killed() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    benchmark = context.Process(target=benchmark_that_is_killed, args=(theirs,))
    benchmark.start()
    (process,) = ours.recv()
    benchmark.join(60.0)
    command, end = Path(f"/proc/{process}/cmdline"), time.monotonic() + 30.0
    while command.exists() and command.read_bytes() and time.monotonic() < end:
        time.sleep(0.1)
    is_running = command.exists() and bool(command.read_bytes())
    if is_running:
        os.kill(process, signal.SIGKILL)
    assert not is_running
