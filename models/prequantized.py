"""The weights of a Llama, quantized once for several batches."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from collective_matmul import prequantize
from collective_matmul.layers import prequantize_kernels
from models.llama import Llama


def prequantized_state(model: Llama, *, weight_axis_name: str | None = None) -> nnx.State:
    """The state of a model; weights that its layers multiply in 8 bits are `Quantized`.

    See `prequantize_kernels`. The table of a tied head has copies for the head, if it is whole.

    Args:
      model: with local parameters, inside a `shard_map` over its axis.
      weight_axis_name: a second axis, which shards parameters as their metadata says, or None.
    """

    def quantized(part: nnx.Module) -> nnx.State:
        return prequantize_kernels(part, weight_axis_name=weight_axis_name)

    state: Any = nnx.state(model)
    blocks: Any = state["layers"]
    if model.scan_layers:
        graph = nnx.graphdef(model.layers)
        state["layers"] = jax.vmap(lambda own: quantized(nnx.merge(graph, own)))(blocks)
    else:
        for number, block in enumerate(model.layers):
            blocks[number] = quantized(block)
    if model.head is not None:
        state["head"] = quantized(model.head)
    elif model.head_fp8 is not None and weight_axis_name is None:
        table: Any = model.embedding.get_value()
        # A tied head multiplies by the transpose.
        quantized = prequantize(table.T.astype(model.dtype), model.head_fp8).T
        state["embedding"] = state["embedding"].replace(quantized.with_array(table))
    return state
