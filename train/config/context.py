"""Long sequences: a context axis of the mesh, whose devices have parts of each sequence.

The tokens of a sequence are divided over context first, in the zigzag layout that balances causal
attention, and the part of a device over tensor, as between any two blocks. So everything but
attention is a matter of a tensor group and its tokens, and attention of all groups along the axis.
"""

from __future__ import annotations

import math

from train.config.config import Config, MeshSizes

#: Backends of `collective_matmul.context_attention`.
BACKENDS = ("xla", "gather", "ulysses", "ring")


def context_implementation(config: Config) -> tuple[str, ...] | None:
    """The implementation of `context_attention` that sends keys and values; None chooses."""
    if config.context_attention != "auto":
        return tuple(config.context_attention.split(","))
    return tuple(name for name in config.overlap.split(",") if name in BACKENDS) or None


def sequence_unit(sizes: MeshSizes) -> int:
    """The divisor of the length of sequences on a mesh with a context axis."""
    return sizes.context * math.lcm(2, sizes.tensor)


def check_context(config: Config, sizes: MeshSizes) -> None:
    """Checks that sequences can be divided over a context axis.

    Raises:
      ValueError: if they cannot.
    """
    names = config.context_attention.split(",")
    if config.context_attention != "auto" and not {*names} <= {*BACKENDS}:
        raise ValueError(
            f"context_attention={config.context_attention!r}: expected auto, or names among"
            f" {', '.join(BACKENDS)}, separated by commas"
        )
    if sizes.context == 1:
        if config.context_attention != "auto":
            raise ValueError(
                f"context_attention={config.context_attention!r}: expected 'auto' with"
                " mesh.context=1, where sequences are whole; add --mesh.context, or leave this out"
            )
        return
    if config.overlap in ("rewrite", "rewrite-jit"):
        raise ValueError(
            f"overlap={config.overlap!r}: with mesh.context={sizes.context} a model calls the"
            " attention of this library itself; choose auto, or names of backends"
        )
    unit = sequence_unit(sizes)
    if config.sequence_length % unit:
        nearest = -(-config.sequence_length // unit) * unit
        raise ValueError(
            f"sequence_length={config.sequence_length} is not divisible by {unit}: with"
            f" mesh.context={sizes.context} × mesh.tensor={sizes.tensor} each context device has"
            " two equal parts of a sequence, and each tensor device an equal share of them; nearest"
            f" that works: --sequence-length {nearest}"
        )


def describe_context(config: Config, sizes: MeshSizes) -> list[str]:
    """How sequences are divided, as lines to print; none if they are whole."""
    if sizes.context == 1:
        return []
    tokens = config.sequence_length // sizes.context
    return [
        f"context={sizes.context}: each sequence of {config.sequence_length} tokens is divided into"
        f" parts of {tokens}, in zigzag layout"
    ]
