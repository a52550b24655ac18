"""Experts by a dense loop in float64 NumPy, their gradients, and how far `expert_mlp` may be off.

All sizes are global. Tokens are sharded over all axes of the mesh, and experts over some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import expert_mlp
from collective_matmul.operands.arithmetic import accumulator
from collective_matmul.ops.experts.activations import ACTIVATIONS
from tests.conftest import MeshFactory


class Arrays(NamedTuple):
    """Arguments of the op, and the gradient of its result; or gradients of these arguments."""

    x: Any
    ids: Any
    weights: Any
    w_gate: Any
    w_up: Any
    w_down: Any
    dy: Any = None


class Outcome(NamedTuple):
    """The result, and the gradients of tokens, of the router's weights and of matrices."""

    y: Any
    dx: Any
    dweights: Any
    dw_gate: Any
    dw_up: Any
    dw_down: Any


@dataclass(frozen=True)
class Case:
    """One call of the op.

    Attributes:
      axes: the mesh, by names of axes. "hidden" divides hidden features and "fsdp" shards weights;
        experts are divided over the others.
      implementation: as the op takes it.
      grouped: likewise, of grouped matmuls.
      tokens: of each device.
      width, hidden: sizes of an expert, global.
      local_experts: experts of each device.
      choices: k.
      dtype: of tokens and matrices.
      routing: "random", or where tokens go: see `ids`.
      options: further arguments of the op.
      check_vma: whether `shard_map` tracks which axes a value varies over.
    """

    axes: Mapping[str, int]
    implementation: Any = "xla"
    grouped: Any = "xla"
    tokens: int = 3
    width: int = 4
    hidden: int = 6
    local_experts: int = 2
    choices: int = 2
    dtype: str = "float32"
    routing: str = "random"
    options: Mapping[str, Any] = field(default_factory=dict)
    check_vma: bool = True

    def __str__(self) -> str:
        mesh = "x".join(f"{size}{name}" for name, size in self.axes.items())
        return f"{self.implementation}-{self.grouped}-{mesh}-{self.dtype}-{self.routing}"

    @property
    def expert_axes(self) -> tuple[str, ...]:
        return tuple(name for name in self.axes if name not in ("hidden", "fsdp"))

    @property
    def experts(self) -> int:
        return self.local_experts * math.prod(self.axes[name] for name in self.expert_axes)

    def arrays(self, seed: int = 0) -> Arrays:
        generator = np.random.default_rng(seed)
        rows, e, h, f = self.tokens * math.prod(self.axes.values()), *self.matrix
        dtype = jnp.dtype(self.dtype)
        draw = lambda *shape: generator.standard_normal(shape).astype(dtype)  # noqa: E731
        return Arrays(
            draw(rows, h),
            self.ids(rows, generator),
            generator.uniform(0.1, 1, (rows, self.choices)).astype(accumulator(dtype)),
            draw(e, h, f),
            draw(e, h, f),
            draw(e, f, h),
            draw(rows, h),
        )

    @property
    def matrix(self) -> tuple[int, int, int]:
        return self.experts, self.width, self.hidden

    def ids(self, rows: int, generator: np.random.Generator) -> np.ndarray:
        """Ids of all tokens. Random ones repeat, and some are of no expert."""
        shape = (rows, self.choices)
        if self.routing == "random":
            return generator.integers(-1, self.experts + 1, shape).astype(np.int32)
        if self.routing == "distinct":
            scores = generator.random((rows, self.experts))
            return np.argsort(scores, axis=1)[:, : self.choices].astype(np.int32)
        chosen = {"first": 0, "last": self.experts - 1, "none": -1, "beyond": 2**31 - 1}
        return np.full(shape, chosen[self.routing], np.int32)

    @property
    def keywords(self) -> dict[str, Any]:
        named = {f"{name}_axis_name": name for name in ("hidden",) if name in self.axes}
        if "fsdp" in self.axes:
            named["weight_axis_name"] = "fsdp"
        return named | {
            "implementation": self.implementation,
            "grouped_implementation": self.grouped,
            **self.options,
        }

    def weights(self, *ws: jax.Array) -> Sequence[Any]:
        """The weights as the op takes them, on one device."""
        return ws

    def sharded(self, mesh: Mesh) -> Callable[..., jax.Array]:
        """The op on global arrays x, ids, weights and matrices."""
        experts = self.expert_axes
        hidden = "hidden" if "hidden" in self.axes else None
        into: list[Any] = [experts or None, None, hidden]
        out: list[Any] = [experts or None, hidden, None]
        if "fsdp" in self.axes:
            for spec in (into, out):
                dimension = self.options.get("weight_dimension", 1)
                before = spec[dimension]
                before = () if before is None else before
                before = (before,) if isinstance(before, str) else before
                # A shard is a part of what this device would have.
                spec[dimension] = (*before, "fsdp")
        tokens = P(tuple(self.axes))
        name = experts[0] if len(experts) == 1 else experts

        def local(x, ids, weights, w_gate, w_up, w_down):
            gate, up, down = self.weights(w_gate, w_up, w_down)
            return expert_mlp(x, ids, weights, gate, up, down, name, **self.keywords)

        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(tokens, tokens, tokens, P(*into), P(*into), P(*out)),
            out_specs=tokens,
            check_vma=self.check_vma,
        )

    def program(self, mesh: Mesh) -> Callable[[Arrays], Outcome]:
        """The result and all gradients."""
        fun = self.sharded(mesh)

        def results_and_gradients(arrays: Arrays) -> Outcome:
            x, ids, weights, *ws, dy = arrays
            y, transpose = jax.vjp(
                lambda x, weights, *ws: fun(x, ids, weights, *ws), x, weights, *ws
            )
            return Outcome(y, *transpose(dy))

        return results_and_gradients

    @property
    def activation(self) -> str:
        return self.options.get("activation", "silu")

    def check(self, make_mesh: MeshFactory, run: Callable = jax.jit, seed: int = 0) -> Outcome:
        """Compares all with the reference."""
        arrays = self.arrays(seed)
        actual = run(self.program(make_mesh(dict(self.axes))))(arrays)
        assert_close(actual, *reference(arrays, self.activation), self)
        return actual


