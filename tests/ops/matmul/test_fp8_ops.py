"""The ops with operands in 8 bits, against the products of the quantized operands in float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, explain, matmul_reduce_scatter
from collective_matmul.operands.format import FORMATS
from tests.conftest import MeshFactory
from tests.covering import covering
from tests.fp8_reference import SHIPPED_RECIPES, Fp8Case
from tests.ops.matmul.ring.test_program_structure import equations
from tests.reference import (
    AXIS,
    OPS,
    PORTABLE,
    assert_close,
    poisoned_results,
    reference,
)
from tests.rewrite.simulator import some_compiled

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[list[tuple[int, ...]]]:
    with poisoned_results() as shapes:
        yield shapes


def case_of(op: str, fp8: str, devices: int, **changes: Any) -> Fp8Case:
    """A case with odd rows, a contraction that blocks do not divide, and two weights."""
    gathers = op == "all_gather_matmul"
    fields: dict[str, Any] = {"implementation": "ring", "dimension": 1} | changes
    return Fp8Case(
        op=op,
        fp8=fp8,
        devices=devices,
        leading=(devices, 3 * devices),
        contracted=136 if gathers else 136 * devices,
        columns=((8 * devices,), (2 * devices, 3)) if gathers else ((8, 17),),
        **fields,
    )


def rounds_before(case: Fp8Case) -> bool:
    """Whether the cotangent is rounded before it is quantized, perhaps to another number.

    Without types that say what is replicated, JAX divides it by D, and sums that over the devices.
    """
    is_replicated = case.op == "matmul_all_reduce" and not case.check_vma
    return is_replicated and case.dtype != "float32" and case.devices not in (1, 2, 4, 8)


PRODUCT = [
    case_of(op, fp8, devices, implementation=implementation, dimension=dimension, **others)
    for op, fp8, implementation, devices, dimension, others in itertools.product(
        OPS,
        SHIPPED_RECIPES,
        (None, *PORTABLE),
        (1, 2, 3, 4, 5, 8),
        (0, 1),
        (
            {"dtype": dtype, "check_vma": vma}
            for dtype in ("float32", "bfloat16", "float16")
            for vma in (True, False)
        ),
    )
]
PRODUCT = [case for case in PRODUCT if not rounds_before(case)]


def factors(case: Fp8Case) -> dict[str, Any]:
    return {
        "op and recipe": (case.op, case.fp8),
        "implementation": case.implementation,
        "devices": case.devices,
        "dimension": case.dimension,
        "dtype": case.dtype,
        "vma": case.check_vma,
    }


@some_compiled(covering(PRODUCT, factors), factors)
def test_matches_quantized_operands(case: Fp8Case, run: Callable, make_mesh: MeshFactory) -> None:
    assert_close(case.compare(make_mesh({AXIS: case.devices}), run=run))


def program(case: Fp8Case, make_mesh: MeshFactory) -> list[Any]:
    """The equations of results and gradients, also those of inner programs."""
    x, ws, dys = case.arrays()

    def both(x: Any, ws: Any, dys: Any) -> Any:
        ys, transpose = jax.vjp(case.sharded(make_mesh({AXIS: case.devices})), x, ws)
        return ys, transpose(dys)

    return list(equations(jax.make_jaxpr(both)(x, tuple(ws), tuple(dys)).jaxpr))


@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
@pytest.mark.parametrize("op", OPS[:2])
def test_gathers_send_messages_and_sums_send_the_dtype(
    op: str, fp8: str, make_mesh: MeshFactory
) -> None:
    """A weight gradient in the operands' dtype needs what is gathered in that dtype too."""
    case = case_of(op, fp8, 4, dtype="bfloat16")
    sent = [
        (equation.invars[0].aval.dtype.name, equation.invars[0].aval.shape[-1])
        for equation in program(case, make_mesh)
        if equation.primitive.name == "ppermute"
    ]
    recipe = FORMATS[fp8]
    contracted = case.contracted if op == OPS[0] else case.columns[0][0] * case.columns[0][1]
    message = ("uint8", recipe.row_bytes(contracted, 1))
    messages, plain = (6, 3) if recipe.packs_gradients and op == OPS[0] else (3, 6)
    if recipe.packs_gradients and op == OPS[1]:
        plain = 3
    assert sent.count(message) == messages
    assert len(sent) == messages + plain
    assert {dtype for dtype, _ in sent} == {"uint8", "bfloat16"}


@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("op", OPS[:2])
def test_matmuls_take_8_bits(op: str, fp8: str, make_mesh: MeshFactory) -> None:
    """No matmul but the weight gradient of "rowwise" has wider operands."""
    case = case_of(op, fp8, 4, dtype="bfloat16")
    widths = [
        {variable.aval.dtype.itemsize for variable in equation.invars}
        for equation in program(case, make_mesh)
        if equation.primitive.name == "dot_general"
    ]
    wider = [width for width in widths if width != {1}]
    gradients = 0 if fp8 == "tensorwise" else len(case.columns)
    assert wider == [{2}] * gradients
    assert len(widths) > gradients


