"""Programs without this library, and comparisons of programs with their rewritten forms.

Arrays are compared within 1e-5 of their largest value. A sum of up to 32 float32 terms in another
order is off by at most 32 · 2⁻²⁴ = 2e-6 of them, and a few such sums follow each other. A chunk
that is lost, doubled or misplaced is off by about the largest value. In bfloat16, with u = 2⁻⁸, a
result that is rounded at a few other places is off by a few u of its terms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul.rewrite import FoundSite, find_sites, overlap
from tests.reference import AXIS

TOLERANCES = {"float32": 1e-5, "bfloat16": 4e-2, "float16": 4e-3}
#: Specs of an operand with sharded rows, and of weights with sharded columns or sharded rows.
ROWS, COLUMNS, CONTRACTED = P(None, AXIS), P(None, AXIS), P(AXIS)
ROWS_OF_PRODUCT, COLUMNS_OF_PRODUCT = P(None, AXIS), P(None, None, AXIS)


@dataclass(frozen=True)
class Program:
    """A function for the inside of `shard_map`, with global shapes.

    Attributes:
      body: function of local arrays.
      shapes: global shapes of its arguments.
      in_specs: specs of its arguments.
      out_specs: specs of its results.
      dtype: dtype of its arguments.
      rounds: the coarsest dtype that it computes in; None for `dtype`.
    """

    body: Callable
    shapes: Sequence[tuple[int, ...]]
    in_specs: Sequence[P]
    out_specs: Any
    dtype: str = "float32"
    rounds: str | None = None

    def sharded(self, mesh: Mesh | AbstractMesh, check_vma: bool = True) -> Callable:
        """The function of global arrays."""
        return jax.shard_map(
            self.body,
            mesh=mesh,
            in_specs=tuple(self.in_specs),
            out_specs=self.out_specs,
            check_vma=check_vma,
        )

    def gradients(self) -> Program:
        """The gradients of `loss_of` of each device's results, computed inside `shard_map`."""
        body = gradients_of(self.body, len(self.shapes))
        return replace(self, body=body, out_specs=tuple(self.in_specs))

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        generator = np.random.default_rng(seed)
        return [
            generator.standard_normal(shape, np.float32).astype(jnp.dtype(self.dtype))
            for shape in self.shapes
        ]


class Form(NamedTuple):
    """A program and what `overlap` does with it.

    Attributes:
      program: the program.
      replaced: the number of sites that are replaced.
      reason: part of the reason why a site is left alone, if one is.
    """

    program: Program
    replaced: int = 1
    reason: str = ""


def gathering(body: Callable, *weights: tuple[int, int], out_specs: Any = None, **kw) -> Program:
    """A program with a body of x [2, 4, 4], with sharded rows, and weights with sharded columns."""
    weights = weights or ((4, 6),)
    specs = [ROWS, *(COLUMNS for _ in weights)]
    return Program(body, [(2, 4, 4), *weights], specs, out_specs or COLUMNS_OF_PRODUCT, **kw)


def scattering(body: Callable, out_specs: Any = ROWS_OF_PRODUCT, **kw) -> Program:
    """A program with a body of h [2, 4, 6], sharded columns, and w [6, 4], sharded rows."""
    return Program(body, [(2, 4, 6), (6, 4)], [COLUMNS_OF_PRODUCT, CONTRACTED], out_specs, **kw)


def ring(fun: Callable, **kwargs: Any) -> Callable:
    return overlap(fun, implementation="ring", **kwargs)


def sites(fun: Callable, *arguments: Any) -> list[FoundSite]:
    return find_sites(fun, implementation="ring")(*arguments)


def loss_of(fun: Callable) -> Callable:
    """A sum of the results, with a different weight for each element."""

    def loss(*arguments: Any) -> jax.Array:
        terms = [
            jnp.sum(
                y.astype(jnp.float32)
                * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
            )
            for y in jax.tree.leaves(fun(*arguments))
        ]
        return jnp.sum(jnp.stack(terms))

    return loss


def gradients_of(fun: Callable, count: int) -> Callable:
    return jax.grad(loss_of(fun), tuple(range(count)))


def results_and_gradients(run: Callable, funs: Sequence[Callable], *arguments: Any) -> list:
    """Results and gradients of each function, from one program; `run` compiles or simulates it."""

    def all_of_them(*arguments: Any) -> list:
        return [(fun(*arguments), gradients_of(fun, len(arguments))(*arguments)) for fun in funs]

    return run(all_of_them)(*arguments)


def assert_same(actual: Any, expected: Any, rounds: str = "float32") -> None:
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(array).astype(np.float64) for array in (a, b))
        error, bound = np.max(np.abs(a - b)), TOLERANCES[rounds] * np.max(np.abs(b))
        assert error <= bound, f"off by {error:.3g} where {bound:.3g} is allowed"


def counts(fun: Callable, *arguments: Any) -> Counter[str]:
    """The number of times that each primitive but the call occurs in a jaxpr, at any depth."""
    counter: Counter[str] = Counter()

    def walk(jaxpr: Any) -> None:
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            counter[equation.primitive.name] += 1
            for inner in jaxprs_in_params(equation.params):
                walk(inner)

    walk(jax.make_jaxpr(fun)(*arguments))
    del counter["jit"]
    return counter


COLLECTIVES = ("all_gather", "reduce_scatter", "psum", "psum_invariant")


def collectives(fun: Callable, *arguments: Any) -> dict[str, int]:
    """The `counts` of the collectives that a ring replaces."""
    return {name: n for name, n in counts(fun, *arguments).items() if name in COLLECTIVES}
