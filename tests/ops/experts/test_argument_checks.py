"""Bad arguments of `expert_mlp`: one sentence each, before anything is compiled."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from collective_matmul import expert_mlp
from tests.conftest import MeshFactory

T, H, F, E, K = 4, 6, 10, 4, 2
GOOD: dict[str, Any] = {
    "x": jnp.zeros((T, H)),
    "expert_ids": jnp.zeros((T, K), jnp.int32),
    "expert_weights": jnp.zeros((T, K)),
    "w_gate": jnp.zeros((E, H, F)),
    "w_up": jnp.zeros((E, H, F)),
    "w_down": jnp.zeros((E, F, H)),
    "axis_name": "expert",
}
NAMES = re.escape("expected the name of a mesh axis, or a tuple of such names")

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "x of one dimension": (
        {"x": jnp.zeros(H)},
        ValueError,
        r"x of shape \(6,\): expected \[tokens, features\]; join",
    ),
    "x of three dimensions": (
        {"x": jnp.zeros((1, T, H))},
        ValueError,
        r"x of shape \(1, 4, 6\): expected \[tokens, features\]; join its dimensions",
    ),
    "x of whole numbers": (
        {"x": jnp.zeros((T, H), jnp.int32)},
        TypeError,
        "x of int32: expected one of float32, bfloat16",
    ),
    "x in 8 bits": (
        {"x": jnp.zeros((T, H), jnp.float8_e4m3fn)},
        TypeError,
        "x of float8_e4m3fn: expected one of float32",
    ),
    "x of no features": (
        {"x": jnp.zeros((T, 0)), "w_gate": jnp.zeros((E, 0, F))},
        ValueError,
        r"w_gate of shape \(4, 0, 10\): expected .* sizes are above 0",
    ),
    "ids that are no whole numbers": (
        {"expert_ids": jnp.zeros((T, K))},
        TypeError,
        "expert_ids of float32: expected whole numbers, such as int32",
    ),
    "ids of other tokens": (
        {"expert_ids": jnp.zeros((T + 1, K), jnp.int32)},
        ValueError,
        r"expert_ids of shape \(5, 2\): expected \[4, k\], the experts of each of the 4 tokens",
    ),
    "ids of one dimension": (
        {"expert_ids": jnp.zeros(T, jnp.int32)},
        ValueError,
        r"expert_ids of shape \(4,\): expected \[4, k\]",
    ),
    "no experts of a token": (
        {"expert_ids": jnp.zeros((T, 0), jnp.int32), "expert_weights": jnp.zeros((T, 0))},
        ValueError,
        r"expert_ids of shape \(4, 0\): expected \[4, k\]",
    ),
    "weights that are whole numbers": (
        {"expert_weights": jnp.zeros((T, K), jnp.int32)},
        TypeError,
        "expert_weights of int32: expected numbers such as float32",
    ),
    "fewer weights than ids": (
        {"expert_weights": jnp.zeros((T, K - 1))},
        ValueError,
        r"expert_ids of shape \(4, 2\) and expert_weights of shape \(4, 1\): expected a weight for",
    ),
    "a matrix without experts": (
        {"w_up": jnp.zeros((H, F))},
        ValueError,
        r"w_up of shape \(6, 10\): expected \[experts, features, hidden\]",
    ),
    "a down matrix without experts": (
        {"w_down": jnp.zeros((F, H))},
        ValueError,
        r"w_down of shape \(10, 6\): expected \[experts, hidden, features\]",
    ),
    "matrices of another dtype": (
        {"w_up": jnp.zeros((E, H, F), jnp.bfloat16)},
        TypeError,
        "w_up of bfloat16 and x of float32: expected one dtype; cast one of them",
    ),
    "matrices of other features": (
        {"w_gate": jnp.zeros((E, H + 1, F))},
        ValueError,
        r"w_gate of shape \(4, 7, 10\): expected \(4, 6, 10\), for x of shape \(4, 6\)",
    ),
    "a down matrix that is transposed": (
        {"w_down": jnp.zeros((E, H, F))},
        ValueError,
        r"w_down of shape \(4, 6, 10\): expected \(4, 10, 6\)",
    ),
    "matrices of fewer experts": (
        {"w_up": jnp.zeros((E - 1, H, F))},
        ValueError,
        r"w_up of shape \(3, 6, 10\): expected \(4, 6, 10\)",
    ),
    "no axis": ({"axis_name": None}, TypeError, f"axis_name=None: {NAMES}"),
    "a list of axes": (
        {"axis_name": ["expert"]},
        TypeError,
        re.escape("axis_name=['expert']: ") + NAMES,
    ),
    "an axis that is not there": (
        {"axis_name": "experts"},
        NameError,
        r"axis_name='experts': no axis 'experts' here \(there are \('expert', 'fsdp'\)\)",
    ),
    "an axis twice": (
        {"axis_name": ("expert", "expert")},
        ValueError,
        r"axis_name=\('expert', 'expert'\): an axis twice; name each axis once",
    ),
    "hidden features over the axis of experts": (
        {"hidden_axis_name": "expert"},
        ValueError,
        "hidden_axis_name='expert': the op exchanges tokens over this axis already; name another",
    ),
    "hidden features over two axes": (
        {"hidden_axis_name": ("fsdp",)},
        TypeError,
        r"hidden_axis_name=\('fsdp',\): expected the name of one mesh axis, or None",
    ),
    "hidden features over an axis that is not there": (
        {"hidden_axis_name": "hidden"},
        NameError,
        "hidden_axis_name='hidden': no axis 'hidden' here",
    ),
    "shards of weights over the axis of experts": (
        {"weight_axis_name": "expert"},
        ValueError,
        "weight_axis_name='expert': the op exchanges tokens over this axis already",
    ),
    "shards of weights along no dimension": (
        {"weight_axis_name": "fsdp", "weight_dimension": 3},
        ValueError,
        "weight_dimension=3: expected 0, the experts, or 1 or 2, the rows or columns of each",
    ),
    "a dimension counted from the end": (
        {"weight_dimension": -1},
        ValueError,
        "weight_dimension=-1: expected 0",
    ),
    "an unknown activation": (
        {"activation": "swish"},
        ValueError,
        "activation='swish': expected one of 'silu', 'gelu', 'relu'",
    ),
    "an activation that is a function": (
        {"activation": jax.nn.silu},
        ValueError,
        "activation=<.*>: expected one of 'silu', 'gelu', 'relu'",
    ),
    "an activation that cannot be hashed": (
        {"activation": ["silu"]},
        ValueError,
        r"activation=\['silu'\]: expected one of 'silu', 'gelu', 'relu'",
    ),
    "an unknown backend": (
        {"implementation": "fused"},
        ValueError,
        "implementation='fused': expected None .*, or one or several of xla, ring",
    ),
    "no backend": ({"implementation": ()}, ValueError, r"implementation=\(\): expected None"),
    "an unknown grouped backend": (
        {"grouped_implementation": "ring"},
        ValueError,
        "grouped_implementation='ring': expected None .*, or one or several of xla, triton",
    ),
    "no choice whether to keep": (
        {"recompute_hidden": "yes"},
        TypeError,
        "recompute_hidden='yes': expected True or False",
    ),
    "a list of tokens": (
        {"x": [[0.0] * H] * T},
        TypeError,
        "x of type list: expected an array",
    ),
    "biases of other features": (
        {"b_gate": jnp.zeros((E, H))},
        ValueError,
        r"b_gate of shape \(4, 6\): expected \(4, 10\), a bias for each expert of this device",
    ),
    "a bias of down for hidden features": (
        {"b_down": jnp.zeros((E, F))},
        ValueError,
        r"b_down of shape \(4, 10\): expected \(4, 6\), a bias",
    ),
    "shards of biases": (
        {"b_up": jnp.zeros((E // 2, F)), "weight_axis_name": "fsdp", "weight_dimension": 0},
        ValueError,
        r"b_up of shape \(2, 10\): expected \(4, 10\), .*; weight_axis_name does not shard biases",
    ),
    "biases of whole numbers": (
        {"b_up": jnp.zeros((E, F), jnp.int32)},
        TypeError,
        "b_up of int32: expected numbers such as float32",
    ),
    "no matrix": ({"w_down": None}, TypeError, "w_down of type NoneType: expected an array"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_arguments_are_refused_by_a_sentence(bad: str, make_mesh: MeshFactory) -> None:
    changes, error, sentence = BAD[bad]

    def local() -> jax.Array:
        return expert_mlp(**(GOOD | changes))

    mesh = make_mesh({"expert": 1, "fsdp": 1})
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P())
    with pytest.raises(error, match=f"^{sentence}") as caught:
        jax.eval_shape(mapped)
    assert "\n" not in str(caught.value)


def test_outside_of_shard_map() -> None:
    with pytest.raises(NameError, match=r"^axis_name='expert': no axis .*inside jax.shard_map"):
        expert_mlp(**GOOD)


def test_good_arguments(make_mesh: MeshFactory) -> None:
    mesh = make_mesh({"expert": 1, "fsdp": 1})
    mapped = jax.shard_map(
        lambda: expert_mlp(**GOOD), mesh=mesh, in_specs=(), out_specs=P(("expert", "fsdp"))
    )
    assert jax.eval_shape(mapped).shape == (T, H)
