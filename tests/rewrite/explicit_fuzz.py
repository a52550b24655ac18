"""Random programs over Explicit mesh axes: ``python -m tests.rewrite.explicit_fuzz``.

A seed determines the program. Statements are drawn while JAX traces them: one that JAX refuses is
dropped. Each program is compared with its rewritten form in float64, by the simulator, and all
results must have the same types. See `tests.rewrite.fuzz` for programs with `shard_map`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from collective_matmul.rewrite import find_sites, overlap
from tests.rewrite.fuzz import TOLERANCE, Search, main, mismatch
from tests.rewrite.programs import gradients_of
from tests.rewrite.simulator import simulate_jaxpr

MESHES = ({"d": 2, "t": 2}, {"d": 2, "t": 2}, {"t": 3}, {"d": 2, "t": 3}, {"d": 1, "t": 2})
MESHES += ({"d": 2, "t": 2, "f": 2},)
SIZES = (6, 6, 12, 4)
MODES = ("not", "not", "before", "after")
AROUND = ("nothing", "nothing", "jit", "checkpoint", "scan", "cond")
IMPLEMENTATIONS = ("ring", "ring", "xla", "ring_two_way")


@dataclass
class ExplicitCase:
    """A program and how it is executed.

    Attributes:
      mesh: the axes, of type Explicit, with their sizes.
      mode: "not" differentiated, or "before" or "after" the rewrite.
      around: what the statements are inside.
      implementation: as for `overlap`.
      arguments: shapes and specs.
      lines: the statements, over arrays a0, a1, ... and y0, y1, ...
    """

    mesh: dict[str, int]
    mode: str
    around: str
    implementation: str
    arguments: list[tuple[tuple[int, ...], P]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        details = f"# {self.mesh} {self.mode} {self.around} {self.implementation}"
        arguments = [f"# a{i}: {shape} {spec}" for i, (shape, spec) in enumerate(self.arguments)]
        return "\n".join([details, *arguments, *self.lines])

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
                return carry + jnp.mean(y), z

            return lax.scan(step, first, None, length=2)
        return self.fun(*arguments)


def _names(arguments: Iterable[Any]) -> dict[str, Any]:
    names: dict[str, Any] = {f"a{i}": array for i, array in enumerate(arguments)}
    return names | {"jax": jax, "jnp": jnp, "lax": lax, "P": P, "reshard": reshard}


class _Drawing:
    """Draws statements while they are traced."""

    def __init__(self, generator: random.Random, case: ExplicitCase):
        self.generator, self.case = generator, case
        self.arguments: dict[str, jax.Array] = {}

    def spec(self, shape: tuple[int, ...]) -> P:
        entries: list[Any] = [None] * len(shape)
        for axis, size in self.case.mesh.items():
            i = self.generator.randrange(-1, len(shape))
            if i < 0 or shape[i] % size:
                continue
            if entries[i] is None:
                entries[i] = axis
            elif (
                isinstance(entries[i], str) and shape[i] % (self.case.mesh[entries[i]] * size) == 0
            ):
                pair = [entries[i], axis]
                self.generator.shuffle(pair)
                entries[i] = tuple(pair)
        return P(*entries)

    def argument(self, shape: tuple[int, ...]) -> str:
        self.case.arguments.append((shape, self.spec(shape)))
        return f"a{len(self.case.arguments) - 1}"

    def candidates(self, scope: dict[str, Any]) -> list[str]:
        """Statements to try, the one that is wanted most first."""
        choose = self.generator.choice
        names = [name for name in scope if name.startswith(("a", "y"))]
        x = choose(names[-3:])
        shape = scope[x].shape
        kind = choose(("dot",) * 5 + ("reshard",) * 4 + ("sum",) * 3 + ("map",) * 2 + ("layout",))
        if kind == "reshard":
            return [f"reshard({x}, {self.spec(shape)})"]
        if kind == "map":
            return [choose(("jnp.sin({})", "{} * 0.5", "-{}", "{}.astype('bfloat16')")).format(x)]
        if kind == "sum":
            same = [n for n in names if scope[n].shape == shape and n != x] or [x]
            y, spec = choose(same), self.spec(shape)
            operator = choose("+-")
            return [f"{x} {operator} {y}", f"reshard({x}, {spec}) {operator} reshard({y}, {spec})"]
        if kind == "layout":
            order = list(range(len(shape)))
            self.generator.shuffle(order)
            merged = (shape[0] * shape[1], *shape[2:]) if len(shape) > 1 else shape
            return [choose((f"jnp.transpose({x}, {order})", f"{x}.reshape({merged})"))]
        return self.dots(names, scope, x)

    def dots(self, names: list[str], scope: dict[str, Any], x: str) -> list[str]:
        shape, choose = scope[x].shape, self.generator.choice
        i = self.generator.randrange(len(shape))
        others = [n for n in names if len(scope[n].shape) == 2 and shape[i] in scope[n].shape]
        is_new = not others or self.generator.random() < 0.5
        w_shape = choose(((shape[i], choose(SIZES)), (choose(SIZES), shape[i])))
        w = self.argument(w_shape) if is_new else choose(others)
        w_shape = w_shape if is_new else scope[w].shape
        j = w_shape.index(shape[i])
        dot = f"jnp.tensordot({x}, {w}, (({i},), ({j},))"
        if is_new:
            return [f"# {dot})"]
        result = shape[:i] + shape[i + 1 :] + w_shape[:j] + w_shape[j + 1 :]
        typed = f"{dot}, out_sharding={self.spec(result)})"
        spec = scope[x].sharding.spec
        axis = spec[i] if i < len(spec) else None
        if isinstance(axis, str) and axis in self.case.mesh and self.generator.random() < 0.3:
            columns = P(*(axis if k == j else None for k in range(2)))
            entries = (None if axis in (entry or ()) else entry for entry in self.spec(result))
            summands = P(*entries, unreduced=frozenset({axis}))
            dot = f"jnp.tensordot({x}, reshard({w}, {columns}), (({i},), ({j},))"
            return [f"reshard({dot}, out_sharding={summands}), {self.spec(result)})"]
        if len(self.case.mesh) > 1 and len(shape) > 1 and self.generator.random() < 0.3:
            return [self.layer(x, w, len(shape), i, j), typed]
        return [f"{dot})", typed] if self.generator.random() < 0.5 else [typed]

    def layer(self, x: str, w: str, dimensions: int, i: int, j: int) -> str:
        """A matmul with a gather of x or a sum, and a weight that a second axis shards."""
        choose, rows = self.generator.choice, [k for k in range(dimensions) if k != i]
        axis, other = self.generator.sample(list(self.case.mesh), 2)
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
    case = ExplicitCase(
        sizes, generator.choice(MODES), generator.choice(AROUND), generator.choice(IMPLEMENTATIONS)
    )
    mesh = _mesh(tuple(sizes.items()))
    drawing = _Drawing(generator, case)
    drawing.argument(generator.choice(((6, 6, 12), (6, 12, 6), (12, 6), (2, 6, 4))))
    for _ in range(2):
        drawing.argument((generator.choice(SIZES), generator.choice(SIZES)))
    with jax.set_mesh(mesh):
        for _ in range(generator.choice((3, 4, 5, 6, 8))):
            _add_statement(drawing, mesh)
    return case, mesh


def _add_statement(drawing: _Drawing, mesh: Mesh) -> None:
    """Adds a statement that JAX accepts after the others, if one is found soon."""
    case = drawing.case
    for _ in range(4):
        scope = _types(case, mesh, case.lines)
        for text in drawing.candidates(scope):
            if text.startswith("# "):  # It has a new argument: what it is used for is drawn next.
                break
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

    jax.eval_shape(program, *_structs(case, mesh))
    return found


def _structs(case: ExplicitCase, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for shape, spec in case.arguments
    ]


def _mesh(sizes: tuple[tuple[str, int], ...]) -> Mesh:
    names, counts = zip(*sizes, strict=True)
    devices = jax.devices()[: int(np.prod(counts))]
    return jax.make_mesh(counts, names, (AxisType.Explicit,) * len(names), devices=devices)


def functions(case: ExplicitCase) -> tuple[Callable, Callable]:
    """The plain program and its rewritten form."""
    count = len(case.arguments)

    def rewrite(fun: Callable) -> Callable:
        return overlap(fun, implementation=case.implementation)

    if case.mode == "before":
        return gradients_of(case.whole, count), rewrite(gradients_of(case.whole, count))
    if case.mode == "after":
        return gradients_of(case.whole, count), gradients_of(rewrite(case.whole), count)
    return case.whole, rewrite(case.whole)


class Refused(Exception):
    """JAX refuses the plain program."""


def finding(case: ExplicitCase, mesh: Mesh) -> tuple[str | None, int]:
    """What is wrong with the rewritten form of a program, if anything is; the number of sites.

    Raises:
      Refused: if something is wrong with the program itself.
    """
    generator = np.random.default_rng(0)
    arguments = [generator.standard_normal(shape, np.float32) for shape, _ in case.arguments]
    with jax.set_mesh(mesh), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        structs = _structs(case, mesh)
        plain, rewritten = functions(case)
        try:
            program = jax.make_jaxpr(plain)(*structs)
            expected = simulate_jaxpr(program, arguments, float64=True)
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        try:
            found = find_sites(case.whole, implementation=case.implementation)(*structs)
            new = jax.make_jaxpr(rewritten)(*structs)
            actual = simulate_jaxpr(new, arguments, float64=True)
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0][:300], 0
        sites = sum(site.replaced for site in found)
        types = [str(aval) for aval in program.out_avals], [str(aval) for aval in new.out_avals]
        if types[0] != types[1]:
            return f"types: {types[1]} instead of {types[0]}", sites
        wrong = mismatch(actual, expected, [TOLERANCE] * len(expected))
        return (f"values: {wrong}" if wrong else None), sites


def search(seeds: Iterable[int], every: int = 0, stop: int = 10**9) -> Search:
    """Compares the program of each seed with its rewritten form."""
    result = Search()
    for seed in seeds:
        case, mesh = drawn(seed)
        try:
            if not case.lines:
                raise Refused
            wrong, sites = finding(case, mesh)
        except Refused:
            result.refused += 1
            continue
        result.programs, result.sites = result.programs + 1, result.sites + sites
        if wrong:
            print(f"# seed {seed}: {wrong}\n{case}", flush=True)
            result.findings.append((seed, wrong, case))
            if len(result.findings) >= stop:
                break
        if every and result.programs % every == 0:
            print(f"# {result.programs} programs, {result.refused} refused, {result.sites} sites")
    return result


if __name__ == "__main__":
    main("python -m tests.rewrite.explicit_fuzz", search)
