"""Programs with a `shard_map` that a seed draws, on every machine the same."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul.rewrite import overlap
from tests.fp8_reference import SHIPPED_RECIPES
from tests.rewrite.grammar import SIZES, Block, Shape, Source, Spec
from tests.rewrite.nested_blocks import add_statement
from tests.rewrite.programs import gradients_of, loss_of

MESHES = (
    *({"t": 2}, {"t": 3}, {"d": 2, "t": 2}, {"d": 2, "t": 2}, {"t": 2, "d": 3}),
    *({"t": 1, "d": 2}, {"d": 1, "t": 2}, {"f": 2, "d": 1, "t": 2}),
)
IMPLEMENTATIONS = ("ring",) * 6 + ("xla", "ring_two_way", "ring_direct")
MODES = ("not", "not", "inside", "before", "after", "vmapped", "forward")


@dataclass(frozen=True)
class Case:
    """A program and how it is executed.

    Attributes:
      lines: statements over local arrays a0, a1, ...
      results: the names of its results.
      arguments: global shapes and specs.
      mesh: all axes with their sizes.
      manual: the axes of the shard_map.
      explicit: whether the other axes are Explicit, with the leading dimensions over them.
      dtype: of the arguments.
      rounds: whether anything is computed in a coarser dtype than float32.
      wide: whether JAX has 64-bit types.
      fp8: as for `overlap`.
      mode: "not" differentiated, or "inside" the shard_map, "before" or "after" the rewrite;
        "vmapped" after the rewrite, or differentiated "forward" before it.
      check_vma: as for `jax.shard_map`.
      strict: whether dtypes are promoted strictly.
      implementation: as for `overlap`.
      seed: of the draw; also of the arguments' values.
    """

    lines: tuple[str, ...]
    results: tuple[str, ...]
    arguments: tuple[tuple[Shape, Spec], ...]
    mesh: tuple[tuple[str, int], ...]
    manual: tuple[str, ...]
    explicit: bool
    dtype: str
    rounds: bool
    wide: bool
    fp8: Any
    mode: str
    check_vma: bool
    strict: bool
    implementation: str
    seed: int

    @property
    def text(self) -> str:
        names = ", ".join(f"a{i}" for i in range(len(self.arguments)))
        results = ", ".join(f"{name}[None]" for name in self.results)
        body = "\n    ".join([*self.lines, f"return ({results},)"])
        return f"def body({names}):\n    {body}\n"

    def __str__(self) -> str:
        details = dataclasses.asdict(self)
        del details["lines"], details["results"]
        return "\n".join([f"# {key}: {value}" for key, value in details.items()] + [self.text])


def drawn(seed: int) -> Case:
    """The program of a seed."""
    generator = random.Random(seed)
    mesh = generator.choice(MESHES)
    manual = tuple(mesh)
    if len(mesh) > 1 and generator.random() < 0.2:
        manual = ("t",)
    wide = generator.random() < 0.15
    dtypes = ("float32",) * 5 + ("bfloat16", "float16")
    dtype = generator.choice((*dtypes, "float64", "float64") if wide else dtypes)
    fp8 = generator.choice(tuple(SHIPPED_RECIPES)) if generator.random() < 0.12 else None
    mode = generator.choice(MODES)
    source = Source(generator, {axis: mesh[axis] for axis in manual}, dtype, mode != "not")
    shapes = [generator.choice(((2, 6, 4), (2, 2, 4), (6, 4), (2, 3, 4))), (4, 4)]
    scope = [source.argument(shape) for shape in reversed(shapes)]
    if generator.random() < 0.02:
        scope.append(source.argument((generator.choice(SIZES), 0)))
    block = Block(source, scope, manual, source.reverse)
    for _ in range(generator.choice((1, 2, 2, 3))):
        add_statement(block)
    made = [value.name for value in block.scope if value.name.startswith("y")] or ["a0"]
    return Case(
        tuple(block.lines),
        tuple(dict.fromkeys([made[-1], generator.choice(made)])),
        tuple(source.arguments),
        tuple(mesh.items()),
        manual,
        explicit=generator.random() < 0.5,
        dtype=dtype,
        rounds=source.rounds or dtype in ("bfloat16", "float16"),
        wide=wide,
        fp8=fp8,
        mode=mode,
        check_vma=generator.random() < 0.5,
        strict=generator.random() < 0.3,
        implementation=generator.choice(IMPLEMENTATIONS),
        seed=seed,
    )


@functools.cache
def _mesh(axes: tuple[tuple[str, int], ...], manual: tuple[str, ...], explicit: bool) -> Mesh:
    other = AxisType.Explicit if explicit else AxisType.Auto
    types = tuple(AxisType.Auto if name in manual else other for name, _ in axes)
    names, sizes = zip(*axes, strict=True)
    count = int(np.prod(sizes))
    return jax.make_mesh(sizes, names, axis_types=types, devices=jax.devices()[:count])


def _body(case: Case) -> Callable:
    def vary(x: jax.Array) -> jax.Array:
        for axis in case.manual if case.check_vma else ():
            with contextlib.suppress(ValueError):  # It varies already.
                x = lax.pcast(x, axis, to="varying")
        return x

    names: dict[str, Any] = {
        "jax": jax, "jnp": jnp, "lax": lax, "checkpoint_name": checkpoint_name,
        "loss_of": loss_of, "vary": vary,
    }  # fmt: skip
    exec(case.text, names)
    body, count = names["body"], len(case.arguments)
    if case.mode != "inside":
        return body
    return lambda *args: [dx[None] for dx in gradients_of(body, count)(*args)]


def functions(case: Case) -> tuple[Callable, Callable]:
    """The plain program and its rewritten form, both of global arrays."""
    count = len(case.arguments)
    fun = jax.shard_map(
        _body(case),
        mesh=_mesh(case.mesh, case.manual, case.explicit),
        in_specs=tuple(P(*spec) for _, spec in case.arguments),
        out_specs=P(case.manual),
        axis_names=set(case.manual),
        check_vma=case.check_vma,
    )
    rewrite = functools.partial(overlap, implementation=case.implementation, fp8=case.fp8)
    if case.mode == "before":
        return gradients_of(fun, count), rewrite(gradients_of(fun, count))
    if case.mode == "after":
        return gradients_of(fun, count), gradients_of(rewrite(fun), count)
    if case.mode == "vmapped":
        return _vmapped(fun), _vmapped(rewrite(fun))
    if case.mode == "forward":
        return _derivative(fun), rewrite(_derivative(fun))
    return fun, rewrite(fun)


def _vmapped(fun: Callable) -> Callable:
    return lambda *args: jax.vmap(fun)(*(jnp.stack([x, 0.5 * x]) for x in args))


def _derivative(fun: Callable) -> Callable:
    return lambda *args: jax.jvp(fun, args, args)[1]


def structs_of(case: Case) -> list[jax.ShapeDtypeStruct]:
    mesh = _mesh(case.mesh, case.manual, case.explicit)
    other = [name for name, _ in case.mesh if name not in case.manual]

    def sharding(shape: Shape, spec: Spec) -> NamedSharding | None:
        if not (other and case.explicit):
            return None
        divided = spec[:1] == (None,) and shape[0] % dict(case.mesh)[other[0]] == 0
        return NamedSharding(mesh, P(other[0]) if divided else P())

    return [
        jax.ShapeDtypeStruct(shape, case.dtype, sharding=sharding(shape, spec))
        for shape, spec in case.arguments
    ]


def values_of(case: Case) -> list[np.ndarray]:
    generator = np.random.default_rng(case.seed)
    return [
        generator.standard_normal(shape, np.float32).astype(jnp.dtype(case.dtype))
        for shape, _ in case.arguments
    ]
