"""Whether a step has the logits of all tokens at one time, or in chunks one after the other."""

from __future__ import annotations

import numpy as np

from models.layers.chunked_loss import chunk_size
from train.config.config import Config, MeshSizes
from train.config.counts import counted

#: Bytes of the logits of a device above which they are computed in chunks by default.
MOST_WHOLE = 4 * 2**30
#: Bytes of the logits of a chunk then.
MOST_OF_CHUNK = 2**30


def loss_chunk(config: Config, sizes: MeshSizes) -> int | None:
    """The most tokens of a sequence whose logits a step has at one time; None: all.

    Args:
      config: the configuration.
      sizes: the mesh.
    """
    if config.loss_chunk == 0 or config.overlap == "rewrite-jit":
        return None
    if config.loss_chunk is not None:
        return config.loss_chunk
    of_token = _bytes_of_token(config, sizes)
    if of_token * _tokens(config, sizes) <= MOST_WHOLE:
        return None
    return max(MOST_OF_CHUNK // of_token, sizes.tensor)


def check_loss_chunk(config: Config, sizes: MeshSizes) -> None:
    """Raises ValueError for a chunk that is too small, or that the model does not have."""
    chunk = config.loss_chunk
    if chunk and config.overlap == "rewrite-jit":
        raise ValueError(
            f"loss_chunk={chunk}: with overlap='rewrite-jit' the loss is that of all tokens at one"
            " time; leave out --loss-chunk, or choose another --overlap"
        )
    if chunk is not None and chunk != 0 and chunk < sizes.tensor:
        raise ValueError(
            f"loss_chunk={chunk}: expected at least mesh.tensor={sizes.tensor}, a token for each"
            " device of the axis; or 0 for all tokens at one time"
        )


def describe_loss_chunks(config: Config, sizes: MeshSizes) -> list[str]:
    """Describes the loss in chunks, in lines to print; none if it is computed at once."""
    tokens, chunk = _tokens(config, sizes), loss_chunk(config, sizes)
    if chunk is None or chunk >= tokens:
        return []
    each = chunk_size(tokens, sizes.tensor, chunk)
    of_token = _bytes_of_token(config, sizes)
    return [
        f"head and loss: {-(-tokens // each)} chunks of {counted(each, 'token')} of each sequence,"
        f" whose logits take {each * of_token:,} bytes; all at one time would take"
        f" {tokens * of_token:,} (--loss-chunk)"
    ]


def _tokens(config: Config, sizes: MeshSizes) -> int:
    """Tokens of a sequence in a tensor group."""
    return config.sequence_length // sizes.context


def _bytes_of_token(config: Config, sizes: MeshSizes) -> int:
    """Bytes of a device's logits of one token of each sequence of a microbatch."""
    groups = sizes.data * sizes.fsdp * config.gradient_accumulation_steps
    columns = config.model.vocabulary_rows // sizes.tensor
    return config.batch_size // groups * columns * np.dtype(config.compute_dtype).itemsize
