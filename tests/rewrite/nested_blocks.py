"""Draws the blocks of random programs: control flow, calls, `jax.vmap` and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.rewrite.grammar import Block, Shape, Value, fits, names_in

_POLICIES = (
    "",
    ", policy=jax.checkpoint_policies.dots_saveable",
    ", policy=jax.checkpoint_policies.everything_saveable",
    ", policy=jax.checkpoint_policies.save_only_these_names('between')",
)


def add_statement(block: Block) -> None:
    x = block.value()
    kinds: dict[Callable[[Value], Value], float] = {
        block.gathered: 3,
        block.scattered: 3,
        block.layer: 2,
        block.exchanged: 2,
        block.matmul: 1,
        block.gather: 0.5,
        block.scatter: 0.5,
        block.sum: 0.5,
        block.between: 1,
        block.merge: 0.5,
        block.reshape: 1,
        block.combine: 1,
        block.scale: 0.3,
    }
    if block.depth < 2:
        kinds[lambda x: nested(block, x)] = 3
    block.random.choices(list(kinds), weights=list(kinds.values()))[0](x)


def nested(block: Block, x: Value) -> Value:
    """Places a block of statements under control flow, in a call or under a gradient."""
    kinds: dict[Callable[[Block, Value], Value], float] = {
        _called: 2,
        _custom: 0.7,
        _branched: 3,
        _scanned: 1,
        _mapped: 0.7,
        _gradient: 2,
        _batched: 0.7,
    }
    if not block.reverse:
        kinds[_repeated] = 2.5
    return block.random.choices(list(kinds), weights=list(kinds.values()))[0](block, x)


def _function(
    block: Block,
    parameter: Shape,
    *,
    axes: tuple[str, ...] | None = None,
    reverse: bool | None = None,
    keeps: bool = True,
) -> tuple[str, Value, list[str]]:
    """Defines a function of one array that may use those around it.

    Args:
      block: where it is defined.
      parameter: shape of its parameter.
      axes: over which it may communicate; None for those of `block`.
      reverse: whether gradients are taken through it; None for as in `block`.
      keeps: whether its result has the parameter's shape.

    Returns:
      Its name, its result and the names that it takes from around it.
    """
    source = block.source
    value = Value(source.name(), parameter)
    around = block.scope if block.chance(0.7) else []
    inner = replace(
        block,
        scope=[*around, value],
        axes=block.axes if axes is None else axes,
        reverse=block.reverse if reverse is None else reverse,
        depth=block.depth + 1,
        lines=[],
    )
    for _ in range(block.random.choice((1, 1, 2))):
        add_statement(inner)
    result = inner.scope[-1]
    if result is value:
        result = inner.assign(f"jnp.sin({value.name})", parameter)
    if keeps and result.shape != parameter:
        result = inner.assign(f"{value.name} * jnp.mean({result.name})", parameter)
    name, returned = source.name("f"), source.name()
    inner.lines.append(f"{returned} = vary({result.name})")
    block.lines.append(f"def {name}({value.name}):")
    block.lines += [f"    {line}" for line in inner.lines]
    block.lines.append(f"    return {returned}")
    made = {line.split(" = ")[0].strip() for line in inner.lines if " = " in line}
    known = {v.name for v in block.scope} | {f"a{i}" for i in range(len(source.arguments))}
    free = sorted((names_in(inner.lines) - made - {value.name}) & known)
    return name, Value(returned, result.shape), free


def _lifted(block: Block, name: str, free: list[str]) -> tuple[str, str]:
    """The function with what it takes from around it as further parameters, and their list."""
    if not free:
        return name, ""
    lifted = block.source.name("f")
    position = max(i for i, line in enumerate(block.lines) if line.startswith(f"def {name}("))
    header = block.lines[position]
    block.lines[position] = f"{header[:-2]}, {', '.join(free)}):".replace(name, lifted, 1)
    return lifted, ", " + ", ".join(free)


def _called(block: Block, x: Value) -> Value:
    name, result, free = _function(block, x.shape, keeps=False)
    extra = ""
    if block.chance(0.5):
        name, extra = _lifted(block, name, free)
    call = f"jax.checkpoint({name}{block.random.choice(_POLICIES)})"
    call = f"jax.jit({name})" if block.chance(0.4) else call
    return block.assign(f"{call}({x.name}{extra})", result.shape)


def _custom(block: Block, x: Value) -> Value:
    """A function with gradients of its own, which may not take arrays from around it."""
    name, result, free = _function(block, x.shape, keeps=False)
    name, extra = _lifted(block, name, free)
    custom = block.source.name("f")
    forward = f"lambda *args: ({name}(*args), args)"
    backward = f"lambda args, dy: jax.vjp({name}, *args)[1](dy)"
    block.lines.append(f"{custom} = jax.custom_vjp({name})")
    block.lines.append(f"{custom}.defvjp({forward}, {backward})")
    return block.assign(f"{custom}({x.name}{extra})", result.shape)


def _uniform(block: Block, x: Value) -> tuple[str, tuple[str, ...]]:
    """A scalar of `x`, or of the mesh, and the axes over which it does not vary."""
    axes = block.source.axes
    same = tuple(axis for axis in axes if block.chance(0.5))
    if block.chance(0.5) and len(same) < len(axes):
        places = [f"lax.axis_index('{axis}')" for axis in axes if axis not in same]
        return f"(2 * ({' + '.join(places)}) - 1)", same
    same = tuple(axis for axis in same if axis in block.axes)
    mean = f"jnp.sum({x.name}.astype(jnp.float32))"
    return (f"lax.psum({mean}, {same})" if same else mean), same


def _within(block: Block, same: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in block.axes if axis in same)


def _branched(block: Block, x: Value) -> Value:
    scalar, same = _uniform(block, x)
    axes = _within(block, same)
    first, _, _ = _function(block, x.shape, axes=axes)
    second, _, _ = _function(block, x.shape, axes=axes)
    if block.chance(0.3):
        second = "lambda y: vary(2 * y)"
    if block.chance(0.15):
        branches = f"[{first}, {second}, lambda y: vary(-y)]"
        index = f"jnp.int32({scalar} > 0) + jnp.int32({scalar} > 1)"
        return block.assign(f"lax.switch({index}, {branches}, {x.name})", x.shape)
    return block.assign(f"lax.cond({scalar} > 0, {first}, {second}, {x.name})", x.shape)


def _repeated(block: Block, x: Value) -> Value:
    """A while loop; its length may depend on the mesh or on data."""
    scalar, same = _uniform(block, x)
    carried = block.chance(0.3)
    if carried:  # The loop ends when its own state says so.
        same = _within(block, same)
        scalar = "jnp.sum(c[1].astype(jnp.float32))"
        scalar = f"lax.psum({scalar}, {same})" if same else scalar
    name, _, _ = _function(block, x.shape, axes=_within(block, same), reverse=False)
    test = f"(c[0] < 2) & ({scalar} > 0)" if carried else f"c[0] < 1 + jnp.int32({scalar} > 0)"
    step = f"lambda c: (c[0] + 1, {name}(c[1]))"
    loop = f"lax.while_loop(lambda c: {test}, {step}, (0, vary({x.name})))[1]"
    return block.assign(loop, x.shape)


def _scanned(block: Block, x: Value) -> Value:
    name, _, _ = _function(block, x.shape)
    if block.chance(0.3):
        return block.assign(f"lax.fori_loop(0, 2, lambda _, y: {name}(y), vary({x.name}))", x.shape)
    scales = f"jnp.array([1.0, 0.5], jnp.{block.source.dtype})"
    step = f"lambda y, scale: ({name}(y) * scale, jnp.mean(y))"
    reverse = ", reverse=True" if block.chance(0.3) else ""
    return block.assign(f"lax.scan({step}, vary({x.name}), {scales}{reverse})[0]", x.shape)


def _mapped(block: Block, x: Value) -> Value:
    """The block on each of several arrays, one after the other."""
    name, result, _ = _function(block, x.shape, keeps=False)
    stack = f"jnp.stack([{x.name}, 0.5 * {x.name}])"
    return block.assign(f"lax.map({name}, {stack})[1]", result.shape)


def _batched(block: Block, x: Value) -> Value:
    if len(x.shape) > 2 and block.chance(0.5):
        name, result, _ = _function(block, x.shape[1:], keeps=False)
        if fits((x.shape[0], *result.shape)):
            return block.assign(f"jax.vmap({name})({x.name})", (x.shape[0], *result.shape))
    name, result, _ = _function(block, x.shape, keeps=False)
    stack = f"jnp.stack([{x.name}, 0.5 * {x.name}])"
    return block.assign(f"jax.vmap({name})({stack}).sum(0)", result.shape)


def _gradient(block: Block, x: Value) -> Value:
    """The gradient of a block with respect to its parameter, or to another array."""
    name, _, free = _function(block, x.shape, reverse=True, keeps=False)
    if not free or block.chance(0.4):
        return block.assign(f"jax.grad(loss_of({name}))({x.name})", x.shape)
    name, extra = _lifted(block, name, free)
    values = block.source.local | {value.name: value for value in block.scope}
    chosen = block.random.randrange(len(free))
    gradients = f"jax.grad(loss_of({name}), (0, {chosen + 1}))({x.name}{extra})"
    block.assign(f"{gradients}[0]", x.shape)
    return block.assign(f"{gradients}[1]", values[free[chosen]].shape)
