"""Random programs over Explicit mesh axes: ``python -m tests.rewrite.explicit_fuzz``.

`tests.rewrite.explicit_grammar` draws them. Each program is compared with its rewritten form in
float64, by the simulator, and all results must have the same types. What XLA is known to refuse is
looked for in the rewritten form. One program in `COMPILED` is also compiled and executed. Set
``JAX_ENABLE_X64=1`` for programs with 64-bit types. See `tests.rewrite.fuzz` for programs with
`shard_map`.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import Mesh, NamedSharding

from collective_matmul.jaxprs.graph import type_of
from collective_matmul.rewrite import find_sites, overlap
from tests.rewrite.explicit_grammar import ExplicitCase, drawn, structs_of
from tests.rewrite.fuzz import TOLERANCE, UNIT, WORSE, Search, _error, main, mismatch
from tests.rewrite.programs import gradients_of
from tests.rewrite.simulator import simulate_jaxpr

#: One program in this number is compiled, and of those with axes in another order than the mesh.
COMPILED, COMPILED_ORDERS = 40, 5
#: Sums over devices, and those of them that keep the shape.
_SUMS = {"psum", "psum_invariant", "reduce_scatter", "pmax", "pmin"}
_ALL_REDUCES = _SUMS - {"reduce_scatter"}
#: From this error on, XLA computes the plain program wrongly: by whether it rounds to 16 bits.
_WRONG = {False: 0.01, True: 0.3}


def functions(case: ExplicitCase) -> tuple[Callable, Callable]:
    """The plain program and its rewritten form."""
    count = len(case.arguments)

    def rewrite(fun: Callable) -> Callable:
        return overlap(fun, implementation=case.implementation, fp8=case.fp8)

    if case.mode == "before":
        return gradients_of(case.whole, count), rewrite(gradients_of(case.whole, count))
    if case.mode == "after":
        return gradients_of(case.whole, count), gradients_of(rewrite(case.whole), count)
    return case.whole, rewrite(case.whole)


class Refused(Exception):
    """JAX refuses the plain program."""


def finding(case: ExplicitCase, mesh: Mesh, compiled: bool = False) -> tuple[str | None, int]:
    """Mistake in the rewritten form of a program, if there is any; the number of sites.

    Raises:
      Refused: if something is wrong with the program itself.
    """
    generator = np.random.default_rng(0)
    arguments = [
        generator.standard_normal(shape, np.float32).astype(case.dtype)
        for shape, _ in case.arguments
    ]
    with jax.set_mesh(mesh), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        structs = structs_of(case, mesh)
        plain, rewritten = functions(case)
        try:
            program = jax.make_jaxpr(plain)(*structs)
            expected = simulate_jaxpr(program, arguments, float64=True)
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        try:
            found = find_sites(case.whole, implementation=case.implementation)(*structs)
            new = jax.make_jaxpr(rewritten)(*structs)
            # What is rounded to 8 bits has other values.
            is_exact = case.fp8 is None
            actual = simulate_jaxpr(new, arguments, float64=True) if is_exact else expected
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0][:300], 0
        sites = sum(site.replaced for site in found)
        types = [str(aval) for aval in program.out_avals], [str(aval) for aval in new.out_avals]
        if types[0] != types[1]:
            return f"types: {types[1]} instead of {types[0]}", sites
        if refused := refused_by_xla(new.jaxpr):
            return f"XLA: {refused}", sites
        wrong = mismatch(actual, expected, [TOLERANCE] * len(expected))
        if not wrong and compiled:
            wrong = _executed(case, mesh, expected, arguments)
        return (f"values: {wrong}" if wrong else None), sites


def refused_by_xla(jaxpr: Jaxpr, mesh: Any = None, left: tuple[str, ...] = ()) -> str | None:
    """Names what XLA does not compile in a `shard_map` that leaves axes of several devices to it.

    Looked for, because it may end the process. As measured with jaxlib 0.10.2 to 0.12 on CPUs.

    Args:
      jaxpr: a program.
      mesh: that of the `shard_map` around it, if there is one.
      left: the axes that it leaves.
    """
    for equation in jaxpr.eqns:
        name, parameters, inside = equation.primitive.name, equation.params, (mesh, left)
        if left and name in _SUMS:
            axes = parameters["axes"] if "axes" in parameters else parameters["axis_name"]
            axes = axes if isinstance(axes, tuple) else (axes,)
            if name in _ALL_REDUCES and math.prod(mesh.shape[axis] for axis in axes) == 1:
                return f"{name} over {axes}, of one device, beside {left}"
            if any(type_of(atom).dtype.itemsize == 2 for atom in equation.invars):
                return f"{name} in 16 bits beside {left}"
        if left and name == "reduce":
            return f"a reduction by a function of its own beside {left}"
        if name == "shard_map":
            inside = parameters["mesh"], _left(parameters)
        for inner in jaxprs_in_params(parameters):
            if found := refused_by_xla(inner, *inside):
                return found
    return None


def _left(parameters: dict[str, Any]) -> tuple[str, ...]:
    """The axes of several devices that a `shard_map` leaves to the compiler."""
    shape, manual = parameters["mesh"].shape, parameters["newly_manual_axes"]
    return tuple(axis for axis, size in shape.items() if size > 1 and axis not in manual)


def _executed(
    case: ExplicitCase, mesh: Mesh, exact: list[Any], arguments: list[np.ndarray]
) -> str | None:
    """Compiles and executes both forms, in the program's dtypes."""
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, (_, spec) in zip(arguments, case.arguments, strict=True)
    ]
    results = []
    for fun in functions(case):
        try:
            results.append(jax.tree.leaves(jax.jit(fun)(*placed)))
        except Exception as error:
            if not results:
                raise Refused(str(error)) from error
            return f"cannot be compiled: {type(error).__name__}: {error}".splitlines()[0][:300]
    if case.fp8 is not None:
        return None
    rounds = case.dtype == "bfloat16" or any("bfloat16" in line for line in case.lines)
    floor = UNIT["bfloat16"] if rounds else 1e-4
    for number, (x, y, z) in enumerate(zip(*results, exact, strict=True)):
        plain, ours = _error(x, z), _error(y, z)
        if plain > _WRONG[rounds]:
            print(
                f"# XLA: result {number} of the plain program is off by {plain:.3g},"
                f" of the rewritten one by {ours:.3g}\n{case}",
                flush=True,
            )
        elif ours > WORSE * (plain + floor):
            return f"executed: result {number} is off by {ours:.3g}, without overlap {plain:.3g}"
    return None


