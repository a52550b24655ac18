"""Stacks of feed-forward layers: many rings in one program, in all that may stand around them.

Legend of global shapes: B sequences of S tokens with K features, L layers, F hidden features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import CHECKPOINT_NAME, all_gather_matmul, matmul_reduce_scatter
from tests.gpu.problems import Problem, Verdict, mesh_of, normal, or_xla, size
from tests.reference import AXIS

LAYERS = 3
Weights = tuple[jax.Array, jax.Array]  # up [L, K, F] and down [L, F, K]


@dataclass(frozen=True)
class Stacks(Problem):
    """Stacks that know nothing of each other, with all their gradients, in one program.

    Attributes:
      name: of the problem.
      mesh_sizes: of the axes "data" and AXIS.
      axes: for each stack, the axis that its rings go over.
      layers: how a stack runs its layers.
      batch: whether the batch is cut along "data", and who knows: the program or the compiler.
    """

    name: str
    mesh_sizes: tuple[int, int]
    axes: tuple[str, ...] = (AXIS,)
    layers: Literal["unrolled", "remat", "scan", "scan_remat", "scan_saved"] = "unrolled"
    batch: Literal["whole", "manual", "automatic"] = "whole"

    def __str__(self) -> str:
        return f"{self.name}-{self.devices}"

    @property
    def devices(self) -> int:
        return math.prod(self.mesh_sizes)

    @property
    def mesh(self) -> Mesh:
        return mesh_of(("data", AXIS), self.mesh_sizes)

    @property
    def specs(self) -> tuple[Any, Any]:
        rows = P(None if self.batch == "whole" else "data", "ring")
        weights = P(None, None, "ring"), P(None, "ring")
        stacks = [_over(axis, (rows, weights)) for axis in self.axes]
        xs, ws = [rows for rows, _ in stacks], [weights for _, weights in stacks]
        return (xs, ws, xs), (xs, (xs, ws))

    @property
    def dtype(self) -> str:
        # XLA for CPUs aborts over a bfloat16 all-reduce where an axis is automatic.
        simulated = jax.default_backend() == "cpu"
        return "float32" if simulated and self.batch == "automatic" else "bfloat16"

    def draw(self) -> Any:
        """Weights keep activations from growing and from vanishing."""
        b, s, k, f = 4, size(2048), size(2048), size(4096)
        x_shapes = [(b, s, k) for _ in self.axes]
        w_shapes = [((LAYERS, k, f), (LAYERS, f, k)) for _ in self.axes]
        xs, ws, dys = normal((x_shapes, w_shapes, x_shapes), self.dtype)
        return xs, jax.tree.map(lambda w: w * math.sqrt(1 / w.shape[1]), ws), dys

    def function(self, implementation: str) -> Callable[..., Any]:
        stacks = [self._stack(axis, implementation) for axis in self.axes]

        def forward(xs: list[jax.Array], ws: list[Weights]) -> list[jax.Array]:
            return [stack(x, w) for stack, x, w in zip(stacks, xs, ws, strict=True)]

        return _with_gradients(forward)

    def _stack(self, axis: str, implementation: str) -> Callable[[jax.Array, Weights], jax.Array]:
        names = or_xla(implementation)

        def layer(x: jax.Array, weights: Weights) -> jax.Array:
            up, down = weights
            hidden = jax.nn.gelu(
                all_gather_matmul(x, up, axis, gather_dimension=1, implementation=names)
            )
            return x + matmul_reduce_scatter(
                hidden, down, axis, scatter_dimension=1, implementation=names
            )

        rows = P("data" if self.batch == "manual" else None, "ring")
        weights = P(None, None, "ring"), P(None, "ring")
        return jax.shard_map(
            lambda x, weights: self._run(layer, x, weights),
            mesh=self.mesh,
            in_specs=_over(axis, (rows, weights)),
            out_specs=_over(axis, rows),
            axis_names={axis} if self.batch == "automatic" else set(self.mesh.axis_names),
        )

    def _run(self, layer: Callable, x: jax.Array, weights: Weights) -> jax.Array:
        if self.layers.endswith("remat"):
            layer = jax.checkpoint(layer)
        if self.layers == "scan_saved":  # The scan stacks what kernels wrote in place.
            policy = jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME)
            layer = jax.checkpoint(layer, policy=policy)
        if self.layers.startswith("scan"):
            return lax.scan(lambda x, weights: (layer(x, weights), None), x, weights)[0]
        for i in range(LAYERS):
            x = layer(x, jax.tree.map(lambda w, i=i: w[i], weights))
        return x

    def expected(self, *operands: Any) -> Any:
        operands = jax.tree.map(lambda array: array.astype(jnp.float32), operands)

        def forward(xs: list[jax.Array], ws: list[Weights]) -> list[jax.Array]:
            for i in range(LAYERS):
                pairs = zip(xs, ws, strict=True)
                xs = [x + jax.nn.gelu(x @ up[i]) @ down[i] for x, (up, down) in pairs]
            return xs

        with jax.default_matmul_precision("highest"):
            return _with_gradients(forward)(*operands)

    def judge(self, actual: jax.Array, expected: jax.Array) -> Verdict:
        """The norm of the error is what independent roundings make, next to the norm of the result.

        A layer rounds a value some D + 8 times forward (two matmuls, the sums between devices, gelu
        and the residual) and twice as often backward. Each is off by 2⁻⁸ at most, so by 2⁻⁸ / √3 in
        quadratic mean; being independent, their squares add up. For 4 devices this allows 0.023,
        where a chunk that has gone wrong in a layer makes a difference of some tenths.
        """
        allowed = 2**-8 * math.sqrt(LAYERS * (self.devices + 8))
        error = jnp.linalg.norm(actual.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
        return Verdict(~(error <= allowed), error / allowed)


def _over(axis: str, specs: Any) -> Any:
    """Specs in which "ring" stands for an axis."""
    return jax.tree.map(lambda spec: P(*(axis if name == "ring" else name for name in spec)), specs)


def _with_gradients(forward: Callable) -> Callable:
    def results_and_gradients(xs: Any, ws: Any, dys: Any) -> Any:
        ys, transpose = jax.vjp(forward, xs, ws)
        return ys, transpose(dys)

    return results_and_gradients


def all_stacks() -> list[Stacks]:
    """Ways to run the layers, rings alive at once, and two mesh axes at once."""
    return [
        Stacks("unrolled", (1, 4), layers="unrolled"),
        Stacks("remat", (1, 4), layers="remat"),
        Stacks("scan", (1, 4), layers="scan"),
        Stacks("scan_remat", (1, 4), layers="scan_remat"),
        Stacks("scan_remat", (1, 2), layers="scan_remat"),
        Stacks("scan_saved", (1, 4), layers="scan_saved"),
        Stacks("scan_saved", (1, 2), layers="scan_saved"),
        Stacks("three_at_once", (1, 4), axes=(AXIS,) * 3),
        Stacks("three_at_once", (1, 2), axes=(AXIS,) * 3),
        Stacks("over_both_axes", (2, 2), axes=(AXIS, "data")),
        Stacks("manual_batch", (2, 2), batch="manual"),
        Stacks("automatic_batch", (2, 2), batch="automatic"),
    ]