def _derivative(fun: Callable, x: np.ndarray) -> np.ndarray:
    """By central differences of fourth order in float64: off by about 1e-11."""
    step = 1e-3
    difference = 8 * (fun(x + step) - fun(x - step)) - (fun(x + 2 * step) - fun(x - 2 * step))
    return difference / (12 * step)


_SIGMAS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}
assert _SIGMAS.keys() == ACTIVATIONS.keys()


def reference(arrays: Arrays, activation: str = "silu") -> tuple[Outcome, Outcome]:
    """The exact outcome, and the magnitude that each element's error is relative to.

    Errors of rounded products are bounded by the products of magnitudes (Higham, Accuracy and
    Stability of Numerical Algorithms, section 3.1). |σ(G)| is at most |G|, the first derivative of
    each σ at most 1.2, and the second at most 1.
    """
    sigma = _SIGMAS[activation]
    x, ids, weights, w_gate, w_up, w_down, dy = (
        a if a.dtype.kind == "i" else a.astype(np.float64) for a in arrays
    )
    exact, size = (
        Outcome(*(np.zeros_like(a) for a in (x, x, weights, w_gate, w_up, w_down)))
        for _ in range(2)
    )
    for t, j in np.ndindex(*ids.shape):
        e, p = ids[t, j], weights[t, j]
        if not 0 <= e < len(w_gate):
            continue
        matrices = w_gate[e], w_up[e], w_down[e]
        _add(exact, (t, j, e), p, x[t], dy[t], matrices, sigma, lambda g: _derivative(sigma, g))
        absolute = [abs(w) for w in matrices]
        _add(size, (t, j, e), p, abs(x[t]), abs(dy[t]), absolute, lambda g: g, lambda g: 1.2 + g)
    return exact, size


def _add(
    outcome: Outcome,
    place: tuple[int, int, int],
    p: Any,
    x: np.ndarray,
    dy: np.ndarray,
    matrices: Any,
    sigma: Callable,
    derivative: Callable,
) -> None:
    """Adds what one expert makes of one token."""
    (t, j, e), (w_gate, w_up, w_down) = place, matrices
    gate, up = x @ w_gate, x @ w_up
    activated = sigma(gate) * up
    dactivated = w_down @ dy
    dgate, dup = p * dactivated * up * derivative(gate), p * dactivated * sigma(gate)
    outcome.y[t] += p * (activated @ w_down)
    outcome.dx[t] += w_gate @ dgate + w_up @ dup
    outcome.dweights[t, j] += dactivated @ activated
    outcome.dw_gate[e] += np.outer(x, dgate)
    outcome.dw_up[e] += np.outer(x, dup)
    outcome.dw_down[e] += np.outer(p * activated, dy)


def assert_close(actual: Outcome, exact: Outcome, size: Outcome, case: Case) -> None:
    """Every element is within the bound of its roundings; NaN never is.

    Roundings to the dtype, each relative to the magnitudes: of G, U, DA and what is computed from
    them (4, of which those of G and U count 1.2 times), of a product (1), of a token's sum (1), of
    the sum over devices (1) or, for gradients of matrices, of one sum for each visit and for each
    shard (2 D). One more covers terms of second order. Sums, in float32 or float64, have at most
    as many terms as all dimensions together. Below the normal numbers a rounding is off by half a
    subnormal, which at most all terms multiply.
    """
    own, wide = jnp.finfo(case.dtype), jnp.finfo(accumulator(case.dtype))
    devices, rows = math.prod(case.axes.values()), exact.y.shape[0]
    terms = 2 * (case.width + case.hidden) + rows * case.choices + devices
    roundings = 9 + 2 * devices
    relative = roundings * float(own.eps) / 2 + terms * float(wide.eps) / 2
    relative += 1e-10  # The reference's own derivatives are off by less.
    absolute = roundings * terms * float(own.smallest_subnormal)
    for name, value, wanted, magnitude in zip(Outcome._fields, actual, exact, size, strict=True):
        dtype = wide.dtype if name == "dweights" else case.dtype
        assert (value.shape, value.dtype) == (wanted.shape, jnp.dtype(dtype)), name
        error = np.abs(np.asarray(value).astype(np.float64) - wanted)
        bound = relative * magnitude + absolute
        wrong = ~(error <= bound)
        assert not wrong.any(), (
            f"{name}: {wrong.sum()} of {wrong.size} elements are off, the first by"
            f" {error[wrong][0]:.3g} where {bound[wrong][0]:.3g} is allowed"
        )
