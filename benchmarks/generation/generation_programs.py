"""The programs of the benchmark of generation: what they are, compiled all at once."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Lowered

from benchmarks.internals import reference_alone
from collective_matmul import overlap_jit
from models.config import LlamaConfig
from models.generation import Generator, Sampling
from models.generation.generator import CACHE_SPEC

#: Tokens of a launch.
LAUNCH = 16
#: Tokens that the cache has place for after the prompt. JAX's own matmuls read all of the cache.
ROOM = 512
#: Programs that are compiled at the same time.
_COMPILING = 16
#: Candidates that others are compared with: the first of these that takes part.
_REFERENCES = ("plain", "baseline", "xla")

#: Of prefill and of decoding.
Programs = tuple[Callable, Callable]
#: The candidate whose attention reads all of caches, by XLA's matmuls, as references do.
WHOLE = "auto, whole cache"
_IMPLEMENTATIONS = {"auto": None, WHOLE: None, "baseline": "xla", "plain": "xla"}
#: Why candidates have no times.
Failures = dict[str, str]


def make_generator(
    name: str, config: LlamaConfig, mesh: jax.sharding.Mesh, dtype: Any
) -> Generator:
    """The generator of a candidate."""
    return Generator(
        config,
        mesh=mesh,
        implementation=_IMPLEMENTATIONS.get(name, name),
        dtype=dtype,
        cache_attention="xla" if name in (WHOLE, *_REFERENCES) else None,
        jit={"baseline": jax.jit, "plain": _plain}.get(name, _Deciding),
    )


def _plain(function: Callable, **options: Any) -> Any:
    """A function whose `lower` has JAX's operations alone: experts have `lax.ragged_dot`."""
    return SimpleNamespace(lower=reference_alone()(jax.jit(function, **options).lower))


class _Deciding:
    """A function whose `lower` returns the program that a call of `overlap_jit` would run."""

    def __init__(self, function: Callable, **options: Any):
        self._jitted = overlap_jit(function, **options)

    def lower(self, *arguments: Any) -> Lowered:
        return self._jitted.decided(*arguments).lower()


def compile_all(
    generators: dict[str, Generator],
    failures: dict[int, Failures],
    prompt: int,
    prefill_limit: int,
) -> dict[int, dict[str, Programs]]:
    """Compiles the programs of all candidates and batches at once.

    Args:
      generators: of each candidate.
      failures: for each batch; what goes wrong is added.
      prompt: number of tokens of each prompt.
      prefill_limit: the largest batch for which each candidate has a prefill of its own.
    """
    first = next(iter(generators))
    with ThreadPoolExecutor(_COMPILING) as pool:

        @functools.cache
        def prefill(name: str, batch: int) -> tuple[Lowered, Future]:
            lowered = _lowered_prefill(generators[name], batch, prompt)
            return lowered, pool.submit(lowered.compile)

        futures: dict[int, dict[str, tuple[Future, Future]]] = {batch: {} for batch in failures}
        for batch, name in itertools.product(failures, generators):
            with recording_failures(failures[batch], name):
                is_timed = batch <= prefill_limit
                before, compiling = prefill(name if is_timed else first, batch)
                decode = _lowered_decode(generators[name], *before.out_info[1:])
                futures[batch][name] = compiling, pool.submit(decode.compile)
        compiled: dict[int, dict[str, Programs]] = {batch: {} for batch in failures}
        for batch, candidates in futures.items():
            for name, (prefilling, decoding) in candidates.items():
                with recording_failures(failures[batch], name):
                    compiled[batch][name] = prefilling.result(), decoding.result()
    return compiled


def _lowered_prefill(generator: Generator, batch: int, prompt: int) -> Lowered:
    tokens, lengths = (
        jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, prompt), (batch,))
    )
    program = generator.prefill(prompt + ROOM, Sampling(), ())
    return program.lower(generator.abstract_params, tokens, lengths)


def _lowered_decode(generator: Generator, ends: Any, caches: Any) -> Lowered:
    """The program of a launch, on ends and caches of such shapes."""

    def placed(arrays: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(generator.mesh, spec)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arrays
        )

    program = generator.decode(LAUNCH, Sampling(), ())
    state = placed(ends, PartitionSpec()), placed(caches, CACHE_SPEC)
    return program.lower(generator.abstract_params, *state)


@contextlib.contextmanager
def recording_failures(failures: Failures, *names: str) -> Iterator[None]:
    """Whatever goes wrong with some candidates, the others still count."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        failures.update(dict.fromkeys(names, reason))


def reference_of(names: Container[str]) -> str | None:
    """The candidate that others are compared with; None if it is not among them."""
    return next((name for name in _REFERENCES if name in names), None)
