"""Draws programs over Explicit mesh axes, for `tests.rewrite.explicit_fuzz`.

A seed determines the program. Statements are drawn while JAX traces them: one that JAX refuses is
dropped. They are matmuls, reshards, sums and maps, and what changes the layout: transposes, merges
and splits of dimensions, `squeeze` and `expand_dims`. Dimensions may be sharded over several axes
in any order; axes may have one device, or be left to the compiler (type Auto). Where 64-bit types
are enabled, arguments may have them.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from tests.fp8_reference import SHIPPED_RECIPES

MESHES = ({"d": 2, "t": 2}, {"d": 2, "t": 2}, {"t": 3}, {"d": 2, "t": 3}, {"d": 1, "t": 2})
MESHES += ({"d": 2, "t": 2, "f": 2}, {"d": 2, "f": 2, "t": 2}, {"s": 1, "d": 2, "t": 2})
MESHES += ({"t": 1, "d": 2}, {"d": 2, "t": 2, "s": 1, "f": 2})
SIZES = (6, 6, 12, 4, 8)
SHAPES = ((6, 6, 12), (6, 12, 6), (12, 6), (2, 6, 4), (4, 1, 8), (8, 8), (1, 4, 12), (4, 2, 4, 6))
MODES = ("not", "not", "before", "after")
AROUND = ("nothing", "nothing", "jit", "checkpoint", "scan", "cond")
IMPLEMENTATIONS = ("ring", "ring", "xla", "ring_two_way")
DTYPES = ("float32", "float32", "float32", "bfloat16")
RECIPES = (*(None,) * 5, *SHIPPED_RECIPES)
#: Kinds of statements, and those that often follow a statement of another kind.
KINDS = ("dot",) * 6 + ("reshard",) * 4 + ("sum",) * 3 + ("map",) * 2 + ("layout",) * 3
FOLLOWING = {
    "reshard": ("layout", "layout", "dot", "dot"),
    "layout": ("dot", "dot", "reshard", "sum"),
    "dot": ("layout", "layout", "reshard", "sum", "map"),
}


@dataclass
class ExplicitCase:
    """A program and how it is executed.

    Attributes:
      mesh: the axes with their sizes.
      auto: those of type Auto; the others are of type Explicit.
      mode: "not" differentiated, or "before" or "after" the rewrite.
      around: what the statements are inside.
      implementation: as for `overlap`.
      fp8: as for `overlap`.
      dtype: dtype of the arguments.
      arguments: shapes and specs.
      lines: the statements, over arrays a0, a1, ... and y0, y1, ...
    """

    mesh: dict[str, int]
    auto: tuple[str, ...]
    mode: str
    around: str
    implementation: str
    fp8: Any
    dtype: str
    arguments: list[tuple[tuple[int, ...], P]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        auto = f" ({', '.join(self.auto)} Auto)" if self.auto else ""
        details = f"# {self.mesh}{auto} {self.mode} {self.around} {self.implementation}"
        details += f" {self.fp8} {self.dtype}"
        arguments = [f"# a{i}: {shape} {spec}" for i, (shape, spec) in enumerate(self.arguments)]
        return "\n".join([details, *arguments, *self.lines])

    @property
    def explicit(self) -> dict[str, int]:
        """The axes that specs may name, with their sizes."""
        return {axis: size for axis, size in self.mesh.items() if axis not in self.auto}

    @property
    def against_mesh_order(self) -> bool:
        """Whether a dimension is sharded over two axes in another order than that of the mesh."""
        axes = [*self.mesh]
        pairs = re.findall(r"(?<!P)\('(\w+)', '(\w+)'", str(self))
        return any(axes.index(first) > axes.index(second) for first, second in pairs)

    def fun(self, *arguments: jax.Array) -> Any:
        names = _names(arguments)
        for line in self.lines:
            exec(line, names)
        return names[self.lines[-1].split(" = ")[0]], names[self.lines[0].split(" = ")[0]]

    def whole(self, *arguments: jax.Array) -> Any:
        """The function with what is around the statements."""
        if self.around == "jit":
            return jax.jit(self.fun)(*arguments)
        if self.around == "checkpoint":
            return jax.checkpoint(self.fun)(*arguments)
        if self.around == "cond":
            return lax.cond(
                jnp.sum(arguments[0]) > 0,
                self.fun,
                lambda *a: self.fun(a[0] * 2, *a[1:]),
                *arguments,
            )
        if self.around == "scan":
            first, *others = arguments

            def step(carry, _):
                y, z = self.fun(carry, *others)
                return carry + jnp.mean(y).astype(carry.dtype), z

            return lax.scan(step, first, None, length=2)
        return self.fun(*arguments)


def _names(arguments: Iterable[Any]) -> dict[str, Any]:
    names: dict[str, Any] = {f"a{i}": array for i, array in enumerate(arguments)}
    return names | {"jax": jax, "jnp": jnp, "lax": lax, "P": P, "reshard": reshard}


class _Drawing:
    """Draws statements while they are traced."""

    def __init__(self, generator: random.Random, case: ExplicitCase):
        self.generator, self.case = generator, case
        self.kind = ""
        #: A weight that was made to be multiplied by an array next.
        self.planned: tuple[str, str] | None = None

    def spec(self, shape: tuple[int, ...]) -> P:
        """Several axes may shard a dimension, in any order."""
        names: list[list[str]] = [[] for _ in shape]
        axes = [*self.case.explicit]
        self.generator.shuffle(axes)
        for axis in axes:
            i = self.generator.randrange(-1, len(shape))
            if i >= 0:
                names[i].append(axis)
                if shape[i] % math.prod(self.case.mesh[name] for name in names[i]):
                    names[i].pop()
        return P(*(tuple(each) if len(each) > 1 else each[0] if each else None for each in names))

    def near(self, shape: tuple[int, ...], spec: P) -> P:
        """A spec with an axis more or less, as gathers and scatters have; or any."""
        generator, choice = self.generator, self.generator.random()
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        names = [list(e) if isinstance(e, tuple) else [e] if e else [] for e in entries]
        used = [i for i, each in enumerate(names) if each]
        free = [a for a in self.case.explicit if not any(a in each for each in names)]
        if used and choice < 0.5:
            i = generator.choice(used)
            names[i].pop(generator.randrange(len(names[i])))
        elif free and choice < 0.7:
            i = generator.randrange(len(shape))
            names[i].insert(generator.randrange(len(names[i]) + 1), generator.choice(free))
        else:
            return self.spec(shape)
        return P(*(tuple(each) if len(each) > 1 else each[0] if each else None for each in names))

    def argument(self, shape: tuple[int, ...]) -> str:
        self.case.arguments.append((shape, self.spec(shape)))
        return f"a{len(self.case.arguments) - 1}"

    def candidates(self, scope: dict[str, Any]) -> list[str]:
        """Statements to try, the one that is wanted most first."""
        choose = self.generator.choice
        names = [name for name in scope if name.startswith(("a", "y"))]
        if self.planned is not None:
            (x, w), self.planned = self.planned, None
            return self.products(scope, x, w)
        x, kind = choose(names[-3:]), choose(KINDS)
        if self.kind in FOLLOWING and self.generator.random() < 0.6:
            x, kind = names[-1], choose(FOLLOWING[self.kind])
        shape, self.kind = scope[x].shape, kind
        if kind == "reshard":
            return [f"reshard({x}, {self.near(shape, scope[x].sharding.spec)})"]
        if kind == "map":
            return [choose(("jnp.sin({})", "{} * 0.5", "-{}", "{}.astype('bfloat16')")).format(x)]
        if kind == "sum":
            same = [n for n in names if scope[n].shape == shape and n != x] or [x]
            y, spec = choose(same), self.spec(shape)
            operator = choose("+-")
            return [f"{x} {operator} {y}", f"reshard({x}, {spec}) {operator} reshard({y}, {spec})"]
        if kind == "layout":
            return self.layouts(x, shape)
        return self.dots(names, scope, x)

    def layouts(self, x: str, shape: tuple[int, ...]) -> list[str]:
        """Writes the same numbers in another layout."""
        choose, i = self.generator.choice, self.generator.randrange(len(shape))
        kind = choose(("transpose", "merge", "merge", "split", "squeeze", "expand", "both"))
        if kind == "transpose":
            order = list(range(len(shape)))
            self.generator.shuffle(order)
            return [f"jnp.transpose({x}, {order})"]
        if kind == "squeeze" and 1 in shape[1:]:
            return [f"jnp.squeeze({x}, {shape.index(1, 1)})"]
        if kind == "expand" and len(shape) < 5:
            return [f"jnp.expand_dims({x}, {choose(range(len(shape) + 1))})"]
        new = shape
        if kind in ("split", "both") and len(shape) < 5:
            new = (*shape[:i], *self.factors(shape[i]), *shape[i + 1 :])
        if kind != "split" and len(new) > 2:
            i = self.generator.randrange(len(new) - 1)
            new = (*new[:i], new[i] * new[i + 1], *new[i + 2 :])
        # JAX asks for the sharding of some results.
        return [f"jnp.reshape({x}, {new})", f"{x}.reshape({new}, out_sharding={self.spec(new)})"]

    def factors(self, size: int) -> tuple[int, int]:
        first = self.generator.choice([i for i in range(1, size + 1) if size % i == 0])
        return first, size // first

    def dots(self, names: list[str], scope: dict[str, Any], x: str) -> list[str]:
        shape, choose = scope[x].shape, self.generator.choice
        i = self.generator.randrange(len(shape))
        others = [n for n in names if len(scope[n].shape) == 2 and shape[i] in scope[n].shape]
        if others and self.generator.random() < 0.5:
            return self.products(scope, x, choose(others))
        w = self.argument(choose(((shape[i], choose(SIZES)), (choose(SIZES), shape[i]))))
        self.planned = x, w
        return []

    def products(self, scope: dict[str, Any], x: str, w: str) -> list[str]:
        """Matmuls of an array and a weight, typed in several ways."""
        shape, w_shape, choose = scope[x].shape, scope[w].shape, self.generator.choice
        pairs = [(i, j) for i, m in enumerate(shape) for j, n in enumerate(w_shape) if m == n]
        i, j = choose(pairs)
        dot = f"jnp.tensordot({x}, {w}, (({i},), ({j},))"
        result = shape[:i] + shape[i + 1 :] + w_shape[:j] + w_shape[j + 1 :]
        typed = f"{dot}, out_sharding={self.spec(result)})"
        spec = scope[x].sharding.spec
        axis = spec[i] if i < len(spec) else None
        if isinstance(axis, str) and self.generator.random() < 0.3:
            columns = P(*(axis if k == j else None for k in range(2)))
            entries = (None if axis in (entry or ()) else entry for entry in self.spec(result))
            summands = P(*entries, unreduced=frozenset({axis}))
            dot = f"jnp.tensordot({x}, reshard({w}, {columns}), (({i},), ({j},))"
            return [f"reshard({dot}, out_sharding={summands}), {self.spec(result)})"]
        if self.case.explicit and self.generator.random() < 0.2:
            summed = choose([*self.case.explicit])
            x, w = f"reshard({x}, {_spec({i: summed})})", f"reshard({w}, {_spec({j: summed})})"
            dot = f"jnp.tensordot({x}, {w}, (({i},), ({j},))"
            return [f"{dot}, out_sharding={self.spec(result)})", typed]
        if len(self.case.explicit) > 1 and len(shape) > 1 and self.generator.random() < 0.3:
            return [self.layer(x, w, len(shape), i, j), typed]
        return [f"{dot})", typed] if self.generator.random() < 0.5 else [typed]

    def layer(self, x: str, w: str, dimensions: int, i: int, j: int) -> str:
        """A matmul with a gather of x or a sum, and a weight that a second axis shards."""
        choose, rows = self.generator.choice, [k for k in range(dimensions) if k != i]
        axis, other = self.generator.sample(list(self.case.explicit), 2)
        gathered, *batch = self.generator.sample(rows, len(rows))
        columns, along = 1 - j, {k: other for k in batch[:1]}
        if self.generator.random() < 0.5:
            before, whole, product = {gathered: axis, **along}, along, {len(rows): axis}
            sharded = choose(({columns: axis, j: other}, {columns: (axis, other)}))
        else:
            before = whole = {i: axis, **along}
            sharded, product = {j: axis, columns: other}, {rows.index(gathered): axis}
        product |= {rows.index(k): name for k, name in along.items()}
        weight = {k: axis for k, names in sharded.items() if axis in names}
        x, w = f"reshard({x}, {_spec(before)})", f"reshard({w}, {_spec(sharded)})"
        dot = f"jnp.tensordot(reshard({x}, {_spec(whole)}), reshard({w}, {_spec(weight)})"
        return f"{dot}, (({i},), ({j},)), out_sharding={_spec(product)})"


def _spec(entries: dict[int, Any]) -> P:
    return P(*(entries.get(k) for k in range(max(entries, default=-1) + 1)))


def drawn(seed: int) -> tuple[ExplicitCase, Mesh]:
    """The program of a seed, and its mesh. Trace the program inside the mesh."""
    generator = random.Random(seed)
    sizes = generator.choice(MESHES)
    auto = generator.sample([*sizes], 1) if len(sizes) > 1 and generator.random() < 0.1 else ()
    dtypes = (*DTYPES, "float64") if jax.config.read("jax_enable_x64") else DTYPES
    choose = generator.choice
    case = ExplicitCase(
        sizes,
        tuple(auto),
        choose(MODES),
        choose(AROUND),
        choose(IMPLEMENTATIONS),
        choose(RECIPES),
        choose(dtypes),
    )
    mesh = _mesh(tuple(sizes.items()), case.auto)
    drawing = _Drawing(generator, case)
    drawing.argument(generator.choice(SHAPES))
    for _ in range(2):
        drawing.argument((generator.choice(SIZES), generator.choice(SIZES)))
    with jax.set_mesh(mesh):
        for _ in range(generator.choice((3, 4, 5, 6, 8))):
            _add_statement(drawing, mesh)
    return case, mesh


def _add_statement(drawing: _Drawing, mesh: Mesh) -> None:
    """Adds a statement that JAX accepts after the others, if one is found soon."""
    case = drawing.case
    for _ in range(5):
        scope = _types(case, mesh, case.lines)
        for text in drawing.candidates(scope):
            line = f"y{len(case.lines)} = {text}"
            try:
                _types(case, mesh, [*case.lines, line])
            except Exception:  # JAX refuses it.
                continue
            case.lines.append(line)
            return


def _types(case: ExplicitCase, mesh: Mesh, lines: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def program(*arguments: jax.Array) -> None:
        names = _names(arguments)
        for line in lines:
            exec(line, names)
        found.update((k, jax.typeof(v)) for k, v in names.items() if isinstance(v, jax.Array))

    jax.eval_shape(program, *structs_of(case, mesh))
    return found


def structs_of(case: ExplicitCase, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(shape, case.dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in case.arguments
    ]


def _mesh(sizes: tuple[tuple[str, int], ...], auto: tuple[str, ...]) -> Mesh:
    names, counts = zip(*sizes, strict=True)
    types = tuple(AxisType.Auto if name in auto else AxisType.Explicit for name in names)
    return jax.make_mesh(counts, names, types, devices=jax.devices()[: math.prod(counts)])
