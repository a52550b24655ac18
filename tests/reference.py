"""The unsharded computation that the ops are compared with, in float64 NumPy.

On global arrays all three ops compute the same y = x w, contracted over x's last dimension and w's
first; they differ in which dimensions are sharded. One reference therefore serves them all.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import collective_matmul
from collective_matmul.ops.matmul.backends import BACKENDS

AXIS = "tensor"
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
#: Names of the backends whose kernels address the memory of peer GPUs.
PEER_KERNELS = tuple(name for name, backend in BACKENDS.items() if backend.uses_peer_kernels)
#: Names of the backends that run on every device.
PORTABLE = tuple(name for name in BACKENDS if name not in PEER_KERNELS)


class Outcome(NamedTuple):
    """Results and gradients, global: one y and one dw for every weight."""

    ys: tuple[Any, ...]
    dx: Any
    dws: tuple[Any, ...]


class Comparison(NamedTuple):
    """Results, expected ones, how far an element may be off, and the dtype expected."""

    actual: Outcome
    expected: Outcome
    bounds: Outcome
    dtype: str


@dataclass(frozen=True)
class Case:
    """One call of an op. All sizes are global.

    Attributes:
      op: the name of the op.
      implementation: as the op takes it.
      devices: D, the size of the mesh axis.
      leading: sizes of x's dimensions but the last.
      contracted: K, the size of x's last dimension.
      columns: *N of every weight.
      dimension: the dimension gathered or scattered, as the op takes it.
      dtype: of the operands, the results and the gradients.
      check_vma: whether `shard_map` tracks which axes a value varies over.
      mean: whether matmul_reduce_scatter averages.
    """

    op: str
    implementation: str | tuple[str, ...] | None
    devices: int
    leading: tuple[int, ...]
    contracted: int
    columns: tuple[tuple[int, ...], ...]
    dimension: int = 0
    dtype: str = "float32"
    check_vma: bool = True
    mean: bool = False

    def __str__(self) -> str:
        vma = "vma" if self.check_vma else "no_vma"
        return f"{self.op}-{self.implementation}-{self.devices}-{self.dimension}-{self.dtype}-{vma}"

    @property
    def scale(self) -> float:
        return 1 / self.devices if self.mean else 1.0

    @property
    def specs(self) -> tuple[P, tuple[P, ...], tuple[P, ...]]:
        """How x, the weights and the results are laid over the devices.

        A gather has weights with columns of their own on each device. A sum has rows of its own.
        """
        along_dimension: list[str | None] = [None] * (len(self.leading) + 1)
        along_dimension[self.dimension] = AXIS
        contraction = P(*(None for _ in self.leading), AXIS)
        if self.op == "all_gather_matmul":
            weights = tuple(P(None, AXIS) for _ in self.columns)
            return P(*along_dimension), weights, (contraction,) * len(self.columns)
        result = P() if self.op == "matmul_all_reduce" else P(*self._padded(along_dimension))
        return contraction, (P(AXIS),), (result,)

    def _padded(self, spec: list[str | None]) -> list[str | None]:
        """The spec of x [..., K] as that of y [..., *N]; a negative dimension counts in x."""
        return spec[:-1] + [None] * len(self.columns[0])

    def arrays(self, seed: int = 0) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """x, the weights and a cotangent for each result: normally distributed."""
        generator = np.random.default_rng(seed)

        def draw(*shape: int) -> np.ndarray:
            return generator.standard_normal(shape).astype(jnp.dtype(self.dtype))

        x = draw(*self.leading, self.contracted)
        ws = [draw(self.contracted, *columns) for columns in self.columns]
        return x, ws, [draw(*self.leading, *columns) for columns in self.columns]

    def call(self, x: jax.Array, ws: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The op on local arrays, under `shard_map`."""
        keywords: dict[str, Any] = {"implementation": self.implementation}
        if self.op == "all_gather_matmul":
            keywords["gather_dimension"] = self.dimension
            return collective_matmul.all_gather_matmul(x, tuple(ws), AXIS, **keywords)
        if self.op == "matmul_reduce_scatter":
            keywords |= {"scatter_dimension": self.dimension, "mean": self.mean}
        return (getattr(collective_matmul, self.op)(x, ws[0], AXIS, **keywords),)

    def sharded(self, mesh: Mesh) -> Callable[..., tuple[jax.Array, ...]]:
        """The op on global arrays x and ws."""
        x_spec, w_specs, y_specs = self.specs
        return jax.shard_map(
            self.call,
            mesh=mesh,
            in_specs=(x_spec, w_specs),
            out_specs=y_specs,
            check_vma=self.check_vma,
        )

    def run(self, mesh: Mesh, arrays: tuple, jit: Callable = jax.jit) -> Outcome:
        """Results and gradients of the op, out of one compiled program."""
        fun = self.sharded(mesh)

        def results_and_gradients(x, ws, dys):
            ys, transpose = jax.vjp(fun, x, ws)
            return Outcome(ys, *transpose(dys))

        x, ws, dys = arrays
        return jit(results_and_gradients)(x, tuple(ws), tuple(dys))

    def compare(self, mesh: Mesh, seed: int = 0, run: Callable = jax.jit) -> Comparison:
        """Runs the case, and the reference; `run` compiles or simulates the program."""
        arrays = self.arrays(seed)
        return Comparison(
            self.run(mesh, arrays, run),
            reference(*arrays, self.scale),
            self.bounds(arrays),
            self.dtype,
        )

    def bounds(self, arrays: tuple) -> Outcome:
        """How far each element may be from the reference: the bound of a rounded inner product.

        A sum of n products in float32 is off by at most n u |x|·|w|, with u = 2⁻²⁴ (Higham,
        Accuracy and Stability of Numerical Algorithms, section 3.1). Each rounding to `dtype` on
        the way adds its own unit roundoff, relative to no more than |x|·|w| again. A value is
        rounded once after its matmul, then once at each of the D − 1 additions between devices,
        and once where a mean or a second weight's share enters: D + 1 in all. One more covers the
        terms of second order. Below the normal numbers a rounding is off by half a subnormal.
        """
        x, ws, dys = arrays
        terms = max(self.contracted, x.size // self.contracted, sum(w[0].size for w in ws))
        roundings = self.devices + 2
        float32, own = jnp.finfo(jnp.float32), jnp.finfo(self.dtype)
        relative = terms * float(float32.eps) / 2 + roundings * float(own.eps) / 2
        absolute = roundings * float(own.smallest_subnormal)
        magnitudes = reference(abs(x), [abs(w) for w in ws], [abs(y) for y in dys], self.scale)
        return jax.tree.map(lambda magnitude: relative * magnitude + absolute, magnitudes)


def reference(
    x: np.ndarray, ws: Sequence[np.ndarray], dys: Sequence[np.ndarray], scale: float = 1.0
) -> Outcome:
    """y = scale · x w for every weight, with its gradients, in float64."""
    x = x.astype(np.float64)
    ws, dys = ([array.astype(np.float64) for array in arrays] for arrays in (ws, dys))
    rows = tuple(range(x.ndim - 1))
    return Outcome(
        ys=tuple(scale * np.tensordot(x, w, 1) for w in ws),
        dx=sum(
            scale * np.tensordot(dy, np.moveaxis(w, 0, -1), w.ndim - 1)
            for w, dy in zip(ws, dys, strict=True)
        ),
        dws=tuple(scale * np.tensordot(x, dy, (rows, rows)) for dy in dys),
    )


def assert_close(comparison: Comparison, *fields: str) -> None:
    """Every element of the fields of the outcome is within its bound; NaN never is."""
    actual, expected, bounds, dtype = comparison
    for name in fields or Outcome._fields:
        parts = (jax.tree.leaves(getattr(outcome, name)) for outcome in (actual, expected, bounds))
        for i, (value, wanted, bound) in enumerate(zip(*parts, strict=True)):
            assert (value.shape, value.dtype) == (wanted.shape, jnp.dtype(dtype)), f"{name}[{i}]"
            error = np.abs(np.asarray(value).astype(np.float64) - wanted)
            wrong = ~(error <= bound)
            assert not wrong.any(), (
                f"{name}[{i}]: {wrong.sum()} of {wrong.size} elements are off, the first at"
                f" {tuple(np.argwhere(wrong)[0])} by {error[wrong][0]:.3g} where"
                f" {bound[wrong][0]:.3g} is allowed"
            )


@contextlib.contextmanager
def poisoned_results() -> Iterator[list[tuple[int, ...]]]:
    """Makes `lax.empty` give NaNs or the largest integers, so that an element nobody writes shows.

    Yields the shapes.
    """
    shapes: list[tuple[int, ...]] = []

    def poison(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        shapes.append(shape)
        floating = jnp.issubdtype(dtype, jnp.floating)
        # Bytes of messages are then NaN too, as values and as scales.
        return lax.full(shape, math.nan if floating else jnp.iinfo(dtype).max, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lax, "empty", poison)
        yield shapes
