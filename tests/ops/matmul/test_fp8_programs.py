"""Lowered programs with operands in 8 bits: what travels, what is multiplied, and what is kept."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from collective_matmul import (
    SCALE_CHECKPOINT_NAME,
    all_gather_matmul,
    explain,
    matmul_reduce_scatter,
    prequantize,
)
from collective_matmul.operands.format import FORMATS
from tests.conftest import MeshFactory
from tests.fp8_reference import SHIPPED_RECIPES, Fp8Case
from tests.ops.matmul.test_fp8_ops import case_of
from tests.ops.matmul.test_quantized_weights import drawn
from tests.reference import AXIS, OPS

#: Of each device: rows of a chunk, as case_of has them, contracted numbers, and columns.
DEVICES, ROWS, K = 4, "4x3", 136
E4M3, E5M2 = "f8E4M3FN", "f8E5M2"
#: The dtype of dy in each recipe.
GRADIENTS = {"tensorwise": E5M2, "rowwise": E4M3, "blockwise": E4M3}
MESSAGE = f"{ROWS}x{FORMATS['rowwise'].row_bytes(K, 1)}xui8"
PLAIN = f"{ROWS}x{K}xbf16"


class Program:
    """A function that is lowered for GPUs."""

    def __init__(self, fun: Callable, *arguments: Any):
        lowered = jax.jit(fun).trace(*arguments).lower(lowering_platforms=("cuda",))
        self._module: Any = lowered.compiler_ir("stablehlo")  # Operations do not keep it alive.

    def operations(self, name: str) -> list[Any]:
        """All operations of this name, also those of inner functions."""

        def inside(operation: Any) -> Iterator[Any]:
            for region in operation.regions:
                for block in region:
                    for each in block:
                        yield each.operation
                        yield from inside(each.operation)

        found = inside(self._module.operation)
        return [each for each in found if each.name == f"stablehlo.{name}"]


def tensor(value: Any) -> str:
    """Sizes and dtype, as in "4x3x152xui8"."""
    return re.sub(r"tensor<(.*)>", r"\1", str(value.type))


def dtype_of(value: Any) -> str:
    return tensor(value).rpartition("x")[-1]


@functools.cache
def program(op: str, fp8: str, make_mesh: MeshFactory) -> Program:
    """Results and gradients."""
    case = case_of(op, fp8, DEVICES, dtype="bfloat16")
    x, ws, dys = case.arrays()
    sharded = case.sharded(make_mesh({AXIS: DEVICES}))

    def both(x: Any, ws: Any, dys: Any) -> Any:
        ys, transpose = jax.vjp(sharded, x, ws)
        return ys, transpose(dys)

    return Program(both, x, tuple(ws), tuple(dys))


every_program = pytest.mark.parametrize(
    ("op", "fp8"), [(op, fp8) for op in OPS[:2] for fp8 in SHIPPED_RECIPES]
)


@every_program
def test_permutes_carry_messages(op: str, fp8: str, make_mesh: MeshFactory) -> None:
    """Forward and backward gathers do; sums do not. D - 1 permutes each, of one chunk."""
    permutes = program(op, fp8, make_mesh).operations("collective_permute")
    sent = Counter(tensor(each.operands[0]) for each in permutes)
    # The scatter's backward gathers dy; the gather's backward sums dx. If the weight gradient is in
    # 8 bits, it needs the message; else the array itself.
    expected = Counter({MESSAGE: 3, PLAIN: 3})
    in_fp8 = FORMATS[fp8].packs_gradients
    if op == OPS[0] or not in_fp8:
        expected[MESSAGE if in_fp8 else PLAIN] += 3
    assert sent == expected


@every_program
def test_matmuls_have_8_bit_operands(op: str, fp8: str, make_mesh: MeshFactory) -> None:
    """Blocks have scales of their own, which XLA multiplies in float32 before the matmul."""
    dots = Counter(
        tuple(map(dtype_of, each.operands))
        for each in program(op, fp8, make_mesh).operations("dot_general")
    )
    weights = 2 if op == OPS[0] else 1  # Each is multiplied by every chunk, in both passes.
    forward, backward = (E4M3, E4M3), (GRADIENTS[fp8], E4M3)
    if fp8 == "blockwise":
        forward = backward = ("f32", "f32")
    expected = Counter({forward: DEVICES * weights})
    expected[backward] += DEVICES * weights
    expected[(E4M3, E5M2) if fp8 == "tensorwise" else ("bf16", "bf16")] += weights
    assert dots == expected


@every_program
def test_no_8_bits_are_widened_before_a_matmul(op: str, fp8: str, make_mesh: MeshFactory) -> None:
    """Else the matmul would be as slow as in half precision.

    An operand of a weight gradient may be multiplied by ratios of scales, and is in 8 bits again.
    """
    for dot in program(op, fp8, make_mesh).operations("dot_general"):
        for operand in dot.operands:
            if dtype_of(operand) in (E4M3, E5M2):
                continue
            widened = [each for each in converts(operand) if each.startswith("f8")]
            assert bool(widened) == (fp8 == "blockwise" and dtype_of(operand) == "f32")


#: Operations that give an array another place, or multiply it by scales.
_PASSED = {"reshape", "transpose", "slice", "dynamic_slice", "multiply", "broadcast_in_dim"}


def converts(value: Any) -> Iterator[str]:
    """The dtypes that a value was converted from, as far as only layout and scales changed."""
    owner = getattr(value, "owner", None)
    operation: Any = getattr(owner, "operation", owner)
    name = getattr(operation, "name", "").removeprefix("stablehlo.")
    if name == "convert":
        yield dtype_of(operation.operands[0])
    if name in _PASSED | {"convert"}:
        for operand in operation.operands:
            yield from converts(operand)


@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
@pytest.mark.parametrize("contracted", [256, 136])
def test_weights_are_gathered_in_8_bits(fp8: Any, contracted: int, make_mesh: MeshFactory) -> None:
    """Also shards that divide blocks."""
    weights = {"weight_axis_name": "fsdp", "fp8": fp8, "implementation": "ring"}

    def results(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        def op(x: jax.Array, w: jax.Array) -> jax.Array:
            return all_gather_matmul(x, w, AXIS, gather_dimension=1, **weights)

        y, transpose = jax.vjp(op, x, w)
        return y, transpose(dy)

    mesh = make_mesh({"fsdp": 2, AXIS: 2})
    x, w, y = P("fsdp", AXIS), P("fsdp", AXIS), P("fsdp", None, AXIS)
    fun = jax.shard_map(results, mesh=mesh, in_specs=(x, w, y), out_specs=(y, (x, w)))
    sizes = (4, 8, contracted), (contracted, 512), (4, 8, 512)
    arguments = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]
    shard = rf"({contracted // 2}x\d+|\d+x{contracted // 2})x(\w+)"  # Scales are smaller.
    gathers = Program(fun, *arguments).operations("all_gather")
    found = [re.fullmatch(shard, tensor(each.operands[0])) for each in gathers]
    assert {each.group(2) for each in found if each} == {E4M3}


@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
@pytest.mark.parametrize("implementation", [None, "ring", "xla"])
def test_gradients_of_shards_travel_as_they_were_rounded(
    fp8: Any, implementation: str | None, make_mesh: MeshFactory
) -> None:
    """In bfloat16, though they are summed in float32. XLA's own collectives send that."""
    options: Any = {"weight_axis_name": "fsdp", "fp8": fp8, "implementation": implementation}

    def gradients(x: jax.Array, up: jax.Array, down: jax.Array, dy: jax.Array) -> Any:
        def layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            hidden = all_gather_matmul(x, up, AXIS, gather_dimension=0, **options)
            return matmul_reduce_scatter(hidden, down, AXIS, scatter_dimension=0, **options)

        return jax.vjp(layer, x, up, down)[1](dy)

    rows, ups, downs = P(("fsdp", AXIS)), P("fsdp", AXIS), P((AXIS, "fsdp"))
    fun = jax.shard_map(
        gradients,
        mesh=make_mesh({"fsdp": 2, AXIS: 1}),
        in_specs=(rows, ups, downs, rows),
        out_specs=(rows, ups, downs),
    )
    x, up = (
        jax.ShapeDtypeStruct((64, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((256, 512), "float32"),
    )
    down = jax.ShapeDtypeStruct((512, 256), "float32")
    program = Program(fun, x, up, down, x)

    def sent(name: str) -> set[str]:
        return {tensor(each.operands[0]) for each in program.operations(name)}

    if implementation == "xla":
        assert sent("reduce_scatter") >= {"256x512xf32", "512x256xf32"}
        assert not sent("collective_permute")
    else:
        assert sent("collective_permute") == {"128x512xbf16", "256x256xbf16"}
        assert not any(shape.endswith("f32") for shape in sent("reduce_scatter"))


def kept_for_backward(case: Fp8Case, mesh: Any, *names: str) -> list[tuple[int, str]]:
    """Numbers in the last dimension and dtypes of arrays with x's dimensions, with x recomputed but
    for what has these checkpoint names; without names, all is kept."""
    x, ws, _ = case.arrays()
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    sharded: Any = case.sharded(mesh)
    fun = jax.checkpoint(sharded, policy=policy) if names else sharded
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], x, tuple(ws)))
    return [(leaf.shape[-1], leaf.dtype.name) for leaf in kept if leaf.ndim == x.ndim]


