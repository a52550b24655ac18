"""What the chains of a fused op are checked and timed on: drawn once for all numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from benchmarks.communication import AXIS
from benchmarks.fused.cases import Case, random_arrays, whole_numbers

# Layers take turns with so many weights when they are checked.
_CHECKED = 2


class Rows(NamedTuple):
    """Of one case.

    Attributes:
      nothing: an x of which nothing is a number: what is left of it in memory shows.
      exact: an x of which every sum is exact.
      results: of that, with each weight of `Operands.exact_ws`.
      random: an x that takes as much power as a program's.
    """

    nothing: jax.Array
    exact: jax.Array
    results: list[jax.Array]
    random: jax.Array


class Operands:
    """Arrays for all cases of one model whose operands are divided alike.

    Args:
      case: that with the most rows.
      layers: ops of a chain.
      mesh: of one axis.
      dtype: of all arrays.
    """

    def __init__(self, case: Case, layers: int, mesh: Mesh, dtype: Any):
        x_shape, w_shape = case.shapes
        contracted = w_shape[0]
        self.mesh = mesh
        x_sharding, w_sharding, y_sharding = self._shardings(case)

        def exact() -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
            x, *ws = (
                whole_numbers(jax.random.key(number), shape, contracted, dtype)
                for number, shape in enumerate([x_shape, *[w_shape] * _CHECKED])
            )
            ys = [jnp.matmul(x, w, preferred_element_type=jnp.float32) for w in ws]
            return x, ws, [y.astype(dtype) for y in ys]

        shardings = x_sharding, [w_sharding] * _CHECKED, [y_sharding] * _CHECKED
        self._exact, ws, self._results = jax.jit(exact, out_shardings=shardings)()
        self.exact_ws = [ws[layer % _CHECKED] for layer in range(layers)]
        (self._random,) = random_arrays(x_shape, dtype, x_sharding, [layers])
        self.random_ws = random_arrays(w_shape, dtype, w_sharding, range(layers))

    def compile_rows(self, case: Case, pool: Executor) -> Future[Any]:
        """Has what `rows` calls for a case compiled."""
        x_sharding, _, y_sharding = self._shardings(case)

        def cut(exact: jax.Array, results: list[jax.Array], random: jax.Array) -> Any:
            exact, random, *results = (a[: case.rows] for a in (exact, random, *results))
            return jnp.full_like(exact, jnp.nan), exact, results, random

        shardings: Any = (x_sharding, x_sharding, [y_sharding] * _CHECKED, x_sharding)
        jitted = jax.jit(cut, out_shardings=shardings)
        return pool.submit(jitted.lower(self._exact, self._results, self._random).compile)

    def rows(self, compiled: Any) -> Rows:
        """The operands of a case."""
        return Rows(*compiled(self._exact, self._results, self._random))

    def compile_count(self, case: Case, pool: Executor) -> Future[Any]:
        """Has what counts wrong elements of each layer, on all devices, compiled.

        Returns:
          In the future, a function of a chain's results and `Rows.results`.
        """
        y_spec, sharding = case.specs[2], self._shardings(case)[2]

        def count(ys: Sequence[jax.Array], results: Sequence[jax.Array]) -> list[jax.Array]:
            return [
                lax.psum(jnp.sum(y != results[layer % _CHECKED], dtype=jnp.int32), AXIS)
                for layer, y in enumerate(ys)
            ]

        specs = {"in_specs": (y_spec, y_spec), "out_specs": jax.sharding.PartitionSpec()}
        sharded = jax.shard_map(count, mesh=self.mesh, check_vma=False, **specs)
        shape = case.rows, case.shapes[1][1]
        y = jax.ShapeDtypeStruct(shape, self._exact.dtype, sharding=sharding)
        jitted = jax.jit(sharded)
        return pool.submit(jitted.lower([y] * len(self.exact_ws), [y] * _CHECKED).compile)

    def _shardings(self, case: Case) -> list[NamedSharding]:
        return [NamedSharding(self.mesh, spec) for spec in case.specs]
