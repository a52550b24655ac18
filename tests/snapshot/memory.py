"""Temporary memory of each call of an op, compiled for H200 by their description.

JAX needs its CUDA build for that, and no GPU. Compiling takes most of a snapshot's time. A program
that an earlier snapshot holds, with an equal digest, need not be compiled again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.snapshot.calls import DIRECTIONS, FORMS, OPS, STORAGES, Call
from tests.snapshot.kernels import module_digests
from tests.snapshot.library import error_text
from tests.train.compiled_memory import H200, as_text

#: 4,096 tokens, 4,096 features, and 3,584 hidden features on each of four devices.
_FORM = replace(
    FORMS["four devices"], name="4096 tokens", rows=1024, contracted=4096, columns=((3584,),)
)
_IMPLEMENTATIONS = ("xla", "ring", "ring_direct")


def snapshot(known: Mapping[str, Any]) -> dict[str, Any]:
    """The temporary bytes of each call by its name, or its error.

    Args:
      known: the memory of an earlier snapshot, by the same versions of JAX and of XLA.
    """
    bytes_of_programs = {
        _program_key(each): each["temporary bytes"]
        for each in known.values()
        if "temporary bytes" in each
    }
    described = topologies.get_topology_desc(
        "h200", platform="cuda", target_config=as_text(H200), topology="1x1x8"
    )
    with mock.patch.object(jax, "default_backend", lambda: "gpu"):
        devices = np.array(described.devices)
        return {str(call): _measured(call, devices, bytes_of_programs) for call in _calls()}


def _calls() -> Iterator[Call]:
    for op in OPS:
        form = _FORM
        if op != "all_gather_matmul":  # The way back: 3,584 hidden features of each token.
            form = replace(form, contracted=3584, columns=((4096,),))
        for storage in STORAGES:
            for implementation in _IMPLEMENTATIONS:
                for direction in DIRECTIONS:
                    yield Call(op, storage, implementation, direction, form)


def _measured(call: Call, devices: np.ndarray, known: Mapping[str, int]) -> dict[str, Any]:
    sizes, names = (*call.axes.values(),), (*call.axes,)
    mesh = Mesh(
        devices[: int(np.prod(sizes))].reshape(sizes),
        names,
        axis_types=(AxisType.Auto,) * len(sizes),
    )
    program = call.program(mesh)
    try:
        lowered = jax.jit(program.fun).lower(*_placed(call, mesh, program.arguments))
    except ValueError as error:
        return {"error": error_text(error)}
    result: dict[str, Any] = module_digests(lowered.compiler_ir())
    if (key := _program_key(result)) in known:
        return result | {"temporary bytes": known[key]}
    memory: Any = lowered.compile().memory_analysis()
    return result | {"temporary bytes": memory.temp_size_in_bytes}


def _placed(call: Call, mesh: Mesh, arguments: Any) -> Any:
    """The types of the arguments, with the shardings that the program gives them."""

    def placed(argument: Any, spec: P) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=sharding)

    return jax.tree.map(placed, arguments, call.specs)


def _program_key(entry: Mapping[str, Any]) -> str:
    return " ".join([entry["program"], *entry["kernels"]])
