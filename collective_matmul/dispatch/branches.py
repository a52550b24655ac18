"""Axes along which devices may disagree about a branch or a loop, and what that forbids."""

from __future__ import annotations

import jax

from collective_matmul._compat import inside_branch_or_loop
from collective_matmul.dispatch.contract import Request


def divergent_axes(*axis_names: str) -> tuple[str, ...]:
    """The `Request.divergent_axes` of an op over these axes that a user's program calls now.

    Call this in the function that users call, and keep the result for the backward pass, which is
    traced elsewhere.
    """
    mesh = jax.sharding.get_abstract_mesh()
    further = [a for a in mesh.manual_axes if a not in axis_names and mesh.shape[a] > 1]
    return tuple(further) if further and inside_branch_or_loop() else ()


def no_permutes_reason(request: Request) -> str | None:
    """Why a backend whose permutes meet on all devices cannot execute a request; None if it can."""
    if not request.divergent_axes:
        return None
    axes = " and ".join(map(repr, request.divergent_axes))
    return (
        f"devices along {axes} may take different branches or numbers of steps around it,"
        " and a permute waits for all devices of the program"
    )
