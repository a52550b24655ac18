"""The kernels that the ops lower to for Hopper GPUs, and the programs around them, as digests.

Locations in the source and names of functions are left out, and so are the addresses of workspaces
that are compiled into programs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mosaic
from jax.interpreters import mlir
from jax.sharding import AxisType
from jaxlib.mlir import ir

from tests.snapshot.calls import DIRECTIONS, FORMS, OPS, Call, Form, Storage, with_dtype
from tests.snapshot.library import (
    HAS_PEER_KERNELS,
    RECIPES,
    error_text,
    for_hopper,
)

_SQUARE, _LATER = FORMS["four devices"], FORMS["two devices, later dimension, outside"]
_FEW_ROWS = replace(_SQUARE, name="few rows", rows=4, contracted=1024)
_LARGE = replace(_SQUARE, name="large", rows=1024, contracted=4096, columns=((1792,),))
_FORMS = [
    _SQUARE,
    replace(with_dtype(_SQUARE, "float16"), name="float16"),
    _LATER,
    _FEW_ROWS,
    _LARGE,
]
_PEER_KERNELS = ("one_shot", "fused") * HAS_PEER_KERNELS


def snapshot() -> dict[str, Any]:
    """The digests of each call's program and kernels by its name, or its error."""
    with for_hopper():
        return {str(call): _digests(call) for call in _calls()}


def _calls() -> Iterator[Call]:
    for form in _FORMS:
        for storage in (Storage(), *map(Storage, RECIPES)):
            for implementation in _implementations(form):
                for op in OPS:
                    for direction in DIRECTIONS:
                        yield Call(op, storage, implementation, direction, form)


def _implementations(form: Form) -> tuple[str, ...]:
    """All in one form; in the others one of the rings, which launch the same kernels."""
    if form is _SQUARE:
        return ("ring", "ring_two_way", "ring_direct", *_PEER_KERNELS)
    # Rings leave chunks of few rows to XLA.
    return (*("ring",) * (form is not _FEW_ROWS), *_PEER_KERNELS)


def _digests(call: Call) -> dict[str, Any]:
    sizes, names = (*call.axes.values(),), (*call.axes,)
    devices = jax.devices()[: _product(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)
    program = call.program(mesh)
    try:
        traced = jax.jit(program.fun).trace(*program.arguments)
    except ValueError as error:
        return {"error": error_text(error)}
    return module_digests(traced.lower(lowering_platforms=("cuda",)).compiler_ir())


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def module_digests(module: Any) -> dict[str, Any]:
    """The digests of a lowered program without its kernels, and of each of its kernels."""
    kernels: list[str] = []

    def visit(operation: Any) -> Any:
        if _is_kernel(operation):
            kernels.append(_take_kernel(operation))
        return ir.WalkResult.ADVANCE

    with module.context, ir.Location.unknown():
        copied = module.operation.clone()
        copied.walk(visit)
        text = copied.get_asm(enable_debug_info=False)
    return {"program": _digest(_without_names(text)), "kernels": sorted(kernels)}


def _is_kernel(operation: Any) -> bool:
    if operation.name != "stablehlo.custom_call":
        return False
    return "mosaic_gpu" in str(operation.attributes["call_target_name"])


def _take_kernel(operation: Any) -> str:
    """The digest of a kernel, which takes the kernel's place in the program."""
    config = {each.name: each.attr for each in operation.attributes["mhlo.backend_config"]}
    config.pop("kernel_hash", None)
    digest = _kernel_digest(ir.StringAttr(config.pop("module")).value_bytes)
    config["module"] = ir.StringAttr.get(digest)
    operation.attributes["mhlo.backend_config"] = ir.DictAttr.get(config)
    return digest


def _kernel_digest(bytecode: bytes) -> str:
    context = mlir.make_ir_context()
    # Serialized kernels have operations under names that no dialect registers, and types of theirs.
    context.allow_unregistered_dialects = True
    types: Any = mosaic
    types.dialect.register_dialect(context)
    with context:
        text: Any = ir.Module.parse(bytecode).operation.get_asm(enable_debug_info=False)
    # The kernel's own name, in the line that begins the module.
    return _digest(re.sub(r"^module @\S+", "module", text, count=1, flags=re.MULTILINE))


def _without_names(text: str) -> str:
    """A program with functions numbered in the order in which they first occur."""
    text = re.sub(r"dense<[^>]*> : tensor<(\d+x)+2xi32>", "addresses", text)
    numbers: dict[str, str] = {}
    return re.sub(r"@[\w.]+", lambda m: numbers.setdefault(m[0], f"@{len(numbers)}"), text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]
