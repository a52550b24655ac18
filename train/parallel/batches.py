"""Batches as global arrays, of which each process has the rows of its own devices.

On a mesh with a context axis, the tokens of each sequence are in the order of `zigzag_order`, so
that each device has the part which `collective_matmul.context_attention` expects: tokens, targets
and what counts of them alike. Lengths of documents are those of whole sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import zigzag_order
from train.config.config import Config
from train.parallel.mesh import BATCH_AXES

Batch = dict[str, jax.Array]
BATCH_SPEC = P(BATCH_AXES, None)
#: The arrays of a batch that have no number for each token.
_OF_SEQUENCES = ("document_lengths",)
#: The number of documents in a sequence that is assumed where they are kept apart.
_DOCUMENTS = 64


def abstract_batch(config: Config) -> Batch:
    """Global shapes and dtypes of a batch, without its text."""
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.sequence_length), jnp.int32)
    batch: dict[str, Any] = {"inputs": tokens, "targets": tokens}
    if config.chat:
        batch["answers"] = tokens
    if config.separate_documents or config.chat:
        # The text knows how many there are.
        documents = min(_DOCUMENTS, config.sequence_length)
        batch["document_lengths"] = jax.ShapeDtypeStruct((config.batch_size, documents), jnp.int32)
    return batch


def local_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """The rows of a batch [rows, ...] that devices of this process hold, in order."""
    sharding = NamedSharding(mesh, BATCH_SPEC)
    parts = sharding.addressable_devices_indices_map((rows, 1)).values()
    bounds = {part[0].indices(rows)[:2] for part in parts if part is not None}
    return np.concatenate([np.arange(*bound) for bound in sorted(bounds)])


def batch_specs(names: Iterable[str], mesh: Mesh | AbstractMesh) -> dict[str, P]:
    """How the arrays of a batch are sharded on a mesh, by name."""
    if "context" not in mesh.axis_names:
        return dict.fromkeys(names, BATCH_SPEC)
    of_tokens = P(BATCH_AXES, "context")
    return {name: BATCH_SPEC if name in _OF_SEQUENCES else of_tokens for name in names}


def global_arrays(arrays: Mapping[str, np.ndarray], mesh: Mesh, rows: int) -> dict[str, jax.Array]:
    """Global arrays [rows, ...] from the `local_rows` that each process has, in the order of
    positions."""
    specs = batch_specs(arrays, mesh)

    def placed(name: str, array: np.ndarray) -> jax.Array:
        if specs[name] != BATCH_SPEC:
            array = array[:, zigzag_order(array.shape[1], mesh.shape["context"])]
        sharding = NamedSharding(mesh, specs[name])
        return jax.make_array_from_process_local_data(sharding, array, (rows, *array.shape[1:]))

    return {name: placed(name, array) for name, array in arrays.items()}
