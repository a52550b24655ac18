"""A recipe is one class and one registration: docs/contributing/add_an_operand.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import explain, matmul_reduce_scatter, tune
from collective_matmul.dispatch.tables.table import Table
from collective_matmul.operands.format import FORMATS, register_format, unregister_format
from collective_matmul.operands.recipes.recipe import E4M3, E5M2, Recipe
from collective_matmul.operands.scaled.scaling import next_power_of_two, scale_of
from tests.conftest import MeshFactory
from tests.operands.row_scaled_case import FSDP, cases_of, check
from tests.reference import AXIS

NAME = "powers_of_two"


@dataclass(frozen=True)
class PowersOfTwo(Recipe):
    """Row-wise scales that are powers of two, and gradients of more range."""

    name: str = NAME
    gradient_dtype: jnp.dtype = E5M2

    def scale(self, largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return next_power_of_two(scale_of(largest, dtype))


def quantize(array: np.ndarray, axis: int, of_gradient: bool) -> np.ndarray:
    """Values that an array stands for when it is rounded, by another implementation."""
    dtype = E5M2 if of_gradient else E4M3
    largest = np.abs(array).max(axis, keepdims=True).astype(np.float64)
    scales = 2.0 ** np.ceil(np.log2(largest / float(jnp.finfo(dtype).max)))
    return (array / scales).astype(np.float32).astype(dtype).astype(np.float64) * scales


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    register_format(PowersOfTwo())
    yield
    unregister_format(NAME)


@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_ops_multiply_quantized_operands(make_mesh: MeshFactory, implementation: str) -> None:
    cases = [c for c in cases_of(implementation, 2, NAME) if c.dimension == 0]
    check(cases, make_mesh({AXIS: 2}), quantize)


@pytest.mark.parametrize("weight_dimension", [0, 1])
def test_shards_of_weights_have_the_scales_of_the_whole(
    make_mesh: MeshFactory, weight_dimension: int
) -> None:
    """Quantized by the op, and before it."""
    mesh = make_mesh({FSDP: 2, AXIS: 2})
    cases = cases_of("ring", 2, NAME, weight_dimension=weight_dimension)
    cases = [c for c in cases if c.dimension == 0 and len(c.columns) == 1]
    check([*cases, *(replace(c, quantized_before=True) for c in cases)], mesh, quantize)


def scatter(mesh: Any) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """The gradients of an op, and the shapes of their arguments."""
    sharded = jax.shard_map(
        lambda x, w: matmul_reduce_scatter(x, w, AXIS, fp8=NAME),
        mesh=mesh,
        in_specs=(P(None, AXIS), P(AXIS)),
        out_specs=P(AXIS),
    )
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 32), (32, 8))]
    return jax.grad(lambda *args: sharded(*args).sum(), (0, 1)), shapes


def test_what_is_tuned_is_saved_and_decides(
    make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLLECTIVE_MATMUL_CACHE_DIR", str(tmp_path))
    gradients, shapes = scatter(make_mesh({AXIS: 2}))
    table = tune(gradients, *shapes, implementations=["ring"], groups=1, seconds_per_group=1e-4)
    (path,) = tmp_path.glob("*.jsonl")
    read = Table.from_text(path.read_text(encoding="utf-8"))
    assert read.entries.keys() == table.entries.keys()
    assert [site.format for site in read.entries] == [FORMATS[NAME]] * 2
    decisions = explain(gradients)(*shapes).decisions
    assert len(decisions) == 2
    assert all(d.reason.startswith("measured (your table)") for d in decisions)


def test_explain_names_its_dtypes() -> None:
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    types = (AxisType.Auto,)
    gradients, shapes = scatter(
        AbstractMesh((2,), (AXIS,), axis_types=types, abstract_device=device)
    )
    text = str(explain(gradients)(*shapes))
    assert text.count(f"fp8 {NAME}") == 2
    assert "float8_e5m2 + scales" in text
