"""`overlap_jit` and `overlap` treat nnx objects that a function takes or returns as `nnx.jit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import explain, overlap, overlap_jit
from collective_matmul.jit.graph_functions import StaticArguments
from collective_matmul.peer_access import peer_kernels_disallowed_reason
from tests.conftest import MeshFactory


class Model(nnx.Module):
    """Two layers that are one, batch statistics, random bits, a counter, an attribute."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(4, 4, rngs=rngs)
        self.outer = self.inner
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), int))
        self.used = False

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        self.used = True
        self.seen = nnx.Intermediate(x.sum())
        return self.dropout(self.norm(self.outer(self.inner(x))))


class Opaque(nnx.Module, pytree=False):
    """A module that is no pytree, so that `jax.jit` refuses it."""

    def __init__(self) -> None:
        self.count = nnx.Variable(jnp.zeros(()))


def train_step(model: Model, optimizer: nnx.Optimizer, state: Any, x: jax.Array) -> jax.Array:
    """Updates everything; `state` nests the same model again, metrics and random bits."""

    def loss_of(model: Model) -> jax.Array:
        return jnp.mean((model(x) - 1) ** 2)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    state["metrics"].update(loss=loss)
    state["again"][0].calls[...] += 10
    return loss + jax.random.uniform(state["rngs"].params())


def trained(jit: Callable) -> tuple[list[float], Any]:
    """The losses of a few steps, and all variables after them."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    state = {"metrics": metrics, "again": [model], "rngs": nnx.Rngs(7)}
    x = jax.random.normal(jax.random.key(1), (8, 4), jnp.float32)
    step = jit(train_step)
    losses = [float(step(model, optimizer, state=state, x=x)) for _ in range(3)]
    assert model.outer is model.inner
    assert model.used
    assert model.calls[...] == 33
    assert jnp.isfinite(model.seen[...])  # A variable that was not there before.
    return losses, jax.tree.map(
        lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf,
        nnx.state((model, optimizer, metrics, state["rngs"])),
    )  # fmt: skip


@pytest.mark.parametrize("donated", [{}, {"donate_argnames": ("model", "optimizer")}], ids=str)
def test_training_is_that_of_nnx_jit(donated: dict[str, Any]) -> None:
    expected, actual = trained(nnx.jit), trained(functools.partial(overlap_jit, **donated))
    assert len(set(actual[0])) == 3
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def count(counter: Any, by: Any = 1) -> Any:
    counter.count[...] += by
    return counter


@pytest.fixture
def counter() -> Any:
    return Counter()


class Counter(nnx.Module):
    """One variable."""

    def __init__(self) -> None:
        self.count = nnx.Variable(jnp.zeros(()))


def test_donated_modules_are_consumed(counter: Any) -> None:
    before = counter.count[...]
    overlap_jit(count, donate_argnums=0)(counter)
    assert before.is_deleted()
    assert counter.count[...] == 1


def test_returned_modules_are_the_objects_that_came_in(counter: Any) -> None:
    assert overlap_jit(count)(counter) is counter
    assert overlap_jit(lambda pair: pair[0].count)((counter, 1)) is counter.count


@pytest.mark.parametrize("nest", [lambda x: x, lambda x: [{"a": x}]], ids=["itself", "nested"])
def test_modules_that_are_no_pytrees(nest: Callable) -> None:
    opaque = Opaque()
    fun = overlap_jit(lambda nested: jax.tree.map(count, nested, is_leaf=is_opaque))
    for _ in range(2):
        fun(nest(opaque))
    assert opaque.count[...] == 2
    assert isinstance(overlap_jit(Opaque)(), Opaque)


def is_opaque(x: Any) -> bool:
    return isinstance(x, Opaque)


def test_a_returned_model_keeps_its_shared_layers() -> None:
    model = overlap_jit(lambda: Model(nnx.Rngs(0)))()
    assert model.outer is model.inner
    np.testing.assert_array_equal(model.inner.kernel[...], Model(nnx.Rngs(0)).inner.kernel[...])
    key = jax.random.key(0)
    nested = overlap_jit(lambda key: {"model": Model(nnx.Rngs(key))})(key)["model"]
    assert nested.outer is nested.inner


def test_variables_in_containers() -> None:
    variables = {"a": nnx.Param(jnp.zeros(()))}

    def increase(variables: Any) -> None:
        variables["a"][...] += 1

    overlap_jit(increase)(variables)
    assert variables["a"][...] == 1


def test_pure_functions_of_states_stay_those_of_jax_jit(counter: Any) -> None:
    """The state is passed by value: what changes is in the state that the function returns."""
    graph, state = nnx.split(counter)

    def step(state: nnx.State) -> nnx.State:
        return nnx.state(count(nnx.merge(graph, state)))

    fun = overlap_jit(step)
    assert fun(state)["count"][...] == 1
    assert state["count"][...] == 0
    assert not fun._is_graph_function


@pytest.mark.parametrize(
    "options", [{"static_argnums": 1}, {"static_argnums": -1}, {"static_argnames": "by"}], ids=str
)
def test_static_arguments(options: dict[str, Any], counter: Any) -> None:
    traces = []

    def count_traces(counter: Any, by: Any) -> None:
        traces.append(by)
        count(counter, {"one": 1, "two": 2}[by])

    fun = overlap_jit(count_traces, **options)
    for by in ("one", "two", "one"):
        fun(counter, by)
    assert counter.count[...] == 4
    assert fun.lower(counter, "two").compile()(counter) is None
    assert counter.count[...] == 6
    assert set(traces) == {"one", "two"}


def test_a_static_module_is_left_alone(counter: Any) -> None:
    fun = overlap_jit(lambda module, x: x + module.count[...], static_argnums=0)
    assert fun(counter, 1.0) == 1
    assert not fun._is_graph_function


def test_methods() -> None:
    class Method(Counter):
        @overlap_jit
        def increase(self, by: jax.Array) -> None:
            count(self, by)

    counter = Method()
    counter.increase(2.0)
    assert counter.count[...] == 2


def test_stages(counter: Any) -> None:
    fun = overlap_jit(count)
    traced = fun.trace(counter, by=2.0)
    assert traced.jaxpr.eqns
    assert counter.count[...] == 0
    lowered = fun.lower(counter, by=2.0)
    for stage in (traced.lower(), lowered):
        compiled = stage.compile()
        assert "ENTRY" in str(compiled.as_text())
        assert compiled(counter, by=2.0) is counter
    assert counter.count[...] == 4
    shape = fun.eval_shape(counter, by=2.0)
    assert isinstance(shape.count.get_raw_value(), jax.ShapeDtypeStruct)
    assert counter.count[...] == 4
    fun.clear_cache()
    fun(counter)
    assert counter.count[...] == 5


def test_shardings(make_mesh: MeshFactory) -> None:
    mesh = make_mesh({"a": 2})
    halves, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())

    def forward(model: nnx.Linear, x: jax.Array) -> jax.Array:
        model.kernel[...] += 1
        return model(x)

    def results(jit: Callable) -> Any:
        by_type = nnx.StateSharding({nnx.PathContains("kernel"): halves, ...: whole})
        found = []
        for shardings in ((whole, halves), (by_type, halves)):
            model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            y = jit(forward, in_shardings=shardings, out_shardings=halves)(model, jnp.ones((2, 4)))
            found.append([(array, array.sharding) for array in (y, model.kernel[...])])
        return found

    actual, expected = results(overlap_jit), results(nnx.jit)
    for ours, theirs, kernel_sharding in zip(actual, expected, (whole, halves), strict=True):
        assert [sharding for _, sharding in ours] == [halves, kernel_sharding]
        for (array, _), (same, _) in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(array, same)


def test_created_with_shardings(make_mesh: MeshFactory) -> None:
    halves = NamedSharding(make_mesh({"a": 2}), P("a"))
    create = overlap_jit(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), out_shardings=halves)
    assert create().kernel[...].sharding == halves


def test_kernels_of_peers_are_known_to_be_allowed(counter: Any) -> None:
    reasons = []

    def fun(counter: Any) -> None:
        reasons.append(peer_kernels_disallowed_reason())
        count(counter)

    overlap_jit(fun, peer_kernels=True)(counter)
    overlap_jit(fun)(counter)
    assert [reason is None for reason in reasons] == [True, False]
    assert counter.count[...] == 2


class Sharded(nnx.Module):
    """A gather, two matmuls by one weight and a scatter, in JAX's own collectives; a counter."""

    def __init__(self, mesh: jax.sharding.Mesh):
        self.mesh = mesh
        self.first = nnx.Param(jax.random.normal(jax.random.key(0), (4, 4)))
        self.second = self.first
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        def local(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
            hidden = jax.lax.all_gather(x, "a", tiled=True) @ first
            return jax.lax.psum_scatter(hidden @ second, "a", tiled=True)

        self.calls[...] += 1
        specs = P("a"), P(None, "a"), P("a")
        sharded = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=P("a"))
        return sharded(x, self.first[...], self.second[...])


