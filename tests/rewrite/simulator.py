"""Executes programs with `shard_map` equation by equation, on arrays stacked over the devices.

Programs of tests run only once, and compiling one takes ten times as long.

Where a branch or the length of a loop differs between devices, each part of them executes its own
equations, and values are stacked over that part only. A collective then meets per group, as XLA
executes it: it needs all devices of its own group, and no others. A `ppermute` is one rendezvous of
all devices of the program, whatever its axis. Devices that would wait for ever raise
`DeadlockError`. This follows from the values of the predicates alone, and knows nothing of how
`overlap` decides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.sharding import PartitionSpec

from collective_matmul.jaxprs.graph import communicates, type_of
from tests.covering import covering
from tests.rewrite import numpy_operations
from tests.rewrite.numpy_operations import Stacks, stored

_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2"}
    | {"custom_vjp_call", "custom_jvp_call"}
)
_TYPES_ONLY = frozenset({"pvary", "pcast", "preduced", "name", "optimization_barrier", "reshard"})
#: Copies of a result that is the same on all devices agree within this fraction of its largest
#: value: sums in different orders, in float64 or in a coarse dtype.
_COPIES_AGREE = {True: 1e-9, False: 0.05}


class DeadlockError(Exception):
    """Devices wait for others that never come."""


@dataclass(frozen=True)
class Team:
    """The devices that execute an equation together.

    Attributes:
      mesh: the manual axes with their sizes; none outside of shard_map.
      members: indices into the row-major mesh. Arrays are stacked in this order.
      float64: whether all floating-point arrays are held in float64.
    """

    mesh: tuple[tuple[str, int], ...] = ()
    members: tuple[int, ...] = (0,)
    float64: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh)

    @property
    def is_whole(self) -> bool:
        return len(self.members) == math.prod(self.sizes.values())

    def part(self, chosen: np.ndarray) -> Team:
        """The members where `chosen` is true."""
        return replace(self, members=tuple(np.array(self.members)[chosen].tolist()))

    def everywhere(self, value: Any, dtype: Any) -> np.ndarray:
        value = np.asarray(value, stored(dtype, self.float64))
        return np.broadcast_to(value, (len(self.members), *value.shape))


def simulated(fun: Callable) -> Callable:
    """Simulates a function of global arrays."""

    def simulate(*arguments: Any) -> Any:
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(*arguments)
        return jax.tree.unflatten(
            jax.tree.structure(shapes), simulate_jaxpr(program, jax.tree.leaves(arguments))
        )

    return simulate


def some_compiled(cases: Sequence[Any], factors: Callable[[Any], Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by cases that `run` simulates.

    Exhaustive runs compile few of them too, which hold each value of every factor.
    """
    compiled = covering(cases, factors, 1)
    return pytest.mark.parametrize(
        ("case", "run"),
        [
            *((case, simulated) for case in cases),
            *(pytest.param(case, jax.jit, marks=pytest.mark.exhaustive) for case in compiled),
        ],
    )


#: For tests of many programs: `run` simulates them, and in exhaustive runs compiles them too.
simulated_or_compiled = pytest.mark.parametrize(
    "run",
    [simulated, pytest.param(jax.jit, marks=pytest.mark.exhaustive)],
    ids=["simulated", "compiled"],
)


def simulate_jaxpr(program: Any, arguments: Sequence[Any], float64: bool = False) -> list[Any]:
    """Executes a closed jaxpr of global arrays.

    Raises:
      DeadlockError: if devices wait for others that never come.
    """
    team = Team(float64=float64)
    stacks = [team.everywhere(argument, np.asarray(argument).dtype) for argument in arguments]
    return [result[0] for result in _call(program, stacks, team)]


