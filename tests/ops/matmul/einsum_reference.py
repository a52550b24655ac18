"""The einsum of whole arrays that `collective_einsum` is compared with, in float64 NumPy.

Every device has its own part of every array: arrays of all devices are stacked along a first
dimension, which the mesh axis shards. What is sharded along the label is thus a stack of shards;
what is not is a stack of as many independent arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import collective_einsum
from tests.reference import AXIS, Comparison, Outcome

#: The label of the stack of devices, in einsums of the reference.
_DEVICE = "Z"


def on_stacks(fun: Callable, mesh: Mesh | AbstractMesh, **keywords: Any) -> Callable:
    """`fun` of local arrays as one of stacks, of which each device has its part."""

    def local(*stacks: jax.Array) -> Any:
        return jax.tree.map(lambda y: y[None], fun(*(stack[0] for stack in stacks)))

    return jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), **keywords)


@dataclass(frozen=True)
class EinsumCase:
    """One call of collective_einsum.

    Attributes:
      subscripts: explicit, and every label in two of the three terms.
      sizes: of the labels in the order in which they first occur; of the one that is gathered or
        scattered, that of a shard.
      devices: D, the size of the mesh axis.
      gather: the label gathered, or None.
      scatter: the label scattered, or None.
      operand: the one to gather, 0 or 1, where both have the label.
      implementation: as the function takes it.
      dtype: of the operands, the results and the gradients.
      check_vma: whether `shard_map` tracks which axes a value varies over.
    """

    subscripts: str
    sizes: tuple[int, ...]
    devices: int = 3
    gather: str | None = None
    scatter: str | None = None
    operand: int = 0
    implementation: str | None = "ring"
    dtype: str = "float32"
    check_vma: bool = True

    def __str__(self) -> str:
        vma = "vma" if self.check_vma else "no_vma"
        what = f"gather={self.gather}{self.operand}" if self.gather else f"scatter={self.scatter}"
        return f"{self.subscripts}-{what}-{self.implementation}-{self.devices}-{self.dtype}-{vma}"

    @property
    def label(self) -> str:
        return self.gather or self.scatter or ""

    @property
    def terms(self) -> tuple[str, str, str]:
        """Labels of x, w and the result."""
        inputs, result = self.subscripts.split("->")
        x, w = inputs.split(",")
        return x, w, result

    @property
    def sharded(self) -> tuple[bool, bool, bool]:
        """Whether x, w and the result are shards along the label."""
        if self.scatter:
            return False, False, True
        x, w, _ = (self.label in term for term in self.terms)
        return (x and not (w and self.operand)), (w and not (x and not self.operand)), False

    def arrays(self, seed: int) -> list[np.ndarray]:
        """x, w and a cotangent of the result, stacked."""
        generator = np.random.default_rng(seed)
        labels = dict.fromkeys("".join(self.terms))
        sizes = dict(zip(labels, self.sizes, strict=True))
        whole = sizes | {self.label: sizes[self.label] * self.devices}
        return [
            generator.standard_normal(
                (self.devices, *((sizes if sharded else whole)[label] for label in term))
            ).astype(jnp.dtype(self.dtype))
            for term, sharded in zip(self.terms, self.sharded, strict=True)
        ]

    def call(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """On local arrays, under `shard_map`."""
        return collective_einsum(
            self.subscripts,
            x,
            w,
            AXIS,
            gather=self.gather,
            scatter=self.scatter,
            implementation=self.implementation,
        )

    def results_and_gradients(self, x: jax.Array, w: jax.Array, dy: jax.Array) -> Outcome:
        """On local arrays, under `shard_map`."""
        y, transpose = jax.vjp(self.call, x, w)
        dx, dw = transpose(dy)
        return Outcome((y,), dx, (dw,))

    def compare(self, mesh: Mesh, seed: int = 0, run: Callable = jax.jit) -> Comparison:
        """Runs the case in one program, and the reference; `run` compiles or simulates it."""
        arrays = self.arrays(seed)
        fun = on_stacks(self.results_and_gradients, mesh, check_vma=self.check_vma)
        return Comparison(
            run(fun)(*arrays), self.reference(arrays), self.bounds(arrays), self.dtype
        )

    def reference(self, arrays: list[np.ndarray]) -> Outcome:
        """Results and gradients of whole arrays."""
        x, w, dy = (array.astype(np.float64) for array in arrays)
        return Outcome(
            ys=(self._einsum((0, x), (1, w), 2),),
            dx=self._einsum((2, dy), (1, w), 0),
            dws=(self._einsum((0, x), (2, dy), 1),),
        )

    def _einsum(
        self, a: tuple[int, np.ndarray], b: tuple[int, np.ndarray], result: int
    ) -> np.ndarray:
        """From two of x, w and the result, which are 0, 1 and 2, the third.

        What is sharded along the label enters whole. It has no label of devices then; if the third
        has none, the einsum is a sum over devices.
        """

        def labels(i: int) -> str:
            return self.terms[i] if self.sharded[i] else _DEVICE + self.terms[i]

        def along_label(i: int) -> int:
            return self.terms[i].index(self.label)

        left, right = (
            np.concatenate(stack, along_label(i)) if self.sharded[i] else stack
            for i, stack in (a, b)
        )
        third = np.einsum(f"{labels(a[0])},{labels(b[0])}->{labels(result)}", left, right)
        if not self.sharded[result]:
            return third
        return np.stack(np.split(third, self.devices, along_label(result)))

    def bounds(self, arrays: list[np.ndarray]) -> Outcome:
        """How far each element may be from the reference, as derived in `Case.bounds`.

        Here no sum has more terms than the whole arrays' labels have combinations.
        """
        terms = math.prod(self.sizes) * self.devices
        roundings = self.devices + 2
        float32, own = jnp.finfo(jnp.float32), jnp.finfo(self.dtype)
        relative = terms * float(float32.eps) / 2 + roundings * float(own.eps) / 2
        absolute = roundings * float(own.smallest_subnormal)
        magnitudes = self.reference([abs(array) for array in arrays])
        return jax.tree.map(lambda magnitude: relative * magnitude + absolute, magnitudes)


#: One einsum for everything that can happen to a label.
FORMS = {
    "gathered free label": EinsumCase("bsd,dhk->bhsk", (2, 3, 2, 2, 2), gather="s"),
    "gathered free label of w": EinsumCase("sd,df->sf", (4, 5, 3), gather="f"),
    "gathered contracted label": EinsumCase("sd,sf->df", (3, 4, 5), gather="s"),
    "gathered contracted label of w": EinsumCase("sd,sf->df", (3, 4, 5), gather="s", operand=1),
    "gathered batch label": EinsumCase("ecd,edf->ecf", (3, 2, 4, 5), gather="e"),
    "gathered batch label of w": EinsumCase("ecd,edf->ecf", (3, 2, 4, 5), gather="e", operand=1),
    "three batch labels": EinsumCase("abcsd,adcb->bsac", (2, 2, 3, 2, 2), gather="c"),
    "scattered free label of w": EinsumCase("sd,df->fs", (4, 5, 3), scatter="f"),
    "scattered batch label": EinsumCase("ced,dfe->cfe", (2, 3, 4, 5), scatter="e"),
    "product of elements": EinsumCase("es,se->es", (2, 3), scatter="s"),
    "inner product": EinsumCase("s,s->", (3,), gather="s"),
    "outer product": EinsumCase("s,f->sf", (3, 2), gather="s"),
    "gathered matmul": EinsumCase("bsd,dhk->bshk", (2, 3, 4, 2, 2), gather="s"),
    "gathered matmul, w moved": EinsumCase("bsd,hdk->bskh", (2, 3, 4, 2, 2), gather="s"),
    "scattered matmul": EinsumCase("bshk,hkd->bsd", (2, 3, 2, 2, 4), scatter="s"),
    "scattered matmul, w transposed": EinsumCase("bsf,df->bsd", (2, 3, 5, 4), scatter="s"),
}


def case_of(form: str, implementation: str | None) -> EinsumCase:
    return replace(FORMS[form], implementation=implementation)
