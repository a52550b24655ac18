"""Who takes part: each a way to communicate, and the XLA options it is compiled with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks import options
from benchmarks.communication import (
    CollectiveMatmul,
    Communication,
    MosaicExample,
    NoCommunication,
    Partitioned,
    PlainJax,
    Rewritten,
)
from collective_matmul import overlap_jit
from collective_matmul.backends import BACKENDS

#: `jax.jit` and its like.
Jit = Callable[..., Any]


#: The library's own choice, and the same where fused kernels may be chosen.
AUTO = ("auto", "auto_fused")


@dataclass(frozen=True)
class Contender:
    """A way to communicate, and by name the ways to compile it, of which the fastest counts."""

    name: str
    communication: Communication
    jits: Mapping[str, Jit]


def names() -> tuple[str, ...]:
    """All contenders, in the order of tables."""
    return (
        "baseline",
        "windowed",
        "mosaic_example",
        *BACKENDS,
        *AUTO,
        "rewrite",
        "ceiling",
    )


def of_layers() -> tuple[str, ...]:
    """Those that can carry out whole layers and their gradients."""
    return tuple(name for name in names() if name != "mosaic_example")


def make(
    name: str, mesh: Mesh, try_options: bool = True, skip_options: Sequence[str] = ()
) -> Contender:
    """The contender of a name.

    Args:
      name: one of `names`.
      mesh: that the programs run on.
      try_options: whether to compile XLA's own contenders with every set of options there is for
        them, or with the first set alone.
      skip_options: names of sets not to compile with.
    """
    communication: Communication
    sets: options.OptionSets
    match name:
        case "baseline":
            communication, sets = PlainJax(), options.BASELINE
        case "windowed":
            communication, sets = Partitioned(mesh), options.WINDOWED
        case "mosaic_example":
            communication, sets = MosaicExample(), options.DEFAULT
        case "ceiling":
            communication, sets = NoCommunication(), options.DEFAULT
        case "rewrite":
            return Contender(name, Rewritten(), {"overlap": overlap_jit})
        case _:
            communication = CollectiveMatmul(None if name in AUTO else name)
            if name == "auto_fused" or (name in BACKENDS and BACKENDS[name].uses_peer_kernels):
                jit = functools.partial(overlap_jit, peer_kernels=True)
                return Contender(name, communication, {"overlap_jit(peer_kernels=True)": jit})
            return Contender(name, communication, {"overlap_jit": overlap_jit})
    sets = {key: chosen for key, chosen in sets.items() if key not in skip_options}
    if not try_options:
        sets = dict([next(iter(sets.items()))])
    return Contender(name, communication, _jits(options.known(sets)))


def _jits(sets: options.OptionSets) -> dict[str, Jit]:
    return {
        name: functools.partial(jax.jit, compiler_options=dict(chosen))
        for name, chosen in sets.items()
    }


def in_order(chosen: Sequence[str]) -> tuple[str, ...]:
    """The names chosen, in the order of tables."""
    return tuple(name for name in names() if name in chosen)
