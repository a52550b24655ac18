"""The candidates of a benchmark: each a way to communicate, and how it is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks.comparison.baseline_xla_options import (
    BASELINE,
    DEFAULT,
    WINDOWED_EINSUM,
    OptionSets,
    known,
)
from benchmarks.comparison.communication import (
    CollectiveMatmul,
    Communication,
    ExplicitAxes,
    MosaicExample,
    NoCommunication,
    Partitioned,
    PlainJax,
    Rewritten,
    RewrittenJit,
)
from benchmarks.internals import BACKENDS, COMPUTE_ONLY, FORMATS, RecipeName
from collective_matmul import overlap_jit

#: The library's own choice, and its choice where kernels that address peer memory are allowed.
AUTO = ("auto", "auto_fused")

#: The ways to compile. XLA_FLAGS set options of all of them.
COMPILERS: dict[str, Callable[..., Any]] = {
    "jit": jax.jit,
    "overlap_jit": overlap_jit,
    "overlap_jit(peer_kernels=True)": functools.partial(overlap_jit, peer_kernels=True),
}


@dataclass(frozen=True)
class Candidate:
    """A way to communicate, one of `COMPILERS`, and XLA options: the fastest set counts."""

    name: str
    communication: Communication
    compiler: str
    option_sets: OptionSets = field(default_factory=lambda: DEFAULT)


def names() -> tuple[str, ...]:
    """All candidates, in the order of tables."""
    xla = ("baseline", "windowed_einsum")
    return (*xla, "mosaic_example", *BACKENDS, *AUTO, "rewrite", COMPUTE_ONLY)


def layer_names() -> tuple[str, ...]:
    """The candidates that can execute whole layers and their gradients."""
    *others, bound = (name for name in names() if name != "mosaic_example")
    return (*others, "explicit", "rewrite_jit", bound)


def with_fp8(chosen: Sequence[str], recipes: Sequence[RecipeName]) -> tuple[str, ...]:
    """The candidates, and after them those of the library with each recipe: "auto_fp8_rowwise"."""
    library = (*BACKENDS, *AUTO, "rewrite", "rewrite_jit")
    added = (f"{name}_fp8_{recipe}" for recipe in recipes for name in chosen if name in library)
    return (*chosen, *added)


def with_attention(chosen: Sequence[str], kernels: Sequence[str]) -> tuple[str, ...]:
    """The candidates, and the library's own choice with each kernel of attention after them."""
    added = (f"{name}_attention_{k}" for k in kernels for name in chosen if name in AUTO)
    return (*chosen, *added)


def make(name: str, mesh: Mesh, try_options: bool = True) -> Candidate:
    """The candidate of a name, with all of its option sets, or the first one only.

    Args:
      name: one of `names`, or of `with_fp8` or `with_attention`.
      mesh: the mesh of its programs.
      try_options: whether it has all of its option sets.
    """
    tried = None if try_options else 1
    without, _, attention = name.partition("_attention_")
    base, _, recipe = without.partition("_fp8_")
    fp8 = recipe if recipe in FORMATS else None
    match base:
        case "baseline":
            return Candidate(name, PlainJax(), "jit", known(BASELINE, tried))
        case "windowed_einsum":
            return Candidate(name, Partitioned(mesh), "jit", known(WINDOWED_EINSUM, tried))
        case "mosaic_example":
            return Candidate(name, MosaicExample(), "jit")
        case "rewrite":
            return Candidate(name, Rewritten(fp8), "overlap_jit")
        case "explicit":
            return Candidate(name, ExplicitAxes(), "jit", known(BASELINE, tried))
        case "rewrite_jit":
            return Candidate(name, RewrittenJit(fp8), "overlap_jit")
        case _ if name == COMPUTE_ONLY:
            return Candidate(name, NoCommunication(), "jit")
    communication = CollectiveMatmul(None if base in AUTO else base, fp8, attention or None)
    if base == "auto_fused" or (base in BACKENDS and BACKENDS[base].uses_peer_kernels):
        return Candidate(name, communication, "overlap_jit(peer_kernels=True)")
    return Candidate(name, communication, "overlap_jit")
