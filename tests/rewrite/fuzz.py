"""Random programs, each compared with its rewritten form: ``python -m tests.rewrite.fuzz``.

`tests.rewrite.random_programs` draws them. A program that JAX itself refuses is not counted. One
program in `COMPILED` is also compiled and executed on simulated devices, after the simulator
has shown that no device waits for ever.

Values and gradients are compared in float64, whatever the dtypes of the program are: sums in
another order then agree within 1e-9 however the program amplifies errors, and anything else is a
mistake. Where a program computes in bfloat16 or float16, it is executed in these too, and must not
round much worse than the plain program does. `tests.rewrite.minimize` makes a program that was
found smaller.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from collective_matmul.rewrite import find_sites
from tests.conftest import ON_THE_CPU
from tests.rewrite.random_programs import Case, drawn, functions, structs_of, values_of
from tests.rewrite.simulator import DeadlockError, simulate_jaxpr

DEVICES = 8
#: One program in this number is compiled.
COMPILED = 100
#: Constants of the backward are in float32, which float64 sums see.
TOLERANCE = 1e-6
#: A relative change of the arguments, a few roundings of float64.
NUDGE = 1e-14
#: How much larger than the plain program's the rounding errors may be, and the unit roundoffs.
WORSE, UNIT = 8.0, {"float32": 2.0**-8, "bfloat16": 2.0**-8, "float16": 2.0**-11}


class Refused(Exception):
    """JAX refuses the plain program, or its devices wait for ever."""


def finding(case: Case, second_pass: bool = True, compiled: bool = False) -> str | None:
    """Mistake in the rewritten form of a program; None if there is none.

    Args:
      case: the program.
      second_pass: whether a second `overlap` must find nothing to replace.
      compiled: whether both forms are also compiled and executed.

    Raises:
      Refused: if something is wrong with the program itself.
    """
    promotion = "strict" if case.strict else "standard"
    with (
        jax.numpy_dtype_promotion(promotion),
        jax.enable_x64(case.wide),
        warnings.catch_warnings(),
        np.errstate(all="ignore"),
    ):
        warnings.simplefilter("ignore")
        arguments, structs = values_of(case), structs_of(case)
        try:
            plain, rewritten = functions(case)
            expected_program = jax.make_jaxpr(plain)(*structs)
            expected = simulate_jaxpr(expected_program, arguments, float64=True)
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        try:
            actual_program = jax.make_jaxpr(rewritten)(*structs)
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0][:200]
        wrong = _difference(case, expected_program, expected, actual_program, arguments)
        # The gradient of what `overlap` returns has collectives of its own.
        if not wrong and second_pass and not case.fp8 and case.mode not in ("after", "vmapped"):
            wrong = _second_pass(case, actual_program, structs)
        if not wrong and compiled:
            wrong = _executed(case, plain, rewritten, expected)
        return wrong


def _difference(
    case: Case, plain: Any, expected: list, rewritten: Any, arguments: list[np.ndarray]
) -> str | None:
    types = [(v.shape, v.dtype) for v in plain.out_avals]
    if types != [(v.shape, v.dtype) for v in rewritten.out_avals]:
        return f"types: {rewritten.out_avals} instead of {plain.out_avals}"
    if case.fp8:
        return _difference_in_fp8(plain, expected, rewritten, arguments)
    try:
        actual = simulate_jaxpr(rewritten, arguments, float64=True)
    except DeadlockError as error:
        return f"waits for ever: {error}"
    except Exception as error:
        return f"cannot be executed: {type(error).__name__}: {error}".splitlines()[0][:200]
    if mismatch(actual, expected, [TOLERANCE] * len(expected)):
        # A program may amplify the rounding of float64 itself.
        nudged = simulate_jaxpr(
            plain, [np.asarray(x, float) * (1 + NUDGE) for x in arguments], True
        )
        bounds = [TOLERANCE + _error(x, y) * WORSE for x, y in zip(nudged, expected, strict=True)]
        if wrong := mismatch(actual, expected, bounds):
            return f"values: {wrong}"
    if not case.rounds:
        return None
    coarse, ours = simulate_jaxpr(plain, arguments), simulate_jaxpr(rewritten, arguments)
    bounds = [
        WORSE * (_error(x, y) + UNIT[case.dtype]) for x, y in zip(coarse, expected, strict=True)
    ]
    wrong = mismatch(ours, expected, bounds)
    return f"rounding: {wrong}" if wrong else None


def _difference_in_fp8(
    plain: Any, expected: list, rewritten: Any, arguments: list[np.ndarray]
) -> str | None:
    """Error beyond what operands in 8 bits explain; a wrong place is off by much more."""
    try:
        actual = simulate_jaxpr(rewritten, arguments)
    except DeadlockError as error:
        return f"waits for ever: {error}"
    except Exception as error:
        return f"cannot be executed: {type(error).__name__}: {error}".splitlines()[0][:200]
    bounds = [0.25] * len(expected)
    for seed in range(3):
        noise = np.random.default_rng(seed)
        nudged = [np.asarray(x, float) * (1 + noise.normal(0, 2**-4, x.shape)) for x in arguments]
        # In its own dtypes too, as float16 may overflow.
        own = [x.astype(y.dtype) for x, y in zip(nudged, arguments, strict=True)]
        for results in (simulate_jaxpr(plain, nudged, True), simulate_jaxpr(plain, own)):
            errors = [WORSE * error for error in map(_error, results, expected)]
            bounds = [*map(max, bounds, errors)]
    wrong = mismatch(actual, expected, bounds)
    return f"in 8 bits: {wrong}" if wrong else None


def _error(actual: Any, expected: Any) -> float:
    """The largest error as a fraction of the largest value; infinite for a NaN."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if not expected.size or not np.isfinite(expected).all():
        return 0.0
    scale = max(float(np.max(np.abs(expected))), 1e-3)
    error = float(np.max(np.abs(actual - expected))) / scale
    return error if error < np.inf else np.inf


