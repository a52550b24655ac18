"""Sets of XLA options that a candidate is tried with; the fastest is the one that counts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from collective_matmul import OVERLAP_OPTIONS

Options = Mapping[str, Any]
OptionSets = Mapping[str, Options]

DEFAULT: OptionSets = {"default": {}}

#: What may help plain collectives: when they start, how many run at once, how they are combined,
#: whether they are pipelined through loops, and what carries them.
BASELINE: OptionSets = {
    "default": {},
    "latency hiding on": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "latency hiding off": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "speed-of-light estimates": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_analytical_sol_latency_estimator": True,
    },
    "pipelined": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
    },
    "4 collectives at once": {"xla_gpu_experimental_parallel_collective_overlap_limit": "4"},
    "nothing combined": {
        "xla_gpu_all_gather_combine_threshold_bytes": "0",
        "xla_gpu_reduce_scatter_combine_threshold_bytes": "0",
    },
    "all combined": {
        "xla_gpu_all_gather_combine_threshold_bytes": str(2**30),
        "xla_gpu_reduce_scatter_combine_threshold_bytes": str(2**30),
    },
    "no dot merger": {"xla_gpu_dot_merger_threshold_mb": "0"},
    "gathers by copy engine": {"xla_gpu_all_gather_mode": "COLLECTIVES_PEER_MEMORY"},
}

_WINDOWED: Options = {
    "xla_gpu_threshold_for_windowed_einsum_mib": "0",
    "xla_gpu_multi_streamed_windowed_einsum": True,
}

#: XLA's own windowed einsum.
WINDOWED: OptionSets = {
    "windowed": _WINDOWED,
    "windowed, one stream": {**_WINDOWED, "xla_gpu_multi_streamed_windowed_einsum": False},
    "windowed, peer copies, no dot merger": {**OVERLAP_OPTIONS, **_WINDOWED},
}


def known(sets: OptionSets) -> OptionSets:
    """The sets that the installed XLA accepts; says which it leaves out, and why."""
    refusals = {name: _refusal(tuple(options.items())) for name, options in sets.items()}
    for name, refusal in refusals.items():
        if refusal is not None:
            print(f"options {name!r} left out: {refusal}", flush=True)
    return {name: options for name, options in sets.items() if refusals[name] is None}


@functools.cache
def _refusal(options: tuple[tuple[str, Any], ...]) -> str | None:
    """Why XLA refuses the options, or None."""
    try:
        jax.jit(lambda: 0, compiler_options=dict(options)).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return None
