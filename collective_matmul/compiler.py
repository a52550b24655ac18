"""The compiler options that rings need on GPUs, and `jax.jit` with them."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from collective_matmul.log import warn_once
from collective_matmul.peer_access import no_peer_access_reason, peer_kernels_allowed
from collective_matmul.xla_options import OVERLAP_OPTIONS, PEER_KERNEL_OPTIONS, PERMUTE_MODE


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
      peer_kernels: whether the program may use kernels that address the memory of peer GPUs, as the
        backends "fused" and "one_shot" do, where they are requested or should be fastest. XLA then
        runs no other collective beside anything, and calls of such programs wait for each other
        until they are launched, as all devices must have them in the same order. Inference gains by
        that, training seldom does.
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
    if "fused" in kwargs:
        peer_kernels = renamed_fused("overlap_jit", kwargs.pop("fused"))
    users = compiler_options or {}
    if peer_kernels and (taken := sorted(users.keys() & {*PEER_KERNEL_OPTIONS, PERMUTE_MODE})):
        raise ValueError(
            f"compiler_options: {', '.join(taken)}: kernels that address peers need our value;"
            " leave out either the option or peer_kernels=True"
        )
    return OverlapJit(fun, users, peer_kernels, kwargs)


def renamed_fused(function: str, value: bool) -> bool:
    """The value of an argument that is called `peer_kernels` today, with a DeprecationWarning."""
    warnings.warn(
        f"{function}: fused={value} is now called peer_kernels={value}; the old name will be"
        " removed",
        DeprecationWarning,
        stacklevel=3,
    )
    return value


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
    if PERMUTE_MODE not in users and (obstacle := no_peer_access_reason()):
        warn_once(f"overlap_jit leaves permutes to NCCL, where no matmul hides them: {obstacle}")
        del options[PERMUTE_MODE]
    if jax.process_count() > 1:
        # Otherwise all devices of a program are one group, whose permutes all go through NCCL if
        # any of them must; this makes every ring a group.
        options["xla_gpu_collective_permute_connected_components"] = True
    return options | dict(users)
