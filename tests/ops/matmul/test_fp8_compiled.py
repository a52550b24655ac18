"""Programs with operands in 8 bits as XLA compiles them for H200, with or without a GPU.

It needs the CUDA build of JAX.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import OVERLAP_OPTIONS, all_gather_matmul, matmul_reduce_scatter
from collective_matmul.operands.format import FORMATS
from collective_matmul.operands.scaled.packed_rows import PackedRows
from tests.reference import AXIS
from tests.train import compiled_memory

#: Matmuls are cuBLAS's, which are not tried on a GPU.
WITHOUT_TRITON: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
RINGS = dict(OVERLAP_OPTIONS) | WITHOUT_TRITON


def compile_for_two_h200(
    fun: Callable,
    shapes: Sequence[tuple[int, ...]],
    *,
    specs: tuple[Sequence[P], Any] | None = None,
    dtype: Any = jnp.bfloat16,
    options: Mapping[str, Any] = WITHOUT_TRITON,
) -> str:
    """The program that XLA makes of a function for two H200, with or without GPUs.

    Args:
      fun: the function.
      shapes: global shapes of its arguments.
      specs: those of its arguments and of its results, inside `jax.shard_map`; without, all devices
        have everything.
      dtype: of the arguments.
      options: of the compiler.
    """
    with compiled_memory.gpus(2) as devices:
        mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
        in_specs = [P()] * len(shapes)
        if specs is not None:
            in_specs, out_specs = specs
            fun = jax.shard_map(fun, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs)
        arguments = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, in_specs, strict=True)
        ]
        program: Any = jax.jit(fun).lower(*arguments).compile(dict(options))
    return program.as_text()


def feed_forward(fp8: Any, x: Any, scale: Any, gate: Any, up: Any, down: Any) -> jax.Array:
    """An RMS norm and a SwiGLU, with x [batch, sequence, features] sharded along the sequence."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    keywords: Any = {"fp8": fp8, "implementation": "ring"}
    gates, ups = all_gather_matmul(
        wide.astype(x.dtype) * scale, (gate, up), AXIS, gather_dimension=1, **keywords
    )
    hidden = jax.nn.silu(gates) * ups
    return x + matmul_reduce_scatter(hidden, down, AXIS, scatter_dimension=1, **keywords)


@functools.cache
def compiled(fp8: str, features: int) -> str:
    """The feed-forward of 2 × 4096 tokens as compiled for two H200."""
    hidden = 14336
    weights = *[(features, hidden)] * 2, (hidden, features)
    specs = P(None, AXIS), P(), P(None, AXIS), P(None, AXIS), P(AXIS)
    return compile_for_two_h200(
        functools.partial(feed_forward, fp8),
        ((1, 8192, features), (1, 1, features), *weights),
        specs=(specs, specs[0]),
        options=RINGS,
    )


