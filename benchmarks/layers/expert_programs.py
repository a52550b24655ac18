"""Expert layers to compare: the library's, and plain JAX around a public grouped matmul.

Plain JAX gathers the tokens, copies one row for each pair of a token and an expert of the device,
multiplies groups of rows, adds the weighted rows of each token and scatters the sums. Its copies
are permutations, and so are their gradients: no program here adds rows by a scatter.

Legend: T tokens of a device, D devices, k experts of a token, h features, f hidden features, E
experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.comparison.communication import AXIS
from collective_matmul import expert_mlp, prequantize_experts

#: ``product(x [M, K], w [G, K, N], sizes [G])``, differentiable.
GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class ExpertLayer:
    """An expert layer on several devices.

    Attributes:
      name: of the model.
      tokens: T.
      width: h.
      hidden: f.
      experts: E.
      choices: k.
      dtype: of everything but the router's weights.
    """

    name: str
    tokens: int
    width: int
    hidden: int
    experts: int
    choices: int
    dtype: Any = jnp.bfloat16

    def arguments(self, devices: int) -> dict[str, Any]:
        """Global arrays on the host's side: functions of keys would be compiled for each shape."""
        h, f, e = self.width, self.hidden, self.experts
        rng = np.random.default_rng(0)
        tokens = devices * self.tokens
        keys = iter(jax.random.split(jax.random.key(0), 8))

        def normal(*shape: int, scale: float) -> jax.Array:
            return jax.random.normal(next(keys), shape, self.dtype) * scale

        ids = np.argsort(rng.random((tokens, e)), axis=1)[:, : self.choices].astype(np.int32)
        weights = rng.random((tokens, self.choices)).astype(np.float32)
        return {
            "x": normal(tokens, h, scale=1.0),
            "ids": ids,
            "weights": weights / weights.sum(1, keepdims=True),
            "ws": [normal(e, *s, scale=s[0] ** -0.5) for s in ((h, f), (h, f), (f, h))],
            "dy": normal(tokens, h, scale=1.0),
        }


Layer = Callable[..., jax.Array]
#: The axis that shards each expert's matrices, beside the axis that divides the experts.
FSDP = "fsdp"


def token_spec(mesh: Mesh) -> P:
    """How tokens are divided: over all devices."""
    return P(mesh.axis_names)


def weight_spec(mesh: Mesh) -> P:
    """How matrices of experts are divided."""
    return P(AXIS, _weight_axis(mesh))


def _weight_axis(mesh: Mesh) -> str | None:
    return FSDP if FSDP in mesh.axis_names else None


def ours(implementation: str | None, mesh: Mesh, *, before: bool = False, **options: Any) -> Layer:
    """The library's op with a backend; `before` takes weights that were quantized before."""

    options |= {"implementation": implementation, "weight_axis_name": _weight_axis(mesh)}

    def layer(x: Any, ids: Any, weights: Any, *arrays: Any) -> jax.Array:
        gate, up, down = arrays[:3]
        if before:
            matrices = zip(arrays[3][options["fp8"]], arrays, strict=False)
            gate, up, down = (q.with_array(w) for q, w in matrices)
        return expert_mlp(x, ids, weights, gate, up, down, AXIS, **options)

    return layer


def quantized_before(mesh: Mesh, fp8: str, ws: Sequence[jax.Array]) -> Any:
    """The weights gate, up and down as a step with several microbatches has them."""
    quantize = functools.partial(prequantize_experts, fp8=fp8, weight_axis_name=_weight_axis(mesh))
    local = lambda *ws: [w.frozen for w in quantize(ws)]  # noqa: E731
    specs: dict[str, Any] = {"in_specs": weight_spec(mesh), "out_specs": weight_spec(mesh)}
    return jax.jit(jax.shard_map(local, mesh=mesh, check_vma=False, **specs))(*ws)


