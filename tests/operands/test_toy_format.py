"""A format of integers is one class and one matrix: docs/contributing/add_an_operand.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, explain, matmul_reduce_scatter, prequantize, tune
from collective_matmul.dispatch.tables.table import Table
from collective_matmul.operands.format import (
    FORMATS,
    Format,
    Matrix,
    register_format,
    unregister_format,
)
from collective_matmul.operands.scaled.packed_rows import PackedRows, pack, scale_bytes
from collective_matmul.ops.matmul import checks
from tests.conftest import MeshFactory
from tests.operands import row_scaled_case
from tests.operands.row_scaled_case import FSDP, RowScaledCase, cases_of, run_all
from tests.reference import AXIS

NAME = "int8_rows"
LARGEST = 127
IMPLEMENTATIONS = ("xla", "ring", "ring_two_way", "ring_direct")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Matrix(Matrix):
    """int8 [K, N], and float32 scales of the columns of the whole weight, [N]."""

    values: Any
    scales: Any
    product_dtype: Any = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape

    def multiply(self, rows: PackedRows) -> jax.Array:
        dimensions = (((len(rows.shape) - 1,), (0,)), ((), ()))
        sums = lax.dot_general(
            rows.values, self.values, dimensions, preferred_element_type=jnp.int32
        )
        scales = self.scales.reshape((1,) * (sums.ndim - 1) + self.scales.shape)
        return (sums.astype(jnp.float32) * rows.scales * scales).astype(self.product_dtype)

    def dequantized(self) -> jax.Array:
        return self.values.astype(jnp.float32) * self.scales[None]

    def gathered(self, axis_name: str, dimension: int) -> Int8Matrix:
        values = lax.all_gather(self.values, axis_name, axis=dimension, tiled=True)
        return replace(self, values=values)


@dataclass(frozen=True)
class Int8Rows(Format):
    """int8, with a scale for each row of x and each column of w.

    A row or a column with a number that is not finite has no finite scale: all of it is NaN.
    """

    name: str = NAME

    def rows(self, xs: Sequence[Any], *, of_gradient: bool = False) -> tuple[PackedRows, ...]:
        del of_gradient
        scales = [scale(jnp.max(jnp.abs(x), -1, keepdims=True)) for x in xs]
        pairs = zip(xs, scales, strict=True)
        return tuple(pack(rounded(x, s), s, array=x) for x, s in pairs)

    def matrices(
        self, ws: Sequence[Any], *, transposed: bool = False, sharding: Any = None
    ) -> tuple[Int8Matrix, ...]:
        if transposed:
            ws, sharding = [w.T for w in ws], sharding and sharding.transposed
        return tuple(self._matrix(w, sharding) for w in ws)

    def _matrix(self, w: Any, sharding: Any) -> Int8Matrix:
        largest = jnp.max(jnp.abs(w), 0)
        if sharding is not None and sharding.dimension == 0:
            largest = lax.pmax(largest, sharding.axis_name)
        scales = scale(largest)
        values = rounded(w, scales[None])
        if sharding is not None and sharding.dimension == 1:
            scales = lax.all_gather(scales, sharding.axis_name, tiled=True)
        return Int8Matrix(values, scales, w.dtype)

    def row_bytes(self, columns: int, itemsize: int) -> int:
        del itemsize
        return columns + scale_bytes(1)

    def operand_dtypes(self, dtype: Any, *, backward: bool) -> tuple[str, str]:
        del dtype, backward
        return "int8", "int8"


def scale(largest: jax.Array) -> jax.Array:
    return jnp.maximum(largest.astype(jnp.float32) * (1 / LARGEST), 2.0**-126)


def rounded(x: jax.Array, scales: jax.Array) -> jax.Array:
    return jnp.round(x.astype(jnp.float32) * (1 / scales)).astype(jnp.int8)


def quantize(array: np.ndarray, axis: int, of_gradient: bool) -> np.ndarray:
    """Values that an array stands for when it is rounded, by another implementation."""
    del of_gradient
    wide, one = np.asarray(array, np.float32), np.float32(1)
    largest = np.abs(wide).max(axis, keepdims=True)
    scales = np.maximum(largest * np.float32(1 / LARGEST), np.float32(2.0**-126))
    return np.rint(wide * (one / scales)).astype(np.float64) * scales.astype(np.float64)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    register_format(Int8Rows())
    yield
    unregister_format(NAME)


def check(cases: Sequence[RowScaledCase], mesh: Any) -> None:
    row_scaled_case.check(cases, mesh, quantize, exact_products=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_ops_multiply_quantized_operands(
    make_mesh: MeshFactory, implementation: str, devices: int
) -> None:
    """Results and gradients of all ops, with one and two weights and as an einsum."""
    check(cases_of(implementation, devices, NAME), make_mesh({AXIS: devices}))


@pytest.mark.parametrize("weight_dimension", [0, 1])
@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_shards_of_weights_have_the_scales_of_the_whole(
    make_mesh: MeshFactory, implementation: str, weight_dimension: int
) -> None:
    mesh = make_mesh({FSDP: 2, AXIS: 2})
    check(cases_of(implementation, 2, NAME, weight_dimension=weight_dimension), mesh)


def test_weights_quantized_before_give_the_same_bits(make_mesh: MeshFactory) -> None:
    """Whole weights, and shards of them. Two weights are quantized together."""
    for options, mesh in (({}, {AXIS: 2}), ({"weight_dimension": 0}, {FSDP: 2, AXIS: 2})):
        cases = [c for c in cases_of("ring", 2, NAME, **options) if c.dimension == 0]
        before = [replace(case, quantized_before=True) for case in cases]
        outcomes = ([out for _, out in run_all(c, make_mesh(mesh))] for c in (cases, before))
        for plain, early in zip(*outcomes, strict=True):
            assert jax.tree.all(jax.tree.map(np.array_equal, plain.ys, early.ys))
            assert np.array_equal(plain.dx, early.dx)
            assert jax.tree.all(jax.tree.map(np.array_equal, plain.dws, early.dws))


def layer(x: jax.Array, up: Any, down: Any) -> jax.Array:
    hidden = all_gather_matmul(x, up, AXIS, fp8=NAME, implementation="ring")
    return matmul_reduce_scatter(hidden, down, AXIS, fp8=NAME, implementation="ring")


def quantized(up: jax.Array, down: jax.Array) -> tuple[Any, Any]:
    return prequantize(up, NAME).with_array(up), prequantize(down, NAME).with_array(down)


def repeated(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    for i in range(ups.shape[0]):
        x = layer(x, ups[i], downs[i])
    return x


def scanned(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    return lax.scan(lambda x, ws: (layer(x, *ws), None), x, (ups, downs))[0]


def scanned_over_matrices(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    made = jax.vmap(quantized)(ups, downs)
    return lax.scan(lambda x, ws: (layer(x, *ws), None), x, made)[0]


def stacked(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    pairs = zip(ups, downs, strict=True)
    return jnp.stack([layer(each, up, down) for each, (up, down) in zip(x, pairs, strict=True)])


def mapped(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    return jax.vmap(layer)(x, ups, downs)


def mapped_over_matrices(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    return jax.vmap(layer)(x, *jax.vmap(quantized)(ups, downs))


@pytest.mark.parametrize(
    ("plain", "transformed"),
    [
        (repeated, scanned),
        (repeated, scanned_over_matrices),
        (stacked, mapped),
        (stacked, mapped_over_matrices),
    ],
)
def test_transforms_change_no_bit(make_mesh: MeshFactory, plain: Any, transformed: Any) -> None:
    """Layers with weights that are arrays, or quantized before, in a loop and in a batch."""
    generator = np.random.default_rng(0)
    batch = () if plain is repeated else (3,)
    shapes = (*batch, 8, 16), (3, 16, 8), (3, 8, 16)
    arrays = tuple(generator.standard_normal(shape).astype(np.float32) for shape in shapes)
    x_spec = P(*(None for _ in batch), AXIS)
    outcomes = []
    for fun in (plain, transformed):
        sharded = jax.shard_map(
            fun,
            mesh=make_mesh({AXIS: 2}),
            in_specs=(x_spec, P(None, None, AXIS), P(None, AXIS)),
            out_specs=x_spec,
        )

        def results(*args: Any, sharded: Any = sharded) -> Any:
            y, transpose = jax.vjp(sharded, *args)
            return y, transpose(jnp.cos(y))

        outcomes.append(jax.tree.leaves(jax.jit(results)(*arrays)))
    for wanted, value in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_half_precision_rounds_once(make_mesh: MeshFactory) -> None:
    check(cases_of("ring", 2, NAME, dtype="bfloat16"), make_mesh({AXIS: 2}))


def arguments_and_gradients(mesh: Any, dtype: str, implementation: Any = None) -> tuple:
    sharded = jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, AXIS, fp8=NAME, implementation=implementation),
        mesh=mesh,
        in_specs=(P(AXIS), P(None, AXIS)),
        out_specs=P(None, AXIS),
    )
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((16, 32), (32, 8))]
    return shapes, jax.grad(lambda *args: sharded(*args).astype("float32").sum(), (0, 1))


HOPPER = AbstractMesh(
    (2,),
    (AXIS,),
    axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu"),
)


@pytest.mark.parametrize(
    "implementation",
    [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("fused", "one_shot")],
)
def test_kernels_refuse_what_they_do_not_know(implementation: str) -> None:
    shapes, gradients = arguments_and_gradients(HOPPER, "bfloat16", implementation)
    reason = {
        "fused": f"the kernels do not multiply operands in '{NAME}'",
        "one_shot": f"operands in {NAME}: these exchanges send wider numbers only",
    }
    with pytest.raises(ValueError, match=reason[implementation]):
        explain(gradients, peer_kernels=True)(*shapes)


def test_explain_names_what_travels_and_is_multiplied() -> None:
    shapes, gradients = arguments_and_gradients(HOPPER, "bfloat16")
    text = str(explain(gradients)(*shapes))
    assert text.count(f", {NAME}") == 2
    assert "fp8" not in text
    assert "travels int8 + scales, multiplies int8" in text
    assert "multiplies int8; weight gradient bfloat16" in text


def test_a_saved_table_is_read_back(
    make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sites are measured in this format, and only sites in this format find the times."""
    monkeypatch.setenv("COLLECTIVE_MATMUL_CACHE_DIR", str(tmp_path))
    shapes, gradients = arguments_and_gradients(make_mesh({AXIS: 2}), "float32")
    table = tune(gradients, *shapes, implementations=["ring"], groups=1, seconds_per_group=1e-4)
    (path,) = tmp_path.glob("**/*.jsonl")
    text = path.read_text(encoding="utf-8")
    read = Table.from_text(text)
    assert read.entries.keys() == table.entries.keys()
    assert [site.format for site in read.entries] == [FORMATS[NAME]] * 2
    unregister_format(NAME)
    try:
        assert not Table.from_text(text).entries
        assert Table.from_text(text).to_text() == text  # For programs that have registered it.
    finally:
        register_format(Int8Rows())
    explanation = explain(gradients)(*shapes)
    assert all(d.reason.startswith("measured (your table)") for d in explanation.decisions)