def mismatch(actual: list, expected: list, bounds: list[float]) -> str | None:
    for i, (x, y, bound) in enumerate(zip(actual, expected, bounds, strict=True)):
        if _error(x, y) > bound:
            return f"result {i} is off by {_error(x, y):.3g} where {bound:.3g} is allowed"
    return None


def _second_pass(case: Case, program: Any, structs: list) -> str | None:
    again = find_sites(jaxpr_as_fun(program), implementation=case.implementation)(*structs)
    replaced = [site for site in again if site.replaced and not site.kept]
    return f"second pass: {replaced[0]}" if replaced else None


def _executed(case: Case, plain: Callable, rewritten: Callable, exact: list) -> str | None:
    """Compiles and executes both forms, in the program's dtypes."""
    if len(case.manual) < len(case.mesh) and (case.explicit or case.rounds or case.fp8):
        # Arguments would have to be placed first; XLA for CPUs aborts, as 16-bit sums over devices
        # are impossible beside automatic axes (jaxlib 0.10 to 0.12), whether rewritten or not.
        return None
    if any(0 in shape for shape, _ in case.arguments):
        return None  # XLA for CPUs crashes at some of them (jaxlib 0.11).
    both = jax.jit(lambda *args: [jax.tree.leaves(f(*args)) for f in (plain, rewritten)])
    arguments = values_of(case)
    try:
        expected, actual = both(*arguments)
    except Exception as error:
        try:
            jax.jit(plain).lower(*arguments).compile()
        except Exception as refusal:
            raise Refused(str(refusal)) from refusal
        return f"cannot be compiled: {type(error).__name__}: {error}".splitlines()[0][:200]
    if case.fp8:
        return None  # It rounds more; that it compiles and runs is what the compiler adds.
    floor = UNIT[case.dtype] if case.rounds else 1e-4
    bounds = [WORSE * (_error(x, y) + floor) for x, y in zip(expected, exact, strict=True)]
    wrong = mismatch(actual, exact, bounds)
    return f"executed: {wrong}" if wrong else None


@dataclass
class Search:
    """Results of a search over many programs.

    Attributes:
      findings: seed, what was found and the program.
      programs: how many programs were compared.
      refused: how many draws were no program.
      sites: how many sites were replaced, where they are counted.
    """

    findings: list[tuple[int, str, Any]] = dataclasses.field(default_factory=list)
    programs: int = 0
    refused: int = 0
    sites: int = 0


def search(
    seeds: Iterable[int], every: int = 0, second_pass: bool = True, stop: int = 10**9
) -> Search:
    """Compares the program of each seed with its rewritten form; prints what it finds."""
    result, start = Search(), time.perf_counter()
    for seed in seeds:
        case = drawn(seed)
        try:
            wrong = finding(case, second_pass, compiled=seed % COMPILED == 0)
            result.programs += 1
        except Refused:
            result.refused += 1
            continue
        if wrong:
            print(f"# seed {seed}, program {result.programs}: {wrong}\n{case}", flush=True)
            result.findings.append((seed, wrong, case))
            if len(result.findings) >= stop:
                break
        if every and result.programs % every == 0:
            seconds = time.perf_counter() - start
            print(
                f"# {result.programs} programs, {result.refused} refused, {seconds:.0f} s",
                flush=True,
            )
    return result


def simulate_devices() -> None:
    for name, value in ON_THE_CPU.items():
        jax.config.update(name, value)
    jax.config.update("jax_num_cpu_devices", DEVICES)


def main(prog: str, search: Callable[..., Search]) -> None:
    """A command that searches programs of consecutive seeds, and fails if it finds something."""
    parser = argparse.ArgumentParser(
        prog=prog, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=2000, help="how many draws")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    arguments = parser.parse_args()
    simulate_devices()
    seeds = range(arguments.first, arguments.first + arguments.programs)
    result = search(seeds, every=100)
    sites = f" with {result.sites} sites" if result.sites else ""
    print(
        f"seeds {seeds.start} to {seeds.stop - 1}: {result.programs} programs{sites},"
        f" {result.refused} refused, {len(result.findings)} findings"
    )
    raise SystemExit(bool(result.findings))


if __name__ == "__main__":
    main("python -m tests.rewrite.fuzz", search)
