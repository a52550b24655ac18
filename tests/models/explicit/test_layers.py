"""Blocks over mesh axes of type Explicit compile to the program of the library's layers."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import layers as collective
from collective_matmul import overlap
from models.config import LlamaConfig
from models.explicit import layers as explicit_layers
from models.llama import Block
from models.parameters.stacked import Keys
from train.config import presets

CONFIG: LlamaConfig = presets.debug().model
ROWS = P("data", "tensor")


def instructions(layers: Any, kind: AxisType, **options: Any) -> Counter:
    """The instructions of a compiled block, by their names."""

    def build() -> Block:
        return Block(
            CONFIG,
            layers,
            axis_name="tensor",
            dtype=jnp.float32,
            kernel_init=nnx.initializers.zeros,
            rngs=Keys(jax.random.key(0)),
            **options,
        )

    graph, state = nnx.split(nnx.eval_shape(build))
    structure = jax.tree.structure(state)
    specs = [leaf.get_value() for _, leaf in nnx.to_flat_state(nnx.get_partition_spec(state))]
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind, kind))

    def block(parameters: list[jax.Array], x: jax.Array) -> Any:
        return nnx.merge(graph, jax.tree.unflatten(structure, parameters))(x)

    def sharded(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, "float32", sharding=sharding)

    parameters = [sharded(*pair) for pair in zip(jax.tree.leaves(state), specs, strict=True)]
    x = sharded(jnp.zeros((4, 16, CONFIG.features)), ROWS)
    if kind is AxisType.Explicit:
        program = overlap(block, implementation="ring", require=4)
    else:
        program = jax.shard_map(block, mesh=mesh, in_specs=(specs, ROWS), out_specs=ROWS)
    with jax.set_mesh(mesh):
        text = jax.jit(program).lower(parameters, x).compile().as_text()
    assert text is not None
    return Counter(re.findall(r"= [^=]*?[\]})] ([a-z][\w\-]*)\(", text))


def test_separate_sites_compile_as_one_shard_map_does() -> None:
    """Nothing is gathered, copied or transposed where a site begins or ends."""
    found = instructions(explicit_layers, AxisType.Explicit)
    assert found["all-gather"] == found["all-reduce"] == 0
    assert found["collective-permute"] == 12  # Four rings of four devices.
    assert found == instructions(collective, AxisType.Auto, implementation="ring")
