"""The compiler options that rings need on GPUs, and `jax.jit` with them."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax

from collective_matmul.log import warn_once
from collective_matmul.peer_access import no_peer_access_reason, peer_kernels_allowed

_PERMUTE_MODE = "xla_gpu_collective_permute_mode"

#: XLA options under which a ring of permutes runs beside its matmuls on NVLink GPUs. Each is
#: ignored by compilers for other platforms.
OVERLAP_OPTIONS = MappingProxyType(
    {
        # A permute is a copy between peers, on a copy engine: it takes no multiprocessor from the
        # matmul, and needs every GPU of the ring in one process.
        _PERMUTE_MODE: "COLLECTIVES_PEER_MEMORY",
        # Merging the matmuls of chunks that share a weight makes the first wait for the last.
        "xla_gpu_dot_merger_threshold_mb": "0",
        # A backward ring carries an accumulator and an operand at once.
        "xla_gpu_experimental_parallel_collective_overlap_limit": "2",
    }
)

#: Those under which kernels may address peers' memory: see
#: `collective_matmul.peer_access.peer_kernels_disallowed_reason`.
PEER_KERNEL_OPTIONS = MappingProxyType(
    {
        # All collectives that NCCL's kernels carry out wait for ours, and ours for them.
        "xla_gpu_disable_async_collectives": (
            "ALLREDUCE,ALLGATHER,REDUCESCATTER,COLLECTIVEBROADCAST,ALLTOALL,RAGGEDALLTOALL"
        ),
        # Kernels that address peers take turns in the same memory: no CUDA graph may launch two of
        # them at once, as it might what needs nothing of each other.
        "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE",
    }
)


def overlap_jit(
    fun: Callable,
    *,
    peer_kernels: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> OverlapJit:
    """`jax.jit` with the compiler options that rings need on GPUs; harmless on other platforms.

    For the outermost function alone, since options are of a whole program: differentiate and
    overlap inside it, ``overlap_jit(jax.grad(overlap(loss)))``. Inside of what JAX traces it is
    refused. ``jax.grad(overlap_jit(loss))`` is so before jax 0.12; since then it is two programs,
    and inside `jax.jit` refused still.

    Where GPUs cannot address each other's memory, permutes go through NCCL instead, and a warning
    names the GPUs once. In programs of several processes XLA chooses for each ring: copies between
    peers within a process, NCCL across.

    Args:
      fun: the function to compile.
      peer_kernels: whether the program may use kernels that address peers' memory, fused ones and one-shot
        collectives, where they are requested or should be fastest. XLA then runs no other
        collective beside anything, and calls of such programs wait for each other until they are
        launched, as all devices must have them in the same order. Inference gains by that, training
        seldom does.
      compiler_options: further options; they win over ours.
      **kwargs: handed to `jax.jit`.

    Returns:
      What `jax.jit` returns, for all of its public uses. The devices are looked at when it is first
      used, so that decorating a function does not start JAX's backend.

    Raises:
      RuntimeError: at compilation, by XLA, for an option it does not know.
      ValueError, TypeError: by `jax.jit`, for keywords that do not fit.
      ValueError: for options of the user's in place of those without which these kernels are wrong.
      ValueError: when called inside another function that JAX traces.
    """
    users = compiler_options or {}
    if peer_kernels and (taken := sorted(users.keys() & {*PEER_KERNEL_OPTIONS, _PERMUTE_MODE})):
        raise ValueError(
            f"compiler_options: {', '.join(taken)}: kernels that address peers need our value;"
            " leave out either the option or peer_kernels=True"
        )
    return OverlapJit(fun, users, peer_kernels, kwargs)


# Kernels that address peers meet in the order in which programs reach each device: of two threads
# that launch at once, one program could be first on one device, and the other on another.
_launching = threading.RLock()


class OverlapJit:
    """A function compiled by `jax.jit`, with options that depend on the devices it finds."""

    def __init__(
        self, fun: Callable, users: Mapping[str, Any], peer_kernels: bool, kwargs: Mapping[str, Any]
    ):
        self._jit = functools.partial(jax.jit, fun, **kwargs)
        self._users_options = users
        self._peer_kernels = peer_kernels
        self._jit()  # Refuses what does not fit where it is written, not where it is first used.
        functools.update_wrapper(self, fun, updated=())

    @functools.cached_property
    def _jitted(self) -> Any:
        ours = PEER_KERNEL_OPTIONS if self._peer_kernels else {}
        return self._jit(compiler_options=_options({**ours, **self._users_options}))

    def _tracing(self) -> contextlib.AbstractContextManager:
        """Tells what is traced how it will be compiled."""
        return peer_kernels_allowed(self._peer_kernels)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As an attribute of a class, a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function, compiled for these arguments."""
        order = _launching if self._peer_kernels else contextlib.nullcontext()
        with self._tracing(), _refusing_to_be_inside(), order:
            return self._jitted(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the function for these arguments, as `jax.jit` does."""
        with self._tracing():
            return self._jitted.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the function for these arguments, as `jax.jit` does."""
        with self._tracing():
            return self._jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result, as from `jax.jit`."""
        with self._tracing():
            return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Drops the compiled programs, as `jax.jit` does."""
        self._jitted.clear_cache()


@contextlib.contextmanager
def _refusing_to_be_inside() -> Iterator[None]:
    """Names the remedy where JAX refuses options of a function that others are traced around."""
    try:
        yield
    except ValueError as error:
        if "can only be passed to top-level" not in str(error):
            raise
        raise ValueError(
            "overlap_jit: called inside a function that JAX traces, and its compiler options are of"
            " a whole program; make it the outermost: write overlap_jit(overlap(f)),"
            " overlap_jit(jax.grad(f)), explain(f)"
        ) from error


def _options(users: Mapping[str, Any]) -> dict[str, Any]:
    """Our options for the devices there are, and the user's, which win."""
    options: dict[str, Any] = dict(OVERLAP_OPTIONS)
    if _PERMUTE_MODE not in users and (obstacle := no_peer_access_reason()):
        warn_once(f"overlap_jit leaves permutes to NCCL, where no matmul hides them: {obstacle}")
        del options[_PERMUTE_MODE]
    if jax.process_count() > 1:
        # Otherwise all devices of a program are one group, whose permutes all go through NCCL if
        # any of them must; this makes every ring a group.
        options["xla_gpu_collective_permute_connected_components"] = True
    return options | dict(users)
