"""Memory and collectives of compiled steps of Llama 3 8B on four GPUs.

``python -m tests.train.compiled_collectives`` prints tables: memory beside what the dry run
predicts, the collectives of the optimised program, and the backend of each collective matmul.
Without four GPUs, XLA compiles for four H200 by their description, as in `compiled_memory`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from collective_matmul import explain
from tests.train.compiled_memory import (
    Case,
    CompiledStep,
    case,
    compiled_step,
    gpus,
    mesh_of,
    print_head,
    print_row,
)
from train.config.config import Config, MeshSizes
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import state_on_mesh
from train.parallel.batches import abstract_batch
from train.parallel.model import ModelFunctions
from train.step import sharded_step

#: One sequence for each group of devices that share it. All fits without rematerialization.
CASES = [
    case(MeshSizes(fsdp=fsdp, tensor=4 // fsdp), 32, zero=3, batch_size=fsdp, fp8=fp8)
    for fp8 in (None, "tensorwise", "rowwise")
    for fsdp in (4, 2, 1)
]
#: The collective matmuls of a step in the order in which they are traced.
LAYERS = ("queries, keys, values", "attention output", "gate, up", "down", "head")

#: The operations, by their name without the "-start" of those that go on while others execute.
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")

_DEFINITION = re.compile(r"^ +(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\(([^)]*)\)(.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \([^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_ARRAY = re.compile(r"\b([a-z]+\d+(?:e\d+m\d+\w*)?|pred)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|body|condition|\w+_computation)=%([^,\s)]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_ITERATIONS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Collective(NamedTuple):
    """A kind of operation over arrays of one dtype, as HLO names both."""

    kind: str
    dtype: str


class Traffic(NamedTuple):
    """How often a program executes an operation.

    Attributes:
      count: the number of operations; one of arrays of several dtypes counts for each.
      size: bytes of the whole arrays: what a gather returns, and what others take.
    """

    count: int
    size: int


def collectives(text: str) -> dict[Collective, Traffic]:
    """Collectives that a device executes in one call of a program, loops included."""
    bodies = {match[1]: match[2] for match in _COMPUTATION.finditer(text)}
    found: dict[Collective, Traffic] = {}
    for name, times in _calls(text, bodies).items():
        for collective, size in _inside(bodies[name]):
            before = found.get(collective, Traffic(0, 0))
            found[collective] = Traffic(before.count + times, before.size + times * size)
    return found


def _calls(text: str, bodies: Mapping[str, str]) -> Counter[str]:
    """How often each computation is executed."""
    times: Counter[str] = Counter()

    def call(name: str, count: int) -> None:
        times[name] += count
        for line in bodies[name].splitlines():
            called = _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                called += re.findall(r"%([^,\s]+)", branches)
            iterations = _ITERATIONS.search(line)
            for each in called:
                call(each, count * (int(iterations[1]) if iterations else 1))

    entry = re.search(r"^ENTRY %(\S+)", text, re.MULTILINE)
    assert entry is not None
    call(entry[1], 1)
    return times


def _inside(body: str) -> Iterator[tuple[Collective, int]]:
    """The collectives of one computation, with their bytes of each dtype."""
    results: dict[str, list[tuple[str, int]]] = {}
    for line in body.splitlines():
        if not (definition := _DEFINITION.match(line)):
            continue
        name, shape, operation, operands, _ = definition.groups()
        results[name] = [*_arrays(shape)]
        kind = operation.removesuffix("-start")
        if kind not in KINDS:
            continue
        taken = _by_dtype(a for o in re.findall(r"%([\w.-]+)", operands) for a in results[o])
        sizes = taken
        if kind == "all-gather":
            sizes = _by_dtype(results[name])
            if operation != kind:  # The result of the start has the operands too.
                sizes = sizes - taken
        for dtype, size in sizes.items():
            yield Collective(kind, dtype), size


def _arrays(shape: str) -> Iterator[tuple[str, int]]:
    """Dtypes and bytes of the arrays of a shape, which may be a tuple."""
    for dtype, dimensions in _ARRAY.findall(shape):
        bits = re.search(r"\d+", dtype)
        each = max(1, int(bits[0]) // 8) if bits else 1
        yield dtype, each * math.prod(int(d) for d in dimensions.split(",") if d)


def _by_dtype(arrays: Iterable[tuple[str, int]]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for dtype, size in arrays:
        sizes[dtype] += size
    return sizes


def name_of(one: Case) -> str:
    """The mesh and the recipe."""
    return f"{one.sizes.fsdp} × {one.sizes.tensor}, {one.config.fp8 or one.config.compute_dtype}"


def memory_row(name: str, step: CompiledStep) -> list[str]:
    """GiB of arguments, of temporary arrays, of all, live and predicted; and a ratio."""
    sizes = (step.arguments, step.temporary, step.total, step.live, step.predicted.total)
    ratio = step.predicted.total / step.live
    seconds = f"{step.trace_seconds:.0f} + {step.compile_seconds:.0f}"
    return [name, *(f"{size / 2**30:.2f}" for size in sizes), f"{ratio:.3f}", seconds]


def collective_rows(name: str, program: str) -> Iterator[list[str]]:
    """Kind, dtype, how often, and GB of all."""
    for (kind, dtype), traffic in sorted(collectives(program).items()):
        yield [name, kind, dtype, f"{traffic.count:,}", f"{traffic.size / 1e9:.3f}"]


def backends_row(name: str, config: Config, mesh: Mesh | AbstractMesh) -> list[str]:
    """The backend of each layer, forward / backward, by what it is chosen; and the times of all."""
    model = ModelFunctions(config, MeshSizes(**mesh.shape))
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    state, batch = state_on_mesh(model, optimizer, mesh), abstract_batch(config)
    step = sharded_step(config, model, optimizer, mesh)
    explained = explain(step, peer_kernels=False)(state, batch)
    sites = {(d.site.direction, d.site.op, str(d.site)): d for d in explained.decisions}
    forward = [d for d in sites.values() if d.site.direction == "forward"]
    backward = [d for d in sites.values() if d.site.direction == "backward"][::-1]
    pairs = zip(forward, backward, strict=True)
    cells = [f"{one.implementation} / {other.implementation}" for one, other in pairs]
    assert len(cells) == len(LAYERS), cells
    reasons = sorted({re.split(r" \(|: |, |;", d.reason)[0] for d in sites.values()})
    times = ["–", "–"]  # Without a second device in the axis none is predicted.
    if all(d.seconds and d.reference_seconds for d in sites.values()):
        found = re.search(r"predicted: ([\d.]+) ms, ([\d.]+) ms", " ".join(str(explained).split()))
        times = [*found.groups()] if found else times
    return [name, *cells, ", ".join(reasons), *times]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--match", default="", help="compile the configurations with this text")
    arguments = parser.parse_args(argv)
    with gpus(4) as devices:
        cases = [each for each in CASES if arguments.match in name_of(each)]
        meshes = {each.sizes: mesh_of(devices, each.sizes) for each in cases}
        print(f"jax {jax.__version__}, 4 × {devices[0].device_kind}; GiB per device\n")
        columns = ("arguments", "temporary", "total", "live", "predicted", "predicted / live")
        print_head("fsdp × tensor", *columns, "seconds: trace + compile")
        programs = {}
        for each in cases:
            step = compiled_step(each.config, meshes[each.sizes])
            print_row(memory_row(name_of(each), step))
            programs[name_of(each)] = step.program
        print()
        print_head("fsdp × tensor", "collective", "dtype", "count", "GB")
        for name, program in programs.items():
            for row in collective_rows(name, program):
                print_row(row)
        print()
        print_head("fsdp × tensor", *LAYERS, "by", "ms", "ms with xla")
        for each in cases:
            print_row(backends_row(name_of(each), each.config, meshes[each.sizes]))


if __name__ == "__main__":
    main()
