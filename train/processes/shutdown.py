"""SIGTERM and SIGINT: a run finishes its step, saves and exits.

A thread receives the signals, because Python runs handlers in the main thread alone, and only when
it is not inside of XLA, which compiles or waits for minutes.

Where several processes train together, each has a parent, `train.processes.supervisor`, which
receives the signals and passes them on through a pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: The variable with the descriptor of the pipe from the parent.
FORWARDED = "TRAIN_FORWARDED_SIGNALS"


class Interrupted(Exception):
    """A run ended before its last step because of a signal, on all of its processes."""

    agreed = True

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
        self._has_parent = False

    def __enter__(self) -> Shutdown:
        if (descriptor := os.environ.pop(FORWARDED, None)) is not None:
            # The parent made this process ignore the signals themselves.
            self._has_parent, self._reading_end = True, int(descriptor)
            threading.Thread(target=self._receive, name="signals", daemon=True).start()
            return self
        if threading.current_thread() is not threading.main_thread():
            return self  # Python sets handlers in the main thread only.
        self._reading_end, self._writing_end = os.pipe()
        os.set_blocking(self._writing_end, False)
        self._previous_descriptor = signal.set_wakeup_fd(self._writing_end)
        for number in SIGNALS:
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
    def requested(self) -> int:
        """The number of the signal that asks the run to stop after its step; 0 for none."""
        return self._signal or 0

    def stop(self, step: int, checkpoint_dir: str | None, number: int) -> NoReturn:
        """Raises `Interrupted`, once ``step`` is done and its save has begun.

        Signal ``number`` asked for it, in this process or in another one of the run.
        """
        kept = (
            "nothing is saved, for want of --checkpoint-dir"
            if checkpoint_dir is None
            else f"its checkpoint is saved in {checkpoint_dir}; give --resume to continue"
        )
        raise Interrupted(
            f"{signal.Signals(number).name}: stopped after step {step}; {kept}", 128 + number
        )

    def _receive(self) -> None:
        with os.fdopen(self._reading_end, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if self._has_parent or number[0] in self._previous:
                    self._react(signal.Signals(number[0]))
        if self._has_parent:
            _print("stopped at once, since the parent process has ended")
            os._exit(1)

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
    # Who read it may have ended, as a parent that was killed.
    with contextlib.suppress(OSError):
        os.write(2, f"{message}\n".encode())