def descend(model: Sharded, x: jax.Array, wrap: Callable = lambda loss: loss) -> jax.Array:
    def loss_of(model: Sharded) -> jax.Array:
        return jnp.mean(model(x) ** 2)

    loss, gradients = nnx.value_and_grad(wrap(loss_of))(model)
    model.first[...] -= 0.01 * gradients["first"][...]
    return loss


@pytest.mark.parametrize(
    "transform",
    [
        overlap,
        lambda fun: overlap_jit(overlap(fun, require=3)),
        lambda fun: overlap_jit(functools.partial(fun, wrap=overlap)),
    ],
    ids=["overlap", "overlap_jit(overlap)", "inside a gradient"],
)
def test_overlap_propagates_updates_too(transform: Callable, make_mesh: MeshFactory) -> None:
    mesh, x = make_mesh({"a": 2}), jnp.arange(8.0).reshape(2, 4) / 8

    def losses(transform: Callable) -> list[float]:
        model = Sharded(mesh)
        fun = transform(descend)
        results = [float(fun(model, x)) for _ in range(2)]
        assert model.calls[...] == 2
        assert model.second is model.first
        return results

    # Sums of four float32 products in another order.
    np.testing.assert_allclose(losses(transform), losses(nnx.jit), rtol=1e-5)


def test_explain_changes_no_module(make_mesh: MeshFactory) -> None:
    model = Sharded(make_mesh({"a": 2}))
    before = nnx.to_pure_dict(nnx.state(model))
    assert len(explain(descend)(model, jnp.ones((2, 4))).plain) == 3
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(model)), before)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, StaticArguments((), ())),
        ({"static_argnums": 0}, StaticArguments((0,), ("a",))),
        ({"static_argnums": (-2,)}, StaticArguments((-2,), ())),
        ({"static_argnames": ("b", "c")}, StaticArguments((1,), ("b", "c"))),
        ({"static_argnums": (1,), "static_argnames": "c"}, StaticArguments((1,), ("c",))),
    ],
    ids=str,
)
def test_static_arguments_are_those_that_jax_infers(
    options: dict[str, Any], expected: StaticArguments
) -> None:
    def fun(a: Any, b: Any, *, c: Any) -> None:
        del a, b, c

    assert StaticArguments.of(fun, options) == expected
