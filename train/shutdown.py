"""SIGTERM and SIGINT: a run finishes its step, saves and exits.

A thread receives the signals, because Python runs handlers in the main thread alone, and only when
it is not inside of XLA, which compiles or waits for minutes.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """A run ended before its last step because of a signal."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status
        """128 plus the number of the signal: 143 for SIGTERM, 130 for SIGINT."""


class Shutdown:
    """Receives SIGTERM and SIGINT inside of its ``with`` block. Without that it does nothing.

    Before `defer`, a signal ends the process at once: there is nothing to save. Afterwards the
    first one is a request, and the second ends the process at once, as if it was killed.
    """

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._deferring = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Shutdown:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python sets handlers in the main thread only.
        self._reading_end, self._writing_end = os.pipe()
        os.set_blocking(self._writing_end, False)
        self._previous_descriptor = signal.set_wakeup_fd(self._writing_end)
        for number in _SIGNALS:
            # A signal that the parent process ignores, as in a shell's background job, stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                # The thread does the work. This handler only makes Python write to the pipe.
                self._previous[number] = signal.signal(number, lambda *_: None)
        threading.Thread(target=self._receive, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._previous:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
        signal.set_wakeup_fd(self._previous_descriptor)
        os.close(self._writing_end)

    def defer(self) -> None:
        """Makes the first signal a request from now on."""
        self._deferring = True

    @property
    def requested(self) -> bool:
        """Whether a signal asks the run to stop after its step."""
        return self._signal is not None

    def stop(self, step: int, checkpoint_dir: str | None) -> NoReturn:
        """Raises `Interrupted`, once ``step`` is done and its save has begun."""
        assert self._signal is not None
        kept = (
            "nothing is saved, for want of --checkpoint-dir"
            if checkpoint_dir is None
            else f"its checkpoint is saved in {checkpoint_dir}; give --resume to continue"
        )
        raise Interrupted(
            f"{self._signal.name}: stopped after step {step}; {kept}", 128 + self._signal
        )

    def _receive(self) -> None:
        with os.fdopen(self._reading_end, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in self._previous:
                    self._react(signal.Signals(number[0]))

    def _react(self, received: signal.Signals) -> None:
        if self._deferring and not self.requested:
            self._signal = received
            _print(f"{received.name}: finishing the step and saving; a second signal stops at once")
            return
        when = "the save that was under way is lost" if self._deferring else "before the first step"
        _print(f"{received.name}: stopped at once, {when}; complete checkpoints are kept")
        os._exit(128 + received)


def _print(message: str) -> None:
    """Prints on stderr. The main thread may hold the locks of `sys.stderr`."""
    os.write(2, f"{message}\n".encode())
