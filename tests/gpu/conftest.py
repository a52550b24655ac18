"""Programs for GPUs are compiled many at once, while tests run those that are there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import jax
import pytest

from collective_matmul.mosaic_gpu import requirements
from tests.conftest import skip_without
from tests.gpu.problems import Call, Prepared


@pytest.fixture
def _with_kernels() -> None:
    """For tests of kernels that address peers, which are called directly."""
    if reason := requirements.unsupported_reason(devices=2):
        pytest.skip(f"{jax.devices()[0].device_kind}: {reason}")


class Compilable(Protocol):
    @property
    def devices(self) -> int: ...

    def compile(self) -> Any: ...


class Programs:
    """Programs that the session's tests need, compiled once each, in the order of their use."""

    def __init__(self, needs: Iterable[Compilable]):
        self._uses = Counter(need for need in needs if need.devices <= len(jax.devices()))
        self._pool = ThreadPoolExecutor(min(32, os.cpu_count() or 1))
        self._futures: dict[Any, Future] = {
            need: self._pool.submit(need.compile) for need in self._uses
        }

    def __call__(self, need: Compilable) -> Any:
        """The program, once it is there. Forgotten after its last use, to free its memory."""
        skip_without(need.devices)
        self._uses[need] -= 1
        last = self._uses[need] == 0
        return (self._futures.pop(need) if last else self._futures[need]).result()

    def wait(self) -> None:
        """Until nothing is being compiled, since XLA tries out matmuls on the GPUs meanwhile."""
        wait(self._futures.values())

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Iterator[Programs]:
    """Compiles what is in the `needs` of the tests' parameters."""
    parameters = (
        value
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        for value in item.callspec.params.values()
    )
    compiled = Programs(need for value in parameters for need in getattr(value, "needs", ()))
    yield compiled
    compiled.close()


class Drawn:
    """Operands and expected results of the last problem asked for, shared by its calls."""

    def __init__(self) -> None:
        self._problem: Any = None
        self._arrays: Any = None

    def __call__(self, call: Call, prepared: Prepared) -> tuple[Any, Any]:
        if self._problem != call.problem:
            self._arrays = None  # Before the next are made: they may fill half of the memory.
            self._problem, self._arrays = call.problem, prepared.draw()
        return self._arrays


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return Drawn()


class Ready:
    """A call whose program is compiled and whose operands are drawn."""

    def __init__(self, programs: Programs, drawn: Drawn, call: Call):
        prepared, self.program = (programs(need) for need in call.needs)
        self.operands, self._expected = drawn(call, prepared)
        self._judge = prepared.judge

    def run(self) -> Any:
        return self.program(*self.operands)

    def judge(self, results: Any) -> Any:
        return self._judge(results, self._expected)


@pytest.fixture
def ready(programs: Programs, drawn: Drawn) -> Callable[[Call], Ready]:
    return lambda call: Ready(programs, drawn, call)
