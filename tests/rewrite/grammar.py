"""Draws random programs for the inside of `shard_map`, as source text.

A program is a list of statements over local arrays. Any statement may take any earlier array, so
that a matmul's operands may both be gathered, be replicated, or derive from each other. Blocks of
statements are placed under control flow, calls, `jax.vmap` or a gradient. The predicate of a branch
or a loop may vary over some mesh axes; the block then communicates over the other axes only, so
that the program itself never waits for ever.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, field
from typing import NamedTuple

#: Sizes of arrays on one device stay below these, so that programs are cheap to execute.
MAX_ELEMENTS, MAX_SIZE, MAX_RANK = 320, 24, 4
#: Sizes of weights' dimensions on one device.
SIZES = (1, 2, 3, 4, 6)
Shape = tuple[int, ...]
Spec = tuple[str | tuple[str, ...] | None, ...]


class Value(NamedTuple):
    """A name in the program, and its shape on one device."""

    name: str
    shape: Shape


@dataclass
class Source:
    """State that all blocks of a program share.

    Attributes:
      random: the source of randomness.
      axes: the manual mesh axes, with their sizes.
      dtype: dtype of the arguments and of every named array.
      reverse: whether gradients are taken through the whole program.
      arguments: the global shape and the spec of each argument.
      local: each argument as it is on one device.
      rounds: whether anything is computed in a coarser dtype than float32.
    """

    random: random.Random
    axes: dict[str, int]
    dtype: str
    reverse: bool
    arguments: list[tuple[Shape, Spec]] = field(default_factory=list)
    local: dict[str, Value] = field(default_factory=dict)
    rounds: bool = False
    names: int = 0

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def name(self, prefix: str = "y") -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def argument(self, shape: Shape) -> Value:
        """An argument with this shape on each device. Axes shard a dimension of it or none.

        Several may shard one dimension, in any order.
        """
        sizes = list(shape)
        sharded: list[tuple[str, ...]] = [()] * len(shape)
        for axis in self.random.sample([*self.axes], len(self.axes)):
            if self.chance(0.5):
                i = self.random.randrange(len(shape))
                if not sharded[i] or self.chance(0.5):
                    sizes[i], sharded[i] = sizes[i] * self.axes[axis], (*sharded[i], axis)
        spec = [axes if len(axes) > 1 else axes[0] if axes else None for axes in sharded]
        value = Value(f"a{len(self.arguments)}", shape)
        self.arguments.append((tuple(sizes), tuple(spec)))
        self.local[value.name] = value
        return value


@dataclass
class Block:
    """Statements with what is in their scope.

    Attributes:
      source: what all blocks share.
      scope: the arrays that statements may use, the newest last.
      axes: the axes over which statements may communicate.
      reverse: whether gradients are taken through the block.
      depth: how many blocks are around it.
      lines: the statements.
    """

    source: Source
    scope: list[Value]
    axes: tuple[str, ...]
    reverse: bool
    depth: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def random(self) -> random.Random:
        return self.source.random

    def chance(self, probability: float) -> bool:
        return self.source.chance(probability)

    def assign(self, expression: str, shape: Shape) -> Value:
        value = Value(self.source.name(), shape)
        self.lines.append(f"{value.name} = {expression}")
        self.scope.append(value)
        return value

    def value(self) -> Value:
        """An array in scope, more often a new one."""
        if self.chance(0.6):
            return self.scope[-1]
        return self.random.choice(self.scope)

    def axis(self) -> tuple[str, int]:
        """The axes of a collective as source text, seldom several in any order, and their size."""
        count = self.random.choice((1, 1, 1, 1, 2)) if len(self.axes) > 1 else 1
        axes = tuple(self.random.sample(self.axes, count))
        return repr(axes if count > 1 else axes[0]), math.prod(
            self.source.axes[axis] for axis in axes
        )

    # Collectives.

    def gather(self, x: Value) -> Value:
        if not self.axes or not x.shape:
            return x
        (axis, size), i = self.axis(), self.random.randrange(len(x.shape))
        shape = (*x.shape[:i], x.shape[i] * size, *x.shape[i + 1 :])
        if not fits(shape):
            return x
        forms = [f"lax.all_gather({x.name}, {axis}, axis={i}, tiled=True)"] * 3
        forms += [f"lax.all_gather({x.name}, {axis}, axis={i}).reshape{shape}"]
        if i and len(shape) > 1:
            swapped = f"jnp.swapaxes({x.name}, 0, {i})"
            forms += [f"jnp.swapaxes(lax.all_gather({swapped}, {axis}, tiled=True), 0, {i})"]
        return self.assign(self.random.choice(forms), shape)

    def scatter(self, x: Value) -> Value:
        axis, size = self.axis() if self.axes else ("", 1)
        divisible = [i for i, rows in enumerate(x.shape) if rows and rows % size == 0]
        if not axis or not divisible:
            return self.sum(x)
        i = self.random.choice(divisible)
        rows = x.shape[i] // size
        shape = (*x.shape[:i], rows, *x.shape[i + 1 :])
        split = (*x.shape[:i], size, rows, *x.shape[i + 1 :])
        start = f"lax.axis_index({axis}) * {rows}"
        forms = [f"lax.psum_scatter({x.name}, {axis}, scatter_dimension={i}, tiled=True)"] * 3
        forms += [
            f"lax.psum_scatter({x.name}.reshape{split}, {axis}, scatter_dimension={i})",
            f"lax.dynamic_slice_in_dim(lax.psum({x.name}, {axis}), {start}, {rows}, {i})",
        ]
        return self.assign(self.random.choice(forms), shape)

    def sum(self, x: Value) -> Value:
        if not self.axes:
            return x
        axis, _ = self.axis()
        axes = repr(self.axes) if self.chance(0.1) else axis
        name = self.random.choice(("psum", "psum", "pmean"))
        return self.assign(f"lax.{name}({x.name}, {axes})", x.shape)

    # Arithmetic.

    def between(self, x: Value) -> Value:
        """An operation that commutes with collectives; seldom one that does not."""
        if not x.shape:
            return x
        y, last = x.name, len(x.shape) - 1
        forms = [
            f"{y} * 0.5",
            f"2.0 * {y} / 3.0",
            f"checkpoint_name({y}, 'between')",
            f"lax.optimization_barrier({y})",
            f"-{y}",
            f"jnp.expand_dims({y}, {last}).reshape{x.shape}",
            f"jnp.swapaxes(jnp.swapaxes({y}, 0, {last}), 0, {last})",
            f"jax.jit(lambda y: y * 0.25)({y})",
        ]
        if self.chance(0.2):
            forms = [f"jnp.tanh({y})", f"{y} + 0.5", f"jnp.sin({y})", f"{y} * jnp.mean({y})"]
        return self.assign(self.random.choice(forms), x.shape)

    def merge(self, x: Value) -> Value:
        """A reshape or a transposition that changes the shape."""
        if len(x.shape) < 2:
            return x
        i = self.random.randrange(len(x.shape) - 1)
        if self.chance(0.5):
            shape = (*x.shape[:i], x.shape[i] * x.shape[i + 1], *x.shape[i + 2 :])
            return self.assign(f"{x.name}.reshape{shape}", shape)
        order = self.random.sample(range(len(x.shape)), len(x.shape))
        shape = tuple(x.shape[i] for i in order)
        return self.assign(f"jnp.transpose({x.name}, {tuple(order)})", shape)

    def reshape(self, x: Value) -> Value:
        """A dimension split, a dimension of size 1 added or removed, or rows merged."""
        y, shape, forms = x.name, x.shape, []
        for i, size in enumerate(shape):
            forms += [
                (f"{y}.reshape{parts}", parts)
                for part in (2, 3, 4)
                if size > part and size % part == 0
                for parts in [(*shape[:i], size // part, part, *shape[i + 1 :])]
            ]
            if size == 1 and len(shape) > 1:
                forms += [(f"jnp.squeeze({y}, {i})", (*shape[:i], *shape[i + 1 :]))] * 3
        place = self.random.randint(0, len(shape))
        forms += [(f"jnp.expand_dims({y}, {place})", (*shape[:place], 1, *shape[place:]))]
        if len(shape) > 2:
            rows = math.prod(shape[:-1])
            forms += [(f"jnp.reshape({y}, (-1, {shape[-1]}))", (rows, shape[-1]))] * 2
        expression, shape = self.random.choice(forms)
        return self.assign(expression, shape) if fits(shape) and 0 not in shape else x

    def combine(self, x: Value) -> Value:
        others = [value for value in self.scope if value.shape == x.shape]
        operator = self.random.choice("+-*")
        return self.assign(f"{x.name} {operator} {self.random.choice(others).name}", x.shape)

    def scale(self, x: Value) -> Value:
        return self.assign(f"{x.name} * jnp.mean({self.value().name})", x.shape)

    def derived(self, x: Value) -> Value:
        """An array of the same shape that is computed from `x`."""
        y = x.name
        forms = [f"2 * {y} + 1", f"jnp.sin({y})", f"{y} * 0.5"]
        return x if self.chance(0.3) else self.assign(self.random.choice(forms), x.shape)

    # Matmuls.

    def matmul(self, x: Value, result: Shape | None = None) -> Value:
        """A matmul of `x`; with `result`, one that has this shape, if an argument can give it."""
        if not x.shape:
            return x
        i = len(x.shape) - 1 if self.chance(0.7) else self.random.randrange(len(x.shape))
        depth = x.shape[i]
        if result and result[:-1] == x.shape[:-1]:
            w = self.source.argument((x.shape[-1], result[-1]))
            return self.product(x, len(x.shape) - 1, w, 0)
        matching = [
            (value, j)
            for value in self.scope
            for j, size in enumerate(value.shape)
            if size == depth
        ]
        if self.chance(0.6):
            columns = [depth if self.chance(0.4) else self.random.choice(SIZES)]
            columns += [2] * self.chance(0.1)
            j = 0 if self.chance(0.8) else len(columns)
            return self.product(x, i, self.source.argument((*columns[:j], depth, *columns[j:])), j)
        if self.chance(0.6) or not matching:
            return self.product(x, i, self.derived(x), i)
        return self.product(x, i, *self.random.choice(matching))

    def product(self, x: Value, i: int, w: Value, j: int) -> Value:
        """Contracts dimension i of `x` with j of `w`; the leading dimensions may be a batch."""
        left, right = list("abcdef"[: len(x.shape)]), list("uvwxyz"[: len(w.shape)])
        right[j] = left[i]
        if i and j and x.shape[0] == w.shape[0] and self.chance(0.6):
            right[0] = left[0]
        result = [c for c in left if c not in right or (c == left[0] == right[0] and i and j)]
        result += [c for c in right if c not in left]
        sizes = dict(zip(left, x.shape, strict=True)) | dict(zip(right, w.shape, strict=True))
        if self.chance(0.15):
            self.random.shuffle(result)
        shape = tuple(sizes[c] for c in result)
        if not fits(shape):
            return x
        names, terms = [x.name, w.name], ["".join(left), "".join(right)]
        plain = (i, j) == (len(x.shape) - 1, 0) and len(w.shape) == 2
        if self.chance(0.2):
            names, terms, plain = names[::-1], terms[::-1], False
        subscripts = f"'{','.join(terms)}->{''.join(result)}'"
        if plain and result == left[:-1] + right[1:] and self.chance(0.7):
            return self.assign(self.dot("jnp.matmul(", names), shape)
        return self.assign(self.dot(f"jnp.einsum({subscripts}, ", names), shape)

    def dot(self, function: str, names: list[str]) -> str:
        """A call of a matmul, sometimes with casts around it or a result in float32."""
        dtype = f"jnp.{self.source.dtype}"
        if self.source.dtype == "float32" and self.chance(0.05):
            self.source.rounds = True
            names = [f"{name}.astype(jnp.bfloat16)" for name in names]
            return f"{function}{', '.join(names)}).astype({dtype})"
        if self.source.dtype in ("bfloat16", "float16") and self.chance(0.4):
            return (
                f"{function}{', '.join(names)}, preferred_element_type=jnp.float32).astype({dtype})"
            )
        return f"{function}{', '.join(names)})"

    # Sequences of statements.

    def sometimes_between(self, x: Value) -> Value:
        while self.chance(0.25):
            x = self.between(x) if self.chance(0.6) else self.reshape(x)
        return x

    def gathered(self, x: Value) -> Value:
        """A gather with its matmuls."""
        whole = self.sometimes_between(self.gather(x))
        for _ in range(self.random.choice((1, 1, 2))):
            y = self.matmul(whole)
        return y

    def scattered(self, x: Value) -> Value:
        """A matmul, or a sum or difference of two, with its scatter or sum."""
        y = self.sometimes_between(self.matmul(x))
        if self.chance(0.25):
            z = self.matmul(x, y.shape)
            y = self.combine(z if z.shape == y.shape else y)
        return self.scatter(y) if self.chance(0.7) else self.sum(y)

    def exchanged(self, x: Value) -> Value:
        """A gather, one matmul and a scatter, so that the weight's gradient gathers twice."""
        y = self.sometimes_between(self.matmul(self.sometimes_between(self.gather(x))))
        return self.scatter(y)

    def layer(self, x: Value) -> Value:
        return self.scattered(self.sometimes_between(self.gathered(x)))


def fits(shape: Shape) -> bool:
    return (
        math.prod(shape) <= MAX_ELEMENTS
        and max(shape, default=0) <= MAX_SIZE
        and len(shape) <= MAX_RANK
    )


def names_in(lines: list[str]) -> set[str]:
    """The names of arguments and arrays in statements."""
    return set(re.findall(r"\b[ay]\d+\b", "\n".join(lines)))
