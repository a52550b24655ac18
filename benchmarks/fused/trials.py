"""The plans of a fused kernel on one case: compiled, compared with what is exact, timed."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.communication import AXIS
from benchmarks.fused.cases import FEATURES, Case, Way, chain, lowered_chain, quartiles, way_of
from benchmarks.fused.operands import Operands, Rows
from collective_matmul.backends.fused import all_gather, reduce_scatter
from collective_matmul.backends.fused.all_gather_config import AllGatherProblem
from collective_matmul.backends.fused.all_gather_search import candidate_all_gather_configs
from collective_matmul.backends.fused.config_search import KernelCall, without_row_dependent
from collective_matmul.backends.fused.reduce_scatter_config import ReduceScatterProblem
from collective_matmul.backends.fused.reduce_scatter_search import (
    candidate_all_reduce_configs,
    candidate_reduce_scatter_configs,
)
from collective_matmul.mosaic_gpu import device
from collective_matmul.tuning.timing import measure

Plan = Any
#: Of an H100 or H200; plans are rehearsed for those where there are none.
MULTIPROCESSORS = 132


def call_of(case: Case, devices: int) -> KernelCall:
    """What the plans of a case are for."""
    features, hidden = FEATURES[case.model]
    hidden //= devices
    problem: Any
    if case.op == "all_gather_matmul":
        problem = AllGatherProblem(devices, 1, case.rows // devices, features, (hidden,))
    elif case.op == "matmul_reduce_scatter":
        owned = case.rows // devices
        problem = ReduceScatterProblem("scatter", devices, 1, owned, (hidden,), features)
    else:
        problem = ReduceScatterProblem("one_shot", devices, 1, case.rows, (hidden,), features)
    target = device.target()
    return KernelCall(case.op, problem, target.multiprocessors if target else MULTIPROCESSORS)


def plans_of(call: KernelCall) -> tuple[Plan, ...]:
    """All plans of a call, the likeliest to be fastest first."""
    found: Callable[[Any, int], tuple[Plan, ...]] = {
        "all_gather_matmul": candidate_all_gather_configs,
        "matmul_reduce_scatter": candidate_reduce_scatter_configs,
        "matmul_all_reduce": candidate_all_reduce_configs,
    }[call.op]
    return found(call.problem, call.multiprocessors)


def plans_to_try(call: KernelCall, count: int, failed: Iterable[str]) -> list[Plan]:
    """The likeliest of those like none that failed, and what is chosen today."""
    plans, failed = plans_of(call), {*failed}
    tried = [plan for plan in plans if kind_of(call, plan) not in failed]
    return list(dict.fromkeys([*tried[:count], *filter(tried.__contains__, [call.choose(plans)])]))


def text_of(plan: Plan) -> str:
    """A plan's choices."""
    return json.dumps(plan.to_json())


def kind_of(call: KernelCall, plan: Plan) -> str:
    """What a plan has in common with those for other numbers of rows."""
    return json.dumps([call.op, without_row_dependent(plan.to_json())])


def way_by(plan: Plan, case: Case) -> Way:
    """What carries out a case's op as planned; on devices that no kernel runs on, bulk does."""
    if device.target() is None:
        return way_of("xla", case.op)
    if case.op == "all_gather_matmul":
        gather = functools.partial(all_gather.all_gather_matmul, dimension=0, config=plan)
        return lambda x, w: gather(x, [w], AXIS)[0][0]
    if case.op == "matmul_reduce_scatter":
        scatter = functools.partial(reduce_scatter.matmul_reduce_scatter, dimension=0, config=plan)
        return lambda x, w: scatter([x], [w], AXIS)
    return lambda x, w: reduce_scatter.matmul_all_reduce(x, w, AXIS, config=plan)


@dataclass
class Trials:
    """What XLA compiles of one case.

    Attributes:
      case: that it is of.
      call: what its plans are for.
      operands: of the case's op and model.
      chains: by plan; or why there is none.
      contenders: chains of what is timed beside them.
      rows: makes the case's operands.
      count: counts wrong elements.
    """

    case: Case
    call: KernelCall
    operands: Operands
    chains: dict[Plan, Future[Any] | str]
    contenders: dict[str, Any]
    rows: Future[Any]
    count: Future[Any]


def start(
    case: Case,
    call: KernelCall,
    plans: Iterable[Plan],
    contenders: Iterable[str],
    operands: Operands,
    pool: Executor,
) -> Trials:
    """Traces and lowers the chains of a case; the pool compiles them.

    What competes is compiled before this returns: XLA tries kernels on the devices meanwhile.
    """
    mesh, dtype, layers = operands.mesh, operands.exact_ws[0].dtype, len(operands.exact_ws)
    chains: dict[Plan, Future[Any] | str] = {}
    for plan in plans:
        try:
            lowered = lowered_chain(case, way_by(plan, case), case.specs, mesh, dtype, layers)
        except Exception as error:
            chains[plan] = describe(error)
        else:
            chains[plan] = pool.submit(lowered.compile)
    return Trials(
        case,
        call,
        operands,
        chains,
        {name: chain(case, name, mesh, dtype, layers) for name in contenders},
        operands.compile_rows(case, pool),
        operands.compile_count(case, pool),
    )


def describe(error: Exception) -> str:
    """One line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


class Bench:
    """A case's executables and arrays, once XLA is done with them."""

    def __init__(self, trials: Trials):
        self.operands = trials.operands
        self.rows: Rows = self.operands.rows(trials.rows.result())
        self.count, self.contenders = trials.count.result(), trials.contenders

    def wrong(self, compiled: Any) -> int:
        """Wrong elements of all layers, where memory had nothing that is a number before."""
        ws = self.operands.exact_ws
        jax.block_until_ready(compiled(self.rows.nothing, ws))
        return sum(map(int, self.count(compiled(self.rows.exact, ws), self.rows.results)))

    def times(
        self, chains: Mapping[Plan, Any], lead_seconds: float, groups: int, group_seconds: float
    ) -> dict[Plan | str, list[float]]:
        """Quartiles in microseconds per op of all plans, and contenders, in turns."""
        ws = self.operands.random_ws
        runs = {
            name: functools.partial(
                compiled, jax.device_put(self.rows.random, compiled.input_shardings[0][0]), ws
            )
            for name, compiled in {**chains, **self.contenders}.items()
        }
        # In a burst on a cool GPU other plans win than in the long run.
        ends = time.monotonic() + lead_seconds
        while time.monotonic() < ends:
            jax.block_until_ready(next(iter(runs.values()))())
        numbered = dict(zip(map(str, itertools.count()), runs.values(), strict=False))
        timings = measure(numbered, groups=groups, seconds_per_group=group_seconds)
        return {
            name: quartiles(timing, len(ws))
            for name, timing in zip(runs, timings.values(), strict=True)
        }
