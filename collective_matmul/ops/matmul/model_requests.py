"""Sites of common transformers, to be measured in advance."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
import numpy as np

from collective_matmul.hardware import how_to_simulate
from collective_matmul.operands.format import FORMATS, format_named
from collective_matmul.ops.matmul import checks
from collective_matmul.ops.matmul.checks import RecipeName
from collective_matmul.ops.matmul.request import Site

#: Rows, the most informative first. The fastest backend changes between 1024 and 4096 rows;
#: training has more, decoding fewer.
ROWS = (8192, 4096, 2048, 16384, 1024, 512, 32768, 256, 128, 64, 32, 16)

#: Decoding has at most this many rows, no backward pass, and no sequence to scatter along, so that
#: layers all-reduce.
DECODED_ROWS = 256


@dataclass(frozen=True)
class Layer:
    """A matmul of a model and its communication. Sizes are global: K, and N of every weight."""

    name: str
    kind: Literal["gather", "scatter"]
    contracted: int
    columns: tuple[int, ...]


def _attention(
    features: int, heads: int, key_value_heads: int, head_size: int = 128
) -> tuple[Layer, ...]:
    """The layers beside an attention. Fused weights count as several weights of one gather."""
    own, shared = heads * head_size, key_value_heads * head_size
    return (
        Layer("query, key and value", "gather", features, (own, shared, shared)),
        Layer("attention output", "scatter", own, (features,)),
    )


def _block(
    features: int, hidden: int, heads: int, key_value_heads: int, head_size: int = 128
) -> tuple[Layer, ...]:
    """The layers of a block of a Llama-style model without experts."""
    return (
        Layer("gate and up", "gather", features, (hidden, hidden)),
        Layer("down", "scatter", hidden, (features,)),
        *_attention(features, heads, key_value_heads, head_size),
        Layer("up", "gather", features, (hidden,)),
    )


#: The layers by name: of all presets of the trainer, and some more. Those of a model with experts
#: are the layers beside its attention.
LAYERS: dict[str, tuple[Layer, ...]] = {
    "llama3-8b": _block(4096, 14336, 32, 8),
    "llama3-70b": _block(8192, 28672, 64, 8),
    "llama3-405b": _block(16384, 53248, 128, 8),
    "llama3.2-1b": _block(2048, 8192, 32, 8, 64),
    "llama3.2-3b": _block(3072, 8192, 24, 8),
    "mistral-7b-v0.1": _block(4096, 14336, 32, 8),
    "mistral-7b-v0.3": _block(4096, 14336, 32, 8),
    "mixtral-8x7b": _attention(4096, 32, 8),
    "qwen2.5-0.5b": _block(896, 4864, 14, 2, 64),
    "qwen2.5-7b": _block(3584, 18944, 28, 4),
    "qwen2.5-72b": _block(8192, 29568, 64, 8),
    "qwen3-0.6b": _block(1024, 3072, 16, 8),
    "qwen3-8b": _block(4096, 12288, 32, 8),
    "qwen3-32b": _block(5120, 25600, 64, 8),
    "qwen3-30b-a3b": _attention(2048, 32, 4),
    "gpt-oss-20b": _attention(2880, 64, 8, 64),
    "gpt-oss-120b": _attention(2880, 64, 8, 64),
    "debug": _block(128, 384, 16, 8, 8),
    "llama3-heads": tuple(
        Layer(f"head of {features}", "gather", features, (128256,)) for features in (4096, 8192)
    ),
    # Sizes that do not fill tiles or waves.
    "awkward": (
        Layer("K=5120", "gather", 5120, (13824,)),
        Layer("N=5120", "scatter", 13824, (5120,)),
        Layer("N=11000", "gather", 4096, (11000,)),
        Layer("K=11000", "scatter", 11000, (4096,)),
    ),
    "square": (
        Layer("up", "gather", 8192, (8192,)),
        Layer("down", "scatter", 8192, (8192,)),
    ),
    # To try tuning itself, and benchmarks, in seconds.
    "tiny": (
        Layer("up", "gather", 16, (32, 32)),
        Layer("down", "scatter", 32, (16,)),
    ),
}


def check_shapes(names: Sequence[str]) -> None:
    """Raises ValueError, with the nearest name, for one that is not in `LAYERS`."""
    for name in names:
        if name not in LAYERS:
            near = difflib.get_close_matches(name, LAYERS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"shapes={name!r}: expected one of {', '.join(LAYERS)}{hint}")


def sites(
    shapes: Sequence[str],
    rows: Sequence[int],
    devices: int,
    dtype: str = "bfloat16",
    *,
    fp8: RecipeName | None = None,
) -> Iterator[Site]:
    """The sites of layers, forward and backward, for each number of global rows.

    Args:
      shapes: names in `LAYERS`.
      rows: global numbers of rows.
      devices: number of devices on the axis.
      dtype: dtype of operands, before they are quantized, and of results.
      fp8: the recipe by which operands are quantized to 8 bits, or the name of a registered format;
        or None.

    Raises:
      ValueError: for an unknown name, fewer than 2 devices, or sizes that devices do not divide.
    """
    if devices < 2:
        raise ValueError(
            f"devices={devices}: expected at least 2, since one communicates with nobody;"
            f" give --devices; {how_to_simulate(4)}"
        )
    check_shapes(shapes)
    checks.fp8(fp8)
    for m in rows:
        for name in shapes:
            for layer in LAYERS[name]:
                for site in _passes(layer, m, devices, jnp.dtype(dtype)):
                    if fp8 is None or _is_quantized(site, fp8):
                        yield replace(site, format=format_named(fp8))


def _is_quantized(site: Site, fp8: RecipeName) -> bool:
    """Whether a recipe is used at a site; not where a forward pass keeps the gathered array.

    That array is then used in the site's dtype too. It travels beside the packed rows, except with
    recipes whose weight gradient is in 8 bits.
    """
    kept = site.keep_gathered and site.direction == "forward"
    return not (kept and FORMATS[fp8].packs_gradients)


def _passes(layer: Layer, rows: int, devices: int, dtype: np.dtype) -> Iterator[Site]:
    """The site of a layer's op, and those of its backward pass.

    The backward pass of our all-gather gathers again. In a program that JAX differentiated before
    `collective_matmul.overlap` rewrites it, the gathered array is kept instead. For the few rows of
    decoding, a sum has the reduce-scatter and the all-reduce.
    """
    divided = (rows, *(layer.columns if layer.kind == "gather" else (layer.contracted,)))
    for size in divided:
        if size % devices or size < 1:
            raise ValueError(
                f"layer {layer.name!r} with {rows} rows: size {size} is not a positive multiple of"
                f" {devices} devices; choose other rows, shapes or devices"
            )
    shard = rows // devices
    if layer.kind == "gather":
        ws = [(layer.contracted, n // devices) for n in layer.columns]
        forward = tuple(((shard, layer.contracted), w) for w in ws)
        backward = tuple(((rows, n), (n, k)) for k, n in ws)
        yield Site("all_gather_matmul", forward, dtype, "", devices)
        if rows <= DECODED_ROWS:
            return
        co_gathered = {"co_gathered": (shard, layer.contracted), "direction": "backward"}
        yield Site("matmul_reduce_scatter", backward, dtype, "", devices, **co_gathered)
        yield Site("all_gather_matmul", forward, dtype, "", devices, keep_gathered=True)
        yield Site("matmul_reduce_scatter", backward, dtype, "", devices)
    else:
        k, (n,) = layer.contracted // devices, layer.columns
        forward, backward = ((rows, k), (k, n)), ((shard, n), (n, k))
        yield Site("matmul_reduce_scatter", (forward,), dtype, "", devices)
        if rows <= DECODED_ROWS:
            yield Site("matmul_all_reduce", (forward,), dtype, "", devices)
            return
        kept = {"keep_gathered": True, "direction": "backward"}
        yield Site("all_gather_matmul", (backward,), dtype, "", devices, **kept)
