"""`explain` says which gathers bring keys and values to an attention, and what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from collective_matmul import context_attention, dot_product_attention, explain, overlap
from collective_matmul.rewrite.find import written_blocks
from tests.conftest import MeshFactory
from tests.reference import AXIS

TOKENS, HEADS, SIZE = 8, 2, 4
KERNEL = Primitive("dot_product_attention_fwd_wrapper")
KERNEL.def_abstract_eval(lambda q, k, v: q)


def gathered(x: jax.Array) -> jax.Array:
    return lax.all_gather(x, AXIS, axis=1, tiled=True)


def causal(q: Any, k: Any, v: Any) -> jax.Array:
    queries = q.shape[1] * lax.axis_index(AXIS) + jnp.arange(q.shape[1])
    mask = queries[:, None] >= jnp.arange(AXIS_SIZE * q.shape[1])[None]
    return jax.nn.dot_product_attention(q, gathered(k), gathered(v), mask=mask[None, None])


def by_einsum(q: Any, k: Any, v: Any) -> jax.Array:
    scores = jnp.einsum("bsnh,btnh->bnst", q, gathered(k)) * SIZE**-0.5
    return jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores), gathered(v))


def stacked(q: Any, k: Any, v: Any) -> jax.Array:
    k, v = lax.all_gather(jnp.stack([k, v]), AXIS, axis=2, tiled=True)
    return jax.nn.dot_product_attention(q, k, v)


def by_the_librarys_kernel(q: Any, k: Any, v: Any) -> jax.Array:
    return dot_product_attention(q, gathered(k), gathered(v), causal=False)


def by_cudnn(q: Any, k: Any, v: Any) -> jax.Array:
    return KERNEL.bind(q, gathered(k), gathered(v))


def mapped_in_a_loop(q: Any, k: Any, v: Any) -> jax.Array:
    one = jax.checkpoint(by_einsum)
    return lax.scan(lambda q, _: (jax.jit(one)(q, k, v), None), q, length=2)[0]


AXIS_SIZE = 2
KEYS, VALUES = "it gathers keys for attention", "it gathers values for attention"
CALL = "collective_matmul.context_attention"


def sharded(fun: Callable, make_mesh: MeshFactory) -> Callable:
    spec, mesh = P(None, AXIS), make_mesh({AXIS: AXIS_SIZE})
    return jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def arrays(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = 1, TOKENS, HEADS, SIZE
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(3)]


@pytest.mark.parametrize(
    "attend", [causal, by_einsum, by_the_librarys_kernel, by_cudnn, mapped_in_a_loop]
)
def test_gathers_of_keys_and_values_are_told(attend: Callable, make_mesh: MeshFactory) -> None:
    sites = explain(sharded(attend, make_mesh))(*arrays()).plain
    assert len(sites) == 2
    for site, what in zip(sites, (KEYS, VALUES), strict=True):
        assert what in site.reason and CALL in site.reason
        assert site.replaced == (attend not in (by_the_librarys_kernel, by_cudnn))


def test_one_gather_of_both_is_told(make_mesh: MeshFactory) -> None:
    (site,) = explain(sharded(stacked, make_mesh))(*arrays()).plain
    assert KEYS in site.reason and CALL in site.reason


def test_the_work_grows_with_the_program(
    make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of many layers that are not scanned: no pair of gathers is looked at by itself."""
    calls: list[int] = []
    reached = written_blocks.Flow.reached
    monkeypatch.setattr(
        written_blocks.Flow, "reached", lambda *each: calls.append(1) or reached(*each)
    )

    def work(layers: int) -> int:
        def attend(q: Any, k: Any, v: Any) -> jax.Array:
            for _ in range(layers):
                q = by_einsum(q, k + q, v - q)
            return q

        calls.clear()
        sites = explain(sharded(attend, make_mesh))(*arrays()).plain
        assert sum(KEYS in site.reason for site in sites) > 0
        return len(calls)

    assert work(12) <= 2.2 * work(6)


def test_no_equation_is_looked_at_twice(
    make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are looked into with what is around them, and not again by themselves."""
    steps: list[object] = []
    add = written_blocks.Flow._add_equation

    def counted(flow: Any, equation: Any, operands: Any) -> Any:
        steps.append(equation)
        return add(flow, equation, operands)

    monkeypatch.setattr(written_blocks.Flow, "_add_equation", counted)

    def attend(q: Any, k: Any, v: Any) -> jax.Array:
        return jax.jit(jax.checkpoint(jax.jit(by_einsum)))(q, k, v)

    assert len(explain(sharded(attend, make_mesh))(*arrays()).plain) == 2
    assert len(steps) == len({*map(id, steps)}) > 10


def of_experts(q: Any, k: Any, v: Any) -> jax.Array:
    """A softmax without values of the gathered tokens."""
    scores = jnp.einsum("bsnh,btnh->bnst", q, gathered(k))
    return jax.nn.softmax(scores).sum(axis=-1).swapaxes(1, 2)[..., None] * v


def of_words(q: Any, k: Any, v: Any) -> jax.Array:
    """Products of activations and a weight, with a softmax between: no batch of matrices."""
    weight = gathered(k).reshape(-1, SIZE)
    return jax.nn.softmax(q @ weight.T) @ gathered(v).reshape(-1, SIZE)


def of_ours(q: Any, k: Any, v: Any) -> jax.Array:
    return context_attention(q, k, v, AXIS, implementation="xla")


@pytest.mark.parametrize("other", [of_experts, of_words, of_ours])
def test_other_gathers_are_not(other: Callable, make_mesh: MeshFactory) -> None:
    assert CALL not in str(explain(sharded(other, make_mesh))(*arrays()))


def test_replaced_products_have_the_values_and_gradients(make_mesh: MeshFactory) -> None:
    def both(attend: Callable) -> Callable:
        def run(*operands: Any) -> Any:
            out, pullback = jax.vjp(attend, *operands)
            return out, pullback(out)

        return run

    fun = sharded(causal, make_mesh)
    found = jax.jit(both(overlap(fun, implementation="ring", require=2)))(*arrays())
    dense = jax.jit(both(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True)))(*arrays())
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(dense), strict=True):
        # Float32 sums of eight terms in another order.
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
