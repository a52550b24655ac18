"""Rematerialization: which results the backward of a block computes again."""

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
from models.layers import plain

Remat = Literal["none", "dots", "attention", "full"]

#: The names of what the backward finds again, besides scales. Attention is dear to repeat, and for
#: long sequences ever more so, while its results are as small as a block's input.
_SAVED: dict[Remat, tuple[str, ...]] = {
    "dots": (
        CHECKPOINT_NAME,
        HIDDEN_CHECKPOINT_NAME,
        plain.CHECKPOINT_NAME,
        ATTENTION_CHECKPOINT_NAME,
    ),
    "attention": (ATTENTION_CHECKPOINT_NAME,),
    "full": (),
}


def recomputes_matmuls(remat: Remat) -> bool:
    """Whether the backward of a block repeats its matmuls."""
    return remat in ("attention", "full")


def rematerialize(fun: Callable, remat: Remat) -> Callable:
    """A function whose backward recomputes what `remat` says, as in `Llama`."""
    if remat == "none":
        return fun
    saved = SCALE_CHECKPOINT_NAME, *_SAVED[remat]
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint(fun, policy=policy)
