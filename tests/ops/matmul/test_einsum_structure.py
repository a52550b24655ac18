"""Contents of the programs of collective_einsum, of every form and implementation."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import Jaxpr
from jax.sharding import Mesh

from collective_matmul import CHECKPOINT_NAME, all_gather_matmul, collective_einsum
from collective_matmul.ops.matmul.equation import Equation
from collective_matmul.ops.matmul.request import Site
from collective_matmul.ops.matmul.ring.backend import RINGS
from collective_matmul.schedule.schedules import Schedule, Use, make_schedule
from tests.conftest import MeshFactory
from tests.ops.matmul.einsum_reference import FORMS, EinsumCase, case_of, on_stacks
from tests.ops.matmul.ring.test_program_structure import (
    ancestors,
    compiled_operations,
    count,
    equations,
    indices,
    local_jaxpr,
)
from tests.reference import AXIS

every_form = pytest.mark.parametrize("form", FORMS)
every_ring = pytest.mark.parametrize("ring", RINGS)
GATHERS_AND_REDUCTIONS = ("all_gather", "reduce_scatter", "psum", "all_to_all")


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({AXIS: 3})


def schedule_of(use: Use, ring: str) -> Schedule:
    pattern = RINGS[ring].pattern
    assert pattern is not None
    return make_schedule(use, pattern, 3)


def multiplies(schedule: Schedule) -> int:
    return sum(len(step.multiply) for step in schedule.steps)


def use_of(case: EinsumCase) -> Use:
    return "gather" if case.gather else "scatter"


def passes(case: EinsumCase, mesh: Mesh) -> tuple[Jaxpr, Jaxpr]:
    """Programs of a device: forward; and backward, where the forward's result is not used."""
    x, w, dy = case.arrays(0)
    backward = on_stacks(lambda x, w, dy: jax.vjp(case.call, x, w)[1](dy), mesh)
    return (
        local_jaxpr(on_stacks(case.call, mesh), (x, w)),
        local_jaxpr(backward, (x, w, dy)),
    )


@every_form
@every_ring
def test_a_ring_is_its_schedule_forward_and_backward(form: str, ring: str, mesh: Mesh) -> None:
    """Backward it is the other schedule, and one undivided einsum."""
    case = case_of(form, ring)
    gather, scatter = (schedule_of(use, ring) for use in ("gather", "scatter"))
    own, (other, *co_gathered) = (gather, [scatter, gather]) if case.gather else (scatter, [gather])
    forward, both = passes(case, mesh)
    assert count(forward, "ppermute") == own.permutes
    assert count(forward, "dot_general") == multiplies(own)
    rings = sum(schedule.permutes for schedule in (other, *co_gathered))
    assert count(both, "ppermute") == own.permutes + rings
    assert count(both, "dot_general") == multiplies(own) + multiplies(other) + 1
    for name in GATHERS_AND_REDUCTIONS:
        assert count(both, name) == 0


@every_form
def test_the_compiler_adds_no_communication(form: str, mesh: Mesh) -> None:
    case = case_of(form, "ring")
    x, w, _ = case.arrays(0)
    operations = compiled_operations(on_stacks(case.call, mesh), (x, w))
    del operations["dot"]
    assert operations == {"collective-permute": 2}


@every_form
def test_xla_is_one_collective_and_one_einsum(form: str, mesh: Mesh) -> None:
    case = case_of(form, "xla")
    forward, both = passes(case, mesh)
    own, other = ("all_gather", "reduce_scatter")[:: 1 if case.gather else -1]
    assert (count(forward, own), count(forward, "dot_general")) == (1, 1)
    # A gathered operand is gathered again beside the scatter of its gradient.
    assert (count(both, own), count(both, other)) == ((2, 1) if case.gather else (1, 1))
    assert count(both, "dot_general") == 3


@every_form
@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_nothing_gathered_is_kept_for_the_backward(
    form: str, implementation: str, mesh: Mesh
) -> None:
    """All that stands beside the forward, which is one equation, waits for the cotangent."""
    _, jaxpr = passes(case_of(form, implementation), mesh)
    waits_for = ancestors(jaxpr)
    communication = [
        i for name in ("ppermute", *GATHERS_AND_REDUCTIONS) for i in indices(jaxpr, name)
    ]
    assert communication
    assert all(jaxpr.invars[-1] in waits_for[i] for i in communication)


@every_ring
@pytest.mark.parametrize("form", ["gathered contracted label", "scattered batch label"])
def test_steps_run_in_lockstep(form: str, ring: str, mesh: Mesh) -> None:
    """The matmuls and the permutes of a step wait for every barrier before it, and for no other."""
    case = case_of(form, ring)
    schedule = schedule_of(use_of(case), ring)
    op = "all_gather_matmul" if case.gather else "matmul_reduce_scatter"
    equation = Equation(*case.terms, case.label)

    def walk(a: jax.Array, b: jax.Array) -> Any:
        request = Site(op, (), a.dtype, AXIS, case.devices, equation=equation)
        return RINGS[ring].execute(request, [a], [b])[0]

    fun = on_stacks(walk, mesh)
    x, w, _ = case.arrays(0)
    jaxpr = local_jaxpr(fun, (x, w))
    waits_for, barriers = ancestors(jaxpr), indices(jaxpr, "optimization_barrier")
    assert len(barriers) == len(schedule.steps) - 1
    for name, works in (
        ("ppermute", [len(step.sends) for step in schedule.steps]),
        ("dot_general", [len(step.multiply) for step in schedule.steps]),
    ):
        steps = [i for i, number in enumerate(works) for _ in range(number)]
        for index, step in zip(indices(jaxpr, name), steps, strict=True):
            assert waits_for[index].intersection(barriers) == set(barriers[:step])


def test_a_matmul_is_the_op(mesh: Mesh) -> None:
    """With all that the op has, such as kernels: the very same equations."""
    x, w = np.ones((3, 2, 4, 6), np.float32), np.ones((3, 6, 5), np.float32)
    einsum, op = (
        local_jaxpr(on_stacks(fun, mesh), (x, w))
        for fun in (
            lambda x, w: collective_einsum(
                "bsd,df->bsf", x, w, AXIS, gather="s", implementation="ring"
            ),
            lambda x, w: all_gather_matmul(x, w, AXIS, gather_dimension=1, implementation="ring"),
        )
    )

    def names(jaxpr: Jaxpr) -> list[str]:
        return [equation.primitive.name for equation in equations(jaxpr)]

    assert [n for n in names(einsum) if n != "reshape"] == [n for n in names(op) if n != "reshape"]


def test_results_can_be_saved_by_name(mesh: Mesh) -> None:
    jaxpr, _ = passes(case_of("gathered batch label", "ring"), mesh)
    (equation,) = (e for e in jaxpr.eqns if e.primitive.name == "name")
    assert equation.params["name"] == CHECKPOINT_NAME


@pytest.mark.parametrize("implementation", ["xla", "ring"])
@every_form
def test_lowers_for_gpus(form: str, implementation: str, mesh: Mesh) -> None:
    case = case_of(form, implementation)
    x, w, dy = case.arrays(0)
    fun = on_stacks(lambda x, w, dy: jax.vjp(case.call, x, w)[1](dy), mesh)
    traced = jax.jit(fun).trace(x, w, dy)
    operations = [
        re.findall(
            r"stablehlo\.(?:collective_permute|all_gather|reduce_scatter|dot_general)",
            traced.lower(lowering_platforms=(platform,)).as_text(),
        )
        for platform in ("cpu", "cuda")
    ]
    assert operations[0] == operations[1] != []
