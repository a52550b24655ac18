"""The gated activations of experts, by name."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]
GatedActivation = Callable[[jax.Array, jax.Array], jax.Array]

#: Activations of gate alone, which up is multiplied with: functions of float32 or float64.
ACTIVATIONS: dict[str, Activation] = {
    "silu": lambda x: x * jax.lax.logistic(x),
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": lambda x: jnp.maximum(x, 0),
}

#: Of gpt-oss: where gate and up are clamped, and the slope of the sigmoid.
_LIMIT, _SLOPE = 7.0, 1.702


def _gpt_oss(gate: jax.Array, up: jax.Array) -> jax.Array:
    """``gate sigmoid(1.702 gate) (up + 1)``, with gate at most 7 and up from -7 to 7.

    OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2.3. A number at the limit has
    the gradient of one below, which half precision meets often.
    """
    gate = jnp.where(gate > _LIMIT, _LIMIT, gate)
    up = jnp.where(up > _LIMIT, _LIMIT, jnp.where(up < -_LIMIT, -_LIMIT, up))
    return gate * jax.lax.logistic(_SLOPE * gate) * (up + 1)


#: Activations of gate and up that are no product of up and a function of gate.
GATED_ACTIVATIONS: dict[str, GatedActivation] = {"gpt_oss": _gpt_oss}

#: All names.
NAMES = (*ACTIVATIONS, *GATED_ACTIVATIONS)


def gated_activation(name: str) -> GatedActivation:
    """The function of gate and up that a name of `NAMES` stands for."""
    if name in GATED_ACTIVATIONS:
        return GATED_ACTIVATIONS[name]
    of_gate = ACTIVATIONS[name]
    return lambda gate, up: of_gate(gate) * up
