"""Schedules, checked by playing them with sets: a piece is (owner, part), a device is a number."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest

from collective_matmul.schedule.schedules import (
    PATTERNS,
    USES,
    Chunk,
    Pattern,
    Schedule,
    Send,
    Use,
    make_schedule,
)

Piece = tuple[int, int]

every_schedule = pytest.mark.parametrize(
    "schedule",
    [
        make_schedule(use, pattern, devices)
        for use in USES
        for pattern in (PATTERNS if use != "exchange" else ("direct",))
        for devices in range(1, 10)
    ],
    ids=lambda schedule: f"{schedule.use}-{schedule.pattern}-{schedule.devices}",
)


def piece_named(chunk: Chunk, device: int, schedule: Schedule) -> Piece:
    """Piece that `device` means by `chunk`."""
    return (device + chunk.offset) % schedule.devices, chunk.part


def deliveries(send: Send, schedule: Schedule) -> list[tuple[int, int, Piece]]:
    """(source, destination, piece) of a send; both ends must mean the same piece."""
    pairs = send.permutation(schedule.devices)
    everyone = list(range(schedule.devices))
    assert [source for source, _ in pairs] == everyone
    assert sorted(destination for _, destination in pairs) == everyone
    result = []
    for source, destination in pairs:
        piece = piece_named(send.chunk, source, schedule)
        assert piece == piece_named(send.arrival, destination, schedule)
        result.append((source, destination, piece))
    return result


def own_pieces(device: int, schedule: Schedule) -> set[Piece]:
    return {(device, part) for part in range(schedule.parts)}


def every_piece(schedule: Schedule) -> list[Piece]:
    return sorted((d, part) for d in range(schedule.devices) for part in range(schedule.parts))


def received_pieces(device: int, schedule: Schedule) -> list[Piece]:
    """The pieces that a device works on: those addressed to it, of an exchange, or else all."""
    if schedule.use != "exchange":
        return every_piece(schedule)
    return [
        (d, part) for d, part in every_piece(schedule) if (d + part) % schedule.devices == device
    ]


def play_gather(schedule: Schedule) -> tuple[list[list[Piece]], int]:
    """Pieces that each device multiplied, and the most one had beyond its own at any time."""
    devices = range(schedule.devices)
    held = [own_pieces(d, schedule) for d in devices]
    multiplied: list[list[Piece]] = [[] for _ in devices]
    most = 0
    for i, step in enumerate(schedule.steps):
        for d in devices:
            pieces = [piece_named(chunk, d, schedule) for chunk in step.multiply]
            assert set(pieces) <= held[d], f"step {i}: device {d} multiplies what it lacks"
            multiplied[d] += pieces
        arriving: list[set[Piece]] = [set() for _ in devices]
        for send in step.sends:
            for source, destination, piece in deliveries(send, schedule):
                assert piece in held[source], f"step {i}: device {source} sends what it lacks"
                assert piece not in held[destination] | arriving[destination], "sent twice"
                arriving[destination].add(piece)
        for d in devices:
            most = max(most, len((held[d] | arriving[d]) - own_pieces(d, schedule)))
            needed = {piece_named(chunk, d, schedule) for chunk in schedule.chunks_used_after(i)}
            held[d] = (held[d] | arriving[d]) & needed
    return multiplied, most


def play_scatter(schedule: Schedule) -> tuple[list[dict[Piece, Counter[int]]], int]:
    """Whose contributions each device's sums hold at the end, and the most pieces beyond its own.

    What has left is not counted: it is in flight, and counted where it arrives.
    """
    devices = range(schedule.devices)
    sums: list[dict[Piece, Counter[int]]] = [{} for _ in devices]
    most = 0
    for i, step in enumerate(schedule.steps):
        arriving: list[dict[Piece, Counter[int]]] = [{} for _ in devices]
        for send in step.sends:
            for source, destination, piece in deliveries(send, schedule):
                assert piece in sums[source], f"step {i}: device {source} sends what it lacks"
                arriving[destination][piece] = sums[source].pop(piece)
        for d in devices:
            products = {piece_named(chunk, d, schedule): Counter([d]) for chunk in step.multiply}
            waiting = len(sums[d].keys() - own_pieces(d, schedule))
            most = max(most, waiting + len(products) + len(arriving[d]))
            for piece, contributions in (*products.items(), *arriving[d].items()):
                sums[d][piece] = sums[d].get(piece, Counter()) + contributions
    return sums, most


@every_schedule
def test_every_device_multiplies_every_chunk_once(schedule: Schedule) -> None:
    for d in range(schedule.devices):
        pieces = [
            piece_named(chunk, d, schedule) for step in schedule.steps for chunk in step.multiply
        ]
        assert sorted(pieces) == received_pieces(d, schedule)


@every_schedule
def test_data_is_where_it_is_used(schedule: Schedule) -> None:
    if schedule.use != "scatter":
        multiplied, most = play_gather(schedule)
        for d, pieces in enumerate(multiplied):
            assert sorted(pieces) == received_pieces(d, schedule)
    else:
        sums, most = play_scatter(schedule)
        everyone = Counter(range(schedule.devices))
        for d, held in enumerate(sums):
            assert held == dict.fromkeys(own_pieces(d, schedule), everyone)
    # The chunk being multiplied or summed, and the one in flight; two are in a direct gather
    # or exchange, which works on one part of a shard.
    early = schedule.use != "scatter" and schedule.pattern == "direct"
    worked_on = 1 if schedule.use == "exchange" else schedule.parts
    assert most <= 2 * worked_on + early


@every_schedule
def test_costs(schedule: Schedule) -> None:
    d, chunk_bytes = schedule.devices, 5040
    assert len(schedule.steps) == d
    assert schedule.permutes == (2 if schedule.pattern == "two_way" else 1) * (d - 1)
    # Every device needs, or contributes to, all chunks but its own, whatever way they take.
    # An exchange sends the parts of one shard, but its own.
    sent = chunk_bytes // d if schedule.use == "exchange" else chunk_bytes
    assert schedule.bytes_sent(chunk_bytes) == (d - 1) * sent
    # Round a ring the farthest chunk passes every device; through a switch it passes none.
    assert schedule.hops == (min(1, d - 1) if schedule.pattern == "direct" else d - 1)


@pytest.mark.parametrize("devices", range(3, 9))
def test_a_direct_gather_starts_every_later_transfer_two_steps_ahead(devices: int) -> None:
    steps = make_schedule("gather", "direct", devices).steps
    for i, step in enumerate(steps):
        assert {send.arrival for send in step.sends if send.arrival.offset != 1} == {
            Chunk(offset, 0) for offset in (i + 2,) if offset < devices
        }


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_parts_tile_a_shard(pattern: Pattern, size: int) -> None:
    bounds = make_schedule("gather", pattern, 4).part_bounds(size)
    assert [row for start, stop in bounds for row in range(start, stop)] == list(range(size))
    lengths = [stop - start for start, stop in bounds]
    assert max(lengths) - min(lengths) <= 1


DRAWINGS = {
    ("gather", "one_way", 3): """\
          step 0   step 1   step 2
