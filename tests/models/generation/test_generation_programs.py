"""The decoding program of Llama 3 8B as XLA compiles it for two H200, with or without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.families import PRESETS
from models.generation import Generator, Sampling
from models.generation.cache import LayerCache
from tests.train import compiled_memory

LAYERS, CAPACITY = 3, 2560
#: Parameters of a layer that is neither the first nor the last, on one of two devices.
WEIGHTS = (4096 * 2048, 4096 * 512, 4096 * 7168)


class Kernel(NamedTuple):
    """A kernel of the loop over tokens: elements of each array that it reads and writes."""

    operation: str
    reads: list[int]
    writes: list[int]


@functools.cache
def compiled(batch: int) -> str:
    """The program of two tokens, with XLA's own collectives: ours can be lowered on GPUs only."""
    with (
        # XLA asks whether kernels may be launched as a graph.
        mock.patch.dict(compiled_memory.H200["gpu_device_info"], driver_version="12.9.0"),
        compiled_memory.gpus(2) as devices,
    ):
        mesh = Mesh(np.array(devices), ("tensor",), axis_types=(AxisType.Auto,))
        config = dataclasses.replace(PRESETS["llama3-8b"](), num_layers=LAYERS)
        generator = Generator(config, mesh=mesh, implementation="xla")

        def described(shape: tuple[int, ...], dtype: Any, *axes: str | None) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

        ends = tuple(described((batch,), dtype) for dtype in (jnp.int32, jnp.int32, bool))
        heads = described((batch, 8, CAPACITY, 128), jnp.bfloat16, None, "tensor")
        with jax.set_mesh(mesh):
            decode = generator.decode(2, Sampling(), ())
            lowered = decode.lower(
                generator.abstract_params, ends, [LayerCache(heads, heads)] * LAYERS
            )
            return lowered.compile().as_text()


def kernels(text: str) -> Iterator[Kernel]:
    """The kernels of the loop."""
    (body,) = re.findall(r" while\(.*body=%([^,\s]+)", text)
    lines = text[text.index(f"\n%{body} ") :].partition("\n}")[0]
    sizes: dict[str, list[int]] = {}
    for name, shape, operation, operands in re.findall(
        r"^ +(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)[,\n]", lines, re.MULTILINE
    ):
        dimensions = re.findall(r"\w\[([\d,]*)\]", shape)
        sizes[name] = [math.prod(map(int, filter(None, d.split(",")))) for d in dimensions]
        if operation in ("fusion", "copy", "transpose", "custom-call"):
            operands = re.findall(r"%([\w.-]+)", operands)
            reads = [size for operand in operands for size in sizes.get(operand, [])]
            yield Kernel(f"{name} {operation}", reads, sizes[name])


@compiled_memory.needs_cuda_build
@pytest.mark.parametrize("batch", [1, 8])
def test_four_kernels_read_the_weights_of_a_layer(batch: int) -> None:
    """Queries, keys and values are one, as are gate and up. None of them is copied before."""
    text = compiled(batch)
    readers = [k for k in kernels(text) if set(k.reads) & set(WEIGHTS)]
    assert len(readers) == 4 * LAYERS, readers
    assert sum(sum(size in WEIGHTS for size in reader.reads) for reader in readers) == 7 * LAYERS
    entry = text[text.index("ENTRY") :]
    assert not re.search(r"(fusion|transpose|copy)\S* = bf16\[[\d,]*4096", entry)


@compiled_memory.needs_cuda_build
@pytest.mark.parametrize("batch", [1, 8])
def test_only_tokens_are_written_to_the_cache(batch: int) -> None:
    """Keys and values are updated in place and read once. All else that is written is small."""
    cache = batch * 4 * CAPACITY * 128
    accesses = [kernel for kernel in kernels(compiled(batch)) if cache in kernel.reads]
    updates = [kernel for kernel in accesses if kernel.writes == [cache]]
    assert (len(updates), len(accesses)) == (2 * LAYERS, 3 * LAYERS), accesses
    assert all(re.search("scatter|update", kernel.operation) for kernel in updates), updates
    for kernel in kernels(compiled(batch)):
        assert kernel in updates or max(kernel.writes, default=0) < min(WEIGHTS), kernel
