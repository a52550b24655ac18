"""The tool that lists the collectives of compiled steps, on programs that are compiled for CPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.conftest import MeshFactory
from tests.reference import AXIS
from tests.train.compiled_collectives import (
    CASES,
    Collective,
    Traffic,
    backends_row,
    collectives,
    name_of,
)
from train.config.checks import check
from train.memory.device_memory import GPUS
from train.parallel.mesh import make_abstract_mesh

ROWS, COLUMNS = 8, 32
SHIFT = [(0, 1), (1, 0)]


def three_times(x: jax.Array) -> jax.Array:
    """A loop, inside of which an array travels in each of three iterations."""
    body = lambda c, _: (lax.ppermute(jnp.sin(c), AXIS, SHIFT), None)  # noqa: E731
    return lax.scan(body, x, length=3)[0]


def rounded(x: jax.Array) -> jax.Array:
    return lax.all_gather(x.astype(jnp.float8_e4m3fn).view("uint8"), AXIS, tiled=True)


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda x: lax.all_gather(x, AXIS, tiled=True), {("all-gather", "f32"): (1, 2)}),
        (lambda x: lax.psum(x, AXIS), {("all-reduce", "f32"): (1, 1)}),
        (lambda x: lax.psum_scatter(x, AXIS, tiled=True), {("reduce-scatter", "f32"): (1, 1)}),
        (three_times, {("collective-permute", "f32"): (3, 3)}),
        (lambda x: three_times(three_times(x)), {("collective-permute", "f32"): (6, 6)}),
        (rounded, {("all-gather", "u8"): (1, 0.5)}),
        (jnp.sin, {}),
    ],
)  # fmt: skip
def test_what_a_program_executes(
    fun: Callable[..., Any], expected: dict[tuple[str, str], tuple], make_mesh: MeshFactory
) -> None:
    """In float32 arrays of a device."""
    mesh = make_mesh({AXIS: 2})
    sharded = jax.shard_map(fun, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    x = jax.ShapeDtypeStruct((2 * ROWS, COLUMNS), jnp.float32)
    found = collectives(jax.jit(sharded).lower(x).compile().as_text() or "")
    size = 4 * ROWS * COLUMNS
    assert found == {
        Collective(*what): Traffic(count, int(arrays * size))
        for what, (count, arrays) in expected.items()
    }


#: Operations that begin and end apart, as XLA writes them for GPUs.
ASYNCHRONOUS = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8,32], y: bf16[8,32]) -> f32[16,32] {
  %x = f32[8,32]{1,0} parameter(0)
  %y = bf16[8,32]{1,0} parameter(1)
  %all-gather-start = ((f32[8,32]{1,0}, bf16[8,32]{1,0}), (f32[16,32]{1,0}, bf16[16,32]{1,0})) \
all-gather-start(%x, %y), replica_groups={{0,1}}, dimensions={0}
  %all-gather-done = (f32[16,32]{1,0}, bf16[16,32]{1,0}) all-gather-done(%all-gather-start)
  %all-reduce-start = ((f32[8,32]{1,0}), f32[8,32]{1,0}) all-reduce-start(%x), to_apply=%add
  %all-reduce-done = f32[8,32]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %result = f32[16,32]{1,0} get-tuple-element(%all-gather-done), index=0
}
"""


def test_operations_that_go_on_while_others_execute_count_once():
    size = ROWS * COLUMNS
    assert collectives(ASYNCHRONOUS) == {
        Collective("all-gather", "f32"): Traffic(1, 2 * 4 * size),
        Collective("all-gather", "bf16"): Traffic(1, 2 * 2 * size),
        Collective("all-reduce", "f32"): Traffic(1, 4 * size),
    }


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_configurations_are_valid(case):
    check(case.config, case.sizes)


def test_the_backends_of_all_layers_are_listed():
    case = next(each for each in CASES if each.sizes.tensor == 4)
    # Layers are alike.
    model = dataclasses.replace(case.config.model, num_layers=1)
    config = dataclasses.replace(case.config, model=model)
    row = backends_row("name", config, make_abstract_mesh(case.sizes, GPUS["H200"].device))
    assert row[:2] == ["name", "ring / ring"]
    assert row[6] == "measured"
