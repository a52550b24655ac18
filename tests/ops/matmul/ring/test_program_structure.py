"""Contents of the program: collectives and matmuls, what waits for what, what is alive.

The jaxpr tells what a ring asks for. The compiled HLO tells that XLA neither merged nor added
communication; only one direction at a time is compiled for that, since XLA may find that a forward
and its backward have something in common.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import CHECKPOINT_NAME, all_gather_matmul, matmul_reduce_scatter
from collective_matmul.ops.matmul.ring.backend import RINGS
from collective_matmul.schedule.schedules import Chunk, Schedule, Step, Use, make_schedule
from tests.conftest import MeshFactory
from tests.ops.matmul.requests import request_of
from tests.reference import AXIS, OPS, PORTABLE, Case

DEVICES = 4
USES: dict[str, Use] = {"all_gather_matmul": "gather", "matmul_reduce_scatter": "scatter"}

#: Primitives that communicate, of any backend.
COMMUNICATION = frozenset(
    {"ppermute", "all_gather", "reduce_scatter", "psum", "psum_invariant", "all_to_all"}
)

every_op = pytest.mark.parametrize("op", OPS)
gather_and_scatter = pytest.mark.parametrize("op", USES)
every_ring = pytest.mark.parametrize("ring", RINGS)
every_implementation = pytest.mark.parametrize("implementation", PORTABLE)


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({AXIS: DEVICES})


def case_of(op: str, implementation: str) -> Case:
    """On each device 4 rows in a shard of 16, K = 12 and N = 5: shapes tell arrays apart."""
    contracted, columns = (12, 20) if op == "all_gather_matmul" else (48, 5)
    return Case(op, implementation, DEVICES, (4 * DEVICES,), contracted, ((columns,),))


def schedule_of(use: Use, ring: str) -> Schedule:
    return make_schedule(use, RINGS[ring].pattern, DEVICES)


def multiplies(schedule: Schedule) -> int:
    return sum(len(step.multiply) for step in schedule.steps)


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations, those of inner jaxprs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def count(jaxpr: Jaxpr, name: str) -> int:
    return sum(equation.primitive.name == name for equation in equations(jaxpr))


def forward(case: Case, mesh: Mesh) -> tuple[Callable, tuple]:
    x, ws, _ = case.arrays()
    return case.sharded(mesh), (x, tuple(ws))


def backward(case: Case, mesh: Mesh) -> tuple[Callable, tuple]:
    """Both gradients, from inside `shard_map`; the forward's results are not used."""
    x_spec, w_specs, y_specs = case.specs
    x, ws, dys = case.arrays()

    def gradients(x, ws, dys):
        return jax.vjp(case.call, x, ws)[1](dys)

    fun = jax.shard_map(
        gradients, mesh=mesh, in_specs=(x_spec, w_specs, y_specs), out_specs=(x_spec, w_specs)
    )
    return fun, (x, tuple(ws), tuple(dys))


def local_jaxpr(fun: Callable, arguments: tuple) -> Jaxpr:
    """Program that one device runs: the jaxpr inside the `shard_map` that `fun` is."""
    (equation,) = jax.make_jaxpr(fun)(*arguments).jaxpr.eqns
    (inner,) = jaxprs_in_params(equation.params)
    return inner


def compiled_operations(fun: Callable, arguments: tuple) -> Counter[str]:
    """How often each collective, and a matmul, stands in the optimized HLO."""
    text = jax.jit(fun).lower(*arguments).compile().as_text() or ""
    names = "collective-permute|all-gather|reduce-scatter|all-reduce|all-to-all|dot"
    return Counter(re.findall(rf" ({names})(?:-start)?\(", text))


@gather_and_scatter
@every_ring
def test_a_ring_forward_is_its_schedule(op: str, ring: str, mesh: Mesh) -> None:
    schedule = schedule_of(USES[op], ring)
    assert compiled_operations(*forward(case_of(op, ring), mesh)) == {
        "collective-permute": schedule.permutes,
        "dot": multiplies(schedule),
    }


