"""Jobs of one or several processes, which stay alive and work when they are asked to."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import jax


class JobError(RuntimeError):
    """A process of a job failed, ended, or did not answer in time; the job is over."""


class ResidentJob:
    """Processes that do the same work together.

    Args:
      work: a generator function of a module, called in every process once it has found the others.
        It yields its answer to each request, and is sent the next one.
      arguments: of `work`.
      platform: cpu or gpu.
      devices: of all processes together.
      processes: how many.
      seconds: the time for an answer.
    """

    def __init__(
        self,
        work: Callable[..., Iterator[Any]],
        arguments: tuple[Any, ...],
        platform: str,
        devices: int,
        processes: int,
        seconds: float,
    ):
        self._seconds = seconds
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._started = []
        for number in range(processes):
            ours, theirs = context.Pipe()
            given = work, arguments, (platform, devices, processes, number, address)
            process = context.Process(target=_serve, args=(*given, seconds, theirs), daemon=True)
            process.start()
            self._started.append(process)
            self._connections.append(ours)
            theirs.close()

    def __str__(self) -> str:
        return "1 process" if len(self._started) == 1 else f"{len(self._started)} processes"

    def request(self, request: Any = None) -> None:
        """Sends a request to all processes; the first one is None."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # `answers` says that it has ended.
                connection.send(request)

    def answers(self) -> list[Any]:
        """The answers of all processes, in their order.

        Raises:
          JobError: if there is one that has none; it ends the job.
        """
        answers: dict[Connection, Any] = {}
        end = time.monotonic() + self._seconds
        try:
            while waiting := [each for each in self._connections if each not in answers]:
                left = max(0.0, end - time.monotonic())
                ready: list[Any] = multiprocessing.connection.wait(waiting, left)
                if not ready:
                    raise JobError(f"no answer within {self._seconds:g} seconds")
                for each in ready:
                    answers[each] = each.recv()
                    if isinstance(answers[each], JobError):
                        raise answers[each]
        except (EOFError, OSError) as error:
            self.end()
            raise JobError("a process ended") from error
        except JobError:
            self.end()
            raise
        return [answers[each] for each in self._connections]

    def end(self) -> None:
        """Kills all processes."""
        for process in self._started[::-1]:  # Others say much when the first one ends.
            process.kill()
        for process in self._started:
            process.join()


def _serve(
    work: Callable[..., Iterator[Any]],
    arguments: tuple[Any, ...],
    place: tuple[str, int, int, int, str],
    seconds: float,
    connection: Connection,
) -> None:
    """Answers requests in a process of a job. One that is late says where it is, and ends."""
    late = max(seconds - 10.0, seconds / 2)
    try:
        faulthandler.dump_traceback_later(late, exit=True)
        _join(*place)
        answering: Any = work(*arguments)
        while True:
            request = connection.recv()
            faulthandler.dump_traceback_later(late, exit=True)
            connection.send(answering.send(request))
            faulthandler.cancel_dump_traceback_later()
    except EOFError:
        pass  # The benchmark has ended.
    except BaseException as error:
        traceback.print_exc()
        sentence = str(error).strip().partition("\n")[0]
        connection.send(JobError(f"{type(error).__name__}: {sentence[:300]}"))
    finally:
        # An orderly exit would wait for the other processes.
        os._exit(1)


def _join(platform: str, devices: int, processes: int, number: int, address: str) -> None:
    """Chooses the devices of this process, and finds the others; the first has the address."""
    count = devices // processes
    own = [*range(number * count, (number + 1) * count)]
    jax.config.update("jax_cuda_visible_devices", ",".join(map(str, own)))
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # A process would read what another is writing.
        jax.config.update("jax_enable_compilation_cache", False)
    if processes > 1:
        # Else JAX catches SIGTERM, by which Python ends processes before it waits for them.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(address, processes, number, own, initialization_timeout=120)
