"""The log file of a run: JSON lines, of which each is an event.

The key "event" says what a line holds:

- "start": the first line, with the configuration, the versions and the hardware of the run;
- "resume": the same, and the "step" after which the run goes on;
- "step": a `train.log.metrics.Record`;
- "evaluation": the loss on held-out text after a "step".

Logs of earlier releases have steps only, without the key.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.config.renamed import current_record

#: Beginnings of the first line of a log, of this release and of earlier ones.
_BEGINNINGS = (b'{"event": ', b'{"step": ')


class LogFile:
    """Appends events to a file. Each is in the file when `write` returns."""

    def __init__(self, path: str | Path):
        self._path = Path(path)
        self.name = f"log_file={str(path)!r}"
        _remove_incomplete_line(self._path)

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Appends a line. Numbers that are not finite become null.

        Raises:
            OSError: it cannot be written, as on a full disk. Nothing of it is in the file then.
        """
        line = json.dumps(_finite({"event": event, **values}), allow_nan=False) + "\n"
        size = self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("ab") as file:
                file.write(line.encode())
        except OSError:
            # Half a line would spoil the next one.
            os.truncate(self._path, size)
            raise

    def close(self, failed: bool) -> None:
        """Does nothing: the file is open during a `write` only."""


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The events of a log, with current names, without the steps that a resumed run repeated.

    A resumed run logs the steps after its checkpoint once more; only the last line of a step
    counts. Reads logs of earlier releases too. The incomplete last line of a killed run is left
    out.
    """
    events: list[dict[str, Any]] = []
    text = Path(path).read_text(encoding="utf-8")
    for line in text[: text.rfind("\n") + 1].splitlines():
        event = current_record(json.loads(line))
        if "step" in event:
            step, kind = event["step"], event["event"]
            # A resume is followed by the steps after its checkpoint.
            first = step + 1 if kind == "resume" else step
            kinds = ("step", "evaluation") if kind == "resume" else (kind,)
            events = [e for e in events if e["event"] not in kinds or e["step"] < first]
        events.append(event)
    return events


def check_log_file(log_file: str | None, resume: bool) -> None:
    """Refuses a log file that cannot be written, or that holds anything a run must not change.

    A resumed run appends to its log and repeats the steps after its checkpoint.

    Raises:
        ValueError: the file cannot be written, or holds an earlier run's log and `resume` is False,
          or holds something other than a log.
    """
    if log_file is None:
        return
    path = Path(log_file)
    try:
        path.open("a").close()
        is_empty, is_log = path.stat().st_size == 0, _is_log(path)
    except OSError as error:
        raise ValueError(
            f"log_file={log_file!r}: {error.strerror}; give a file to write, in a folder there is"
        ) from None
    if not is_log:
        raise ValueError(
            f"log_file={log_file!r}: holds something other than a run's log; give another name"
        )
    if not resume and not is_empty:
        raise ValueError(
            f"log_file={log_file!r}: holds an earlier run's log; give another name, or --resume to"
            " append to it"
        )


def _is_log(path: Path) -> bool:
    """Whether the file is empty or starts like an event, which may be incomplete."""
    with path.open("rb") as file:
        start = file.read(max(map(len, _BEGINNINGS)))
    return any(start[: len(b)] == b[: len(start)] for b in _BEGINNINGS)


def _remove_incomplete_line(path: Path) -> None:
    """Removes an incomplete last line, which a killed run may leave."""
    if path.exists():
        text = path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.truncate(path, whole)


def _finite(value: Any) -> Any:
    """Returns the JSON value with null in place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
