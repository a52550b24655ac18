"""Several processes of the trainer on this machine, with simulated devices.

A port is reserved for them: a socket that is bound and does not listen keeps it from other programs
and lets the coordination service open it, which shares its port as this socket does.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.train.faults import ENVIRONMENT

ARGUMENTS = (
    "--preset debug --model.num-layers 1 --model.features 32 --model.hidden-features 64"
    " --overlap xla --batch-size 8 --sequence-length 16 --log-interval 1"
    " --distributed.heartbeat-timeout-seconds 5"
)
# A run that waits for a process that has died would wait for ever.
TIMEOUT_SECONDS = 300


class Trainers:
    """Processes that train together. Threads read what they print. A context manager.

    Args:
      arguments: flags of all processes.
      devices: simulated devices of each.
      count: number of processes; 1 is a run without `jax.distributed`.
      launched: the variables that a launcher gives to a process, by its number; None for flags.
      variables: more environment.
      only: flags of one process, by its number.
      common: flags before `arguments`, which override them.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        count: int,
        devices: int,
        launched: Callable[[int], Mapping[str, str]] | None = None,
        variables: Mapping[str, str] | None = None,
        only: Mapping[int, Sequence[str]] | None = None,
        common: str = ARGUMENTS,
    ) -> None:
        self._reservation = socket.socket()
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reservation.bind(("localhost", 0))
        port = str(self._reservation.getsockname()[1])
        self.logged: list[int] = []
        self.progress = threading.Condition()
        self.processes: list[subprocess.Popen[str]] = []
        self.outputs: list[list[str]] = []
        self.errors: list[list[str]] = []
        self._readers: list[threading.Thread] = []
        for number in range(count):
            command = [sys.executable, "-m", "train", *common.split(), *arguments]
            command += ["--cpu-devices", str(devices), *(only or {}).get(number, ())]
            environment = os.environ | ENVIRONMENT
            # Processes would read what another is writing.
            environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false", **(variables or {})}
            if launched is not None:
                environment |= {**launched(number), "JAX_COORDINATOR_PORT": port}
            elif count > 1:
                address = ["--distributed.coordinator-address", f"localhost:{port}"]
                command += [*address, "--distributed.num-processes", str(count)]
                command += ["--distributed.process-id", str(number)]
            self._start(command, environment)

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        process = subprocess.Popen(
            # A shell's background job ignores SIGINT, and its children with it.
            ["env", "--default-signal=INT", *command],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.processes.append(process)
        for stream, texts in ((process.stdout, self.outputs), (process.stderr, self.errors)):
            lines: list[str] = []
            texts.append(lines)
            first = len(self.processes) == 1 and texts is self.outputs
            reader = threading.Thread(target=self._read, args=(stream, lines, first))
            self._readers.append(reader)
            reader.start()

    def _read(self, stream, lines: list[str], first: bool) -> None:
        with stream:
            for line in stream:
                with self.progress:
                    if not line.startswith("[Gloo]"):
                        lines.append(line.rstrip())
                    match = re.match(r" +(\d+) +\d+\.\d{4} ", line)
                    if first and match:
                        self.logged.append(int(match[1]))
                    self.progress.notify_all()
        with self.progress:
            self.progress.notify_all()

    def wait_for_steps(self, count: int) -> None:
        """Waits until the first process has logged so many steps, or ended."""
        with self.progress:
            self.progress.wait_for(
                lambda: len(self.logged) >= count or not self._readers[0].is_alive(),
                timeout=TIMEOUT_SECONDS,
            )

    def finish(self) -> list[int]:
        """Waits for the end of all processes and returns their exit statuses."""
        try:
            statuses = [process.wait(timeout=TIMEOUT_SECONDS) for process in self.processes]
        finally:
            self.close()
        return statuses

    def child(self, number: int) -> int:
        """The process that trains, below the one that was started."""
        process = self.processes[number].pid
        return int(Path(f"/proc/{process}/task/{process}/children").read_text().split()[0])

    def close(self) -> None:
        # The children end with their parents.
        for process in self.processes:
            process.kill()
        for reader in self._readers:
            reader.join()
        for process in self.processes:
            process.wait()
        self._reservation.close()

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def everything(self) -> str:
        """All that they printed, for the message of a test that fails."""
        return "\n".join(
            line
            for number, texts in enumerate(zip(self.outputs, self.errors, strict=True))
            for line in (f"-- process {number}", *texts[0], *texts[1])
        )


def train(arguments: Sequence[str], *, count: int, devices: int, **options) -> list[list[str]]:
    """Trains to the end. Returns the lines that each process printed.

    Raises:
      AssertionError: a process ended otherwise.
    """
    with Trainers(arguments, count=count, devices=devices, **options) as trainers:
        assert trainers.finish() == [0] * count, trainers.everything()
        return trainers.outputs
