"""Bytes of the arrays that a program holds at one time, from its jaxpr.

XLA fuses elementwise operations, so most of their results are never stored: what is stored are the
results of matmuls, collectives, kernels and reductions, and what these read; and what goes through
a barrier, as all that a rematerialized function reads does. An array that is only read by fused
operations costs nothing itself, but what it is computed from has to stay until then.
Where that is several arrays, and several operations read it, it is stored instead of them.
Operations run in the order of the trace, but for those that `train.memory.postponed` moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from collective_matmul.jaxprs import Body, Execution, Scope, bodies_of, last_reads, peak
from train.memory.loop_copies import copied_before, passed_on
from train.memory.operation import Operation
from train.memory.postponed import postponed

#: Operations that XLA computes where their results are read.
_FUSED = frozenset({
    "abs", "add", "add_any", "and", "bitcast_convert_type", "broadcast_in_dim", "clamp",
    "concatenate", "convert_element_type", "cos", "div", "dynamic_slice", "empty", "eq", "erf",
    "exp", "exp2", "expm1", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "nan_like", "ne", "neg", "not", "or", "pad", "pow",
    "reduce_precision", "rem", "rev", "rsqrt", "select_n", "sign", "sin", "slice", "split", "sqrt",
    "square", "sub", "tanh", "transpose", "xor",
})  # fmt: skip
#: Operations whose result is their operand.
_SAME = frozenset({
    "copy", "copy_p", "expand_dims", "name", "optimization_barrier", "pcast", "pvary", "reshape",
    "squeeze", "stop_gradient",
})  # fmt: skip
#: Calls of a function.
_CALLS = frozenset({
    "jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_vjp_call",
    "custom_jvp_call", "custom_vmap_call", "shard_map",
})  # fmt: skip
#: Operations that fuse what they read, and whose results are stored.
_READS_FUSED = frozenset({
    "argmax", "argmin", "cumsum", "gather", "reduce", "reduce_and", "reduce_max", "reduce_min",
    "reduce_or", "reduce_prod", "reduce_sum",
})  # fmt: skip
#: Operations whose results may be written to what they read for the last time.
_IN_PLACE = _FUSED | {"dynamic_update_slice", "scatter", "scatter-add", "while"}


class Program(NamedTuple):
    """A program without calls.

    Attributes:
      operations: in order.
      sizes: bytes of each value.
      results: values that exist at the end.
      uncounted: arguments, and results, which replace arguments.
      stacked: results of a loop's body of which the loop collects one for each iteration.
      gathered: what is gathered over devices along another dimension than the first.
    """

    operations: list[Operation]
    sizes: list[int]
    results: set[int]
    uncounted: set[int]
    stacked: set[int]
    gathered: set[int]


class Peak(NamedTuple):
    """The moment when most bytes are stored, without arguments and results.

    Attributes:
      total: the bytes.
      of_first: those of arrays that are made of the first arguments, and not of others.
    """

    total: int
    of_first: int


def find_peak(jaxpr: Jaxpr, first_arguments: int) -> Peak:
    """The peak of a program.

    Args:
      jaxpr: the program.
      first_arguments: the number of arguments that are told apart from the others.
    """
    program = flatten(jaxpr)
    of_first = set(range(first_arguments))
    of_others = set(range(first_arguments, len(jaxpr.invars)))
    for operation in program.operations:
        for group in (of_first, of_others):
            if not group.isdisjoint(operation.operands):
                group.update(operation.results)
    total, live = _peak(program)
    return Peak(total, sum(program.sizes[v] for v in live & of_first - of_others))


def flatten(
    jaxpr: Jaxpr,
    axes: Mapping[str, int] | None = None,
    *,
    sliced: int | None = None,
    carried: int = 0,
) -> Program:
    """A jaxpr without calls, with one number for values that are the same array.

    Args:
      jaxpr: of a whole program, or of the body of a loop.
      axes: the sizes of the mesh axes that are known there.
      sliced: index of the first argument that is a slice of an array outside; default: none is.
      carried: number of first results that the next iteration of a loop reads.
    """
    flat = _Flattening()
    arguments = [flat.new(v) for v in jaxpr.invars]
    flat.operations += [
        Operation("dynamic_slice", (), (v,))
        for v in arguments[len(arguments) if sliced is None else sliced :]
    ]
    made = flat.walk(jaxpr, arguments, axes or {})
    results = {v for v in made if v is not None}
    kept = set(arguments if sliced is None else arguments[:sliced])
    continued = {v for v in made[:carried] if v is not None}
    operations = postponed(flat.operations, continued)
    stacked = results - continued
    return Program(operations, flat.sizes, results, kept | results, stacked, flat.gathered)


class _Flattening:
    """The operations and values of a jaxpr and of the functions that it calls."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.sizes: list[int] = []
        self.gathered: set[int] = set()

    def new(self, variable: Var) -> int:
        """The number of a new value."""
        self.sizes.append(_bytes(variable.aval))
        return len(self.sizes) - 1

    def walk(
        self, jaxpr: Jaxpr, arguments: Sequence[int | None], axes: Mapping[str, int]
    ) -> list[int | None]:
        """The results of a jaxpr; literals have no number."""

        def execute(equation: JaxprEqn, operands: Sequence[int | None]) -> Sequence[int | None]:
            return self._execute(equation, operands, axes)

        def outside(v: Var | Literal) -> int | None:
            return None if isinstance(v, Literal) else self.new(v)

        return Scope(jaxpr, arguments, outside).run(execute)

    def _execute(
        self, equation: JaxprEqn, operands: Sequence[int | None], axes: Mapping[str, int]
    ) -> Sequence[int | None]:
        """The results of an equation."""
        own = tuple(v for v in _read_by(equation, operands) if v is not None)
        name = equation.primitive.name
        if _is_barrier(equation):
            self.operations.append(Operation("optimization_barrier", own, ()))
        if name in _CALLS:
            (body,) = bodies_of(equation)
            inner = dict(equation.params["mesh"].shape) if name == "shard_map" else axes
            return self.walk(body.jaxpr, operands, inner)
        if name in _SAME or _adds_dimensions(equation) or _is_alone(equation, axes):
            return operands[: len(equation.outvars)]
        if equation.params.get("all_gather_dimension"):
            self.gathered.update(own)
        results = [self.new(v) for v in equation.outvars]
        inner, replacing = _inner(equation, axes), _replacing(equation)
        self.operations.append(Operation(name, own, tuple(results), inner, replacing))
        return results


