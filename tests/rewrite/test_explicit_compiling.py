"""Sites beside mesh axes that are left to the compiler hold nothing that XLA cannot compile.

XLA ends the process at some of it, so programs are looked at. `refused_by_xla` says what it is.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from collective_matmul import matmul_all_reduce, matmul_reduce_scatter, overlap
from collective_matmul.rewrite import FoundSite, find_sites
from tests.fp8_reference import SHIPPED_RECIPES
from tests.rewrite.explicit_fuzz import refused_by_xla
from tests.rewrite.programs import gradients_of

AXES, N = ("d", "f", "t"), 8
#: A weight that an axis shards along the dimension that is reduced, for a scale of each column.
REDUCED = [((N, N), P("t")), ((N, N), P("d", "t"))]
#: Operands of a sum over "t", or over "d".
OVER_T = [((N, N), P(None, "t")), ((N, N), P("t"))]
OVER_D = [((N, N), P("t", "d")), ((N, N), P("d"))]


def dot(*spec: Any) -> Callable:
    return lambda x, w: jnp.dot(x, w, out_sharding=P(*spec))


def mesh_of(sizes: tuple[int, int, int], auto: str = "") -> Mesh:
    types = tuple(AxisType.Auto if axis in auto else AxisType.Explicit for axis in AXES)
    return jax.make_mesh(
        sizes, AXES, types, devices=jax.devices()[: sizes[0] * sizes[1] * sizes[2]]
    )


def structs(operands: Any, mesh: Mesh, dtype: str) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in operands
    ]


#: Sizes of the axes, the program, its operands and the one axis of type Auto, if there is one.
PROGRAMS = {
    "the result shards another axis": ((2, 1, 2), dot("d"), OVER_T, ""),
    "against the order of the mesh": ((2, 2, 2), dot(("f", "d")), OVER_T, ""),
    "another axis is gathered": (
        (2, 1, 2),
        dot("d"),
        [((N, N), P("d", "t")), ((N, N), P("t", "d"))],
        "",
    ),
    "an automatic axis": ((2, 1, 2), dot(), OVER_T, "d"),
    "scattered": ((2, 1, 2), dot("d", "t"), OVER_T, ""),
    "gathered": ((2, 1, 2), lambda x, w: reshard(x, P()) @ w, [((N, N), P("t")), REDUCED[1]], ""),
    "gathered twice": (
        (2, 2, 2),
        lambda x, w: jnp.tensordot(x.T, x, ((1,), (1,)), out_sharding=P("d", "t")) - x.T + w,
        [((N, N), P("t", "d")), ((N, N), P("d", "t"))],
        "f",
    ),
    "one device": ((1, 1, 2), dot(), OVER_D, ""),
    "one device, scattered": ((1, 1, 2), dot("d"), OVER_D, ""),
}


@pytest.mark.parametrize("implementation", ["ring", "xla"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_beside_axes_that_are_left(name: str, implementation: str) -> None:
    """In 16 bits: of the forward pass, and of gradients before and after `overlap`."""
    sizes, fun, operands, auto = PROGRAMS[name]
    mesh = mesh_of(sizes, auto)

    def rewritten(fun: Callable) -> Callable:
        return overlap(fun, implementation=implementation)

    forms = rewritten(fun), rewritten(gradients_of(fun, 2)), gradients_of(rewritten(fun), 2)
    with jax.set_mesh(mesh):
        for form in forms:
            program = jax.make_jaxpr(form)(*structs(operands, mesh, "bfloat16"))
            assert refused_by_xla(program.jaxpr) is None
    assert refused_by_xla(jax.make_jaxpr(plain_sum(mesh))(jnp.ones(N, jnp.bfloat16)).jaxpr)


def plain_sum(mesh: Mesh) -> Callable:
    """Sum that leaves an axis of several devices to the compiler, which would be found."""
    return jax.shard_map(
        lambda x: lax.psum(x, ("d", "f") if mesh.shape["d"] == 1 else "d"),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        axis_names={"d", "f"},
        check_vma=False,
    )


@pytest.mark.parametrize("recipe", SHIPPED_RECIPES)
@pytest.mark.parametrize("auto", ["", "d"])
def test_scales_of_weights_that_another_axis_shards(recipe: Any, auto: str) -> None:
    mesh = mesh_of((2, 1, 2), auto)
    with jax.set_mesh(mesh):
        operands = structs(REDUCED, mesh, "bfloat16")
        form = overlap(dot(None, "t"), fp8=recipe, implementation="ring", require=1)
        program = jax.make_jaxpr(form)(*operands)
    assert refused_by_xla(program.jaxpr) is None


@pytest.mark.needs("blockwise")
def test_blocks_that_are_filled_up_in_a_loop() -> None:
    """Gradients of a loop keep nothing that was computed where explicit axes are automatic."""
    mesh = mesh_of((2, 1, 2))

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(reshard(x, P(None, "t")), w, out_sharding=P("d", "t"))

    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (step(x, w), None), x, length=2)[0]

    rewritten = overlap(loop, fp8="blockwise", implementation="ring", require=1)
    operands = [((N, N), P("d", "t")), ((N, N), P("t"))]
    with jax.set_mesh(mesh):
        jax.make_jaxpr(gradients_of(rewritten, 2))(*structs(operands, mesh, "float32"))


def left(fun: Callable, operands: Any, mesh: Mesh, dtype: str = "float32") -> list[FoundSite]:
    with jax.set_mesh(mesh):
        found = find_sites(fun, implementation="ring")(*structs(operands, mesh, dtype))
    return [site for site in found if not site.replaced or site.kept]


def test_reasons() -> None:
    """An axis of one device; and a weight whose gradient would be summed in 16 bits."""
    (alone,) = [s for s in left(dot(), OVER_D, mesh_of((1, 1, 2))) if s.axes == ("d",)]
    assert alone.kind == "psum"
    assert "has one device, and others of several are left to the compiler" in alone.reason

    def whole_weight(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(reshard(x, P()), w, out_sharding=P("d"))

    operands, mesh = [((N, N), P("t")), ((N, N), P())], mesh_of((2, 1, 2))
    (kept,) = left(whole_weight, operands, mesh, "bfloat16")
    assert kept.kept and "XLA for CPUs cannot sum its gradients in 16 bits" in kept.reason
    assert not left(whole_weight, operands, mesh)


@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("op", [matmul_all_reduce, matmul_reduce_scatter])
def test_ops_beside_automatic_axes(op: Callable, sizes: tuple[int, int, int]) -> None:
    """The ops themselves, in a `shard_map` that leaves an axis; the sum may have one device."""
    mesh = mesh_of(sizes, "dft")

    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        return op(x, w, "d", implementation="xla")

    sharded = jax.shard_map(
        fun,
        mesh=mesh,
        in_specs=(P(None, "d"), P("d")),
        out_specs=P("d") if op is matmul_reduce_scatter else P(),
        axis_names={"d"},
    )
    x = jax.ShapeDtypeStruct((N, N), "bfloat16")
    for form in sharded, gradients_of(sharded, 2):
        assert refused_by_xla(jax.make_jaxpr(form)(x, x).jaxpr) is None


COMPILE = """
import sys
import jax
from tests.rewrite import fuzz, test_explicit_compiling as tests
fuzz.simulate_devices()
for name, (sizes, fun, operands, auto) in tests.PROGRAMS.items():
    mesh = tests.mesh_of(sizes, auto)
    with jax.set_mesh(mesh):
        for implementation in "ring", "xla":
            after = tests.overlap(fun, implementation=implementation)
            before = tests.overlap(tests.gradients_of(fun, 2), implementation=implementation)
            for form in after, before, tests.gradients_of(after, 2):
                jax.jit(form).lower(*tests.structs(operands, mesh, "bfloat16")).compile()
print("compiled")
"""


@pytest.mark.exhaustive
def test_all_of_them_compile() -> None:
    """In a process of its own, which XLA may end."""
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    assert run.stdout.endswith("compiled\n"), run.stderr[-2000:]
