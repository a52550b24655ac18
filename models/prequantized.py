"""The weights of a Llama, quantized once for several batches."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from collective_matmul import prequantize
from collective_matmul.layers import prequantize_kernels
from models.llama import Llama


def prequantized_state(model: Llama) -> nnx.State:
    """The state of a model; weights that its layers multiply in 8 bits are `QuantizedWeight`.

    See `prequantize_kernels`. The table of a tied head has copies for the head.

    Args:
      model: with local parameters, inside a `shard_map` over its axis.
    """
    state: Any = nnx.state(model)
    blocks: Any = state["layers"]
    if model.scan_layers:
        graph = nnx.graphdef(model.layers)
        state["layers"] = jax.vmap(lambda own: prequantize_kernels(nnx.merge(graph, own)))(blocks)
    else:
        for number, block in enumerate(model.layers):
            blocks[number] = prequantize_kernels(block)
    if model.head is not None:
        state["head"] = prequantize_kernels(model.head)
    elif model.head_fp8 is not None:
        table: Any = model.embedding.get_value()
        # A tied head multiplies by the transpose.
        quantized = prequantize(table.T.astype(model.dtype), model.head_fp8).T
        state["embedding"] = state["embedding"].replace(quantized.with_array(table))
    return state
