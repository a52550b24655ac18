"""Prints the smallest program like that of a seed: ``python -m tests.rewrite.minimize SEED``.

The seed is one that `tests.rewrite.fuzz` found to be wrong. What is printed is a script of its own.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace

from tests.rewrite.fuzz import Refused, finding, simulate_devices
from tests.rewrite.random_programs import Case, drawn


def kind(wrong: str | None) -> str | None:
    """Kind of mistake that a finding is: an exception's type, "values", "waits for ever", ..."""
    return wrong and wrong.removeprefix("cannot be executed: ").split(":")[0]


def minimized(case: Case, second_pass: bool = True) -> Case:
    """The smallest program found with the same kind of mistake, by dropping parts one by one."""
    wanted = kind(finding(case, second_pass))

    def is_wrong(candidate: Case) -> bool:
        try:
            return kind(finding(candidate, second_pass)) == wanted
        except Refused:
            return False

    before = None
    while case != before:
        before = case
        for candidates in (_fewer_results, _simpler, _fewer_lines, _renamed, _shortcuts, _unused):
            position = 0
            while position < len(made := list(candidates(case))):
                if is_wrong(made[position]):
                    case = made[position]
                else:
                    position += 1
    return case


def _fewer_results(case: Case) -> Iterator[Case]:
    for result in case.results if len(case.results) > 1 else ():
        yield replace(case, results=tuple(name for name in case.results if name != result))


def _fewer_lines(case: Case) -> Iterator[Case]:
    """Without one statement, the last first; a function goes with its body."""
    for first in reversed(range(len(case.lines))):
        line, last = case.lines[first], first + 1
        if line.lstrip().startswith("def "):
            depth = len(line) - len(line.lstrip())
            while last < len(case.lines) and case.lines[last].startswith(" " * (depth + 1)):
                last += 1
        yield replace(case, lines=case.lines[:first] + case.lines[last:])


def _shortcuts(case: Case) -> Iterator[Case]:
    """With one array in place of what is computed from it."""
    for i, line in enumerate(case.lines):
        name, equals, expression = line.partition(" = ")
        if equals and not line.lstrip().startswith("def "):
            for other in dict.fromkeys(re.findall(r"\b[ay]\d+\b", expression)):
                if other != expression:
                    lines = (*case.lines[:i], f"{name} = {other}", *case.lines[i + 1 :])
                    yield replace(case, lines=lines)


def _unused(case: Case) -> Iterator[Case]:
    for i in range(len(case.arguments)):
        if not re.search(rf"\ba{i}\b", "\n".join((*case.lines, *case.results))):
            yield _without(case, i)


def _simpler(case: Case) -> Iterator[Case]:
    changes = {"mode": "not", "dtype": "float32", "strict": False, "implementation": "ring"}
    changes |= {"wide": False, "fp8": None}
    changes |= {"check_vma": True, "explicit": False}
    for name, value in changes.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
    if case.manual != tuple(dict(case.mesh)):
        yield replace(case, mesh=tuple((a, n) for a, n in case.mesh if a in case.manual))


def _renamed(case: Case) -> Iterator[Case]:
    """Without a second name for an array."""
    for i, line in enumerate(case.lines):
        single = re.fullmatch(r"(\s*)(\w+) = (\w+)", line)
        if single and single[2].startswith("y"):
            text = "\n".join((*case.lines[:i], *case.lines[i + 1 :]))
            renamed = re.sub(rf"\b{single[2]}\b", single[3], text)
            results = tuple(single[3] if r == single[2] else r for r in case.results)
            yield replace(case, lines=tuple(renamed.split("\n")), results=results)


def _without(case: Case, dropped: int) -> Case:
    def renamed(text: str) -> str:
        return re.sub(r"\ba(\d+)\b", lambda m: f"a{int(m[1]) - (int(m[1]) > dropped)}", text)

    arguments = (*case.arguments[:dropped], *case.arguments[dropped + 1 :])
    lines, results = tuple(map(renamed, case.lines)), tuple(map(renamed, case.results))
    return replace(case, arguments=arguments, lines=lines, results=results)


def script(case: Case) -> str:
    """A script that executes the program and its rewritten form."""
    kinds = ["Auto" if a in case.manual or not case.explicit else "Explicit" for a, _ in case.mesh]
    body = case.text
    if case.mode == "inside":
        body += "inner = body\nbody = lambda *a: [g[None] for g in grads(inner)(*a)]\n"
    end = {
        "before": "plain, ours = grads(fun), ring(grads(fun))",
        "after": "plain, ours = grads(fun), grads(ring(fun))",
        "vmapped": "plain, ours = vmapped(fun), vmapped(ring(fun))",
        "forward": "plain, ours = forward(fun), ring(forward(fun))",
    }.get(case.mode, "plain, ours = fun, ring(fun)")
    return f"""import math, jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec as P
from collective_matmul import overlap
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 6)
jax.config.update("jax_enable_x64", {case.wide})
jax.config.update("jax_numpy_dtype_promotion", "{"strict" if case.strict else "standard"}")
axes, manual, check_vma = {dict(case.mesh)}, {case.manual}, {case.check_vma}
shapes = {[shape for shape, _ in case.arguments]}
specs = {[spec for _, spec in case.arguments]}
mesh = jax.make_mesh(
    tuple(axes.values()), tuple(axes), devices=jax.devices()[: math.prod(axes.values())],
    axis_types=({"".join(f"AxisType.{k}, " for k in kinds)}),
)
def ring(fun):
    return overlap(fun, implementation="{case.implementation}", fp8={case.fp8!r})
def vary(x):
    for axis in manual if check_vma else ():
        try: x = lax.pcast(x, axis, to="varying")
        except ValueError: pass
    return x
def loss_of(fun):
    def weigh(y):
        return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.size)).reshape(y.shape))
    return lambda *a: sum(map(weigh, jax.tree.leaves(fun(*a))))
def grads(fun):
    return jax.grad(loss_of(fun), tuple(range({len(case.arguments)})))
def vmapped(fun):
    return lambda *a: jax.vmap(fun)(*(jnp.stack([x, 0.5 * x]) for x in a))
def forward(fun):
    return lambda *a: jax.jvp(fun, a, a)[1]
{body}
fun = jax.shard_map(
    body, mesh=mesh, in_specs=tuple(P(*spec) for spec in specs), out_specs=P(manual),
    axis_names=set(manual), check_vma=check_vma,
)
{end}
random = np.random.default_rng({case.seed})
args = [random.standard_normal(s, np.float32).astype(jnp.dtype("{case.dtype}")) for s in shapes]
for a, b in zip(jax.tree.leaves(jax.jit(plain)(*args)), jax.tree.leaves(jax.jit(ours)(*args))):
    print(a.shape, a.dtype, b.dtype, "largest", jnp.max(jnp.abs(a)), "off", jnp.max(jnp.abs(a - b)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.rewrite.minimize")
    parser.add_argument("seed", type=int)
    seed = parser.parse_args().seed
    simulate_devices()
    case = drawn(seed)
    if finding(case) is None:
        raise SystemExit(f"seed {seed}: the program agrees with its rewritten form")
    print(script(minimized(case)))


if __name__ == "__main__":
    main()
