"""`overlap_jit` where its options change nothing: on the CPU, `jax.jit` with the same results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul import OVERLAP_OPTIONS, compiler, overlap_jit
from tests.conftest import MeshFactory
from tests.reference import AXIS, Case


@pytest.mark.parametrize("implementation", ["bulk", "ring"])
def test_results_are_those_of_jit(implementation: str, make_mesh: MeshFactory) -> None:
    case = Case("all_gather_matmul", implementation, 2, (4,), 3, ((4,),))
    x, ws, dys = case.arrays()
    fun = case.sharded(make_mesh({AXIS: 2}))

    def results_and_gradients(x, ws, dys):
        ys, transpose = jax.vjp(fun, x, ws)
        return ys, transpose(dys)

    arguments = x, tuple(ws), tuple(dys)
    expected = jax.jit(results_and_gradients)(*arguments)
    actual = overlap_jit(results_and_gradients)(*arguments)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_keywords_reach_jit() -> None:
    fun = overlap_jit(lambda x, power: x**power, static_argnames="power", donate_argnums=0)
    x = jnp.arange(4.0)
    np.testing.assert_array_equal(fun(x, power=2), [0, 1, 4, 9])
    assert x.is_deleted()


def test_the_users_options_join_ours() -> None:
    fun = overlap_jit(jnp.sin, compiler_options={"xla_embed_ir_in_executable": True})
    np.testing.assert_array_equal(fun(0.0), 0.0)


@pytest.mark.parametrize("option", OVERLAP_OPTIONS)
def test_the_users_options_win(option: str) -> None:
    """XLA reads theirs, and says so when it cannot."""
    fun = overlap_jit(jnp.sin, compiler_options={option: "theirs"})
    with pytest.raises(RuntimeError, match=rf"(?s){option}.*theirs|theirs.*{option}"):
        fun(0.0)


def test_our_options_reach_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU they do nothing, but XLA would refuse one that it did not know."""
    monkeypatch.setattr(compiler, "OVERLAP_OPTIONS", {"xla_gpu_overlap_everything": "1"})
    with pytest.raises(RuntimeError, match="xla_gpu_overlap_everything"):
        overlap_jit(jnp.sin)(0.0)


def test_an_unknown_option_is_xlas_error() -> None:
    fun = overlap_jit(jnp.sin, compiler_options={"xla_gpu_overlap_everything": "1"})
    with pytest.raises(RuntimeError, match="xla_gpu_overlap_everything"):
        fun(0.0)
