"""Layouts between a gather, a matmul and a sum over Explicit axes: reshapes and orders of axes.

Programs are compared in float64, by the simulator, which knows how arrays are sharded only inside
of a `shard_map`. What the compiler makes of the orders of axes is executed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from collective_matmul import overlap
from tests.rewrite.explicit_programs import explicit_mesh
from tests.rewrite.fuzz import TOLERANCE, mismatch
from tests.rewrite.programs import assert_same, gradients_of, ring, sites
from tests.rewrite.simulator import simulate_jaxpr

#: [B, S, K] are activations, N columns, H and G the factors of N.
B, S, K, N, H, G = 4, 4, 8, 8, 4, 2
ROWS, UP, DOWN = P("data", "tensor"), P(None, "tensor"), P("tensor")
TOKENS = ((B, S, K), ROWS)


class Layout(NamedTuple):
    """A program with another layout between a gather or a sum and its matmul.

    Attributes:
      fun: the program.
      operands: shape and spec of each argument.
      replaced: the kinds of its sites over "tensor".
      with_gradients: the number of sites in the program that computes all gradients as well.
      reason: part of the reason why something is left alone.
    """

    fun: Callable
    operands: list[tuple[tuple[int, ...], P]]
    replaced: list[str]
    with_gradients: int
    reason: str = ""


def flattened_mlp(x, up, down):
    """Tokens as most programs have them: in one dimension between the matmuls."""
    h = jax.nn.gelu(jnp.reshape(reshard(x, P("data")), (B * S, K)) @ up)
    y = jnp.dot(h, down, out_sharding=P("data"))
    return reshard(jnp.reshape(y, (B, S, K)), ROWS)


def heads(x, w):
    """Columns are divided into heads, and merged."""
    y = (reshard(x, P("data")) @ w).reshape(B, S, H, G, out_sharding=P("data", None, "tensor"))
    return y.reshape(B, S, N, out_sharding=P("data", None, "tensor"))


def split_weight(x, w):
    return jnp.einsum("bsk,khg->bshg", reshard(x, P("data")), w.reshape(K, H, G))


LAYOUTS = {
    "flattened_mlp": Layout(
        flattened_mlp, [TOKENS, ((K, N), UP), ((N, K), DOWN)], ["all_gather", "reduce_scatter"], 6
    ),
    "features_gathered": Layout(
        lambda x, w: jnp.reshape(reshard(x, P("data")), (B * S, K)) @ w,
        [((B, S, K), P("data", None, "tensor")), ((K, N), UP)],
        ["all_gather"],
        2,
    ),
    "first_dimension_gathered": Layout(
        lambda x, w: jnp.reshape(reshard(x, P()), (B * S, K)) @ w,
        [((B, S, K), P("tensor")), ((K, N), UP)],
        ["all_gather"],
        2,
    ),
    "heads": Layout(heads, [TOKENS, ((K, N), UP)], ["all_gather"], 2),
    "split_weight": Layout(split_weight, [TOKENS, ((K, N), UP)], ["all_gather"], 2),
    "squeezed": Layout(
        lambda x, w: jnp.squeeze(reshard(x, P("data")), 1) @ w,
        [((B, 1, S, K), P("data", None, "tensor")), ((K, N), UP)],
        ["all_gather"],
        2,
    ),
    "expanded": Layout(
        lambda x, w: jnp.expand_dims(reshard(x, P("data")), 1) @ w,
        [TOKENS, ((K, N), UP)],
        ["all_gather"],
        2,
    ),
    "split_before_the_sum": Layout(
        lambda h, w: reshard(jnp.reshape(jnp.dot(h, w, out_sharding=P("data")), (B, S, N)), ROWS),
        [((B * S, K), P("data", "tensor")), ((K, N), DOWN)],
        ["reduce_scatter"],
        3,
    ),
    "unreduced": Layout(
        lambda h, w: reshard(
            jnp.reshape(
                jnp.dot(h, w, out_sharding=P("data", unreduced=frozenset({"tensor"}))), (B, S, N)
            ),
            ROWS,
        ),
        [((B * S, K), P("data", "tensor")), ((K, N), DOWN)],
        ["reduce_scatter"],
        3,
    ),
    "moved_batch": Layout(
        lambda x, w: (
            jnp.reshape(reshard(x, P("data")), (2, B * S // 2, K), out_sharding=P(None, "data")) @ w
        ),
        [TOKENS, ((K, N), UP)],
        [],
        2,
        "the op would reshape what an explicit mesh axis shards",
    ),
    "sharded_again": Layout(
        lambda x, w: jnp.dot(
            jnp.reshape(reshard(x, P("data")), (B, S * K), out_sharding=P("data", "tensor")),
            w,
            out_sharding=P("data"),
        ),
        [TOKENS, ((S * K, N), DOWN)],
        ["psum"],
        3,
        "shards its result over 'tensor' again",
    ),
}


def arguments_of(layout: Layout, mesh: Any) -> tuple[list[jax.ShapeDtypeStruct], list[np.ndarray]]:
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(shape, np.float32) for shape, _ in layout.operands]
    structs = [
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for shape, spec in layout.operands
    ]
    return structs, arrays


def value_and_gradients(fun: Callable, count: int) -> Callable:
    return lambda *arguments: (fun(*arguments), gradients_of(fun, count)(*arguments))


SIZES = [(2, 2), *(pytest.param(sizes, marks=pytest.mark.exhaustive) for sizes in ((1, 2), (2, 1)))]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_between_a_matmul_and_its_communication(name: str, sizes: tuple[int, int]) -> None:
    """Sites, values and types, differentiated before and after `overlap`."""
    layout, mesh = LAYOUTS[name], explicit_mesh(sizes)
    count = len(layout.operands)
    program = value_and_gradients(layout.fun, count)
    after = value_and_gradients(ring(layout.fun), count)
    with jax.set_mesh(mesh):
        structs, arrays = arguments_of(layout, mesh)
        found, in_both = sites(layout.fun, *structs), sites(program, *structs)
        plain, *others = (jax.make_jaxpr(f)(*structs) for f in (program, ring(program), after))
        expected, *results = (
            simulate_jaxpr(each, arrays, float64=True) for each in (plain, *others)
        )
    if sizes == (2, 2):
        assert [site.kind for site in found if site.replaced] == layout.replaced
        assert any(layout.reason in site.reason for site in found)
        assert sum(site.replaced for site in in_both) == layout.with_gradients
    for each, result in zip(others, results, strict=True):
        assert [str(aval) for aval in each.out_avals] == [str(aval) for aval in plain.out_avals]
        assert mismatch(result, expected, [TOLERANCE] * len(expected)) is None


@pytest.mark.parametrize("implementation", ["ring", "xla"])
@pytest.mark.parametrize(
    "equation, spec",
    [
        ("ka,kb->ab", P(("fsdp", "data"), "tensor")),
        ("ak,kb->ab", P("tensor", ("fsdp", "data"))),
        ("kba,kc->abc", P(None, "tensor", ("fsdp", "data"))),
    ],
)
def test_a_sum_scattered_against_the_order_of_the_mesh(
    equation: str, spec: P, implementation: str
) -> None:
    """XLA puts blocks of the plain program in the places of others, so NumPy is the reference."""
    generator = np.random.default_rng(0)
    names = equation.split("->")[0].split(",")
    arrays = [generator.standard_normal((8,) * len(each), np.float32) for each in names]
    mesh = explicit_mesh((2, 2, 2), ("data", "fsdp", "tensor"))

    def product(*operands: jax.Array) -> jax.Array:
        return jnp.einsum(equation, *operands, out_sharding=spec)

    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(
                array, NamedSharding(mesh, P(*("tensor" * (c == "k") or None for c in each)))
            )
            for array, each in zip(arrays, names, strict=True)
        ]
        actual = jax.jit(overlap(product, implementation=implementation, require=1))(*placed)
    assert_same(actual, np.einsum(equation, *arrays))
