"""`expert_mlp` under jit, scan, checkpoint and vmap, and where it refuses to be differentiated."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import PartitionSpec as P

from collective_matmul import HIDDEN_CHECKPOINT_NAME, expert_mlp
from tests.conftest import MeshFactory
from tests.ops.experts.reference import Arrays, Case, reference

CASE = Case({"expert": 2}, "ring", tokens=2)


def loss_of(case: Case, make_mesh: MeshFactory, arrays: Arrays) -> Callable:
    fun = case.sharded(make_mesh(dict(case.axes)))
    return lambda x: (fun(x, *arrays[1:6]) * arrays.dy).sum()


@pytest.mark.parametrize(
    "implementation", [pytest.param("xla", marks=pytest.mark.exhaustive), "ring"]
)
def test_layers_of_a_scan(implementation: str, make_mesh: MeshFactory) -> None:
    """Each layer adds the op to its tokens; the scan is checkpointed and differentiated."""
    case = Case({"expert": 2}, implementation, tokens=2)
    fun, arrays = case.sharded(make_mesh({"expert": 2})), case.arrays()

    def layers(x: jax.Array, scale: Any) -> jax.Array:
        def layer(x: jax.Array, factor: jax.Array) -> tuple[jax.Array, None]:
            return x + factor * fun(x, *arrays[1:6]), None

        return lax.scan(jax.checkpoint(layer), x, scale)[0]

    def loss(x: jax.Array, scale: Any) -> jax.Array:
        return (layers(x, scale) * arrays.dy).sum()

    def unrolled(x: jax.Array, scale: Any) -> jax.Array:
        for factor in scale:
            x = x + factor * fun(x, *arrays[1:6])
        return (x * arrays.dy).sum()

    scale = np.array([0.1, 0.2], np.float32)
    found, expected = jax.jit(lambda *args: [jax.grad(f)(*args) for f in (loss, unrolled)])(
        arrays.x, scale
    )
    # The same operations, fused differently: a few roundings of float32.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def equations(jaxpr: Jaxpr) -> list[Any]:
    inner = [e for eqn in jaxpr.eqns for j in jaxprs_in_params(eqn.params) for e in equations(j)]
    return [*jaxpr.eqns, *inner]


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "hidden": jax.checkpoint_policies.save_only_these_names(HIDDEN_CHECKPOINT_NAME),
    "everything": jax.checkpoint_policies.everything_saveable,
}


# A visit has 3 products forward and 6 backward: DA, dx (2), and gradients of matrices (3). Gate and
# up are computed again unless they are saved.
@pytest.mark.parametrize(
    ("policy", "recompute", "products"),
    [
        ("hidden", False, 2 * (3 + 6)),
        ("everything", False, 2 * (3 + 6)),
        ("everything", True, 2 * (3 + 2 + 6)),
        ("nothing", True, 2 * (3 + 2 + 6)),
        # The forward pass runs again, and the result of all visits but the last is tied to the
        # next visit, which starts after it.
        ("nothing", False, 2 * (3 + 2 + 6) + 1),
    ],
)
def test_policies_choose_whether_gate_and_up_are_kept(
    policy: str, recompute: bool, products: int, make_mesh: MeshFactory
) -> None:
    case = Case({"expert": 2}, "ring", tokens=2, options={"recompute_hidden": recompute})
    arrays = case.arrays()
    loss = loss_of(case, make_mesh, arrays)
    gradient = jax.value_and_grad(jax.checkpoint(loss, policy=POLICIES[policy]))
    jaxpr = jax.make_jaxpr(gradient)(arrays.x)
    found = [e for e in equations(jaxpr.jaxpr) if e.primitive.name.startswith("ragged_dot")]
    assert len(found) == products


def test_values_where_gate_and_up_are_kept(make_mesh: MeshFactory) -> None:
    arrays = CASE.arrays()
    loss = jax.checkpoint(loss_of(CASE, make_mesh, arrays), policy=POLICIES["hidden"])
    exact, _ = reference(arrays)
    # Roundings of float32, in values of size 10.
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(arrays.x), exact.dx, rtol=1e-4, atol=1e-4)


def test_kept_products_have_a_name(make_mesh: MeshFactory) -> None:
    """Products that `jax.checkpoint` may keep by that name: gate and up of each visit, [T k, f]."""
    arrays = CASE.arrays()
    fun = CASE.sharded(make_mesh({"expert": 2}))
    jaxpr = jax.make_jaxpr(lambda x: jax.vjp(lambda x: fun(x, *arrays[1:6]), x)[0])(arrays.x)
    named = [
        e.outvars[0].aval.shape
        for e in equations(jaxpr.jaxpr)
        if e.primitive.name == "name" and e.params["name"] == HIDDEN_CHECKPOINT_NAME
    ]
    pairs = CASE.tokens * CASE.choices
    assert named == [(pairs, CASE.hidden)] * 4


FORWARD_MODE = "^forward-mode differentiation of .*: the ops define reverse mode alone; use jax.vjp"
SECOND = "^second derivatives of expert_mlp, .*: the op defines first derivatives alone"


def test_forward_mode_is_refused(make_mesh: MeshFactory) -> None:
    arrays = CASE.arrays()
    loss = loss_of(CASE, make_mesh, arrays)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda x: jax.jvp(loss, (x,), (x,))).lower(arrays.x)


@pytest.mark.exhaustive
def test_forward_mode_is_refused_by_a_sentence(make_mesh: MeshFactory) -> None:
    """Where nothing is compiled, each operation of the program is."""
    arrays = CASE.arrays()
    with pytest.raises(TypeError, match=FORWARD_MODE):
        jax.jvp(loss_of(CASE, make_mesh, arrays), (arrays.x,), (arrays.x,))


@pytest.mark.parametrize("outer", [jax.grad, jax.jacfwd], ids=["reverse", "forward"])
def test_second_derivatives_are_refused(outer: Callable, make_mesh: MeshFactory) -> None:
    arrays = CASE.arrays()
    loss = loss_of(CASE, make_mesh, arrays)
    with pytest.raises(TypeError, match=SECOND):
        jax.make_jaxpr(outer(lambda x: jax.grad(loss)(x).sum()))(arrays.x)


def batched(grouped: str, make_mesh: MeshFactory) -> Callable:
    options: Any = {"implementation": "ring", "grouped_implementation": grouped}

    def local(xs, ids, weights, *ws):
        def one(x, ids, weights):
            return expert_mlp(x, ids, weights, *ws, axis_name="expert", **options)

        return jax.vmap(one)(xs, ids, weights)

    tokens = P(None, "expert")
    return jax.shard_map(
        local,
        mesh=make_mesh({"expert": 2}),
        in_specs=(tokens,) * 3 + (P("expert"),) * 3,
        out_specs=tokens,
        check_vma=False,
    )


def test_vmap_with_our_kernels(make_mesh: MeshFactory) -> None:
    arrays = CASE.arrays()
    both = [np.stack([a, a[::-1]]) for a in arrays[:3]]
    found = jax.jit(batched("triton", make_mesh))(*both, *arrays[3:6])
    exact, _ = reference(arrays)
    # Roundings of float32, in values of size 10.
    np.testing.assert_allclose(found, np.stack([exact.y, exact.y[::-1]]), rtol=1e-4, atol=1e-4)


def test_vmap_is_refused_where_xla_has_no_rule(make_mesh: MeshFactory) -> None:
    arrays = CASE.arrays()
    both = [jnp.stack([a, a]) for a in map(jnp.asarray, arrays[:3])]
    sentence = "jax.vmap of expert_mlp with grouped_implementation='xla': "
    with pytest.raises(NotImplementedError, match=f"^{re.escape(sentence)}.*use jax.lax.map"):
        jax.make_jaxpr(batched("xla", make_mesh))(*both, *arrays[3:6])
