"""The compiler options that rings need on GPUs, and `jax.jit` with them."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax

from collective_matmul.log import say_once
from collective_matmul.peer_access import launched_one_by_one, peer_access_obstacle

_PERMUTE_MODE = "xla_gpu_collective_permute_mode"
_IN_GRAPHS = "xla_gpu_enable_command_buffer"

#: XLA options under which a ring of permutes runs beside its matmuls on NVLink GPUs, and kernels
#: may address peers' memory. Each is ignored by compilers for other platforms.
OVERLAP_OPTIONS = MappingProxyType(
    {
        # A permute is a copy between peers, on a copy engine: it takes no multiprocessor from the
        # matmul, and needs every GPU of the ring in one process.
        _PERMUTE_MODE: "COLLECTIVES_PEER_MEMORY",
        # Merging the matmuls of chunks that share a weight makes the first wait for the last.
        "xla_gpu_dot_merger_threshold_mb": "0",
        # A backward ring carries an accumulator and an operand at once.
        "xla_gpu_experimental_parallel_collective_overlap_limit": "2",
        # What may be in a CUDA graph: all that may by default but custom calls, as our kernels are.
        # See `collective_matmul.peer_access.replay_obstacle`.
        _IN_GRAPHS: "FUSION,CUBLAS,CUBLASLT,CUDNN",
    }
)


def overlap_jit(
    fun: Callable, *, compiler_options: Mapping[str, Any] | None = None, **kwargs: Any
) -> OverlapJit:
    """`jax.jit` with the compiler options that rings and kernels need; harmless beside GPUs.

    For the outermost function alone, since options are of a whole program: differentiate inside it,
    ``overlap_jit(jax.grad(loss))``. JAX refuses ``jax.grad(overlap_jit(loss))``.

    Where GPUs cannot address each other's memory, permutes go through NCCL instead, and a warning
    names the GPUs once. In programs of several processes XLA chooses for each ring: copies between
    peers within a process, NCCL across.

    Args:
      fun: the function to compile.
      compiler_options: further options; they win over ours. Without ours on CUDA graphs, fused
        kernels are not used.
      **kwargs: handed to `jax.jit`.

    Returns:
      What `jax.jit` returns, for all of its public uses. The devices are looked at when it is first
      used, so that decorating a function does not start JAX's backend.

    Raises:
      RuntimeError: at compilation, by XLA, for an option it does not know.
      ValueError, TypeError: by `jax.jit`, for keywords that do not fit.
    """
    return OverlapJit(fun, compiler_options or {}, kwargs)


class OverlapJit:
    """A function compiled by `jax.jit`, with options that depend on the devices it finds."""

    def __init__(self, fun: Callable, users: Mapping[str, Any], kwargs: Mapping[str, Any]):
        self._jit = functools.partial(jax.jit, fun, **kwargs)
        self._users_options = users
        self._jit()  # Refuses what does not fit where it is written, not where it is first used.
        functools.update_wrapper(self, fun, updated=())

    @functools.cached_property
    def _jitted(self) -> Any:
        return self._jit(compiler_options=_options(self._users_options))

    def _tracing(self) -> contextlib.AbstractContextManager:
        """Tells what is traced how it will be compiled."""
        return launched_one_by_one(_IN_GRAPHS not in self._users_options)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As an attribute of a class, a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function, compiled for these arguments."""
        with self._tracing():
            return self._jitted(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As of `jax.jit`."""
        with self._tracing():
            return self._jitted.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """As of `jax.jit`."""
        with self._tracing():
            return self._jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As of `jax.jit`."""
        with self._tracing():
            return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """As of `jax.jit`."""
        self._jitted.clear_cache()


def _options(users: Mapping[str, Any]) -> dict[str, Any]:
    """Our options for the devices there are, and the user's, which win."""
    options: dict[str, Any] = dict(OVERLAP_OPTIONS)
    if _PERMUTE_MODE not in users and (obstacle := peer_access_obstacle()):
        say_once(f"overlap_jit leaves permutes to NCCL, where no matmul hides them: {obstacle}")
        del options[_PERMUTE_MODE]
    if jax.process_count() > 1:
        # Otherwise all devices of a program are one group, whose permutes all go through NCCL if
        # any of them must; this makes every ring a group.
        options["xla_gpu_collective_permute_connected_components"] = True
    return options | dict(users)
