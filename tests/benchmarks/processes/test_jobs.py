"""Jobs of processes: answers, and the end of those that fail or are late."""

from __future__ import annotations

import time
from collections.abc import Iterator
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
