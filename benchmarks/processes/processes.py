"""``python -m benchmarks processes``: decoding with one process for each GPU, and with one for all.

A layer has the matmuls of a Llama block for a few tokens, without attention itself: queries, keys
and values, then the sum over devices of the output; gate and up, then the sum of down. Candidates
are plain JAX and `overlap_jit` with the ops; each runs in processes of its own making.

Legend: B tokens, D devices, K features, F hidden features.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.measuring import environment
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import Settings, check, check_least
from collective_matmul import explain, matmul_all_reduce, overlap_jit

AXIS = "tensor"
CANDIDATES = ("plain", "auto")
#: K, columns of queries, keys and values together, and F, of Llama 3 8B; smaller ones for CPUs.
WIDTHS = {"gpu": (4096, 6144, 14336), "cpu": (64, 96, 128)}
_KILLED_AFTER_SECONDS = 150.0

#: How the weights of a layer are sharded.
SPECS = {"qkv": P(None, AXIS), "out": P(AXIS), "gate_up": P(None, AXIS), "down": P(AXIS)}

Weights = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Processes(Settings):
    """Times of a token's matmuls with one process for each device, beside one for all of them."""

    batches: tuple[int, ...] = (1, 8, 64, 512)
    """Numbers of tokens."""
    layers: int = 8
    """Layers, one after the other, with weights of their own."""
    calls: int = 20
    """Calls of a group, the same number in each process."""


@dataclass(frozen=True)
class Participant:
    """One of the processes that run together.

    Attributes:
      address: where the first of them listens.
      number: which it is.
      processes: how many they are.
      devices: how many devices they have together.
      platform: "gpu" or "cpu".
      batches: see `Processes`.
      layers: likewise.
      calls: likewise.
      groups: see `Settings`.
      dtype: likewise.
    """

    address: str
    number: int
    processes: int
    devices: int
    platform: str
    batches: tuple[int, ...]
    layers: int
    calls: int
    groups: int
    dtype: str


def run(settings: Processes) -> Report:
    """Runs the benchmark; writes the report after each number of processes.

    Raises:
      ValueError: for settings that do not fit.
    """
    check(settings)
    check_least(settings, 1, "layers", "calls")
    devices = settings.devices or 2
    kinds = environment.device_kinds(settings.platform, devices)
    if len(kinds) < devices:
        raise ValueError(f"devices={devices}: there are {len(kinds)}; ask for fewer")
    report = Report("processes", settings, kinds, [rows])
    found: list[dict[str, Any]] = []
    for processes in dict.fromkeys((1, devices)):
        if not report.out_of_time():
            found += _run_together(settings, processes, devices)
            report.write_cases(found)
            report.log(f"{processes} processes: measured")
    print(rows(report.content))
    return report