def test_large_gradients_of_rows_without_activations_leave_the_others(
    make_mesh: MeshFactory,
) -> None:
    """Tensor-wise, one device's rows have large gradients and masked activations."""
    case = case_of(OPS[1], "tensorwise", 4, dimension=0)
    x, ws, (dy,) = case.arrays()
    masked = slice(0, x.shape[0] // 4)
    x[masked], dy[masked] = 0, 1e6 * dy[masked]
    outcome = case.run(make_mesh({AXIS: 4}), (x, ws, [dy]))
    rows = (0, 1)
    exact = np.tensordot(x.astype(np.float64), dy.astype(np.float64), (rows, rows))
    error = np.linalg.norm(np.asarray(outcome.dws[0], np.float64) - exact) / np.linalg.norm(exact)
    # Numbers of 2 and 3 bits after the leading one are off by 0.05 and 0.026 on average.
    assert error < 0.1


def test_explain_names_the_recipe(make_mesh: MeshFactory) -> None:
    case = case_of(OPS[0], "rowwise", 2, implementation=None)
    x, ws, _ = case.arrays()
    table = str(explain(case.sharded(make_mesh({AXIS: 2})))(x, tuple(ws)))
    assert "fp8 rowwise" in table


@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
@pytest.mark.parametrize("weight_dimension", [0, 1])
@pytest.mark.parametrize("contracted", [pytest.param(256, marks=pytest.mark.exhaustive), 136])
def test_shards_of_weights_are_quantized_as_the_whole(
    fp8: str, weight_dimension: int, contracted: int, make_mesh: MeshFactory
) -> None:
    """Scales are those of the whole weight, also where 128 does not divide the shards."""
    mesh = make_mesh({"fsdp": 2, AXIS: 2})
    generator = np.random.default_rng(0)
    x = generator.standard_normal((4, 8, contracted)).astype(np.float32)
    w = generator.standard_normal((contracted, 512)).astype(np.float32)
    back = generator.standard_normal((512, contracted)).astype(np.float32)

    def loss(x: jax.Array, w: jax.Array, back: jax.Array, **keywords: Any) -> jax.Array:
        keywords |= {"fp8": fp8, "implementation": "ring"}
        y = all_gather_matmul(x, w, AXIS, gather_dimension=1, **keywords)
        z = matmul_reduce_scatter(y, back, AXIS, scatter_dimension=1, **keywords)
        return jax.lax.psum(jnp.sum(jnp.sin(z)), ("fsdp", AXIS))

    def gradients(sharded: bool) -> Any:
        keywords: dict[str, Any] = {}
        down = up = P(None, AXIS)
        down = P(AXIS)
        if sharded:
            keywords = {"weight_axis_name": "fsdp", "weight_dimension": weight_dimension}
            up = P(None, (AXIS, "fsdp")) if weight_dimension else P("fsdp", AXIS)
            down = P(AXIS, "fsdp") if weight_dimension else P((AXIS, "fsdp"))
        fun = functools.partial(loss, **keywords)
        specs = P("fsdp", AXIS), up, down
        mapped = jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P())
        return jax.jit(jax.grad(mapped, argnums=(0, 1, 2)))(x, w, back)

    for actual, expected in zip(gradients(True), gradients(False), strict=True):
        # Sums in another order round a few numbers to the neighbour, which is 2⁻⁴ away. With scales
        # of their own most numbers would be, and the difference 4 %.
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert error < 0.01


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1e35, 1e-5, 1e-30), (1e-30, 1e33, 1e-30)], ids=str)
@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
@pytest.mark.parametrize("op", OPS)
def test_one_number_contracted_and_numbers_of_very_different_sizes(
    op: str, fp8: str, sizes: tuple[float, float, float], make_mesh: MeshFactory
) -> None:
    """A device contracts one number in the forward, or in the gradient of x: a scalar head."""
    gathers, devices = op == "all_gather_matmul", 2
    contracted, columns = (1, 4 * devices) if gathers else (devices, 1)
    case = Fp8Case(op, "ring", devices, (4, 2), contracted, ((columns,),), 0, fp8=fp8)
    x, ws, dys = case.arrays(0)
    arrays = (
        (x * sizes[0]).astype("float32"),
        [(w * sizes[1]).astype("float32") for w in ws],
        [(dy * sizes[2]).astype("float32") for dy in dys],
    )
    actual, exact = case.run(make_mesh({AXIS: devices}), arrays, jax.jit), reference(*arrays)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(exact), strict=True):
        if np.max(np.abs(b)) < 1e-30:
            continue  # XLA flushes numbers of that size to zero, and so may their scales be.
        # Two operands, each rounded by 2⁻⁴ (2⁻³ in float8_e5m2), and what a large number next to
        # them takes.
        assert np.max(np.abs(np.asarray(a, np.float64) - b)) <= 0.25 * np.max(np.abs(b))
