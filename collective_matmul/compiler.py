"""The compiler options that rings need on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax

#: XLA options under which a ring of permutes runs beside its matmuls on NVLink GPUs. Each is
#: ignored by compilers for other platforms.
OVERLAP_OPTIONS = MappingProxyType(
    {
        # A permute is a copy between peers, on a copy engine: it takes no multiprocessor from the
        # matmul, and needs every GPU of the ring in one process.
        "xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY",
        # Merging the matmuls of chunks that share a weight makes the first wait for the last.
        "xla_gpu_dot_merger_threshold_mb": "0",
        # A backward ring carries an accumulator and an operand at once.
        "xla_gpu_experimental_parallel_collective_overlap_limit": "2",
    }
)


def overlap_jit(fun: Callable, *, compiler_options: dict[str, Any] | None = None, **kwargs: Any):
    """`jax.jit` with the compiler options that rings need on GPUs; harmless on other platforms.

    For the outermost function alone, since options are of a whole program: differentiate inside it,
    ``overlap_jit(jax.grad(loss))``. JAX refuses ``jax.grad(overlap_jit(loss))``.

    Args:
      fun: the function to compile.
      compiler_options: further options; they win over ours.
      **kwargs: handed to `jax.jit`.

    Raises:
      RuntimeError: at compilation, by XLA, for an option it does not know.
    """
    options = {**OVERLAP_OPTIONS, **(compiler_options or {})}
    return jax.jit(fun, compiler_options=options, **kwargs)