def plain(product: Callable[[str], GroupedMatmul], mesh: Mesh, *, recompute: bool = False) -> Layer:
    """Plain JAX around a grouped matmul.

    Args:
      product: the grouped matmul for "up", which gate and up use, and for "down".
      mesh: the devices.
      recompute: whether the backward pass computes the products of gate and up again.
    """

    def experts(x: Any, weights: Any, gate: Any, up: Any, down: Any, order: Any, sizes: Any) -> Any:
        k = weights.shape[1]
        is_here = (jnp.arange(order.size) < sizes.sum())[:, None]
        rows: Any = _rows_of_tokens(x, order, is_here, k)
        hidden = jax.nn.silu(product("up")(rows, gate, sizes)) * product("up")(rows, up, sizes)
        y = product("down")(hidden, down, sizes)
        factors = _permuted(weights.reshape(-1), order)
        # Kernels do not write rows of no group.
        y = jnp.where(is_here, y, 0) * factors[:, None].astype(y.dtype)
        return _sums_of_tokens(y, order, is_here, k)

    if recompute:
        experts = jax.checkpoint(experts)

    def layer(x: Any, ids: Any, weights: Any, *matrices: Any) -> Any:
        gather = functools.partial(lax.all_gather, axis_name=AXIS, tiled=True)
        gate, up, down = matrices[:3]
        if axis := _weight_axis(mesh):
            gate, up, down = (lax.all_gather(w, axis, axis=1, tiled=True) for w in matrices[:3])
        local = gather(ids).reshape(-1) - lax.axis_index(AXIS) * gate.shape[0]
        here = jnp.where((local >= 0) & (local < gate.shape[0]), local, gate.shape[0])
        numbers = here * here.size + jnp.arange(here.size, dtype=jnp.int32)
        fits = here.size * (gate.shape[0] + 1) < 2**31
        order = jnp.sort(numbers) % here.size if fits else jnp.argsort(here)
        sizes = jnp.sum(here[:, None] == jnp.arange(gate.shape[0])[None], axis=0, dtype=jnp.int32)
        y = experts(gather(x), gather(weights), gate, up, down, order, sizes)
        return lax.psum_scatter(y, AXIS, tiled=True)

    return layer


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rows_of_tokens(x: Any, order: Any, is_here: Any, k: int) -> Any:
    """[T, h] to [T k, h], the row of each pair in this order."""
    del is_here
    return x[order // k]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sums_of_tokens(rows: Any, order: Any, is_here: Any, k: int) -> Any:
    """The opposite: the sum of each token's rows, of those that are here."""
    rows = jnp.where(is_here, rows, 0)[_inverse(order)]
    wide = rows.reshape(-1, k, rows.shape[1]).astype(jnp.float32)
    return wide.sum(1).astype(rows.dtype)


def _inverse(order: jax.Array) -> jax.Array:
    places = jnp.arange(order.size, dtype=order.dtype)
    return jnp.zeros_like(order).at[order].set(places, unique_indices=True)


def _no_gradient(order: jax.Array) -> np.ndarray:
    return np.zeros(order.shape, jax.dtypes.float0)


_rows_of_tokens.defvjp(
    lambda x, order, is_here, k: (_rows_of_tokens(x, order, is_here, k), (order, is_here)),
    lambda k, kept, dy: (_sums_of_tokens(dy, *kept, k), *map(_no_gradient, kept)),
)
_sums_of_tokens.defvjp(
    lambda rows, order, is_here, k: (_sums_of_tokens(rows, order, is_here, k), (order, is_here)),
    lambda k, kept, dy: (dy[kept[0] // k], *map(_no_gradient, kept)),
)


@jax.custom_vjp
def _permuted(values: jax.Array, order: jax.Array) -> jax.Array:
    return values[order]


_permuted.defvjp(
    lambda values, order: (values[order], order),
    lambda order, dy: (dy[_inverse(order)], _no_gradient(order)),
)


def program(layer: Layer, mesh: Mesh, *, differentiated: bool) -> Callable[..., Any]:
    """A function of `ExpertLayer.arguments`, with what `quantized_before` returns by recipe before
    dy: the result, or it and all gradients."""
    tokens, matrices = token_spec(mesh), weight_spec(mesh)
    specs = (*(tokens,) * 3, *(matrices,) * 4)
    sharded = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)

    def forward(x: Any, ids: Any, weights: Any, ws: Any, quantized: Any, _: Any) -> Any:
        return sharded(x, ids, weights, *ws, quantized)

    def both(x: Any, ids: Any, weights: Any, ws: Any, quantized: Any, dy: Any) -> Any:
        fun = lambda x, weights, *ws: sharded(x, ids, weights, *ws, quantized)  # noqa: E731
        y, pullback = jax.vjp(fun, x, weights, *ws)
        # In a model, the gradient of the result depends on the result.
        y, dy = lax.optimization_barrier((y, dy))
        return y, pullback(dy)

    return both if differentiated else forward
