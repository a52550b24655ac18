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

Remat = Literal["none", "dots", "projections", "attention", "full"]

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


def recomputes_projections(remat: Remat) -> bool:
    """Whether the backward of a block repeats the matmuls beside its attention."""
    return remat in ("attention", "full")


def recomputes_feed_forward(remat: Remat) -> bool:
    """Whether the backward of a block repeats the matmuls of its feed-forward."""
    return remat == "projections" or recomputes_projections(remat)


def rematerialize_halves(
    attention: Callable, feed_forward: Callable, remat: Remat
) -> tuple[Callable, Callable]:
    """The halves of a block, each with what `remat` recomputes of it alone: with "projections" the
    first keeps the results of its matmuls, and the second nothing but what enters it."""
    if remat != "projections":
        return attention, feed_forward
    return rematerialize(attention, "dots"), rematerialize(feed_forward, "full")


def rematerialize(fun: Callable, remat: Remat) -> Callable:
    """A block, or a half of one, whose backward recomputes what `remat` says, as in `Llama`;
    "projections" is left to `rematerialize_halves`."""
    if remat in ("none", "projections"):
        return fun
    saved = SCALE_CHECKPOINT_NAME, *_SAVED[remat]
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint(fun, policy=policy)