def _execute(jaxpr: Jaxpr, consts: Sequence[Any], arguments: Stacks, team: Team) -> Stacks:
    def read(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return team.everywhere(atom.val, type_of(atom).dtype)
        return values[atom]

    values: dict[Any, Any] = {
        var: team.everywhere(const, type_of(var).dtype)
        for var, const in zip(jaxpr.constvars, consts, strict=True)
    }
    values |= zip(jaxpr.invars, arguments, strict=True)
    for equation in jaxpr.eqns:
        results = _execute_equation(equation, [*map(read, equation.invars)], team)
        values |= zip(equation.outvars, results, strict=True)
    return [*map(read, jaxpr.outvars)]


def _execute_equation(equation: JaxprEqn, operands: Stacks, team: Team) -> Stacks:
    name, parameters = equation.primitive.name, equation.params
    if name in _CONTROL_FLOW:
        return _CONTROL_FLOW[name](equation, operands, team)
    if name in _CALLS:
        (inner,) = (value for value in parameters.values() if _is_jaxpr(value))
        return _call(inner, operands, team)
    if name in _TYPES_ONLY:
        return operands
    if name in _COLLECTIVES:
        return _collective(equation, operands, team)
    if name != "axis_index" and communicates(equation):
        raise NotImplementedError(f"the simulator does not know {name}: add it to _COLLECTIVES")
    if name == "axis_index":
        return [_axis_index(parameters["axis_name"], team)]
    if any(True for _ in jaxprs_in_params(parameters)):
        raise NotImplementedError(
            f"the simulator cannot execute {name}: its parameters have jaxprs; add it to"
            " _CONTROL_FLOW or _CALLS"
        )
    return numpy_operations.execute(equation, operands, len(team.members), team.float64)


def _call(jaxpr: Any, operands: Stacks, team: Team) -> Stacks:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return _execute(inner, getattr(jaxpr, "consts", ()), operands, team)


# Control flow.


def _branches(equation: JaxprEqn, operands: Stacks, team: Team) -> Stacks:
    index, *operands = operands
    branches = equation.params["branches"]
    index = np.clip(index.astype(int), 0, len(branches) - 1)
    results: list[np.ndarray] = []
    for taken in np.unique(index):
        chosen = index == taken
        here = _call(branches[taken], [x[chosen] for x in operands], team.part(chosen))
        results = _merged(results, here, chosen)
    return results


def _merged(whole: Stacks, part: Stacks, chosen: np.ndarray) -> list[np.ndarray]:
    """The stacks with those of some members replaced; of all members if there are none yet."""
    whole = whole or [np.zeros((len(chosen), *x.shape[1:]), x.dtype) for x in part]
    merged = [np.array(x) for x in whole]
    for x, y in zip(merged, part, strict=True):
        x[chosen] = y
    return merged


def _while(equation: JaxprEqn, operands: Stacks, team: Team) -> Stacks:
    p = equation.params
    tested, constant = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    carry = [*operands[constant:]]
    active = np.ones(len(team.members), bool)
    while True:
        state = [x[active] for x in carry]
        consts = [x[active] for x in operands[:tested]]
        (test,) = _call(p["cond_jaxpr"], [*consts, *state], team.part(active))
        # Under vmap, a device goes on while any of its elements does, and the others stay.
        goes_on = test.reshape(len(test), -1).any(1)
        active[active] = goes_on
        if not active.any():
            return carry
        consts = [x[active] for x in operands[tested:constant]]
        state = [x[active] for x in carry]
        results = _call(p["body_jaxpr"], [*consts, *state], team.part(active))
        test = test[goes_on]
        if test.ndim > 1:
            results = [
                np.where(test.reshape(test.shape + (1,) * (y.ndim - test.ndim)), y, x)
                for x, y in zip(state, results, strict=True)
            ]
        carry = _merged(carry, results, active)


def _scan(equation: JaxprEqn, operands: Stacks, team: Team) -> Stacks:
    parameters = equation.params
    body = getattr(parameters["jaxpr"], "jaxpr", parameters["jaxpr"])
    # Inferred from shapes, since names of the parameters differ between versions of JAX.
    sliced = sum(map(_is_longer, equation.invars, body.invars))
    carried = len(body.outvars) - sum(map(_is_longer, equation.outvars, body.outvars))
    constant = len(operands) - sliced - carried
    consts, carry = operands[:constant], operands[constant : constant + carried]
    steps: list[Stacks] = []
    order = range(parameters["length"])
    for i in reversed(order) if parameters["reverse"] else order:
        slices = [x[:, i] for x in operands[constant + carried :]]
        results = _call(parameters["jaxpr"], [*consts, *carry, *slices], team)
        carry = results[:carried]
        steps.append(results[carried:])
    if parameters["reverse"]:
        steps.reverse()
    return [*carry, *(np.stack(ys, 1) for ys in zip(*steps, strict=True))]


def _reduce(equation: JaxprEqn, operands: Stacks, team: Team) -> Stacks:
    """By a function of the program's own: halves of what is reduced are combined until one is left.

    The function takes numbers; each pair of them is executed as if on a device of its own.
    """
    parameters = equation.params
    count, axes = len(operands) // 2, [axis + 1 for axis in parameters["dimensions"]]
    kept = [i for i in range(operands[0].ndim) if i not in axes]
    shape = [operands[0].shape[i] for i in kept]
    reduced = math.prod(operands[0].shape[i] for i in axes)

    def combine(xs: Stacks, ys: Stacks) -> Stacks:
        pairs = [pair.reshape(-1) for pair in (*xs, *ys)]
        apart = replace(team, mesh=(), members=tuple(range(pairs[0].size)))
        return [z.reshape(xs[0].shape) for z in _call(parameters["jaxpr"], pairs, apart)]

    arrays = [x.transpose(*axes, *kept).reshape(reduced, *shape) for x in operands[:count]]
    starts = [x.reshape(-1, *(1 for _ in shape[1:])) for x in operands[count:]]
    arrays = [
        np.concatenate([np.broadcast_to(start, (1, *shape)), x])
        for start, x in zip(starts, arrays, strict=True)
    ]
    while (size := len(arrays[0])) > 1:
        half = size // 2
        combined = combine([x[:half] for x in arrays], [x[half : 2 * half] for x in arrays])
        arrays = [np.concatenate([z, x[2 * half :]]) for z, x in zip(combined, arrays, strict=True)]
    return [x[0] for x in arrays]


def _is_longer(outside: Any, inside: Any) -> bool:
    return outside.aval.ndim > inside.aval.ndim


# shard_map: from global arrays to stacks of shards, and back.


def _shard_map(equation: JaxprEqn, operands: Stacks, team: Team) -> Stacks:
    """Enters the manual axes; arrays stay whole over the others."""
    parameters = equation.params
    assert not team.mesh, "a shard_map in another is not simulated"
    manual = parameters.get("newly_manual_axes", parameters.get("manual_axes"))
    shape = parameters["mesh"].shape
    mesh = tuple((name, size) for name, size in shape.items() if name in manual)
    inside = replace(team, mesh=mesh, members=tuple(range(math.prod(size for _, size in mesh))))
    stacks = [
        np.stack([operand[0][_shard(operand[0].shape, spec, inside, d)] for d in inside.members])
        for operand, spec in zip(operands, parameters["in_specs"], strict=True)
    ]
    results = _call(parameters["jaxpr"], stacks, inside)
    return [
        _joined(result, spec, inside)[None]
        for result, spec in zip(results, parameters["out_specs"], strict=True)
    ]


def _shard(shape: Sequence[int], spec: PartitionSpec, team: Team, member: int) -> tuple:
    """The slices of a global array that make one device's shard."""
    sizes = team.sizes
    place = dict(zip(sizes, np.unravel_index(member, [*sizes.values()]), strict=True))
    slices = []
    for size, names in zip(shape, spec, strict=False):
        names = () if names is None else names if isinstance(names, tuple) else (names,)
        number, index = 1, 0
        for name in names:
            number, index = number * sizes.get(name, 1), index * sizes.get(name, 1)
            index += int(place.get(name, 0))
        slices.append(slice(index * size // number, (index + 1) * size // number))
    return tuple(slices)


def _joined(stack: np.ndarray, spec: PartitionSpec, team: Team) -> np.ndarray:
    sizes, shape = team.sizes, list(stack.shape[1:])
    for i, names in enumerate(spec):
        names = () if names is None else names if isinstance(names, tuple) else (names,)
        shape[i] *= math.prod(sizes.get(name, 1) for name in names)
    whole = np.zeros(shape, stack.dtype)
    for member in reversed(team.members):
        whole[_shard(shape, spec, team, member)] = stack[member]
    for member in team.members:
        copy = whole[_shard(shape, spec, team, member)]
        if copy.size and copy.dtype.kind not in "biu":
            error = np.max(np.abs(stack[member].astype(float) - copy.astype(float)))
            bound = _COPIES_AGREE[team.float64] * (np.max(np.abs(copy.astype(float))) + 1e-3)
            assert not error > bound, f"copies on devices differ by {error:.3g}"
    return whole


# Collectives.


def _groups(equation: JaxprEqn, axes: tuple[str, ...], team: Team) -> np.ndarray:
    """Places in the stack, [groups, devices of a group], in the order of the axes."""
    groups, complete = _places(team, axes)
    if not complete:
        raise DeadlockError(f"{equation.primitive.name} over {axes} without all of its group")
    return groups


@functools.cache
def _places(team: Team, axes: tuple[str, ...]) -> tuple[np.ndarray, bool]:
    names = [name for name, _ in team.mesh]
    order = [i for i, name in enumerate(names) if name not in axes] + [*map(names.index, axes)]
    whole = np.arange(math.prod(team.sizes.values())).reshape([size for _, size in team.mesh])
    width = math.prod(team.sizes[axis] for axis in axes)
    grouped = whole.transpose(order).reshape(-1, width)
    present = np.isin(grouped, team.members)
    place = {member: i for i, member in enumerate(team.members)}
    chosen = grouped[present.all(1)]
    complete = bool((present.all(1) | ~present.any(1)).all())
    return np.vectorize(lambda member: place[member], otypes=[int])(chosen), complete


def _collective(equation: JaxprEqn, operands: Stacks, team: Team) -> Stacks:
    parameters, name = equation.params, equation.primitive.name
    axes = parameters["axes"] if "axes" in parameters else parameters["axis_name"]
    axes = axes if isinstance(axes, tuple) else (axes,)
    assert parameters.get("axis_index_groups") is None
    if name == "ppermute" and not team.is_whole:
        raise DeadlockError(f"ppermute over {axes} on {len(team.members)} devices of {team.mesh}")
    groups = _groups(equation, axes, team)
    results = []
    for operand in operands:
        grouped = _COLLECTIVES[name](operand[groups], parameters)
        result = np.empty((len(operand), *grouped.shape[2:]), operand.dtype)
        result[groups] = grouped
        results.append(result)
    return results


# Each maps [groups, devices, ...] to the same form.


def _sum(x: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
    return np.repeat(x.sum(1, keepdims=True, dtype=x.dtype), x.shape[1], 1)


def _gather(x: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
    dimension, shards = parameters["all_gather_dimension"], [x[:, i] for i in range(x.shape[1])]
    join = np.concatenate if parameters["tiled"] else np.stack
    return np.repeat(join(shards, dimension + 1)[:, None], x.shape[1], 1)


def _scatter(x: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
    devices, dimension = x.shape[1], parameters["scatter_dimension"] + 1
    whole = x.sum(1, dtype=x.dtype)
    if parameters["tiled"]:
        return np.stack(np.split(whole, devices, dimension), 1)
    return np.moveaxis(whole, dimension, 1)


def _permute(x: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
    result = np.zeros_like(x)
    for source, target in parameters["perm"]:
        result[:, target] = x[:, source]
    return result


def _exchange(x: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
    split, concat = parameters["split_axis"] + 2, parameters["concat_axis"] + 2
    if not parameters["tiled"]:
        return np.moveaxis(x, (1, split), (concat, 1))
    x = x.reshape(*x.shape[:split], x.shape[1], -1, *x.shape[split + 1 :])
    x = np.moveaxis(x, (1, split), (concat, 1))
    return x.reshape(*x.shape[:concat], -1, *x.shape[concat + 2 :])


def _extreme(reduce: Callable) -> Callable:
    return lambda x, parameters: np.repeat(reduce(x, 1, keepdims=True), x.shape[1], 1)


def _axis_index(axes: Any, team: Team) -> np.ndarray:
    axes = axes if isinstance(axes, tuple) else (axes,)
    places = dict(
        zip(team.sizes, np.unravel_index(team.members, [*team.sizes.values()]), strict=True)
    )
    index = np.zeros(len(team.members), np.int32)
    for axis in axes:
        index = index * team.sizes[axis] + places[axis].astype(np.int32)
    return index


_COLLECTIVES: dict[str, Callable[[np.ndarray, dict[str, Any]], np.ndarray]] = {
    "psum": _sum,
    "psum_invariant": _sum,
    "all_gather": _gather,
    "all_gather_invariant": _gather,
    "reduce_scatter": _scatter,
    "ppermute": _permute,
    "all_to_all": _exchange,
    "pmax": _extreme(np.max),
    "pmin": _extreme(np.min),
}
_CONTROL_FLOW = {
    "shard_map": _shard_map,
    "cond": _branches,
    "while": _while,
    "scan": _scan,
    "reduce": _reduce,
}


def _is_jaxpr(value: Any) -> bool:
    return isinstance(getattr(value, "jaxpr", value), Jaxpr)