@gather_and_scatter
def test_a_row_is_not_halved(op: str, mesh: Mesh) -> None:
    """Every other permute would carry nothing."""
    sizes = (DEVICES,), DEVICES, ((DEVICES,),)
    jaxpr = local_jaxpr(*forward(Case(op, "ring_two_way", DEVICES, *sizes), mesh))
    assert count(jaxpr, "ppermute") == DEVICES - 1


@gather_and_scatter
@every_ring
def test_a_ring_backward_is_the_other_schedule(op: str, ring: str, mesh: Mesh) -> None:
    """And one undivided matmul for the weight's gradient."""
    gather, scatter = (schedule_of(use, ring) for use in ("gather", "scatter"))
    # all_gather_matmul scatters dx, and x rides along; matmul_reduce_scatter only gathers dy.
    rings = (scatter, gather) if op == "all_gather_matmul" else (gather,)
    assert compiled_operations(*backward(case_of(op, ring), mesh)) == {
        "collective-permute": sum(schedule.permutes for schedule in rings),
        "dot": multiplies(rings[0]) + 1,
    }


@every_ring
def test_an_all_reduce_rings_once_and_its_backward_is_silent(ring: str, mesh: Mesh) -> None:
    case = case_of("matmul_all_reduce", ring)
    schedule = schedule_of("scatter", ring)
    assert compiled_operations(*forward(case, mesh)) == {
        "collective-permute": schedule.permutes,
        "dot": multiplies(schedule),
        "all-gather": 1,
    }
    assert compiled_operations(*backward(case, mesh)) == {"dot": 2}


def test_an_all_reduce_has_few_chunks_at_once(mesh: Mesh) -> None:
    """The direct pattern would end with a chunk of every peer in memory."""

    def permutations(ring: str) -> list:
        jaxpr = local_jaxpr(*forward(case_of("matmul_all_reduce", ring), mesh))
        found = [e for e in equations(jaxpr) if e.primitive.name == "ppermute"]
        return [equation.params["perm"] for equation in found]

    assert permutations("ring_direct") == permutations("ring")


@pytest.mark.parametrize(
    ("op", "collective", "backward_collectives"),
    [
        ("all_gather_matmul", "all-gather", {"reduce-scatter": 1, "all-gather": 1}),
        ("matmul_reduce_scatter", "reduce-scatter", {"all-gather": 1}),
        ("matmul_all_reduce", "all-reduce", {}),
    ],
)
def test_xla_is_one_collective_and_one_matmul(
    op: str, collective: str, backward_collectives: dict[str, int], mesh: Mesh
) -> None:
    case = case_of(op, "xla")
    assert compiled_operations(*forward(case, mesh)) == {collective: 1, "dot": 1}
    assert compiled_operations(*backward(case, mesh)) == {**backward_collectives, "dot": 2}


def ancestors(jaxpr: Jaxpr) -> dict[int, frozenset[int | Var]]:
    """For each equation by its index, the equations and arguments that it waits for."""
    behind = {argument: frozenset[int | Var]([argument]) for argument in jaxpr.invars}
    waits_for = {}
    for i, equation in enumerate(jaxpr.eqns):
        operands = [var for var in equation.invars if not isinstance(var, Literal)]
        waits_for[i] = frozenset[int | Var]().union(*(behind[var] for var in operands))
        for var in equation.outvars:
            behind[var] = waits_for[i] | {i}
    return waits_for