device 0  0 (0→2)  1 (1→2)  2
device 1  1 (1→0)  2 (2→0)  0
device 2  2 (2→1)  0 (0→1)  1""",
    ("scatter", "direct", 3): """\
          step 0  step 1   step 2
device 0  2       1 (2→2)  0 (1→1)
device 1  0       2 (0→0)  1 (2→2)
device 2  1       0 (1→1)  2 (0→0)""",
    ("gather", "two_way", 2): """\
          step 0              step 1
device 0  0a 0b (0a→1, 0b→1)  1a 1b
device 1  1a 1b (1a→0, 1b→0)  0a 0b""",
    ("exchange", "direct", 3): """\
          step 0        step 1  step 2
device 0  0 (0→1, 0→2)  2       1
device 1  1 (1→2, 1→0)  0       2
device 2  2 (2→0, 2→1)  1       0""",
    ("scatter", "one_way", 1): """\
          step 0
device 0  0""",
}


@pytest.mark.parametrize("arguments", DRAWINGS, ids=str)
def test_drawing(arguments: tuple[Use, Pattern, int]) -> None:
    assert str(make_schedule(*arguments)) == DRAWINGS[arguments]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("scatters", "one_way", 4), r"use='scatters': expected one of gather, scatter, exchange$"),
        (
            ("gather", "spiral", 4),
            r"pattern='spiral': expected one of one_way, two_way, direct$",
        ),
        (
            ("exchange", "two_way", 4),
            r"pattern='two_way': an exchange has the pattern direct only$",
        ),
        (("gather", "direct", 0), r"devices=0: a schedule needs at least 1 device$"),
        (("gather", "direct", -2), r"devices=-2: a schedule needs at least 1 device$"),
    ],
)
def test_bad_arguments(arguments: tuple[str, str, int], sentence: str) -> None:
    use, pattern, devices = arguments
    with pytest.raises(ValueError, match=f"^{sentence}"):
        make_schedule(cast(Use, use), cast(Pattern, pattern), devices)