def test_numbers_that_are_not_finite_are_nan_in_their_row_alone(make_mesh: MeshFactory) -> None:
    sharded = jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, AXIS, fp8=NAME, implementation="ring"),
        mesh=make_mesh({AXIS: 2}),
        in_specs=(P(AXIS), P(None, AXIS)),
        out_specs=P(None, AXIS),
    )
    x = np.ones((4, 16), np.float32)
    x[1, 3], x[2, 5], x[3] = np.inf, np.nan, 0
    y = np.asarray(jax.jit(sharded)(x, np.ones((16, 8), np.float32)))
    assert np.isnan(y[1:3]).all()
    np.testing.assert_allclose(y[0], 16, rtol=1e-6)
    assert not y[3].any()


def test_texts_name_the_format() -> None:
    """`explain` and errors do not call it by the name of other formats."""
    assert FORMATS[NAME].refusal("a reason") == f"not in {NAME}: a reason"
    shapes, gradients = arguments_and_gradients(HOPPER, "float32")
    with pytest.raises(
        TypeError, match=rf"^second derivative .* fp8='{NAME}': .* rounded operands"
    ):
        jax.eval_shape(jax.grad(lambda *args: jnp.sum(gradients(*args)[0]), 0), *shapes)
    with pytest.raises(ValueError, match=rf"or the name of a registered format: .*'{NAME}'"):
        checks.fp8("int9")
