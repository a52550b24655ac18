"""Experts whose weights were quantized before, beside those that quantize them in each pass."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from collective_matmul import Quantized, expert_mlp, prequantize_experts
from collective_matmul.operands.format import FORMATS
from tests.conftest import MeshFactory
from tests.ops.experts.reference import Case
from tests.ops.experts.rounded_reference import RULES, case_of, check, recipe, recipes
from tests.ops.experts.test_structure import bytes_of, traced

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

EXHAUSTIVE = (pytest.mark.exhaustive,)
RECOMPUTED: Any = {"recompute_hidden": True}
FSDP: Any = {"expert": 2, "fsdp": 2}


class QuantizedBefore(Case):
    """A case whose weights, or shards of them, are quantized before the op."""

    @classmethod
    def of(cls, case: Case) -> QuantizedBefore:
        return cls(**{f.name: getattr(case, f.name) for f in dataclasses.fields(case)})

    def weights(self, *ws: jax.Array) -> Sequence[Any]:
        names = ("weight_axis_name", "weight_dimension")
        sharding = {n: self.keywords[n] for n in names if n in self.keywords}
        return prequantize_experts(ws, self.options["fp8"], **sharding)


CASES = [
    recipe("rowwise", (), {"expert": 2}, "ring_direct", RECOMPUTED),
    recipe("blockwise", (), FSDP, "ring", {}),
    recipe("tensorwise", (), {"expert": 2, "hidden": 2}, "xla", {}),
    recipe("rowwise", (), FSDP, "ring_direct", {"weight_dimension": 2}),
    *(
        recipe(fp8, EXHAUSTIVE, axes, implementation, options)
        for fp8, axes, implementation, options in (
            *itertools.product(RULES, [FSDP], ["exchange"], [RECOMPUTED, {"weight_dimension": 2}]),
            *itertools.product(RULES, [{"expert": 1}, {"expert": 3}], [None], [{}, RECOMPUTED]),
        )
    ),
]


@pytest.mark.parametrize(("fp8", "axes", "implementation", "options"), CASES)
def test_values_and_gradients(
    fp8: str, axes: dict[str, int], implementation: str, options: Any, make_mesh: MeshFactory
) -> None:
    """They are right, and those of arrays bit for bit: a matrix is rounded alike wherever."""
    case = case_of(fp8, axes, implementation, options=options, tokens=2)
    actual = check(QuantizedBefore.of(case), make_mesh, jax.jit, RULES[fp8])
    wanted = jax.jit(case.program(make_mesh(dict(axes))))(case.arrays())
    for name, value, other in zip(wanted._fields, actual, wanted, strict=True):
        np.testing.assert_array_equal(value, other, err_msg=name)


class Frozen(QuantizedBefore):
    """Weights of which only matrices are there."""

    def weights(self, *ws: jax.Array) -> Sequence[Any]:
        return [w.frozen for w in super().weights(*ws)]


@pytest.mark.parametrize(
    ("fp8", "axes", "options"),
    [
        recipe("rowwise", (), {"expert": 3}, {}),
        recipe("tensorwise", EXHAUSTIVE, {"expert": 2}, RECOMPUTED),
        recipe("blockwise", EXHAUSTIVE, {"expert": 2}, RECOMPUTED),
        recipe("rowwise", EXHAUSTIVE, FSDP, {"weight_dimension": 2}),
    ],
)
def test_frozen_weights_send_no_more_than_is_needed(
    fp8: str, axes: dict[str, int], options: Any, make_mesh: MeshFactory
) -> None:
    """Gradients of results travel in 8 bits, and tokens only to compute hidden products again."""
    case = case_of(fp8, axes, "ring_direct", options=options, dtype="bfloat16", tokens=2)
    frozen = Frozen.of(case)
    wanted = jax.jit(case.program(make_mesh(dict(axes))))(case.arrays())
    actual = jax.jit(frozen.program(make_mesh(dict(axes))))(case.arrays())
    for name in ("y", "dx", "dweights"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(wanted, name), err_msg=name)
    assert not any(np.any(np.asarray(dw, np.float32)) for dw in actual[3:])
    found, requests = traced(frozen, make_mesh)
    permutes = [e for e in found if e.primitive.name == "ppermute"]
    expected = sum(requests[way].bytes_communicated for way in ("forward", "backward"))
    assert sum(map(bytes_of, permutes)) == expected
    assert not requests["backward"].trained


def three(ws: Sequence[Any]) -> tuple[Any, Any, Any]:
    gate, up, down = ws
    return gate, up, down


def operands(case: Case) -> tuple[Any, ...]:
    return tuple(map(jnp.asarray, case.arrays()))


@recipes(quick=["rowwise"])
def test_frozen_weights_have_no_gradient_and_others_are_the_same(fp8: str) -> None:
    """Their products are not computed, nor do tokens travel for them."""
    case = case_of(fp8, {"expert": 1}, "xla", tokens=4)
    x, ids, weights, *ws, dy = operands(case)
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))

    def outcome(quantized: Any, x: Any, weights: Any, *, frozen: bool, copies: int = 2) -> Any:
        def local(quantized: Any, x: Any, weights: Any, ids: Any) -> jax.Array:
            return expert_mlp(x, ids, weights, *three(quantized), "expert", fp8=fp8)

        op = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        if frozen:
            quantized = [w.frozen for w in quantized]
        if copies == 1:
            quantized = [dataclasses.replace(w, backward=None) for w in quantized]
        y, pullback = jax.vjp(lambda x, weights: op(quantized, x, weights, ids), x, weights)
        return y, *pullback(dy)

    quantized = prequantize_experts(ws, fp8)
    run = jax.jit(outcome, static_argnames=("frozen", "copies"))
    wanted = run(quantized, x, weights, frozen=False)
    actual = run(quantized, x, weights, frozen=True)
    for value, other in zip(actual, wanted, strict=True):
        np.testing.assert_array_equal(value, other)
    # One copy: the backward rounds what the forward's numbers stand for, once more.
    y, dx, dweights = run(quantized, x, weights, frozen=True, copies=1)
    np.testing.assert_array_equal(y, wanted[0])
    np.testing.assert_array_equal(dweights.shape, weights.shape)
    scale = float(jnp.abs(wanted[1]).max())
    np.testing.assert_allclose(dx, wanted[1], atol=0.1 * scale)
    lowered = [
        str(jax.make_jaxpr(functools.partial(outcome, frozen=f))(quantized, x, weights))
        for f in (False, True)
    ]
    # Three products forward and three backward; and a gradient for each weight, which is dropped
    # only if it is not computed.
    assert [text.count("ragged_dot_general[") for text in lowered] == [9, 6]


def test_what_is_quantized_before_is_converted_once() -> None:
    """A pass reads one matrix of each weight, and no array."""
    case = case_of("rowwise", {"expert": 1}, "xla", dtype="bfloat16")
    x, ids, weights, *ws, dy = operands(case)
    quantized = prequantize_experts(ws, "rowwise")
    spoiled = tuple(w.with_array(jnp.full_like(w.array, jnp.nan)) for w in quantized)

    def outcome(ws: Any, x: Any) -> Any:
        mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))

        def local(ws: Any, x: Any) -> jax.Array:
            return expert_mlp(x, ids, weights, *three(ws), "expert", fp8="rowwise")

        op = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        y, pullback = jax.vjp(op, ws, x)
        return y, pullback(dy)

    y, (dws, dx) = jax.jit(outcome, static_argnums=())(spoiled, x)
    wanted, (wanted_dws, wanted_dx) = jax.jit(outcome)(quantized, x)
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(dx, wanted_dx)
    for dw, other, w in zip(dws, wanted_dws, ws, strict=True):
        assert isinstance(dw, Quantized)
        assert dw.array is not None and dw.array.shape == w.shape and dw.array.dtype == w.dtype
        np.testing.assert_array_equal(dw.array, other.array)


def call(ws: Sequence[Any], x: Any = None, **options: Any) -> Any:
    case = case_of("rowwise", {"expert": 1}, "xla")
    own, ids, weights, *_ = operands(case)
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    x = own if x is None else x

    def local(ws: Any, x: Any) -> jax.Array:
        return expert_mlp(x, ids, weights, *three(ws), "expert", **options)

    return jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(ws, x)


def test_weights_that_do_not_fit() -> None:
    x, _, _, *ws, _ = operands(case_of("rowwise", {"expert": 1}, "xla"))
    gate, up, down = prequantize_experts(ws, "rowwise")
    with pytest.raises(ValueError, match=r"an array, 1 of 2 quantized, trained.*in this order"):
        call([ws[0], up, down], fp8="rowwise")
    with pytest.raises(ValueError, match=r"1 of 2 quantized, trained, 0 of 2.*in this order"):
        call([up, gate, down], fp8="rowwise")
    with pytest.raises(ValueError, match=r"frozen.*all trained or all frozen"):
        call([gate.frozen, up, down], fp8="rowwise")
    with pytest.raises(ValueError, match="fp8=None: w_gate is quantized by 'rowwise'"):
        call([gate, up, down])
    with pytest.raises(ValueError, match=r"fp8='blockwise'.*pass fp8='rowwise'"):
        call([gate, up, down], fp8="blockwise")
    with pytest.raises(ValueError, match="quantized in float32, and x is bfloat16"):
        call([gate, up, down], x.astype(jnp.bfloat16), fp8="rowwise")
    with pytest.raises(ValueError, match=r"ws: 2 weights; expected w_gate, w_up and w_down"):
        prequantize_experts(ws[:2], "rowwise")
    again: Any = [ws[0], up, ws[2]]
    with pytest.raises(TypeError, match="w_up: a Quantized; expected an array"):
        prequantize_experts(again, "rowwise")
    with pytest.raises(ValueError, match=r"w_down: bfloat16 .*, and w_gate is float32"):
        prequantize_experts([*ws[:2], ws[2].astype(jnp.bfloat16)], "rowwise")
    nothing: Any = None
    with pytest.raises(ValueError, match="fp8=None: expected the name of a registered format"):
        prequantize_experts(ws, nothing)
    assert gate.fp8 in FORMATS


@pytest.mark.parametrize("dimension", [0, 1])
def test_shards_that_do_not_fit(dimension: int, make_mesh: MeshFactory) -> None:
    case = case_of("rowwise", {"expert": 1, "fsdp": 2}, options={"weight_dimension": dimension})
    before = QuantizedBefore.of(case)
    if dimension == 1:
        before = QuantizedWhole.of(case)
    message = ("shard one of these, or pass arrays", "quantized as a whole, and the op has K of w")
    with pytest.raises(ValueError, match=message[dimension]):
        jax.eval_shape(before.program(make_mesh({"expert": 1, "fsdp": 2})), case.arrays())


class QuantizedWhole(QuantizedBefore):
    """Shards that are quantized as if they were whole."""

    def weights(self, *ws: jax.Array) -> Sequence[Any]:
        return prequantize_experts(ws, self.options["fp8"])
