"""Biases of experts, and the activation of gpt-oss, beside a dense loop in float64 NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from collective_matmul import expert_mlp
from collective_matmul.ops.experts.backends import BACKENDS
from tests.conftest import MeshFactory
from tests.covering import covering
from tests.ops.experts.grouped.test_kernels import lowered, lowers_triton

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

TOKENS, WIDTH, HIDDEN, CHOICES, LOCAL_EXPERTS = 4, 6, 6, 3, 2
LIMIT, SLOPE = 7.0, 1.702


class Values(NamedTuple):
    """Arrays that the op has gradients of, global, or these gradients."""

    x: Any
    weights: Any
    w_gate: Any
    w_up: Any
    w_down: Any
    b_gate: Any
    b_up: Any
    b_down: Any


@dataclass(frozen=True)
class Case:
    """One call: axes by name, of which "hidden" divides hidden features and "fsdp" weights."""

    axes: Mapping[str, int]
    implementation: Any = "xla"
    grouped: Any = "xla"
    dtype: str = "float32"
    activation: str = "gpt_oss"
    without: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        mesh = "x".join(f"{size}{name}" for name, size in self.axes.items())
        parts = self.implementation, self.grouped, mesh, self.dtype, self.activation, *self.without
        return "-".join(map(str, (*parts, *self.options)))

    def draw(self) -> tuple[Values, np.ndarray, np.ndarray]:
        """The values, the ids and the gradient of the result."""
        generator = np.random.default_rng(0)
        experts = LOCAL_EXPERTS * self.axes.get("expert", 1)
        rows = TOKENS * int(np.prod([*self.axes.values()]))
        draw = lambda *shape: generator.standard_normal(shape)  # noqa: E731
        values = Values(
            # Large enough that some of gate and up are beyond either limit.
            3 * draw(rows, WIDTH),
            generator.uniform(0.1, 1, (rows, CHOICES)),
            draw(experts, WIDTH, HIDDEN),
            draw(experts, WIDTH, HIDDEN),
            draw(experts, HIDDEN, WIDTH),
            draw(experts, HIDDEN),
            draw(experts, HIDDEN),
            draw(experts, WIDTH),
        )
        kept = {name: None for name in self.without}
        values = values._replace(**kept)
        values = jax.tree.map(lambda a: np.asarray(a, np.float32), values)
        ids = generator.integers(-1, experts + 1, (rows, CHOICES)).astype(np.int32)
        return values, ids, draw(rows, WIDTH).astype(np.float32)

    def check(self, make_mesh: MeshFactory) -> None:
        """Compares the result and all gradients with the reference."""
        values, ids, dy = self.draw()
        narrow = Values(
            *(
                a if a is None or name.startswith(("b_", "weights")) else jnp.asarray(a, self.dtype)
                for name, a in zip(Values._fields, values, strict=True)
            )
        )
        dy = jnp.asarray(dy, self.dtype)
        fun = self.sharded(make_mesh(dict(self.axes)))

        def program(values: Values) -> Any:
            y, transpose = jax.vjp(lambda values: fun(values, ids), values)
            return y, *transpose(dy)

        found, gradients = jax.jit(program)(narrow)
        exact = jax.tree.map(lambda a: np.asarray(a).astype(np.float64), narrow)
        wide = np.asarray(dy).astype(np.float64)
        expected, size = reference(exact, ids, wide, self.activation)
        # Some ten roundings, relative to sums of magnitudes.
        tolerance = 16 * float(jnp.finfo(self.dtype).eps)
        for name, a, b, scale in zip(
            ("y", *Values._fields), (found, *gradients), expected, size, strict=True
        ):
            if b is None:
                assert a is None
                continue
            assert a.dtype == (jnp.float32 if name.startswith(("b_", "weights")) else self.dtype)
            error = np.abs(np.asarray(a).astype(np.float64) - b)
            assert np.all(error <= tolerance * scale), (name, float(np.max(error / scale)))

    def sharded(self, mesh: Any) -> Any:
        """The op on global values and ids."""
        has = lambda name: name if name in self.axes else None  # noqa: E731
        expert, hidden, fsdp = has("expert"), has("hidden"), has("fsdp")
        tokens, into = P(tuple(self.axes)), P(expert, fsdp, hidden)
        down = P(expert, tuple(a for a in (hidden, fsdp) if a) or None)
        biases = P(expert, hidden), P(expert, hidden), P(expert)
        specs = Values(tokens, tokens, into, into, down, *biases)
        specs = specs._replace(**{name: None for name in self.without})

        def local(values: Values, ids: jax.Array) -> jax.Array:
            x, weights, w_gate, w_up, w_down, *biases = values
            b_gate, b_up, b_down = biases
            return expert_mlp(
                x, ids, weights, w_gate, w_up, w_down, expert or (), b_gate=b_gate, b_up=b_up,
                b_down=b_down, hidden_axis_name=hidden, weight_axis_name=fsdp,
                activation=self.activation, implementation=self.implementation,
                grouped_implementation=self.grouped, **self.options,
            )  # fmt: skip

        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, tokens),
            out_specs=tokens,
            # Pallas' interpreter cannot run where types are checked.
            check_vma=self.grouped == "xla",
        )


def activation(name: str, g: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, ...]:
    """The activation, and its derivatives by gate and up."""
    if name == "silu":
        s = 1 / (1 + np.exp(-g))
        return g * s * u, (s + g * s * (1 - s)) * u, g * s
    inside_g, inside_u = g <= LIMIT, np.abs(u) <= LIMIT
    g, u = np.minimum(g, LIMIT), np.clip(u, -LIMIT, LIMIT)
    s = 1 / (1 + np.exp(-SLOPE * g))
    slope = s + SLOPE * g * s * (1 - s)
    return g * s * (u + 1), slope * (u + 1) * inside_g, g * s * inside_u


def reference(values: Values, ids: np.ndarray, dy: np.ndarray, name: str) -> tuple[Any, Any]:
    """The result and gradients, and the magnitudes that errors are relative to."""
    outcome, size = (
        [None if a is None else np.zeros(a.shape) for a in (values.x, *values)] for _ in range(2)
    )

    def add(place: int, index: Any, term: np.ndarray, magnitude: np.ndarray) -> None:
        total, bound = outcome[place], size[place]
        if total is not None and bound is not None:
            total[index] += term
            bound[index] += magnitude

    zero = lambda b, e: 0 if b is None else b[e]  # noqa: E731
    for t, j in np.ndindex(*ids.shape):
        e = ids[t, j]
        if not 0 <= e < len(values.w_gate):
            continue
        x, p, wg, wu, wd = values.x[t], values.weights[t, j], *(w[e] for w in values[2:5])
        bg, bu, bd = (zero(b, e) for b in values[5:])
        g, u = x @ wg + bg, x @ wu + bu
        mg, mu = abs(x) @ abs(wg) + abs(bg), abs(x) @ abs(wu) + abs(bu)
        a, by_g, by_u = activation(name, g, u)
        # Bounds of the activation, its derivatives, and of their change with rounded G and U.
        ma = (1 + mg) * (1 + mu) + 2 * mu * mg
        result, da, mda = a @ wd + bd, wd @ dy[t], abs(wd) @ abs(dy[t])
        dg, du = p * da * by_g, p * da * by_u
        mdg, mdu = p * mda * 2 * (1 + mu) * (1 + mg), p * mda * 2 * (1 + mg)
        mresult = ma @ abs(wd) + abs(bd)
        add(0, t, p * result, p * mresult)
        add(1, t, wg @ dg + wu @ du, abs(wg) @ mdg + abs(wu) @ mdu)
        add(2, (t, j), dy[t] @ result, abs(dy[t]) @ mresult)
        add(3, e, np.outer(x, dg), np.outer(abs(x), mdg))
        add(4, e, np.outer(x, du), np.outer(abs(x), mdu))
        add(5, e, np.outer(p * a, dy[t]), np.outer(p * ma, abs(dy[t])))
        add(6, e, dg, mdg)
        add(7, e, du, mdu)
        add(8, e, p * dy[t], abs(p * dy[t]))
    # What nothing was added to is zero.
    return outcome, [None if s is None else s + 1e-30 for s in size]


CASES = [
    Case({"expert": 1}),
    Case({"expert": 2}, "ring_direct"),
    Case({"expert": 3}, "ring", options={"recompute_hidden": True}),
    Case({"expert": 2, "hidden": 2}, "xla"),
    Case({"hidden": 3}, "ring_two_way", dtype="bfloat16"),
    Case({"expert": 2, "fsdp": 2}, "exchange", activation="silu"),
    Case({"expert": 2}, "xla", without=("b_up", "b_down")),
    Case({"expert": 2}, "ring", without=("b_gate", "b_up"), activation="silu"),
    Case({"expert": 1}, "xla", "triton"),
]


def others() -> list[Case]:
    """Cases that hold each pair of a number of devices, an implementation, a dtype and an axis."""
    factors: Any = {
        "devices": (1, 2, 3),
        "implementation": tuple(BACKENDS),
        "dtype": ("float32", "bfloat16"),
        "more": (None, "hidden", "fsdp"),
    }
    every = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    return [
        Case(
            {"expert": case["devices"], **({case["more"]: 2} if case["more"] else {})},
            case["implementation"],
            dtype=case["dtype"],
        )
        for case in covering(every, lambda case: case)
    ]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in others())],
    ids=str,
)
def test_values_and_gradients(case: Case, make_mesh: MeshFactory) -> None:
    case.check(make_mesh)


def test_the_limits_of_the_activation_are_reached() -> None:
    """Else the cases would not notice a missing limit."""
    values, ids, _ = CASES[0].draw()
    g = np.einsum("th,ehf->tef", values.x, values.w_gate) + values.b_gate
    u = np.einsum("th,ehf->tef", values.x, values.w_up) + values.b_up
    assert ids.size
    for reached in (g > LIMIT, u > LIMIT, u < -LIMIT):
        assert 0.05 < np.mean(reached) < 0.6


@pytest.mark.parametrize("fp8", ["rowwise", "tensorwise"])
def test_with_operands_in_8_bits(fp8: str, make_mesh: MeshFactory) -> None:
    """Also where gradients of results travel in 8 bits, which those of the bias of down are of."""
    values, ids, dy = Case({"expert": 2}).draw()
    outcomes = []
    for options in ({}, {"fp8": fp8}):
        fun = Case({"expert": 2}, "ring", options=options).sharded(make_mesh({"expert": 2}))

        @jax.jit
        def program(values: Values) -> Any:
            y, transpose = jax.vjp(lambda values: fun(values, ids), values)  # noqa: B023
            return y, *transpose(dy)[0]

        outcomes.append(program(values))
    for name, wanted, found in zip(("y", *Values._fields), *outcomes, strict=True):
        # Operands are off by 2⁻⁴ at most, and by a third of it in the mean.
        difference = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert difference < 0.15, name
    packed = np.linalg.norm(outcomes[1][-1] - outcomes[0][-1]) > 0
    assert packed == (fp8 == "tensorwise")


@lowers_triton
def test_the_activation_lowers_for_cuda() -> None:
    """In the kernels that compute it, and its gradient, from rows."""
    values, ids, dy = Case({"expert": 1}).draw()

    def program(values: Values, dy: Any) -> Any:
        ws: Any = values[2:5]
        biases: dict[str, Any] = dict(zip(("b_gate", "b_up", "b_down"), values[5:], strict=True))

        def fun(x: Any, *ws: Any) -> jax.Array:
            return expert_mlp(
                x, jnp.asarray(ids), values.weights, *ws, axis_name=(), activation="gpt_oss",
                grouped_implementation="triton", **biases,
            )  # fmt: skip

        return jax.vjp(fun, values.x, *ws)[1](dy)

    assert "map_rows" in lowered(program, values, dy)
