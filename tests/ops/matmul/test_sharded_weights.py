"""The ops whose weights are sharded over a second mesh axis, against the unsharded computation."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import collective_matmul
from collective_matmul import all_gather_matmul, explain, matmul_reduce_scatter
from collective_matmul.schedule.schedules import make_schedule
from tests.conftest import MeshFactory
from tests.covering import covering
from tests.hopper import _for_hopper  # noqa: F401
from tests.ops.matmul.ring.test_program_structure import equations
from tests.reference import AXIS, OPS, PORTABLE, Case, assert_close, poisoned_results
from tests.rewrite.simulator import some_compiled

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

#: The axis that shards the batch and the weights.
FSDP = "fsdp"


@dataclass(frozen=True)
class ShardedCase(Case):
    """A call of an op with shards of weights. x [B, S, K] is sharded over FSDP in its batch.

    Attributes:
      weight_devices: F, the size of the second axis.
      weight_dimension: the dimension of the weights that it shards.
    """

    weight_devices: int = 1
    weight_dimension: int = 0

    @property
    def specs(self) -> tuple[P, tuple[P, ...], tuple[P, ...]]:
        """How x, the weights and the results are laid over the devices."""
        along: list[Any] = [FSDP, None]
        along[self.dimension] = (FSDP, AXIS) if self.dimension == 0 else AXIS
        gathers, in_rows = self.op == "all_gather_matmul", self.weight_dimension == 0
        if gathers:
            weight = P(FSDP, AXIS) if in_rows else P(None, (AXIS, FSDP))
            return P(*along), (weight,) * len(self.columns), (P(FSDP, None, AXIS),) * 2
        weight = P((AXIS, FSDP)) if in_rows else P(AXIS, FSDP)
        result = P(*along) if self.op == "matmul_reduce_scatter" else P(FSDP)
        return P(FSDP, None, AXIS), (weight,), (result,)

    def call(self, x: jax.Array, ws: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The op on local arrays, under `shard_map`."""
        keywords: dict[str, Any] = {
            "implementation": self.implementation,
            "weight_axis_name": FSDP,
            "weight_dimension": self.weight_dimension,
        }
        if self.op == "all_gather_matmul":
            return all_gather_matmul(
                x, tuple(ws), AXIS, gather_dimension=self.dimension, **keywords
            )
        if self.op == "matmul_reduce_scatter":
            keywords["scatter_dimension"] = self.dimension
        return (getattr(collective_matmul, self.op)(x, ws[0], AXIS, **keywords),)

    def bounds(self, arrays: tuple) -> Any:
        """Bounds of a case on all devices: sums over either axis are rounded."""
        fields: Any = {name: getattr(self, name) for name in Case.__dataclass_fields__}
        everywhere = Case(**fields | {"devices": self.devices * self.weight_devices})
        return everywhere.bounds(arrays)


def case_of(op: str, devices: int, weight_devices: int, **changes: Any) -> ShardedCase:
    """A case whose sizes all axes divide, with two weights where the op takes several."""
    size = devices * weight_devices
    columns = ((2 * size,), (size, 2)) if op == "all_gather_matmul" else ((weight_devices, 3),)
    fields: Any = {"implementation": "ring", "dimension": 1} | changes
    return ShardedCase(
        op=op,
        devices=devices,
        leading=(size, 3 * devices),
        contracted=2 * size,
        columns=columns,
        weight_devices=weight_devices,
        **fields,
    )


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[list[tuple[int, ...]]]:
    with poisoned_results() as shapes:
        yield shapes


PRODUCT = [
    case_of(op, *sizes, implementation=implementation, dimension=dimension, **others)
    for op, implementation, sizes, dimension, others in itertools.product(
        OPS,
        (None, *PORTABLE),
        ((1, 2), (2, 2), (2, 3), (4, 2), (1, 5), (3, 1)),
        (0, 1),
        (
            {"weight_dimension": weight_dimension, "dtype": dtype, "check_vma": vma}
            for weight_dimension in (0, 1)
            for dtype in ("float32", "bfloat16")
            for vma in (True, False)
        ),
    )
]


def factors(case: ShardedCase) -> dict[str, Any]:
    names = "op", "implementation", "dimension", "weight_dimension", "dtype", "check_vma"
    return {"sizes": (case.devices, case.weight_devices)} | {n: getattr(case, n) for n in names}


