"""How often candidates are called, in which order, and how samples are computed."""

from __future__ import annotations

import math
import time

import pytest

from collective_matmul.tuning.timing import HOPELESS, Timing, measure, measure_finalists


class Clock:
    """A time that passes only while candidates run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def candidate(self, name: str, *seconds: float):
        """Takes the given seconds in turn, the last of them from then on."""
        left = list(seconds)

        def run() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_every_candidate_has_one_turn_in_a_group(clock: Clock) -> None:
    candidates = {name: clock.candidate(name, 1.0) for name in "abc"}
    timings = measure(candidates, groups=4, seconds_per_group=1.0)
    warm_up = [name for name in "abc" for _ in range(3)]
    assert clock.calls[: len(warm_up)] == warm_up
    # A turn is a call that is not timed and one that is.
    turns = "".join(clock.calls[len(warm_up) :])
    groups = [turns[start : start + 6] for start in range(0, 24, 6)]
    assert all(sorted(group[::2]) == list("abc") and group[::2] == group[1::2] for group in groups)
    assert {name: timing.samples for name, timing in timings.items()} == {
        name: (1.0,) * 4 for name in "abc"
    }


def test_nobody_always_follows_the_same_candidate(clock: Clock) -> None:
    """A rotation would keep neighbours together, and the clocks that one leaves to the next."""
    measure({name: clock.candidate(name, 1.0) for name in "abcd"}, groups=20, seconds_per_group=1.0)
    turns = clock.calls[4 * 3 :: 2]
    before_a = {turns[i - 1] for i, name in enumerate(turns) if name == "a" and i % 4}
    assert before_a == set("bcd")


def test_fast_candidates_are_called_more_often_in_a_group(clock: Clock) -> None:
    candidates = {"slow": clock.candidate("slow", 0.5), "fast": clock.candidate("fast", 0.125)}
    measure(candidates, groups=2, seconds_per_group=1.0)
    called = clock.calls[2 * 3 :]
    assert (called.count("slow"), called.count("fast")) == (2 * (1 + 2), 2 * (4 + 8))


def test_a_turn_begins_untimed(clock: Clock) -> None:
    """The first call of all, the warm-up, and the lead of a turn leave no trace in its sample."""
    seconds = (100.0, 1.0, 1.0, *(50.0, 1.0, 1.0) * 3)
    timings = measure({"a": clock.candidate("a", *seconds)}, groups=3, seconds_per_group=2.0)
    assert timings["a"].samples == (1.0, 1.0, 1.0)
    assert len(clock.calls) == 3 + 3 * (1 + 2)


def test_the_hopeless_are_timed_in_one_group(clock: Clock) -> None:
    """Compared with the fastest that is not a bound; the reference is timed in all groups."""
    seconds = {"bound": 0.1, "fast": 1.0, "close": HOPELESS - 0.01, "slow": 2.0, "reference": 3.0}
    candidates = {name: clock.candidate(name, value) for name, value in seconds.items()}
    timings = measure_finalists(
        measure, candidates, groups=3, bounds=["bound"], always=["reference"]
    )
    assert {name: len(timing.samples) for name, timing in timings.items()} == {
        "bound": 3,
        "fast": 3,
        "close": 3,
        "slow": 1,
        "reference": 3,
    }


def test_medians_and_quartiles() -> None:
    timing = Timing((5.0, 1.0, 2.0, 4.0, 3.0))
    assert timing.median == 3.0
    assert timing.quartiles == (2.0, 4.0)
    assert Timing((7.0,)).quartiles == (7.0, 7.0)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^groups=0: expected at least 1"):
        measure({}, groups=0)
    for seconds in (0, math.inf, math.nan):
        with pytest.raises(
            ValueError, match=rf"^seconds_per_group={seconds}: expected more than 0"
        ):
            measure({}, seconds_per_group=seconds)
    assert measure({}) == {}