@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
@pytest.mark.parametrize("op", OPS)
def test_what_the_backward_needs_of_x_is_kept(op: str, fp8: str, make_mesh: MeshFactory) -> None:
    """Its message, or itself."""
    case = case_of(op, fp8, DEVICES, dtype="bfloat16")
    kept = kept_for_backward(case, make_mesh({AXIS: DEVICES}))
    assert [dtype for _, dtype in kept] == ["uint8" if fp8 == "tensorwise" else "bfloat16"]


@pytest.mark.parametrize("op", OPS)
def test_a_scale_can_be_saved_by_its_name(op: str, make_mesh: MeshFactory) -> None:
    """A backward that quantizes x again then needs not search its largest magnitude."""
    case = case_of(op, "tensorwise", DEVICES, dtype="bfloat16")
    kept = kept_for_backward(case, make_mesh({AXIS: DEVICES}), SCALE_CHECKPOINT_NAME)
    assert (1, "float32") in kept


@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
def test_copies_for_the_backward_are_gathered_in_it(fp8: Any, make_mesh: MeshFactory) -> None:
    """They wait for its operands. Copies for the forward do not, and so are not kept for it."""
    options: Any = {"fp8": fp8, "weight_axis_name": "fsdp"}

    def gradients(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        copies = [prequantize(w, **options) for w in (up, down)]

        def layer(x: jax.Array, *arrays: jax.Array) -> jax.Array:
            up, down = (copy.with_array(w) for copy, w in zip(copies, arrays, strict=True))
            hidden = all_gather_matmul(x, up, AXIS, gather_dimension=0, **options)
            return matmul_reduce_scatter(hidden, down, AXIS, scatter_dimension=0, **options)

        y, transpose = jax.vjp(layer, x, up, down)
        return transpose(y)

    rows, ups, downs = P(("fsdp", AXIS)), P("fsdp", AXIS), P((AXIS, "fsdp"))
    fun = jax.shard_map(
        gradients,
        mesh=make_mesh({"fsdp": 2, AXIS: 1}),
        in_specs=(rows, ups, downs),
        out_specs=(rows, ups, downs),
    )
    sizes = (64, 384), (384, 512), (512, 384)
    program = Program(fun, *(jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes))

    def shards(name: str) -> Counter[str]:
        operands = [tensor(v) for each in program.operations(name) for v in each.operands]
        return Counter(each for each in operands if re.fullmatch(rf"\d+x\d+x{E4M3}", each))

    forward, backward = (
        (f"512x192x{E4M3}", f"384x256x{E4M3}"),
        (f"192x512x{E4M3}", f"256x384x{E4M3}"),
    )
    assert shards("all_gather") == Counter(forward + backward)
    held = shards("optimization_barrier")
    assert not held.keys() & set(forward)
    assert held.keys() >= set(backward)


@pytest.mark.parametrize("fp8", SHIPPED_RECIPES)
def test_explain_says_how_shards_are_gathered(fp8: Any, make_mesh: MeshFactory) -> None:
    def gather(x: jax.Array, w: jax.Array) -> jax.Array:
        return all_gather_matmul(x, w, AXIS, fp8=fp8, weight_axis_name="fsdp", weight_dimension=1)

    mesh = make_mesh({"fsdp": 2, AXIS: 2})
    specs = P(("fsdp", AXIS)), P(None, (AXIS, "fsdp"))
    fun = jax.shard_map(gather, mesh=mesh, in_specs=specs, out_specs=P("fsdp", AXIS))
    table = explain(fun)(jnp.ones((8, 136), "bfloat16"), jnp.ones((136, 64))).table(1000)
    assert "gathers N of w over fsdp=2 before, in float8_e4m3fn" in table


@pytest.mark.parametrize("remat", [False, True])
def test_a_loop_over_microbatches_does_not_hold_the_arrays(
    remat: bool, make_mesh: MeshFactory
) -> None:
    """Their values are in the copies. In what is rematerialized neither."""
    rows, columns = 32, 96

    def accumulated(x: jax.Array, w: jax.Array) -> jax.Array:
        quantized = prequantize(w.astype("bfloat16"), "rowwise")

        def loss(array: jax.Array, x: jax.Array) -> jax.Array:
            y = all_gather_matmul(
                jnp.tanh(x), quantized.with_array(array), AXIS, gather_dimension=0, fp8="rowwise"
            )
            return jnp.sum(jnp.square(y.astype("float32")))

        def add(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            gradient = jax.grad(jax.checkpoint(loss) if remat else loss)(quantized.array, x)
            return total + gradient.astype("float32"), None

        none = jnp.zeros_like(w)
        return jax.lax.scan(add, none, x.reshape(4, -1, rows))[0]

    specs = P(AXIS), P(None, AXIS)
    sharded = jax.shard_map(
        accumulated, mesh=make_mesh({AXIS: 2}), in_specs=specs, out_specs=specs[1]
    )
    x, w = drawn(64, rows, seed=0), drawn(rows, 2 * columns, seed=1).astype("float32")
    text = jax.jit(sharded).lower(x, w).compile().as_text() or ""
    loops = [line.partition(" while(")[0] for line in text.splitlines() if " while(" in line]
    assert any(f"[{columns},{rows}]" in loop for loop in loops)  # A copy.
    weights = f"bf16[{rows},{columns}]", f"bf16[{columns},{rows}]"
    assert not any(weight in loop for weight in weights for loop in loops), loops