def ring_jaxpr(op: Any, ring: str, mesh: Mesh) -> Jaxpr:
    """The implementation alone, without the op around it: one flat list of equations."""

    def implementation(x: jax.Array, ws: tuple[jax.Array]) -> Any:
        result, _ = RINGS[ring].execute(request_of(op, [x], ws), [x], ws)
        return result[0] if op == "all_gather_matmul" else result

    case = case_of(op, ring)
    x_spec, w_specs, (y_spec,) = case.specs
    x, ws, _ = case.arrays()
    fun = jax.shard_map(implementation, mesh=mesh, in_specs=(x_spec, w_specs), out_specs=y_spec)
    return local_jaxpr(fun, (x, tuple(ws)))


def indices(jaxpr: Jaxpr, name: str) -> list[int]:
    return [i for i, equation in enumerate(jaxpr.eqns) if equation.primitive.name == name]


def next_use(schedule: Schedule, i: int, chunk: Chunk) -> int:
    """The first step after step i that multiplies or sends a chunk; the end, if none does."""
    steps = schedule.steps
    return next((j for j in range(i + 1, len(steps)) if chunk in uses(steps[j])), len(steps))


def uses(step: Step) -> set[Chunk]:
    return {*step.multiply, *(send.chunk for send in step.sends)}


@gather_and_scatter
@every_ring
def test_steps_run_in_lockstep(op: str, ring: str, mesh: Mesh) -> None:
    """Step i waits for barrier i - 1, which waits for matmul i - 1 and for all that step i uses."""
    jaxpr, schedule = ring_jaxpr(op, ring, mesh), schedule_of(USES[op], ring)
    waits_for = ancestors(jaxpr)
    barriers = indices(jaxpr, "optimization_barrier")
    assert len(barriers) == len(schedule.steps) - 1
    steps = list(enumerate(schedule.steps))
    # The step that each belongs to, and the one that it must be done for.
    permutes = [(i, next_use(schedule, i, send.arrival)) for i, s in steps for send in s.sends]
    matmuls = [(i, i + 1) for i, step in steps for _ in step.multiply]
    for name, work in (("ppermute", permutes), ("dot_general", matmuls)):
        for index, (own, later) in zip(indices(jaxpr, name), work, strict=True):
            assert waits_for[index].intersection(barriers) == set(barriers[:own])
            assert later == len(steps) or index in waits_for[barriers[later - 1]]


@gather_and_scatter
@every_ring
def test_one_chunk_passes_from_step_to_step(op: str, ring: str, mesh: Mesh) -> None:
    """With the one in flight that makes two. The direct pattern keeps all that it will sum up."""
    jaxpr = ring_jaxpr(op, ring, mesh)
    rows, columns = (4, 12) if op == "all_gather_matmul" else (4, 5)
    most = DEVICES - 1 if ring == "ring_direct" else 1
    for i in indices(jaxpr, "optimization_barrier"):
        arrays: list[Any] = [var.aval for var in jaxpr.eqns[i].invars]
        rows_of_chunks = sum(array.shape[0] for array in arrays if array.shape[1:] == (columns,))
        assert rows_of_chunks <= rows * most


@gather_and_scatter
@every_ring
def test_barriers_reach_the_compiler(op: str, ring: str, mesh: Mesh) -> None:
    fun, arguments = forward(case_of(op, ring), mesh)
    text = jax.jit(fun).lower(*arguments).as_text()
    steps = len(schedule_of(USES[op], ring).steps)
    assert text.count("stablehlo.optimization_barrier") == steps - 1


@gather_and_scatter
@every_implementation
def test_nothing_gathered_is_kept_for_the_backward(
    op: str, implementation: str, mesh: Mesh
) -> None:
    """All that the backward communicates waits for the cotangent.

    XLA would otherwise find that the forward has gathered the same, and keep that until then.
    """
    fun, arguments = backward(case_of(op, implementation), mesh)
    jaxpr = local_jaxpr(fun, arguments)
    cotangent = jaxpr.invars[-1]
    waits_for = ancestors(jaxpr)
    # The forward stands inside one equation; what stands beside it is the backward.
    communication = [
        i for i, equation in enumerate(jaxpr.eqns) if equation.primitive.name in COMMUNICATION
    ]
    assert communication
    assert all(cotangent in waits_for[i] for i in communication)