#: Weights of a ring of one device travel under their gradients: a path of its own in each op.
ALONE = [
    case_of(op, 1, 2, weight_dimension=weight_dimension)
    for op, weight_dimension in itertools.product(OPS[:2], (0, 1))
]


@some_compiled([*covering(PRODUCT, factors), *ALONE], factors)
def test_values_and_gradients(case: ShardedCase, run: Callable, make_mesh: MeshFactory) -> None:
    mesh = make_mesh({FSDP: case.weight_devices, AXIS: case.devices})
    assert_close(case.compare(mesh, run=run))


def in_parts(fun: Callable, mesh: Mesh, x: P, w: P) -> Callable:
    return jax.shard_map(fun, mesh=mesh, in_specs=(x, w), out_specs=P(FSDP, AXIS), check_vma=False)


@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_gradients_of_float32_shards_are_summed_in_float32(
    implementation: str, make_mesh: MeshFactory
) -> None:
    """Terms of 1 and 2⁻¹⁰ are exact in bfloat16, their sum is not."""
    mesh = make_mesh({FSDP: 2, AXIS: 1})

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul_reduce_scatter(
            x, w, AXIS, weight_axis_name=FSDP, implementation=implementation
        )

    @jax.jit
    def gradients(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        y, transpose = jax.vjp(in_parts(product, mesh, P(FSDP), P(FSDP)), x, w)
        return y, *transpose(jnp.ones_like(y))

    x = np.asarray([[1.0] * 4, [2**-10] * 4], jnp.bfloat16)
    y, dx, dw = gradients(x, np.ones((4, 8), np.float32))
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(dw, np.full((4, 8), 1 + 2**-10, np.float32))


def lowered(case: ShardedCase, make_mesh: MeshFactory, **keywords: Any) -> str:
    """The program of results and gradients."""
    mesh = make_mesh({FSDP: case.weight_devices, AXIS: case.devices})
    x, ws, dys = case.arrays()
    shapes = jax.tree.map(lambda a: ShapeDtypeStruct(a.shape, a.dtype), (x, ws, dys))

    def lower(fun: Callable) -> Callable:
        return lambda *args: jax.jit(fun).trace(*args).lower(**keywords).as_text()

    return str(case.run(mesh, shapes, jit=lower))


def count(text: str, name: str) -> int:
    return len(re.findall(rf"stablehlo\.{name}\b", text))


@pytest.mark.parametrize(("op", "weights"), [(OPS[0], 2), (OPS[1], 1)])
@pytest.mark.parametrize("devices", [1, 2])
def test_rings_communicate_in_permutes_alone(
    op: str, weights: int, devices: int, make_mesh: MeshFactory
) -> None:
    """Weights are gathered in both passes, and their gradients are scattered in one."""
    case = case_of(op, devices, 4, dtype="float32")
    text = lowered(case, make_mesh)
    # A gather in each pass, or a sum; and x once more for the gradient of the first op's weights.
    own = make_schedule("gather", "one_way", devices).permutes * (3 if op == OPS[0] else 2)
    assert count(text, "collective_permute") == own + 3 * weights * (4 - 1)
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        assert count(text, name) == 0


@pytest.mark.parametrize("implementation", ["xla", "ring"])
@pytest.mark.parametrize("op", OPS[:2])
def test_shards_wait_for_their_op(op: str, implementation: str, make_mesh: MeshFactory) -> None:
    """Without barriers all weights could be gathered at the start of the program, and the backward
    would reuse what the forward gathered."""
    case = case_of(op, 1, 2, implementation=implementation)
    x, ws, dys = case.arrays()

    def both(x: Any, ws: Any, dys: Any) -> Any:
        ys, transpose = jax.vjp(case.sharded(make_mesh({FSDP: 2, AXIS: 1})), x, ws)
        return ys, transpose(dys)

    found = list(equations(jax.make_jaxpr(both)(x, tuple(ws), tuple(dys)).jaxpr))
    producers = {variable: equation for equation in found for variable in equation.outvars}
    name = "all_gather" if implementation == "xla" else "ppermute"
    after_barriers = sum(
        producers[equation.invars[0]].primitive.name == "optimization_barrier"
        for equation in found
        if equation.primitive.name == name
        and FSDP in str(equation.params["axis_name"])
        and equation.invars[0] in producers
    )
    # Shards in both passes, and terms of their gradients. With "xla" the forward is the compiler's.
    assert after_barriers == len(ws) * (1 if implementation == "xla" else 3)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("op", OPS[:2])
def test_weight_gradients_stay_in_their_place(
    op: str, devices: int, make_mesh: MeshFactory
) -> None:
    """Finished sums of terms go through a barrier with what follows. XLA would postpone them, and
    nothing would hide the shards and terms that travel under their products."""
    case = case_of(op, devices, 2, dtype="float32")
    x, ws, dys = case.arrays()
    fun = case.sharded(make_mesh({FSDP: 2, AXIS: devices}))
    jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(fun, *args[:2])[1](args[2]))(
        x, tuple(ws), tuple(dys)
    )
    found = list(equations(jaxpr.jaxpr))
    producers = {variable: equation for equation in found for variable in equation.outvars}
    sums = {
        variable
        for equation in found
        if equation.primitive.name == "add"
        and any(
            producers[v].primitive.name == "ppermute" for v in equation.invars if v in producers
        )
        for variable in equation.outvars
    }
    bound = {
        variable
        for equation in found
        if equation.primitive.name == "optimization_barrier" and len(equation.invars) > len(ws)
        for variable in equation.invars
    }
    sizes = {w.size // (2 * devices) for w in ws}
    shapes: list[Any] = [v.aval for v in sums & bound]
    assert sum(shape.size in sizes for shape in shapes) >= len(ws)


@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize("op", OPS[:2])
def test_kernels_read_and_write_blocks_in_place(op: str, make_mesh: MeshFactory) -> None:
    """With columns sharded, chunks are neither cut out of arrays nor put into them."""
    columns = ((512,), (256,)) if op == OPS[0] else ((512,),)
    case = ShardedCase(
        op, "ring", 1, (2, 128), 256, columns, 1, "bfloat16", weight_devices=2, weight_dimension=1
    )
    text = lowered(case, make_mesh, lowering_platforms=("cuda",))
    assert count(text, "dot_general") == 0
    assert count(text, "dynamic_slice") == count(text, "dynamic_update_slice") == 0
    # Two blocks of the product; two of the weight's gradient; and the gradient of x.
    assert len(re.findall(r"call @launch", text)) == 2 + 2 + 1


def test_explain_says_what_is_sharded(make_mesh: MeshFactory) -> None:
    case = case_of("all_gather_matmul", 2, 2, implementation=None, weight_dimension=1)
    x, ws, _ = case.arrays()
    table = str(explain(case.sharded(make_mesh({FSDP: 2, AXIS: 2})))(x, tuple(ws)))
    assert "N of w over fsdp=2" in table


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"weight_axis_name": "rows"}, "weight_axis_name='rows': no such axis"),
        ({"weight_axis_name": AXIS}, "weight_axis_name='tensor': that is axis_name too"),
        ({"weight_axis_name": FSDP, "weight_dimension": 2}, "weight_dimension=2: expected 0"),
        ({"weight_dimension": 1}, "weight_dimension=1: nothing is sharded"),
        ({"weight_axis_name": FSDP}, r"w: shape \(8, 4\) has 8 × 2 shards rows"),
        pytest.param(
            {"weight_axis_name": FSDP, "weight_dimension": 1, "implementation": "fused"},
            "w is sharded over axis 'fsdp', and fused multiplies whole weights",
            marks=pytest.mark.needs("fused"),
        ),
    ],
)
def test_bad_arguments(keywords: Any, message: str, make_mesh: MeshFactory) -> None:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return all_gather_matmul(x, w, AXIS, **keywords)

    sharded = in_parts(product, make_mesh({FSDP: 2, AXIS: 2}), P((FSDP, AXIS)), P())
    with pytest.raises((ValueError, NameError), match=message):
        jax.eval_shape(sharded, *(jnp.ones(shape, jnp.bfloat16) for shape in ((16, 8), (8, 4))))


def test_shards_may_be_wider_than_x_but_not_narrower(make_mesh: MeshFactory) -> None:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return all_gather_matmul(x, w, AXIS, weight_axis_name=FSDP)

    sharded = in_parts(product, make_mesh({FSDP: 2, AXIS: 1}), P(FSDP), P(FSDP))
    x, w = jnp.ones((16, 8), jnp.float32), jnp.ones((8, 4), jnp.bfloat16)
    with pytest.raises(TypeError, match="x is float32 and w is bfloat16"):
        jax.eval_shape(sharded, x, w)
