"""The ops in 8 bits by the fused kernels: each pass lowers to one kernel, or it says why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest
from jax import ShapeDtypeStruct

from collective_matmul.dispatch.assessment import assess
from collective_matmul.operands.format import FORMATS
from collective_matmul.ops.matmul.backends import BACKENDS
from collective_matmul.peer_access import peer_kernels_allowed
from tests.conftest import MeshFactory
from tests.dispatch.sites import H200, site_of, tracing_for
from tests.fp8_reference import SHIPPED_RECIPES, Fp8Case
from tests.hopper import needs_kernels
from tests.reference import AXIS, OPS

GATHER, SCATTER, ALL_REDUCE = OPS
FUSED: Any = BACKENDS["fused"]


def case_of(op: str, fp8: str, devices: int, leading: tuple[int, ...] = (256,)) -> Fp8Case:
    columns = ((128 * devices,), (256 * devices,)) if op == GATHER else ((256 * devices,),)
    dimension = len(leading) - 1
    contracted = 256 if op == GATHER else 128 * devices
    return Fp8Case(
        op, "fused", devices, leading, contracted, columns, dimension, dtype="bfloat16", fp8=fp8
    )


def lowered(case: Fp8Case, make_mesh: MeshFactory, *, gradients: bool) -> str:
    fun = case.sharded(make_mesh({AXIS: case.devices}))
    x = ShapeDtypeStruct((*case.leading, case.contracted), case.dtype)
    ws = tuple(ShapeDtypeStruct((case.contracted, *n), case.dtype) for n in case.columns)

    def results(x: Any, ws: Any) -> Any:
        if not gradients:
            return fun(x, ws)
        ys, transpose = jax.vjp(fun, x, ws)
        return transpose(ys)

    return jax.jit(results).trace(x, ws).lower(lowering_platforms=("cuda",)).as_text()


@needs_kernels
@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("devices", "leading"), [(2, (256,)), pytest.param(4, (2, 96), marks=pytest.mark.exhaustive)]
)
def test_each_pass_is_one_kernel(
    op: str, fp8: str, devices: int, leading: tuple[int, ...], make_mesh: MeshFactory
) -> None:
    case = case_of(op, fp8, devices, leading)
    forward = lowered(case, make_mesh, gradients=False)
    assert forward.count("custom_call @mosaic_gpu") == 1
    assert not any(f"stablehlo.{name}" in forward for name in ("all_gather", "reduce_scatter"))
    assert "uses_xla_collective_metadata = false" in forward
    if op == ALL_REDUCE:
        return
    both = lowered(case, make_mesh, gradients=True)
    assert both.count("custom_call @mosaic_gpu") == 2
    # What the weight gradient needs is gathered by the kernel only if that is its message.
    collectives = 0 if (op, fp8) == (SCATTER, "tensorwise") else 1
    assert both.count('"stablehlo.all_gather"') == collectives
    assert "stablehlo.reduce_scatter" not in both


@needs_kernels
@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
@pytest.mark.parametrize("op", OPS)
def test_it_says_what_it_cannot_do(op: Any, fp8: Any) -> None:
    site: Any = site_of(op, 1024, 512, 2048, 2)
    scaled = replace(site, format=FORMATS[fp8])
    assert FUSED.unsupported_reason(scaled) is None
    assert FUSED.multiplied_dtypes(scaled) == scaled.operand_dtypes
    assert FUSED.configurations(scaled)
    ((x, (contracted, columns)),) = scaled.operands
    for w in ((contracted + 64, columns), (contracted, columns + 32)):
        wrong = replace(scaled, operands=(((*x[:-1], w[0]), w),))
        reason = FUSED.unsupported_reason(wrong)
        assert f"{(*x[:-1], w[0])} times" in reason and "128 and the columns of 64" in reason


@needs_kernels
def test_it_is_not_chosen_by_itself() -> None:
    """No GPU has executed it: whatever is predicted is not believed."""
    site = replace(site_of("all_gather_matmul", 64, 4096, 14336), format=FORMATS["rowwise"])
    with tracing_for(H200), peer_kernels_allowed(True):
        found = assess(site).by_name["fused"]
    assert found.comparison is not None and not found.comparison.is_believed
