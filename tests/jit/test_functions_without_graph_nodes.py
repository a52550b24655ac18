"""`overlap_jit` of functions without nnx objects is `jax.jit`."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collective_matmul import overlap_jit
from collective_matmul.jit import graph_functions


class Scale:
    """A callable object without a name."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * x

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    "fun",
    [lambda x: 2 * x, functools.partial(jnp.multiply, 2.0), Scale(), jnp.sin, Scale().__call__],
)
def test_the_program_is_that_of_jax_jit(fun: Callable) -> None:
    texts = [jit(fun).lower(1.0).as_text() for jit in (jax.jit, overlap_jit)]
    assert texts[0] == texts[1]


def test_programs_are_cached_by_the_function() -> None:
    traces = []

    def fun(x: jax.Array) -> jax.Array:
        traces.append(x)
        return x

    for _ in range(3):
        overlap_jit(fun)(1.0)
    assert len(traces) == 1


def test_a_call_runs_no_python_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    fun = overlap_jit(lambda x: x)
    fun(1.0)
    for name in ("holds_graph_nodes", "GraphFunction"):
        monkeypatch.setattr(graph_functions, name, lambda *_: pytest.fail("called"))
    assert fun(1.0) == 1


def test_functions_are_not_kept_alive() -> None:
    def fun(x: jax.Array) -> jax.Array:
        return x

    overlap_jit(fun)(1.0)
    alive = weakref.ref(fun)
    del fun
    jax.clear_caches()
    gc.collect()
    assert alive() is None


def test_mutable_arrays_are_jaxs() -> None:
    ref = jax.new_ref(jnp.zeros(()))

    def increase(ref: Any) -> None:
        ref[...] += 1

    fun = overlap_jit(increase)
    fun(ref)
    assert ref[...] == 1
    assert not fun._is_graph_function


def test_type_errors_stay_those_of_jax() -> None:
    fun = overlap_jit(lambda x: x)
    with pytest.raises(TypeError, match="abstract array"):
        fun(object())
    assert not fun._is_graph_function


def test_nothing_looks_for_modules_where_flax_is_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "flax.nnx")
    assert not graph_functions.holds_graph_nodes(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