def rows(content: dict[str, Any]) -> str:
    """Microseconds of a layer, and how much faster `auto` is than plain JAX."""
    lines = [
        "Microseconds of a layer, medians of groups:\n",
        "| processes | tokens | plain JAX | auto | plain / auto | taken | error |",
        "| ---: | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    return "\n".join([*lines, *map(_row, content["cases"])])


def _row(case: dict[str, Any]) -> str:
    plain, auto = (1e6 * statistics.median(case["times"][name]) for name in CANDIDATES)
    return (
        f"| {case['processes']} | {case['batch']} | {plain:.1f} | {auto:.1f}"
        f" | {plain / auto:.2f} | {', '.join(case['taken'])} | {case['error']:.1e} |"
    )


def _run_together(settings: Processes, processes: int, devices: int) -> list[dict[str, Any]]:
    """The cases, measured by so many processes, which share the devices."""
    shared = [getattr(settings, name) for name in ("batches", "layers", "calls", "groups", "dtype")]
    address = free_address()
    participants = [
        Participant(address, number, processes, devices, settings.platform, *shared)
        for number in range(processes)
    ]
    environments = [
        environment_of(settings.platform, devices // processes, number)
        for number in range(processes)
    ]
    return run_together("benchmarks.processes.processes", participants, environments)


def free_address() -> str:
    """An address at which the first process can listen."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def run_together(
    module: str, participants: Sequence[Any], environments: Sequence[dict[str, str]]
) -> list[dict[str, Any]]:
    """The JSON objects that the first of several processes prints, one in each line.

    Args:
      module: what each process runs.
      participants: a dataclass for each process, which gets its fields as JSON.
      environments: the environment of each.

    Raises:
      RuntimeError: with what the first printed, if one of them fails.
    """
    count = len(participants)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(dataclasses.asdict(participant))],
            env=own,
            stdout=subprocess.DEVNULL if number else subprocess.PIPE,
            text=True,
        )
        for number, (participant, own) in enumerate(zip(participants, environments, strict=True))
    ]
    try:
        printed, _ = started[0].communicate(timeout=_KILLED_AFTER_SECONDS)
        codes = [process.wait(timeout=20) for process in started]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{count} processes: not done in time") from error
    finally:
        for process in started:
            process.kill()
    if any(codes):
        raise RuntimeError(f"{count} processes ended with {codes}: {printed}")
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def participate(kind: type, work: Callable[[Any], None]) -> None:
    """Works in one of the processes that `run_together` starts, as the dataclass that it gave."""
    try:
        fields = json.loads(sys.argv[1]).items()
        lists = {name: tuple(value) for name, value in fields if isinstance(value, list)}
        work(kind(**dict(fields) | lists))
    except BaseException:
        # An orderly exit would wait for the other processes.
        traceback.print_exc()
        os._exit(1)


def environment_of(platform: str, devices: int, number: int) -> dict[str, str]:
    """The environment of the process of a number, which has so many devices of its own."""
    if platform == "cpu":
        more = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        return {**os.environ, **more, "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    own = [
        names[index] if names != [""] else str(index)
        for index in range(number * devices, (number + 1) * devices)
    ]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(own)}


def _work(participant: Participant) -> None:
    """Measures all cases; the first process prints them, one JSON object a line."""
    if participant.processes > 1:
        jax.distributed.initialize(
            participant.address,
            participant.processes,
            participant.number,
            initialization_timeout=60,
        )
    mesh = jax.make_mesh((participant.devices,), (AXIS,), axis_types=(AxisType.Auto,))
    weights = _weights(participant, mesh)
    for batch in participant.batches:
        x = np.random.default_rng(batch).standard_normal((batch, WIDTHS[participant.platform][0]))
        placed = _place(mesh, P(), x.astype(participant.dtype))
        with_op = _sharded(mesh, participant.layers, None)
        programs: dict[str, Callable] = {
            "plain": jax.jit(_sharded(mesh, participant.layers, lax.psum)),
            "auto": overlap_jit(with_op),
        }
        results = {name: jax.block_until_ready(f(placed, weights)) for name, f in programs.items()}
        plain, auto = (np.asarray(y.astype(jnp.float32)) for y in results.values())
        explained = explain(with_op)(placed, weights)
        case = {
            "name": f"{participant.processes} processes, {batch} tokens",
            "processes": participant.processes,
            "batch": batch,
            "times": _times(participant, programs, placed, weights),
            "taken": sorted({decision.implementation for decision in explained.decisions}),
            "error": float(np.max(abs(auto - plain)) / np.max(abs(plain))),
        }
        if participant.number == 0:
            case["gpus"] = environment.gpu_state()
            print(json.dumps(case), flush=True)
            # At once, as a later case may fail.
            print(f"{case['name']}: {_row(case)}", file=sys.stderr, flush=True)


def _times(
    participant: Participant, programs: dict[str, Callable], *arguments: Any
) -> dict[str, list[float]]:
    """Seconds of a layer in each group. All processes make the same calls in the same order."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(participant.groups):
        for name, program in programs.items():
            jax.block_until_ready(program(*arguments))
            began = time.perf_counter()
            for _ in range(participant.calls):
                result = program(*arguments)
            jax.block_until_ready(result)
            seconds = time.perf_counter() - began
            times[name].append(seconds / participant.calls / participant.layers)
    return times


def _weights(participant: Participant, mesh: Mesh) -> list[Weights]:
    """Random weights of each layer, sharded over the axis."""
    k, qkv, f = WIDTHS[participant.platform]
    shapes = {"qkv": (k, qkv), "out": (k, k), "gate_up": (k, 2 * f), "down": (f, k)}

    def shard(name: str, layer: int) -> jax.Array:
        def draw(index: Any) -> np.ndarray:
            sizes = [len(range(*i.indices(n))) for i, n in zip(index, shape, strict=True)]
            random = np.random.default_rng((layer, *shape, *(i.start or 0 for i in index)))
            values = random.random(sizes, np.float32) - 0.5
            return (values * np.float32(3.4 / shape[0] ** 0.5)).astype(participant.dtype)

        shape = shapes[name]
        return jax.make_array_from_callback(shape, NamedSharding(mesh, SPECS[name]), draw)

    return [{name: shard(name, n) for name in shapes} for n in range(participant.layers)]


def _place(mesh: Mesh, spec: P, x: np.ndarray) -> jax.Array:
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])


def _sharded(mesh: Mesh, layers: int, reduce: Callable | None) -> Callable:
    """``f(x [B, K], weights) -> [B, K]``; sums over devices by `reduce`, or else by the op."""

    def multiply_and_sum(x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul_all_reduce(x, w, AXIS) if reduce is None else reduce(x @ w, AXIS)

    def layer(x: jax.Array, w: Weights) -> jax.Array:
        queries = (_norm(x) @ w["qkv"])[:, : w["out"].shape[0]]
        x += multiply_and_sum(queries, w["out"])
        gate, up = jnp.split(_norm(x) @ w["gate_up"], 2, axis=1)
        return x + multiply_and_sum(jax.nn.silu(gate) * up, w["down"])

    def stack(x: jax.Array, weights: list[Weights]) -> jax.Array:
        # Not a scan, which would copy the weights of each layer.
        return functools.reduce(layer, weights, x)

    return jax.shard_map(stack, mesh=mesh, in_specs=(P(), [SPECS] * layers), out_specs=P())


def _norm(x: jax.Array) -> jax.Array:
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=1, keepdims=True)
    return (x * lax.rsqrt(squares + 1e-5)).astype(x.dtype)


if __name__ == "__main__":
    participate(Participant, _work)