def _read_by(equation: Any, operands: Sequence[int | None]) -> Sequence[int | None]:
    """The operands that an operation reads. XLA passes nothing to a loop that its body leaves."""
    if equation.primitive.name == "nan_like":  # The library's: it has the operand's type alone.
        return ()
    if equation.primitive.name != "scan":
        return operands
    (loop,) = bodies_of(equation)
    body = flatten(loop.jaxpr)
    stored = _stored(body)
    sources = _sources(body, stored)
    read = {v for result in body.results for v in sources(result)}
    for _, values in _reads(body, stored, sources):
        read |= values
    return [operand for number, operand in enumerate(operands) if number in read]


def _is_barrier(equation: Any) -> bool:
    """Whether operands go through a barrier. Lowered, a rematerialized function begins with one:
    else what it computes again would be what the forward computed."""
    params = equation.params
    again = params.get("differentiated") and params.get("prevent_cse")
    return equation.primitive.name == "optimization_barrier" or bool(again)


def _adds_dimensions(equation: Any) -> bool:
    """Whether it only adds dimensions of size 1."""
    if equation.primitive.name != "broadcast_in_dim":
        return False
    return equation.invars[0].aval.size == equation.outvars[0].aval.size > 1


def _is_alone(equation: Any, axes: Mapping[str, int]) -> bool:
    """Whether it is a collective of one device."""
    if equation.primitive.name in ("psum", "psum_invariant", "pmax"):
        return all(axes.get(axis) == 1 for axis in equation.params["axes"])
    return equation.params.get("axis_size") == 1


def _replacing(equation: Any) -> int:
    """The bytes of results that may replace operands. Of a scan, what it carries."""
    if equation.primitive.name == "scan":
        (body,) = bodies_of(equation)
        return sum(_bytes(v.aval) for v in equation.outvars[: body.stacked])
    in_place = equation.primitive.name in _IN_PLACE
    return sum(_bytes(v.aval) for v in equation.outvars) if in_place else 0


