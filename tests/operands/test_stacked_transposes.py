"""A scan over matrices in 8 bits transposes each of them where it is used, not all before it.

Only XLA for GPUs would do otherwise; `tests.train.compiled_memory` has the memory that it takes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from collective_matmul import quantize_frozen

LAYERS, SIZE = 2, 128


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "tensorwise"])
def test_the_values_of_a_layer_keep_their_layout(recipe: str) -> None:
    w = jax.random.normal(jax.random.key(0), (LAYERS, SIZE, SIZE), jnp.bfloat16)
    ws = jax.vmap(lambda w: quantize_frozen(w, recipe))(w)

    def transposed(ws: Any) -> jax.Array:
        def layer(carry: None, w: Any) -> tuple[None, jax.Array]:
            return carry, w.format.transposed(w.forward)[0].values

        return lax.scan(layer, None, ws)[1]

    lowered = jax.jit(transposed).lower(ws)
    (constraint,) = (line for line in lowered.as_text().splitlines() if "LayoutConstraint" in line)
    assert f"tensor<{SIZE}x{SIZE}xf8E4M3FN>" in constraint
    values = ws.forward.values.astype(jnp.float32)
    found = lowered.compile()(ws).astype(jnp.float32)
    assert jnp.array_equal(found, values.swapaxes(1, 2))
