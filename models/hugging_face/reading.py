"""Parameters from a folder of Hugging Face's, each device's shard straight from the files."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.hugging_face.folder import ModelFolder
from models.hugging_face.tensor_names import Index, Tensor, tensors

_STACKED = re.compile(r"layers\.(?!\d)(.*)")


def load(
    folder: ModelFolder, abstract_params: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads the parameters of a model onto a mesh.

    A parameter is read after the other, and of each file only what this process's devices hold. The
    host holds at most their shards of one parameter.

    Args:
      folder: the folder.
      abstract_params: global shapes, dtypes and named shardings of the parameters by name, as
        `models.llama.Llama` has them; of each layer, or stacked. Rows of a padded vocabulary are
        zeros.

    Returns:
      The global arrays by name.
    """
    sources: dict[str, list[Tensor]] = {}
    for name, tensor in tensors(folder.config):
        sources.setdefault(name, []).append(tensor)
    params = {}
    for name, leaf in abstract_params.items():
        stacked = _STACKED.match(name)
        if stacked is None:
            params[name] = _read(folder, sources[name], leaf)
        else:
            layers = (
                sources[f"layers.{layer}.{stacked[1]}"] for layer in range(folder.config.num_layers)
            )
            params[name] = _stacked(folder, list(layers), leaf)
    return params


def _read(folder: ModelFolder, parts: list[Tensor], leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """A parameter, of one tensor or of those of all experts."""
    dtype: Any = leaf.dtype

    def shard(index: Any) -> np.ndarray:
        if parts[0].expert is None:
            return _part(folder, parts[0], leaf.shape, index).astype(dtype)
        own = np.empty([len(range(n)[i]) for n, i in zip(leaf.shape, index, strict=True)], dtype)
        for place, tensor in enumerate(parts[index[0]]):
            own[place] = _part(folder, tensor, leaf.shape[1:], index[1:])
        return own

    array = jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)
    # The next is read when this one has left the host.
    return array.block_until_ready()


def _part(folder: ModelFolder, tensor: Tensor, shape: tuple[int, ...], index: Index) -> np.ndarray:
    """A part of a parameter, of which `shape` is the padded shape."""
    wanted = [range(size)[part] for size, part in zip(shape, index, strict=True)]
    # What is past the end of the tensor is padding.
    held = [
        range(min(part.start, size), min(part.stop, size))
        for part, size in zip(wanted, tensor.parameter_shape, strict=True)
    ]
    rest, slices, sizes, inner = list(held), [], [], []
    for group in tensor.parameter_groups:
        # Of the first dimension of a group its range is read, and all of the others.
        (first, *others), rest = rest[: len(group)], rest[len(group) :]
        step = math.prod(group[1:])
        slices.append(slice(first.start * step, first.stop * step))
        sizes += [len(first), *group[1:]]
        inner += [slice(None), *(slice(part.start, part.stop) for part in others)]
    if not all(map(len, held)):
        return np.zeros([len(part) for part in wanted], np.float32)
    place, turns = tensor.turn
    if turns > 1:  # Files are read by ranges.
        slices[-1] = slice(slices[-1].start * turns, slices[-1].stop * turns)
    read = folder.read(tensor.name, slices[::-1] if tensor.transposed else slices)
    read = read[..., place::turns]
    read = (read.T if tensor.transposed else read).reshape(sizes)[tuple(inner)]
    missing = [(0, len(part) - n) for part, n in zip(wanted, read.shape, strict=True)]
    return np.pad(read, missing) if any(after for _, after in missing) else read


def _stacked(
    folder: ModelFolder, layers: list[list[Tensor]], leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    """The parameters of all layers, which are read one after the other and stacked on devices."""
    sharding: Any = leaf.sharding
    own = NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
    each = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=own)
    arrays = [_read(folder, parts, each) for parts in layers]
    return _stack(sharding)(*arrays).block_until_ready()


@functools.cache
def _stack(sharding: NamedSharding) -> Any:
    return jax.jit(lambda *arrays: jnp.stack(arrays), out_shardings=sharding)
