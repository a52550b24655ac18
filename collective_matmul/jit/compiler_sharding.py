"""The operations for which XLA may add collectives, where it shards arrays by itself.

Outside `shard_map`, XLA shards arrays as the `shard_map`s around them do, and carries that through
the operations between them, in both directions. A dimension that an operation leaves as it is
belongs to one class with the same dimension of its operands. If all `shard_map`s and constraints
agree about a class, and no operation needs more than a device has of it, XLA needs to communicate
nothing. Otherwise it may.

Arguments and results of the program are assumed to be sharded as the program uses them.

Where one operation needs more than a device has, the arrays that XLA may gather or sum are known.
Where operations disagree, XLA may shard any array between them anew, and no size is known.

XLA itself could be asked: it can partition the program and stop. For decoding with Llama 3 8B that
takes 16 to 19 % of the time of the first call, and these rules 0.05 s. They also answer where there
is no GPU, as `explain` must, and while JAX traces the function, when the shardings of its arguments
are unknown. Operations without a rule are assumed to need whole arrays, and XLA does gather whole
arrays for `top_k`, `approx_max_k` and `fft`. The times are in
benchmarks/reports/2026-11-27-peer-decision.md.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from collective_matmul.jaxprs.bodies import CONTROL_FLOW, Body, bodies_of, called, jaxprs_of
from collective_matmul.jaxprs.graph import type_of
from collective_matmul.jaxprs.walks import Scope

#: One class of dimensions for each dimension of an array; None for those of size 1.
Dimensions = tuple[int | None, ...]
Axes = tuple[str, ...]
#: Arrays, each with the classes of its dimensions and its variable or literal.
_Arrays = Sequence[tuple[Dimensions, Any]]
#: Operations on elements with the same indices; their operands have the shape of the result, apart
#: from scalars and dimensions of size 1.
_ELEMENTWISE = {
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh"),
    *("cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "div"),
    *("eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow"),
    *("is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne"),
    *("neg", "nextafter", "not", "one_minus_square", "optimization_barrier", "or", "pow", "real"),
    *("reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left"),
    *("shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square"),
    *("stop_gradient", "sub", "tan", "tanh", "xor", "sharding_constraint"),
}
#: Operations that need all of the dimensions in a parameter, and leave the others as they are.
_ALONG = {
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "split"), "axis"),
    **dict.fromkeys(("concatenate", "sort"), "dimension"),
    "rev": "dimensions",
}
_RESHAPES = {"reshape", "squeeze", "expand_dims"}
_REDUCTIONS = "reduce_", "argmax", "argmin"


class Operation(NamedTuple):
    """An equation of a program.

    Attributes:
      equation: the equation.
      calls: what executes it, such as calls, loops and shard_maps; the outermost first.
      runs: how often the loops among them run it.
    """

    equation: JaxprEqn
    calls: tuple[JaxprEqn, ...] = ()
    runs: int = 1


class Communication(NamedTuple):
    """An operation for which XLA may communicate.

    Attributes:
      operation: the operation.
      axes: the mesh axes over which XLA communicates.
      gathered: bytes of each array that XLA may gather; None if it may have to communicate arrays
        of other operations, whose sizes are not known.
      summed: bytes of each array that XLA may sum over devices instead.
    """

    operation: Operation
    axes: Axes
    gathered: tuple[int, ...] | None = None
    summed: tuple[int, ...] = ()


def communications(program: Jaxpr, axis_sizes: Mapping[str, int]) -> list[Communication]:
    """All operations for which XLA may communicate by itself; each at least once.

    Args:
      program: the program.
      axis_sizes: mesh axes that are not manual around the program, without those of size 1.
    """
    if not axis_sizes:
        return []
    walk = _Walk(axis_sizes)
    walk.run(program, [walk.classes.new(_shape(var)) for var in program.invars])
    return list(walk.findings())


class DimensionClasses:
    """Classes of dimensions, which are joined as operations show that they are sharded alike.

    Attributes:
      operation: the operation that joins, shards or needs dimensions now.
      whole: operations that need elements of all devices, if a dimension is sharded, and the
        dimension.
      disputed: operations that join or take dimensions which others shard otherwise, and one of
        the dimensions.
    """

    operation: Operation

    def __init__(self) -> None:
        self.whole: list[tuple[Operation, int]] = []
        self.disputed: list[tuple[Operation, int]] = []
        self._parents: list[int] = []
        # The mesh axes over which classes are sharded, by their roots; None where nobody says.
        self._axes: list[Axes | None] = []

    def new(self, shape: Sequence[int]) -> Dimensions:
        """New classes for the dimensions of an array."""
        first = len(self._parents)
        self._parents += range(first, first + len(shape))
        self._axes += [None] * len(shape)
        return tuple(None if size == 1 else first + i for i, size in enumerate(shape))

    def axes_of(self, dimension: int | None) -> Axes | None:
        """The mesh axes over which a dimension is sharded; None where nobody says."""
        return () if dimension is None else self._axes[self.root(dimension)]

    def root(self, dimension: int) -> int:
        """The dimension that stands for all of a class."""
        while (parent := self._parents[dimension]) != dimension:
            self._parents[dimension] = self._parents[parent]
            dimension = parent
        return dimension

    def join(self, one: int | None, other: int | None) -> None:
        """Makes one class of two."""
        if one is None or other is None or (a := self.root(one)) == (b := self.root(other)):
            return
        self._parents[b] = a
        if (added := self._axes[b]) is not None:
            self.shard(a, added)

    def shard(self, dimension: int | None, axes: Axes) -> None:
        """Notes the axes over which the operation takes or returns a dimension."""
        if dimension is None:
            return
        root = self.root(dimension)
        if self._axes[root] not in (None, axes):
            self.disputed.append((self.operation, root))
        self._axes[root] = axes

    def keep_whole(self, dimensions: Sequence[int | None]) -> None:
        """Notes that the operation needs all elements along dimensions."""
        self.whole += [(self.operation, each) for each in dimensions if each is not None]


class _Walk:
    """One walk over a program. What is called several times is walked several times.

    Attributes:
      classes: the classes of all dimensions.
    """

    def __init__(self, axis_sizes: Mapping[str, int]):
        self.classes = DimensionClasses()
        self._axis_sizes = axis_sizes
        # The operations, with the operands and results of each. A list, since callers of one jaxpr
        # share its variables.
        self._uses: list[tuple[Operation, _Arrays, _Arrays]] = []
        self._inside: list[Communication] = []
        self._calls: tuple[JaxprEqn, ...] = ()
        self._runs = 1

    def findings(self) -> Iterator[Communication]:
        """Operations for which XLA may communicate."""
        yield from self._inside
        for operation, dimension in self.classes.disputed:
            yield Communication(operation, self.classes.axes_of(dimension) or (*self._axis_sizes,))
        yield from self._indivisible()
        yield from self._work_along_shards()

    def _indivisible(self) -> Iterator[Communication]:
        """Operations that make or take an array that its axes cannot divide evenly.

        Those that only keep such an array as it is are not among them.
        """
        seen: set[tuple] = set()
        for operation, operands, results in self._uses:
            taken = {self._kind(*array): array for array in operands}
            made = {self._kind(*array): array for array in results}
            if operation.equation.primitive.name in CONTROL_FLOW:  # What is in it makes them.
                made = {}
            new = [kind for kind in made if kind not in taken]
            for kind in (*new, *(kind for kind in taken if kind not in seen)):
                if axes := self._undivided_over(*(taken | made)[kind]):
                    yield Communication(operation, axes)
            seen |= taken.keys() | made.keys()

    def _kind(self, dimensions: Dimensions, atom: Any) -> tuple:
        """Equal for arrays of equal shapes that are sharded alike."""
        roots = (None if each is None else self.classes.root(each) for each in dimensions)
        return *roots, *_shape(atom)

    def _undivided_over(self, dimensions: Dimensions, atom: Any) -> Axes:
        """The axes that cannot divide an array as its dimensions are sharded."""
        every = [self.classes.axes_of(dimension) or () for dimension in dimensions]
        sizes = [math.prod(self._axis_sizes[axis] for axis in axes) for axes in every]
        uneven = [
            axis
            for axes, size, devices in zip(every, _shape(atom), sizes, strict=True)
            if size % devices
            for axis in axes
        ]
        used = [axis for axes in every for axis in axes]
        # One axis cannot shard two dimensions of an array.
        twice = [axis for axis in used if used.count(axis) > 1]
        return tuple(dict.fromkeys(uneven + twice))

    def _work_along_shards(self) -> Iterator[Communication]:
        """Operations that need elements of all devices along a dimension that is sharded.

        XLA gathers or permutes the arrays that have it, or computes with each device's shard and
        sums the results, which may be larger. Sums and maxima it computes in the second way.
        """
        along: dict[int, dict[int, Axes]] = defaultdict(dict)
        for operation, dimension in self.classes.whole:
            if axes := self.classes.axes_of(dimension):
                along[id(operation)][self.classes.root(dimension)] = axes
        for operation, operands, results in self._uses:
            if whole := along.get(id(operation)):
                sharded = [
                    _bytes(atom)
                    for dimensions, atom in (*operands, *results)
                    if any(d is not None and self.classes.root(d) in whole for d in dimensions)
                ]
                is_sum = operation.equation.primitive.name.startswith("reduce_")
                gathered = () if is_sum else tuple(sharded)
                axes = tuple(dict.fromkeys(itertools.chain(*whole.values())))
                yield Communication(operation, axes, gathered, tuple(_bytes(a) for _, a in results))

    def run(self, jaxpr: Jaxpr, operands: Sequence[Dimensions]) -> list[Dimensions]:
        """The dimensions of a jaxpr's results, from those of its arguments."""
        return Scope(jaxpr, operands, self._new).run(self._equation)

    def _new(self, atom: Any) -> Dimensions:
        return self.classes.new(_shape(atom))

    def _equation(self, equation: JaxprEqn, ins: Sequence[Dimensions]) -> list[Dimensions]:
        """The dimensions of an equation's results, from those of its operands."""
        outs = [self._new(var) for var in equation.outvars]
        operation = self.classes.operation = Operation(equation, self._calls, self._runs)
        operands = [*zip(ins, equation.invars, strict=True)]
        results = [*zip(outs, equation.outvars, strict=True)]
        self._uses.append((operation, operands, results))
        for dimensions, atom in (*operands, *results):
            self._shard_as_typed(atom, dimensions)
        self._rule(equation)(equation, ins, outs)
        return outs

    def _shard_as_typed(self, atom: Any, dimensions: Dimensions) -> None:
        """Takes the sharding over Explicit axes from the type of an array."""
        sharding = getattr(type_of(atom), "sharding", None)
        if sharding is not None and self._axis_sizes.keys() <= set(sharding.mesh.explicit_axes):
            self._shard(dimensions, sharding.spec)

    def _shard(self, dimensions: Dimensions, spec: Any) -> None:
        """Shards an array by a `PartitionSpec`."""
        entries = (*spec, *[None] * len(dimensions))
        for dimension, entry in zip(dimensions, entries, strict=False):
            if entry is not PartitionSpec.UNCONSTRAINED:
                axes = entry if isinstance(entry, tuple) else (str(entry),)
                left = tuple(axis for axis in axes if axis in self._axis_sizes)
                self.classes.shard(dimension, left)

    def _rule(self, equation: JaxprEqn) -> Callable:
        """The method that joins the dimensions of an equation's operands and results."""
        name = equation.primitive.name
        if name in _ELEMENTWISE:
            return self._constraint if name == "sharding_constraint" else self._elementwise
        if name.startswith(_REDUCTIONS) and "axes" in equation.params:
            return self._reduction
        if name in _ALONG:
            return self._along
        if name in _RESHAPES:
            return self._reshape
        return getattr(self, f"_{name.replace('-', '_')}", self._call)

    def _join(self, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        for one, other in zip(ins, outs, strict=True):
            self.classes.join(one, other)

    def _elementwise(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        if equation.primitive.multiple_results:  # optimization_barrier
            for one, other in zip(ins, outs, strict=True):
                self._join(one, other)
            return
        (out,) = outs
        for operand in ins:
            if operand:
                self._join(operand, out)

    def _constraint(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        sharding = equation.params["sharding"]
        if not isinstance(sharding, NamedSharding):
            return self._unknown(equation, ins, outs)
        self._elementwise(equation, ins, outs)
        free = equation.params.get("unconstrained_dims") or ()
        spec = (*sharding.spec, *[None] * len(outs[0]))[: len(outs[0])]
        entries = [PartitionSpec.UNCONSTRAINED if i in free else e for i, e in enumerate(spec)]
        self._shard(outs[0], entries)

    def _reduction(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        axes = {int(axis) for axis in equation.params["axes"]}
        for operand, out in zip(ins, outs, strict=True):
            self.classes.keep_whole([operand[axis] for axis in axes])
            self._join([d for i, d in enumerate(operand) if i not in axes], out)

    def _along(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        given = equation.params[_ALONG[equation.primitive.name]]
        axes = given if isinstance(given, tuple) else (given,)
        arrays = [*ins, *outs]
        axes = {axis % len(arrays[0]) for axis in axes}
        for each in arrays:
            self.classes.keep_whole([each[axis] for axis in axes])
            pairs = zip(arrays[0], each, strict=True)
            others = [pair for i, pair in enumerate(pairs) if i not in axes]
            for one, other in others:
                self.classes.join(one, other)

    def _reshape(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        """Joins the first dimensions of parts with equal numbers of elements."""
        (before, after) = (_shape(equation.invars[0]), _shape(equation.outvars[0]))
        (operand, *_), (out,) = ins, outs
        permutes = equation.primitive.name == "reshape" and equation.params["dimensions"]
        if 0 in before or permutes:
            return self._unknown(equation, ins, outs)
        for one, other in _same_elements(before, after):
            one = [operand[i] for i in one if operand[i] is not None]
            other = [out[i] for i in other if out[i] is not None]
            self._join(one[:1], other[:1])
            self.classes.keep_whole([*one[1:], *other[1:]])
        return None

    def _bitcast_convert_type(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        """Elementwise, unless the types have different sizes."""
        same = len(ins[0]) == len(outs[0])
        (self._elementwise if same else self._unknown)(equation, ins, outs)

    def _transpose(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        self._join([ins[0][i] for i in equation.params["permutation"]], outs[0])

    def _broadcast_in_dim(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        kept = [outs[0][i] for i in equation.params["broadcast_dimensions"]]
        self._join(ins[0], kept)

    def _dot_general(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        (contracted, batch), (out,) = equation.params["dimension_numbers"], outs
        free = []
        for operand, axes, others in zip(ins, contracted, batch, strict=True):
            self.classes.keep_whole([operand[i] for i in axes])
            self._join([operand[i] for i in others], out[: len(others)])
            free += [d for i, d in enumerate(operand) if i not in (*axes, *others)]
        self._join(free, out[len(batch[0]) :])

    def _slice(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        """Joins dimensions of equal size; the others are cut or enlarged somewhere.

        If the result of a cut is sharded, XLA shards what is cut as well, though that be replicated
        arguments, and permutes the elements that then are in another device's shard.
        """
        self._join_equal(ins[0], outs[0], (_shape(equation.invars[0]), _shape(equation.outvars[0])))

    _dynamic_slice = _slice

    def _pad(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        """Joins like a slice. Elements may move where the size stays, if one edge grows."""
        self._slice(equation, ins, outs)
        padded = zip(ins[0], equation.params["padding_config"], strict=True)
        self.classes.keep_whole([dimension for dimension, each in padded if any(each)])

    def _dynamic_update_slice(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        self._join(ins[0], outs[0])
        self._join_equal(ins[0], ins[1], (_shape(equation.invars[0]), _shape(equation.invars[1])))

    def _join_equal(self, one: Any, other: Any, shapes: Any) -> None:
        for a, b, size, new in zip(one, other, *shapes, strict=True):
            if size == new:
                self.classes.join(a, b)
            else:
                self.classes.keep_whole([a, b])

    def _gather(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        """Joins dimensions of the indices, and dimensions of the operand that are not indexed."""
        numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
        (operand, indices), (out,), shape = ins, outs, _shape(equation.invars[0])
        rows = [d for i, d in enumerate(out) if i not in numbers.offset_dims]
        self._join(indices[:-1], rows)
        self.classes.keep_whole(indices[-1:])
        batch = dict(
            zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        )
        taken = (d for i, d in enumerate(out) if i in numbers.offset_dims)
        for i, dimension in enumerate(operand):
            if i in batch:
                self.classes.join(dimension, indices[batch[i]])
                continue
            collapsed = i in numbers.collapsed_slice_dims
            result = None if collapsed else next(taken)
            if collapsed or sizes[i] != shape[i]:
                self.classes.keep_whole([dimension, result])
            else:
                self.classes.join(dimension, result)

    def _scatter(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        """Joins the updates with the indices, and with the array along dimensions that they fill.

        Updates of other devices may be of the same elements, unless the indices are those of a
        batch that all arrays have.
        """
        numbers = equation.params["dimension_numbers"]
        (operand, indices, updates), (out,) = ins, outs
        self._join(operand, out)
        rows = [i for i in range(len(updates)) if i not in numbers.update_window_dims]
        self._join(indices[:-1], [updates[i] for i in rows])
        batches = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
        self._join([operand[i] for i in batches[0]], [indices[i] for i in batches[1]])
        self.classes.keep_whole([d for i, d in enumerate(indices) if i not in batches[1]])
        indexed = {*numbers.inserted_window_dims, *batches[0]}
        self.classes.keep_whole([operand[i] for i in numbers.inserted_window_dims])
        filled = [i for i in range(len(operand)) if i not in indexed]
        shapes = _shape(equation.invars[0]), _shape(equation.invars[2])
        self._join_equal(
            [operand[i] for i in filled],
            [updates[i] for i in numbers.update_window_dims],
            ([shapes[0][i] for i in filled], [shapes[1][i] for i in numbers.update_window_dims]),
        )

    _scatter_add = _scatter

    def _reshard(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        """Joins what was sharded. What was not is cut, which needs no communication."""
        for one, other in zip(ins[0], outs[0], strict=True):
            if one is not None and self.classes.axes_of(one) != ():
                self.classes.join(one, other)

    def _shard_map(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        parameters = equation.params
        for operand, spec in zip(ins, parameters["in_specs"], strict=True):
            self._shard(operand, spec)
        for result, spec in zip(outs, parameters["out_specs"], strict=True):
            self._shard(result, spec)
        left = self._axis_sizes.keys() - parameters["newly_manual_axes"]
        if found := _work_on_arrays(called(equation), left, (*self._calls, equation)):
            self._inside.append(Communication(*found))

    def _call(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        """A call of a function, such as `jax.jit` or `jax.checkpoint`, a loop or a branch.

        Joins what a loop carries in all steps, and slices with the arrays that they are parts of.
        """
        bodies = bodies_of(equation)
        is_known = equation.primitive.name in CONTROL_FLOW
        if not is_known or any(body.operands is None for body in bodies):
            return self._unknown(equation, ins, outs)
        for arrays, name in ((ins, "in_shardings"), (outs, "out_shardings")):
            for dimensions, sharding in zip(arrays, equation.params.get(name, ()), strict=False):
                if isinstance(sharding, NamedSharding):
                    self._shard(dimensions, sharding.spec)
        for body in bodies:
            given, results = body.arguments(ins), [outs[i] for i in body.results]
            if body.sliced is not None:
                stacked = [*given[body.sliced :], *results[body.stacked :]]
                self.classes.keep_whole([each[0] for each in stacked])
                given[body.sliced :] = [each[1:] for each in given[body.sliced :]]
                results[body.stacked :] = [each[1:] for each in results[body.stacked :]]
            made = self._run_inside(equation, body, given)
            carried = [(made[result], ins[operand]) for result, operand in body.carried]
            # The result of a loop's condition is none of the loop's.
            for one, other in (*zip(made, results, strict=False), *carried):
                self._join(one, other)
        return None

    def _run_inside(self, call: JaxprEqn, body: Body, operands: Any) -> list[Dimensions]:
        """Variant of `run` for a jaxpr that an equation executes."""
        around = self._calls, self._runs, self.classes.operation
        self._calls, self._runs = (*self._calls, call), self._runs * body.runs
        made = self.run(body.jaxpr, operands)
        self._calls, self._runs, self.classes.operation = around
        return made

    def _unknown(self, equation: JaxprEqn, ins: Any, outs: Any) -> None:
        """Assumes that the operation needs whole arrays, if it has any."""
        if any(_is_array(atom) for atom in equation.invars):
            for each in (*ins, *outs):
                self.classes.keep_whole(each)


def _work_on_arrays(
    jaxpr: Jaxpr, left: Set[str], calls: tuple[JaxprEqn, ...]
) -> tuple[Operation, Axes] | None:
    """The first operation of a `shard_map` that computes while some axes are not manual.

    Whatever surrounds the `shard_map` may be sharded over them in any way.
    """
    if not left:
        return None
    for equation in jaxpr.eqns:
        manual = equation.params.get("newly_manual_axes", frozenset())
        inner = list(jaxprs_of(equation))
        for each in inner:
            if found := _work_on_arrays(each, left - manual, (*calls, equation)):
                return found
        if not inner and any(map(_is_array, equation.invars)):
            return Operation(equation, calls), tuple(sorted(left))
    return None


def _bytes(atom: Any) -> int:
    """The bytes of an array. Random keys, which have types of their own, have 8 at least."""
    dtype = getattr(type_of(atom), "dtype", None)
    return math.prod(_shape(atom)) * getattr(dtype, "itemsize", 8)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(type_of(atom), "shape", ()))


def _is_array(atom: Any) -> bool:
    """Whether an operand has more than one element. Others are not sharded."""
    return getattr(type_of(atom), "size", 1) > 1


def _same_elements(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Cuts the dimensions of a reshape into the smallest parts with equal numbers of elements."""
    i = j = 0
    while i < len(before) or j < len(after):
        one, other, sizes = [], [], [1, 1]
        while not (one or other) or sizes[0] != sizes[1]:
            if j == len(after) or (i < len(before) and sizes[0] <= sizes[1]):
                one.append(i)
                sizes[0] *= before[i]
                i += 1
            else:
                other.append(j)
                sizes[1] *= after[j]
                j += 1
        yield one, other
