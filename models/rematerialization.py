"""What the backward of a block computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax

from collective_matmul import (
    ATTENTION_CHECKPOINT_NAME,
    CHECKPOINT_NAME,
    HIDDEN_CHECKPOINT_NAME,
    SCALE_CHECKPOINT_NAME,
)
from models import plain

Remat = Literal["none", "dots", "full"]


def rematerialize(fun: Callable, remat: Remat) -> Callable:
    """A function whose backward recomputes what `remat` says, as in `Llama`."""
    if remat == "none":
        return fun
    results = (
        CHECKPOINT_NAME, HIDDEN_CHECKPOINT_NAME, plain.CHECKPOINT_NAME, ATTENTION_CHECKPOINT_NAME
    )  # fmt: skip
    results = results if remat == "dots" else ()
    policy = jax.checkpoint_policies.save_only_these_names(SCALE_CHECKPOINT_NAME, *results)
    return jax.checkpoint(fun, policy=policy)