def kernels(text: str) -> dict[str, str]:
    """The operations of a compiled program by name; of a fusion, also those that it executes."""
    bodies = dict(re.findall(r"^%(\S+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    entry = text[text.index("ENTRY") :]
    lines = dict(re.findall(r"^ +(?:ROOT )?%(\S+) = (.*)$", entry, re.MULTILINE))
    called = {name: re.search(r"calls=%([^,\s]+)", line) for name, line in lines.items()}
    inside = {name: bodies[match[1]] for name, match in called.items() if match}
    return {name: line + inside.get(name, "") for name, line in lines.items()}


#: Contracted sizes that our kernel multiplies, and one that it leaves to cuBLAS.
every_size = pytest.mark.parametrize(
    ("features", "library"),
    [(4096, "mosaic"), pytest.param(4112, "cublas", marks=pytest.mark.exhaustive)],
)


@compiled_memory.needs_cuda_build
@every_size
@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise", "blockwise"])
def test_compiled_matmuls_have_8_bit_operands(fp8: str, features: int, library: str) -> None:
    text = compiled(fp8, features)
    matmuls = re.findall(r'custom_call_target="(__cublas[^"]*|mosaic_gpu)', text)
    if library == "mosaic":  # Two weights are multiplied by one kernel.
        assert matmuls == ["mosaic_gpu"] * 4
    else:
        assert matmuls == [f"__cublas$lt$matmul{'' if fp8 == 'blockwise' else '$f8'}"] * 6
    assert not re.search(r"\bf16\[", text)


@compiled_memory.needs_cuda_build
@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise", "blockwise"])
def test_compiled_messages_are_written_by_what_they_are_made_of(fp8: str) -> None:
    """The norm's kernel writes the message. SwiGLU's finds the scales of its own."""
    program = kernels(compiled(fp8, 4096))
    (permute,) = (
        line for line in program.values() if re.search(r"u8.*collective-permute-start\(", line)
    )
    sent = program[re.findall(r"collective-permute-start\(%([^),]+)", permute)[0]]
    for operation in ("rsqrt(", "f8e4m3fn[", "concatenate("):
        assert operation in sent
    (activation,) = (line for line in program.values() if "exponential(" in line)
    assert " maximum(" in activation or " reduce(" in activation
    # One kernel each for three weights and two messages.
    quantizing = [line for line in program.values() if "convert(" in line and "f8e4m3fn[" in line]
    assert len(quantizing) == 5


@compiled_memory.needs_cuda_build
@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise", "blockwise"])
def test_compiled_weights_are_not_written_but_in_8_bits(fp8: str) -> None:
    sizes = 4096 * 7168
    for line in kernels(compiled(fp8, 4096)).values():
        result = re.match(r"(pred|f32|bf16)\[([\d,]+)\]\S* fusion", line)
        assert not result or np.prod([*map(int, result[2].split(","))]) != sizes


@functools.cache
def compiled_weight_gradients(*, triton: bool) -> str:
    """Two weight gradients of equal shape and one x, which is gathered from two shards."""
    recipe: Any = FORMATS["tensorwise"]

    def gradients(x: jax.Array, *dys: jax.Array) -> Any:
        xs = [PackedRows(x, None, recipe.dtype)]
        packed = [PackedRows(dy, None, recipe.gradient_dtype) for dy in dys]
        options = {"shards": 2, "dimension": 0}
        return recipe.weight_gradients(xs, packed, jnp.dtype(jnp.bfloat16), **options)

    shapes = [(8192, recipe.row_bytes(n, 1)) for n in (4096, 7168, 7168)]
    options = {} if triton else WITHOUT_TRITON
    return compile_for_two_h200(gradients, shapes, dtype=jnp.uint8, options=options)


@compiled_memory.needs_cuda_build
def test_compiled_weight_gradients_have_their_scale_in_the_matmul() -> None:
    """Also two of equal shapes. A pass over each would take a tenth of its matmul.

    Smaller ones XLA would merge into one matmul.
    """
    text = compiled_weight_gradients(triton=False)
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 2
    assert not re.search(r" = bf16\[4096,7168\]\S* fusion", text)


@compiled_memory.needs_cuda_build
def test_compiled_scales_of_a_sum_are_not_merged() -> None:
    """Its operands have one scale, by which XLA would multiply the results in a pass."""
    recipe = FORMATS["tensorwise"]

    def gradients(dy: jax.Array, *xs: jax.Array) -> Any:
        sent, options = recipe.rows([dy], of_gradient=True), {"shards": 1, "dimension": 0}
        return recipe.weight_gradients(recipe.rows(xs), sent, dy.dtype, **options)

    text = compile_for_two_h200(gradients, [(8192, n) for n in (7168, 4096, 4096)])
    assert not re.search(r" = bf16\[4096,7168\]\S* fusion", text)


@functools.cache
def compiled_gradients(op: str) -> str:
    """One op and its gradients, "tensorwise", by a ring over two H200."""
    gathers = op == "all_gather_matmul"

    def both(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        call = all_gather_matmul if gathers else matmul_reduce_scatter
        # The messages of what a pass computes are written by that.
        y, transpose = jax.vjp(
            lambda x, w: call(jnp.sin(x), w, AXIS, fp8="tensorwise", implementation="ring"), x, w
        )
        return y, transpose(dy)

    rows, columns = P(AXIS), P(None, AXIS)
    specs = (rows, columns, columns) if gathers else (columns, rows, rows)
    shapes = (8192, 4096), (4096, 14336), (8192, 14336)
    if not gathers:
        shapes = (8192, 14336), (14336, 4096), (8192, 4096)
    results = specs[2], specs[:2]
    return compile_for_two_h200(both, shapes, specs=(specs, results), options=RINGS)


@compiled_memory.needs_cuda_build
def test_compiled_backward_gathers_messages_again() -> None:
    """Else XLA keeps the forward's, as large as all shards."""
    text = compiled_gradients("all_gather_matmul")
    assert len(re.findall(r"u8\S*.* collective-permute-start\(", text)) == 2


@compiled_memory.needs_cuda_build
def test_compiled_backward_transposes_messages_of_the_forward() -> None:
    """Else XLA transposes the values before they are a message, and keeps both."""
    program = kernels(compiled_gradients("matmul_reduce_scatter"))
    (line,) = (line for line in program.values() if re.match(r"f8e4m3fn\[7168,8192\]", line))
    assert re.search(r"u8\[8192,7296\]\S* parameter", line)


@compiled_memory.needs_cuda_build
@pytest.mark.parametrize("triton", [False, True])
def test_compiled_weight_gradients_transpose_each_message_once(triton: bool) -> None:
    """By the kernels that read the messages; what multiplies transposes nothing any more."""
    program = kernels(compiled_weight_gradients(triton=triton))
    transposing = [line for line in program.values() if re.search(r" (transpose|copy)\(", line)]
    assert len(transposing) == 3
    assert all(re.match(r"f8\w+\[\d+,8192\]", line) for line in transposing)
    assert all(re.search(r"u8\[8192,(4224|7296)\]", line) for line in transposing)
    multiplying = [line for line in program.values() if re.search(r" dot\(|__cublas", line)]
    assert len(multiplying) == 2
