"""The candidates of a benchmark: each a way to communicate, and how it is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks import option_sets
from benchmarks.communication import (
    CollectiveMatmul,
    Communication,
    MosaicExample,
    NoCommunication,
    Partitioned,
    PlainJax,
    Rewritten,
)
from benchmarks.internals import BACKENDS, COMPUTE_ONLY
from collective_matmul import overlap_jit

#: `jax.jit`, `overlap_jit`, or either with compiler options.
Jit = Callable[..., Any]

#: The library's own choice, and its choice where kernels that address peer memory are allowed.
AUTO = ("auto", "auto_fused")


@dataclass(frozen=True)
class Candidate:
    """A way to communicate. `jits` are the ways to compile it by name; the fastest one counts."""

    name: str
    communication: Communication
    jits: Mapping[str, Jit]


def names() -> tuple[str, ...]:
    """All candidates, in the order of tables."""
    return (
        "baseline",
        "windowed",
        "mosaic_example",
        *BACKENDS,
        *AUTO,
        "rewrite",
        COMPUTE_ONLY,
    )


def layer_names() -> tuple[str, ...]:
    """The candidates that can execute whole layers and their gradients."""
    return tuple(name for name in names() if name != "mosaic_example")


def make(
    name: str, mesh: Mesh, try_options: bool = True, skip_options: Sequence[str] = ()
) -> Candidate:
    """The candidate of a name.

    Args:
      name: one of `names`.
      mesh: the mesh that its programs run on.
      try_options: whether to compile XLA's own candidates with every set of options there is for
        them, or with the first set only.
      skip_options: names of sets not to compile with.
    """
    communication: Communication
    sets: option_sets.OptionSets
    match name:
        case _ if name == COMPUTE_ONLY:
            communication, sets = NoCommunication(), option_sets.DEFAULT
        case "baseline":
            communication, sets = PlainJax(), option_sets.BASELINE
        case "windowed":
            communication, sets = Partitioned(mesh), option_sets.WINDOWED
        case "mosaic_example":
            communication, sets = MosaicExample(), option_sets.DEFAULT
        case "rewrite":
            return Candidate(name, Rewritten(), {"overlap": overlap_jit})
        case _:
            communication = CollectiveMatmul(None if name in AUTO else name)
            if name == "auto_fused" or (name in BACKENDS and BACKENDS[name].uses_peer_kernels):
                jit = functools.partial(overlap_jit, peer_kernels=True)
                return Candidate(name, communication, {"overlap_jit(peer_kernels=True)": jit})
            return Candidate(name, communication, {"overlap_jit": overlap_jit})
    sets = {key: chosen for key, chosen in sets.items() if key not in skip_options}
    if not try_options:
        sets = dict([next(iter(sets.items()))])
    return Candidate(name, communication, _jits(option_sets.known(sets)))


def _jits(sets: option_sets.OptionSets) -> dict[str, Jit]:
    return {
        name: functools.partial(jax.jit, compiler_options=dict(chosen))
        for name, chosen in sets.items()
    }


def in_order(chosen: Sequence[str]) -> tuple[str, ...]:
    """The names chosen, in the order of tables."""
    return tuple(name for name in names() if name in chosen)
