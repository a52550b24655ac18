"""The cost of tracing, in numbers of traced permutes, as times differ between runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax import lax

from tests.conftest import MeshFactory
from tests.reference import AXIS
from tests.rewrite.blocks import programs
from tests.rewrite.programs import Program, gradients_of, ring

ORDERS: dict[str, Callable[[Callable], Callable]] = {
    "forward": ring,
    "overlap of gradients": lambda fun: ring(gradients_of(fun, 3)),
    "gradients of overlap": lambda fun: gradients_of(ring(fun), 3),
}


def count_traced_permutes(fun: Callable, arguments: list, monkeypatch: pytest.MonkeyPatch) -> int:
    permute, calls = lax.ppermute, []

    def counted(*args: Any, **kwargs: Any) -> jax.Array:
        calls.append(None)
        return permute(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(lax, "ppermute", counted)
        jax.jit(fun).trace(*arguments)
    return len(calls)


@pytest.mark.parametrize("order", ORDERS)
def test_equal_layers_are_traced_once(
    order: str, make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rings of five layers are traced as often as those of two."""
    layer, _ = programs()["mlp"]

    def traced(layers: int) -> int:
        def stack(x: jax.Array, *weights: jax.Array) -> jax.Array:
            for _ in range(layers):
                x = layer.body(x, *weights)
            return x

        program = Program(stack, layer.shapes, layer.in_specs, layer.out_specs)
        fun = ORDERS[order](program.sharded(make_mesh({AXIS: 2})))
        return count_traced_permutes(fun, program.arguments(), monkeypatch)

    assert 0 < traced(5) == traced(2)
