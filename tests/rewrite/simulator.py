"""Executes programs with `shard_map` equation by equation, on arrays stacked over the devices.

Each random program runs only once, and compiling it would take longer than everything else. The
programs consist of few different operations. Each operation is compiled once, and executed on one
device for all. Collectives are sums, concatenations and permutations along the stack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.sharding import PartitionSpec

from collective_matmul.rewrite.graph import type_of

_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2"}
    | {"custom_vjp_call", "custom_jvp_call"}
)
_TYPES_ONLY = frozenset({"pvary", "pcast", "preduced", "name", "optimization_barrier"})

Values = Sequence[Any]


def simulated(fun: Callable) -> Callable:
    """The same function of global arrays. Its `shard_map`s are over one axis."""

    def simulate(*arguments: Any) -> Any:
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(*arguments)
        results = _execute(program.jaxpr, program.consts, arguments, None)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return simulate


def _execute(jaxpr: Jaxpr, consts: Values, arguments: Values, devices: int | None) -> list[Any]:
    """Executes a jaxpr.

    With `devices`, it is the jaxpr of a shard, and values are stacked over the devices.
    """

    def everywhere(value: Any) -> np.ndarray:
        value = np.asarray(value)
        return value if devices is None else np.broadcast_to(value, (devices, *value.shape))

    def read(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return everywhere(np.asarray(atom.val, type_of(atom).dtype))
        return values[atom]

    values = dict(zip(jaxpr.constvars, map(everywhere, consts), strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)

    for equation in jaxpr.eqns:
        results = _execute_equation(equation, [*map(read, equation.invars)], devices)
        values |= zip(equation.outvars, results, strict=True)
    return [*map(read, jaxpr.outvars)]


def _execute_equation(equation: JaxprEqn, operands: Values, devices: int | None) -> Values:
    name, parameters = equation.primitive.name, equation.params
    if name == "shard_map":
        return _shard_map(parameters, operands)
    if name == "scan":
        return _loop(equation, operands, devices)
    if name == "cond":
        (taken,) = {int(index) for index in np.ravel(operands[0])}
        return _call(parameters["branches"][taken], operands[1:], devices)
    if name in _CALLS:
        (inner,) = (value for value in parameters.values() if _is_jaxpr(value))
        return _call(inner, operands, devices)
    if name in _TYPES_ONLY:
        return operands
    if name in _COLLECTIVES:
        assert devices is not None
        return _COLLECTIVES[name](operands, devices, parameters)
    if any(True for _ in jaxprs_in_params(parameters)):
        raise NotImplementedError(f"{name} holds jaxprs")
    return _compiled(equation, operands, devices)


def _call(jaxpr: Any, operands: Values, devices: int | None) -> Values:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return _execute(inner, getattr(jaxpr, "consts", ()), operands, devices)


def _compiled(equation: JaxprEqn, operands: Values, devices: int | None) -> Values:
    primitive = equation.primitive
    mapped = devices is not None and bool(operands)
    operation = _operation(primitive, mapped, tuple(equation.params.items()))
    results = operation(*operands)
    results = results if primitive.multiple_results else [results]
    if devices is not None and not operands:
        results = [jnp.broadcast_to(result, (devices, *result.shape)) for result in results]
    return results


@functools.cache
def _operation(primitive: Any, mapped: bool, parameters: tuple) -> Callable:
    bind = functools.partial(primitive.bind, **dict(parameters))
    return jax.jit(jax.vmap(bind) if mapped else bind)


def _loop(equation: JaxprEqn, operands: Values, devices: int | None) -> list[Any]:
    """A scan. Its slices and stacks are along dimension 0, or 1 if dimension 0 is devices."""
    axis = 0 if devices is None else 1
    parameters = equation.params
    body = getattr(parameters["jaxpr"], "jaxpr", parameters["jaxpr"])
    # Inferred from shapes, since names of the parameters differ between versions of JAX.
    sliced = sum(map(_is_longer, equation.invars, body.invars))
    carried = len(body.outvars) - sum(map(_is_longer, equation.outvars, body.outvars))
    constant = len(operands) - sliced - carried
    consts, carry = operands[:constant], operands[constant : constant + carried]
    steps: list[Values] = []
    order = range(parameters["length"])
    for i in reversed(order) if parameters["reverse"] else order:
        slices = [_taken(x, i, axis) for x in operands[constant + carried :]]
        results = _call(parameters["jaxpr"], [*consts, *carry, *slices], devices)
        carry = results[:carried]
        steps.append(results[carried:])
    if parameters["reverse"]:
        steps.reverse()
    return [*carry, *(_stacked(ys, axis) for ys in zip(*steps, strict=True))]


def _is_longer(outside: Any, inside: Any) -> bool:
    return outside.aval.ndim > inside.aval.ndim


_taken = jax.jit(lambda x, i, axis: jnp.take(x, i, axis), static_argnums=2)
_stacked = jax.jit(lambda ys, axis: jnp.stack(ys, axis), static_argnums=1)


# shard_map: from global arrays to stacks of shards, and back.


def _shard_map(parameters: dict[str, Any], operands: Values) -> list[Any]:
    (devices,) = parameters["mesh"].axis_sizes
    stacks = [
        _split(np.asarray(operand), _sharded_dimension(spec), devices)
        for operand, spec in zip(operands, parameters["in_specs"], strict=True)
    ]
    results = _call(parameters["jaxpr"], stacks, devices)
    return [
        _joined(np.asarray(result), _sharded_dimension(spec))
        for result, spec in zip(results, parameters["out_specs"], strict=True)
    ]


def _sharded_dimension(spec: PartitionSpec) -> int | None:
    """The dimension that is sharded, or None."""
    divided = [i for i, axes in enumerate(spec) if axes not in (None, ())]
    assert len(divided) <= 1
    return divided[0] if divided else None


def _split(array: np.ndarray, dimension: int | None, devices: int) -> np.ndarray:
    if dimension is None:
        return np.broadcast_to(array, (devices, *array.shape))
    return np.stack(np.split(array, devices, dimension))


def _joined(stack: np.ndarray, dimension: int | None) -> np.ndarray:
    return stack[0] if dimension is None else np.concatenate([*stack], dimension)


# Collectives on stacks.


def _each(shared: jax.Array, devices: int) -> jax.Array:
    return jnp.broadcast_to(shared, (devices, *shared.shape))


def _on_one(fun: Callable[..., jax.Array], *names: str) -> Callable[..., Values]:
    """A collective that treats each operand separately, with these parameters of its equation."""
    compiled = jax.jit(fun, static_argnums=range(1, 2 + len(names)))

    def operate(operands: Values, devices: int, parameters: dict[str, Any]) -> Values:
        assert parameters.get("axis_index_groups") is None
        details = [parameters[name] for name in names]
        return [compiled(x, devices, *details) for x in operands]

    return operate


def _sum(stack: jax.Array, devices: int) -> jax.Array:
    return _each(stack.sum(0), devices)


def _gather(stack: jax.Array, devices: int, dimension: int, tiled: bool) -> jax.Array:
    shards = [*stack]
    return _each((jnp.concatenate if tiled else jnp.stack)(shards, dimension), devices)


def _scatter(stack: jax.Array, devices: int, dimension: int, tiled: bool) -> jax.Array:
    whole = stack.sum(0)
    if tiled:
        return jnp.stack(jnp.split(whole, devices, dimension))
    return jnp.moveaxis(whole, dimension, 0)


def _permute(stack: jax.Array, devices: int, pairs: tuple[tuple[int, int], ...]) -> jax.Array:
    sources, targets = zip(*pairs, strict=True)
    return jnp.zeros_like(stack).at[jnp.array(targets)].set(stack[jnp.array(sources)])


def _index(operands: Values, devices: int, parameters: dict[str, Any]) -> Values:
    return [np.arange(devices, dtype=np.int32)]


_sums = _on_one(_sum)
_gathers = _on_one(_gather, "all_gather_dimension", "tiled")
_COLLECTIVES: dict[str, Callable[..., Values]] = {
    "psum": _sums,
    "psum_invariant": _sums,
    "all_gather": _gathers,
    "all_gather_invariant": _gathers,
    "reduce_scatter": _on_one(_scatter, "scatter_dimension", "tiled"),
    "ppermute": _on_one(_permute, "perm"),
    "axis_index": _index,
}


def _is_jaxpr(value: Any) -> bool:
    return isinstance(getattr(value, "jaxpr", value), Jaxpr)
