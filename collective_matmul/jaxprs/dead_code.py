"""Programs without what computes nothing that they return, which XLA does not execute."""

from __future__ import annotations

from jax.extend.core import Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr


def without_dead_code(program: Jaxpr) -> Jaxpr:
    """The program with the same arguments and results, and only the equations that these need.

    Gradients of weights in a block that is computed again leave others. Within the calls, loops and
    shard_maps of a program they are left out too.
    """
    live, _ = dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)
    return live
