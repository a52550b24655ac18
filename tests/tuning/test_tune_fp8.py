"""Tuning of operands in 8 bits: a backend gets what ops give it, and a recipe decides alone."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul import (
    all_gather_matmul,
    explain,
    matmul_all_reduce,
    matmul_reduce_scatter,
    overlap,
    tune,
)
from collective_matmul.dispatch.recording import decisions_of
from collective_matmul.operands.format import PLAIN, format_named
from collective_matmul.ops.matmul.checks import RecipeName
from collective_matmul.ops.matmul.measured_program import Stack
from collective_matmul.ops.matmul.request import Site
from collective_matmul.ops.matmul.xla import Xla
from collective_matmul.tuning import tune as tuning
from tests.conftest import MeshFactory
from tests.fp8_reference import SHIPPED_RECIPES
from tests.reference import AXIS
from tests.tuning.test_tune import ring_is_fastest

ROWS, K, COLUMNS = 16, 12, (10, 6)
X = jax.ShapeDtypeStruct((ROWS, K), jnp.bfloat16)


def gather(x: jax.Array, *ws: jax.Array, **keywords: Any) -> tuple[jax.Array, ...]:
    return all_gather_matmul(x, ws, AXIS, **keywords)


def scatter(x: jax.Array, w: jax.Array, **keywords: Any) -> jax.Array:
    return matmul_reduce_scatter(x, w, AXIS, **keywords)


def all_reduce(x: jax.Array, w: jax.Array, **keywords: Any) -> jax.Array:
    return matmul_all_reduce(x, w, AXIS, **keywords)


def gather_and_keep(x: jax.Array, w: jax.Array) -> jax.Array:
    """Program that `overlap` makes an op of that keeps the gathered array."""
    whole = lax.all_gather(x, AXIS, tiled=True)
    return whole @ w + jnp.sum(whole, axis=1, keepdims=True)


OPS: dict[str, tuple[Callable, tuple[P, ...], P | tuple[P, ...], tuple[int, ...]]] = {
    "gather": (gather, (P(AXIS), *[P(None, AXIS)] * 2), (P(None, AXIS),) * 2, COLUMNS),
    "scatter": (scatter, (P(None, AXIS), P(AXIS)), P(AXIS), COLUMNS[:1]),
    "all_reduce": (all_reduce, (P(None, AXIS), P(AXIS)), P(), COLUMNS[:1]),
    "gather_and_keep": (gather_and_keep, (P(AXIS), P(None, AXIS)), P(None, AXIS), COLUMNS[:1]),
}


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[tuple]]:
    """Calls of the reference: layouts of requests, and shapes and dtypes of all operands."""
    calls: list[tuple] = []

    original = Xla.execute

    def recording(self: Xla, request: Site, xs: Any, ws: Any, co_gathered: Any = None) -> Any:
        # Matrices are never transposed, and nothing is divided in an all-reduce.
        transposes = request.transpose_w and request.format == PLAIN
        layout = request.op, request.dimension or 0, transposes, request.keep_gathered
        leaves, tree = jax.tree.flatten((list(xs), list(ws), co_gathered))
        shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        calls.append((layout, tree, shapes))
        return original(self, request, xs, ws, co_gathered)

    with mock.patch.object(Xla, "execute", recording):
        yield calls


def gradients_of(
    op: str, make_mesh: MeshFactory, fp8: RecipeName | None
) -> tuple[Callable, Sequence[Any]]:
    """The gradients of an op, and their arguments."""
    local, in_specs, out_specs, columns = OPS[op]
    rewrites = local is gather_and_keep
    fun = jax.shard_map(
        local if rewrites else functools.partial(local, fp8=fp8),
        mesh=make_mesh({AXIS: 2}),
        in_specs=in_specs,
        out_specs=out_specs,
    )
    sharded = overlap(fun, fp8=fp8) if rewrites else fun

    def loss(*operands: jax.Array) -> jax.Array:
        terms = [jnp.sum(y.astype(jnp.float32) ** 2) for y in jax.tree.leaves(sharded(*operands))]
        return functools.reduce(jnp.add, terms)

    ws = [jax.ShapeDtypeStruct((K, n), X.dtype) for n in columns]
    return jax.grad(loss, tuple(range(1 + len(ws)))), [X, *ws]


@pytest.mark.parametrize(
    ("op", "fp8"),
    [
        (op, fp8)
        for op, fp8 in itertools.product(OPS, SHIPPED_RECIPES)
        if (op, fp8) != ("gather_and_keep", "tensorwise")  # It is not quantized.
    ],
)
def test_a_backend_gets_what_the_op_gives_it(
    op: str, fp8: RecipeName, make_mesh: MeshFactory
) -> None:
    gradients, arguments = gradients_of(op, make_mesh, fp8)
    with recorded_calls() as of_op:
        sites = [decision.site.flat for decision in decisions_of(gradients, *arguments)]
    with recorded_calls() as measured:
        for site in sites:
            stack = Stack(site, jax.devices())
            jax.eval_shape(stack.program("xla"), stack.operands("xla"))
    assert set(measured) == set(of_op)  # `overlap` traces an op twice.
    # These have no backward in which a backend communicates.
    is_forward_alone = op in ("all_reduce", "gather_and_keep")
    assert [site.fp8 for site in sites] == [fp8] * (1 if is_forward_alone else 2)


def test_a_recipe_decides_about_its_own_sites_alone(
    make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Programs are compiled and run; times are made up."""
    monkeypatch.setenv("COLLECTIVE_MATMUL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "measure", ring_is_fastest)

    def chosen(fp8: RecipeName | None) -> list[str]:
        gradients, arguments = gradients_of("scatter", make_mesh, fp8)
        return [d.implementation for d in explain(gradients)(*arguments).decisions]

    gradients, arguments = gradients_of("scatter", make_mesh, "rowwise")
    with recorded_calls() as calls:
        table = tune(gradients, *arguments, implementations=["ring"])
    assert {site.fp8 for site in table.entries} == {"rowwise"}
    assert [set(entry.seconds) for entry in table.entries.values()] == [
        {"xla", "ring", "compute_only"}
    ] * 2
    messages = [dtype for _, _, ((_, dtype), *_) in calls]
    assert messages and set(messages) == {jnp.dtype("uint8")}
    assert chosen("rowwise") == ["ring", "ring"]
    assert chosen(None) == chosen("tensorwise") == ["xla", "xla"]


def test_weights_gathered_before_are_measured_whole(make_mesh: MeshFactory, tmp_path: Path) -> None:
    """In 8 bits, XLA gathers shards of weights before the backend has them."""
    sharded = jax.shard_map(
        functools.partial(gather, fp8="rowwise", weight_axis_name="fsdp"),
        mesh=make_mesh({AXIS: 2, "fsdp": 2}),
        in_specs=(P(("fsdp", AXIS)), P("fsdp", AXIS)),
        out_specs=(P("fsdp", AXIS),),
    )
    arguments = [jax.ShapeDtypeStruct(shape, X.dtype) for shape in ((ROWS, K), (K, 8))]
    (decision,) = decisions_of(sharded, *arguments)
    assert decision.site.gathered_shards is not None
    options: dict[str, Any] = {"implementations": ["xla"], "groups": 1, "seconds_per_group": 1e-4}
    table = tune(sharded, *arguments, path=tmp_path / "table.jsonl", **options)
    whole = Site(
        "all_gather_matmul", (((4, K), (K, 4)),), X.dtype, "", 2, format=format_named("rowwise")
    )
    assert [*table.entries] == [whole]
    assert decision.site.flat == whole