def _is_compiled(seed: int, case: ExplicitCase) -> bool:
    # XLA ends the process at some programs over axes of 2 and 3 devices, without `overlap` too
    # (jaxlib 0.12).
    if {2, 3} <= set(case.mesh.values()):
        return False
    return seed % (COMPILED_ORDERS if case.against_mesh_order else COMPILED) == 0


def search(
    seeds: Iterable[int], every: int = 0, stop: int = 10**9, compiled: bool = False
) -> Search:
    """Compares the program of each seed with its rewritten form."""
    result = Search()
    for seed in seeds:
        case, mesh = drawn(seed)
        try:
            if not case.lines:
                raise Refused
            wrong, sites = finding(case, mesh, compiled and _is_compiled(seed, case))
        except Refused:
            result.refused += 1
            continue
        result.programs, result.sites = result.programs + 1, result.sites + sites
        if wrong:
            print(f"# seed {seed}, program {result.programs}: {wrong}\n{case}", flush=True)
            result.findings.append((seed, wrong, case))
            if len(result.findings) >= stop:
                break
        if every and result.programs % every == 0:
            print(
                f"# {result.programs} programs, {result.refused} refused, {result.sites} sites",
                flush=True,
            )
    return result


if __name__ == "__main__":
    main("python -m tests.rewrite.explicit_fuzz", functools.partial(search, compiled=True))
