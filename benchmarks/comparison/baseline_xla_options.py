"""Sets of XLA options for XLA's own programs: the baseline gets its best settings.

A candidate is compiled with every set that the installed XLA accepts. The fastest one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from collective_matmul import OVERLAP_OPTIONS

XlaOptions = Mapping[str, Any]
#: By name, in the order to try them in.
OptionSets = Mapping[str, XlaOptions]

#: For a candidate that is not XLA's own: no options besides its compiler's.
DEFAULT: OptionSets = {"default": {}}

_LATENCY_HIDING: XlaOptions = {"xla_gpu_enable_latency_hiding_scheduler": True}

#: What may help plain collectives: when they start, how many run at once, how they are combined,
#: whether they are pipelined through loops, and what carries them.
BASELINE: OptionSets = {
    **DEFAULT,
    "latency hiding on": _LATENCY_HIDING,
    "latency hiding off": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "speed-of-light estimates": {
        **_LATENCY_HIDING,
        "xla_gpu_enable_analytical_sol_latency_estimator": True,
    },
    "pipelined": {
        **_LATENCY_HIDING,
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

_WINDOWED: XlaOptions = {
    "xla_gpu_threshold_for_windowed_einsum_mib": "0",
    "xla_gpu_multi_streamed_windowed_einsum": True,
}

#: XLA's windowed einsum: its partitioner makes loops of permutes and matmuls.
WINDOWED_EINSUM: OptionSets = {
    "windowed": _WINDOWED,
    "windowed, one stream": {**_WINDOWED, "xla_gpu_multi_streamed_windowed_einsum": False},
    "windowed, peer copies, no dot merger": {**OVERLAP_OPTIONS, **_WINDOWED},
}


def known(sets: OptionSets, count: int | None = None) -> OptionSets:
    """The first `count` sets, or all, that XLA accepts; prints which it refuses, and why."""
    lowered = jax.jit(lambda: 0).lower()
    accepted = {}
    for name, options in [*sets.items()][:count]:
        try:
            lowered.compile(compiler_options=dict(options))
            accepted[name] = options
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            print(f"XLA options {name!r} are left out: {reason}", flush=True)
    return accepted