@gather_and_scatter
@every_ring
def test_a_ring_needs_no_more_memory_than_xla(op: str, ring: str, mesh: Mesh) -> None:
    """XLA holds the whole gathered x, or the whole product. A ring may hold two chunks besides."""
    rows, contracted, columns = 64 * DEVICES, 256, 256

    def temporary_bytes(implementation: str) -> int:
        case = Case(op, implementation, DEVICES, (rows,), contracted, ((columns,),))
        fun, arguments = forward(case, mesh)
        memory = jax.jit(fun).lower(*arguments).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    chunk_bytes = rows // DEVICES * 256 * 4
    assert temporary_bytes(ring) <= temporary_bytes("xla") + 2 * chunk_bytes


@gather_and_scatter
@every_ring
def test_weight_gradients_are_not_put_off(op: str, ring: str, mesh: Mesh) -> None:
    """They leave in one barrier with the gradient that the backward goes on with."""
    jaxpr = local_jaxpr(*backward(case_of(op, ring), mesh))
    made_by = {var: equation.primitive.name for equation in jaxpr.eqns for var in equation.outvars}
    gradients = [var for var in jaxpr.outvars if isinstance(var, Var)]
    assert [made_by[var] for var in gradients] == ["optimization_barrier"] * 2


@gather_and_scatter
@every_ring
def test_weight_gradients_that_nobody_wants_are_not_computed(
    op: str, ring: str, mesh: Mesh
) -> None:
    fun, arguments = backward(case_of(op, ring), mesh)
    both = compiled_operations(fun, arguments)
    one = compiled_operations(lambda *arguments: fun(*arguments)[0], arguments)
    other = "matmul_reduce_scatter" if op == "all_gather_matmul" else "all_gather_matmul"
    assert one["dot"] == multiplies(schedule_of(USES[other], ring)) < both["dot"]


@pytest.mark.parametrize(("saved", "forwards_in_backward"), [(CHECKPOINT_NAME, 0), ("other", 1)])
def test_saved_results_are_not_communicated_again(
    saved: str, forwards_in_backward: int, mesh: Mesh
) -> None:
    policy = jax.checkpoint_policies.save_only_these_names(saved)

    @functools.partial(jax.checkpoint, policy=policy)
    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(all_gather_matmul(x, up, AXIS, implementation="ring"))
        return matmul_reduce_scatter(hidden, down, AXIS, implementation="ring")

    sharded = jax.shard_map(
        block, mesh=mesh, in_specs=(P(AXIS), P(None, AXIS), P(AXIS)), out_specs=P(AXIS)
    )
    gradients = jax.grad(lambda *operands: jnp.sum(sharded(*operands)), (0, 1, 2))
    operands = (np.ones(shape, np.float32) for shape in ((8, 4), (4, 8), (8, 4)))
    rings = {
        "forward": 2,
        # Of the two forwards only the gather's is needed again: its result is gelu's argument.
        "forward again": forwards_in_backward,
        "dy": 1,
        "dx and its co_gathered": 2,
    }
    jaxpr = jax.make_jaxpr(gradients)(*operands).jaxpr
    assert count(jaxpr, "ppermute") == sum(rings.values()) * (DEVICES - 1)


@every_op
@every_implementation
@pytest.mark.parametrize("direction", [forward, backward])
def test_lowers_for_gpus(op: str, implementation: str, direction: Callable, mesh: Mesh) -> None:
    fun, arguments = direction(case_of(op, implementation), mesh)
    traced = jax.jit(fun).trace(*arguments)

    def operations(platform: str) -> Counter[str]:
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return Counter(re.findall(r"stablehlo\.(?:collective_permute|optimization_barrier)", text))

    assert operations("cuda") == operations("cpu")