def _inner(equation: Any, axes: Mapping[str, int]) -> int:
    """The most bytes inside a loop or a branch."""
    if equation.primitive.name not in ("scan", "while", "cond"):
        return 0
    bodies = (body for body in bodies_of(equation) if body.results)
    return max((_inner_of(body, axes) for body in bodies), default=0)


def _inner_of(body: Body, axes: Mapping[str, int]) -> int:
    """The most bytes inside a branch, or an iteration of a loop, and what XLA adds to a loop."""
    program = flatten(body.jaxpr, axes, sliced=body.sliced, carried=len(body.carried))
    most = _peak(program)[0]
    if not body.carried:
        return most
    shared = len(body.jaxpr.invars) if body.sliced is None else body.sliced
    constants = set(range(shared)) - {operand for _, operand in body.carried}
    added = copied_before(program.operations, program.gathered, constants)
    added |= passed_on(program.operations, program.stacked, _FUSED)
    return most + sum(program.sizes[v] for v in added)


def _peak(program: Program) -> tuple[int, set[int]]:
    """The most bytes at one time, and the values that are stored then."""
    stored = _stored(program)
    executions = [
        Execution(
            {v for v in operation.results if v in stored} - program.uncounted,
            operation.inner,
            operation.replacing,
        )
        for operation in program.operations
    ]
    reads = _reads(program, stored, _sources(program, stored))
    counted = ((place, read - program.uncounted) for place, read in reads)
    return peak(executions, last_reads(counted), program.sizes)


def _reads(
    program: Program, stored: Set[int], sources: Callable[[int], frozenset[int]]
) -> Iterator[tuple[int, set[int]]]:
    """Places of operations that execute by themselves, and the stored values that each reads."""
    for place, operation in enumerate(program.operations):
        if operation.name not in _FUSED or not stored.isdisjoint(operation.results):
            yield place, {v for operand in operation.operands for v in sources(operand)}


def _stored(program: Program) -> set[int]:
    """The values that are stored."""
    stored = set(program.uncounted)
    for operation in program.operations:
        if operation.name not in _FUSED:
            stored.update(operation.results)
            if operation.name not in _READS_FUSED:
                stored.update(operation.operands)
    return stored | _stored_instead(program, stored)


def _stored_instead(program: Program, stored: Set[int]) -> set[int]:
    """The values that are stored where otherwise several arrays of their size would have to stay,
    from which several operations would compute them again."""
    readers = _readers(program, stored)
    found: dict[int, frozenset[int]] = {v: frozenset([v]) for v in stored}
    chosen = set[int]()
    for operation in program.operations:
        read = frozenset[int]().union(*(found.get(v, frozenset([v])) for v in operation.operands))
        for value in operation.results:
            size = program.sizes[value]
            several = sum(program.sizes[v] >= size for v in read) > 1
            if value not in stored and several and len(readers.get(value, ())) > 1:
                chosen.add(value)
                found[value] = frozenset([value])
            found.setdefault(value, read)
    return chosen


def _readers(program: Program, stored: Set[int]) -> dict[int, set[int]]:
    """The places of two operations, or one, that read a value which is not stored."""
    readers: dict[int, set[int]] = {}
    for place, operation in reversed([*enumerate(program.operations)]):
        reached = {place}
        if operation.name in _FUSED and stored.isdisjoint(operation.results):
            reached = set[int]().union(*(readers.get(v, ()) for v in operation.results))
        for value in operation.operands:
            if value not in stored:
                readers[value] = {*itertools.islice(readers.get(value, set()) | reached, 2)}
    return readers


def _sources(program: Program, stored: Set[int]) -> Callable[[int], frozenset[int]]:
    """A function that returns the stored values from which a value is computed."""
    found: dict[int, frozenset[int]] = {v: frozenset([v]) for v in stored}
    for operation in program.operations:
        read = frozenset[int]().union(*(found.get(v, frozenset([v])) for v in operation.operands))
        for value in operation.results:
            found.setdefault(value, read)
    return lambda value: found.get(value, frozenset([value]))


def _bytes(aval: Any) -> int:
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    return math.prod(shape) * np.dtype(dtype).itemsize if isinstance(dtype, np.dtype) else 0
