"""Problems as large as models make them, which every implementation must solve alike.

The reference is the unsharded computation in float32, without TensorFloat-32, on the GPUs
themselves: every device draws all operands and computes its part of the results from them, so that
no contraction is spread over devices. Operands, results and comparisons never leave the devices.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import overlap_jit
from collective_matmul.ops.matmul.backends import BACKENDS
from tests.reference import PEER_KERNELS


class Verdict(NamedTuple):
    """Whether an array is wrong, and its error in units of the allowed error."""

    wrong: jax.Array
    error: jax.Array


class Prepared(NamedTuple):
    """Functions that a `Problem` compiles.

    Attributes:
      draw: () -> (operands, expected results)
      judge: (results, expected results) -> a `Verdict` of each
    """

    draw: Callable[[], tuple[Any, Any]]
    judge: Callable[[Any, Any], Any]


class Problem(ABC):
    """A function of global arrays. Subclasses are frozen dataclasses, and legible."""

    @property
    @abstractmethod
    def devices(self) -> int:
        """How many it takes, known also where there are fewer."""

    @property
    @abstractmethod
    def mesh(self) -> Mesh: ...

    @property
    @abstractmethod
    def specs(self) -> tuple[Any, Any]:
        """How the operands, and the results, are laid over the mesh."""

    @abstractmethod
    def draw(self) -> Any:
        """Random operands; on every device all of them."""

    @abstractmethod
    def function(self, implementation: str) -> Callable[..., Any]:
        """Operands -> results, by an implementation."""

    @abstractmethod
    def expected(self, *operands: Any) -> Any:
        """Operands -> results, in float32."""

    @abstractmethod
    def judge(self, actual: jax.Array, expected: jax.Array) -> Verdict: ...

    @property
    def shardings(self) -> tuple[Any, Any]:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs)

    def compile(self) -> Prepared:
        def draw() -> tuple[Any, Any]:
            everywhere = NamedSharding(self.mesh, P())
            operands = lax.with_sharding_constraint(self.draw(), everywhere)
            return operands, self.expected(*operands)

        operands, results = self.shardings
        expected = described(jax.eval_shape(draw)[1], results)
        actual = described(
            jax.eval_shape(self.function("xla"), *jax.eval_shape(self.draw)), results
        )
        drawn = jax.jit(draw, out_shardings=(operands, results)).lower()
        judge = functools.partial(jax.tree.map, self.judge)
        return Prepared(
            # The reference runs once: trying which matmul is fastest would take longer.
            drawn.compile({"xla_gpu_autotune_level": "0"}),
            jax.jit(judge).lower(actual, expected).compile(),
        )


@dataclass(frozen=True)
class Call:
    """A problem, and the implementation that solves it."""

    problem: Problem
    implementation: str

    def __str__(self) -> str:
        return f"{self.problem}-{self.implementation}"

    @property
    def devices(self) -> int:
        return self.problem.devices

    @property
    def needs(self) -> tuple[Problem, Call]:
        """Programs that have to be compiled for it."""
        return self.problem, self

    def compile(self) -> Any:
        operands, results = self.problem.shardings
        fun = overlap_jit(
            self.problem.function(self.implementation),
            peer_kernels=self.implementation in PEER_KERNELS,
            out_shardings=results,
        )
        return fun.lower(*described(jax.eval_shape(self.problem.draw), operands)).compile()


def calls(problems: Iterable[Problem]) -> list[Call]:
    """Each problem by every implementation."""
    return [Call(problem, name) for problem in problems for name in BACKENDS]


def or_xla(implementation: str) -> tuple[str, str]:
    """A request for a backend that not all problems fit: kernels take no float32, for one."""
    return implementation, "xla"


def assert_right(verdicts: Any) -> None:
    """Nothing is wrong with any of the results."""
    judged, _ = jax.tree.flatten_with_path(
        jax.device_get(verdicts), is_leaf=lambda part: isinstance(part, Verdict)
    )
    wrong = {jax.tree_util.keystr(path): part.error for path, part in judged if part.wrong}
    assert not wrong, f"errors in units of what is allowed: {wrong}"


def size(full: int) -> int:
    """A size, or a small one where devices are simulated. Multiples of 8, as all full sizes are."""
    return full if jax.default_backend() == "gpu" else 8 * math.ceil(full / 1024)


@functools.cache
def mesh_of(names: tuple[str, ...], sizes: tuple[int, ...]) -> Mesh:
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def described(shapes: Any, shardings: Any) -> Any:
    """Arrays of these shapes, laid out so, that need not exist to be compiled for."""
    return jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def normal(shapes: Any, dtype: str) -> Any:
    """A tree of arrays from a normal distribution, for a tree of shapes."""
    leaves, tree = jax.tree.flatten(shapes, is_leaf=_is_shape)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [jax.random.normal(key, s, dtype) for key, s in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, drawn)


def _is_shape(tree: Any) -> bool:
    return isinstance(tree, tuple) and all(isinstance(size, int) for size in tree)
