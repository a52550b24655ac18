"""The decisions for several thousand random calls, on several kinds of devices; nothing compiles.

Each call is drawn by its own number, so that one more kind of call leaves the others as they are.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import jax
from jax import ShapeDtypeStruct, lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import explain
from tests.snapshot.calls import FSDP, OPS, TENSOR, Call, Form, Program, Storage
from tests.snapshot.library import (
    H200,
    IMPLEMENTATIONS,
    RECIPES,
    decision_fields,
    error_text,
    warnings_of_library,
)
from tests.snapshot.programs import EINSUMS

_NUMBER = 4500
_SEED = 43
_DEVICES = {
    "H200": H200,
    "H100": AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    "A100": AbstractDevice("NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu"),
    "unknown": AbstractDevice("NVIDIA Z900", num_cores=200, platform="gpu"),
    "CPU": None,
}
#: Features and hidden sizes of Llama 3 8B and 70B, of which the tables hold measurements.
_MODELS = ((4096, 14336), (8192, 28672))
#: Global rows, hidden sizes and features: of models, of few tokens, and odd ones.
_ROWS = (1, 4, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 24, 96, 1000, 4000)
_FEATURES = (4096, 8192, 1024, 2048, 5120, 512, 96, 200)
_HIDDEN = (14336, 28672, 4096, 8192, 1024, 512, 384, 600)
#: Longer than any line of a table.
_WIDE = 4000


def snapshot() -> dict[str, Any]:
    """The decisions for each call by its name, or its error; and the warnings of all."""
    entries = {}
    with warnings_of_library() as warnings:
        for number in range(_NUMBER):
            draw = random.Random(f"{_SEED} {number}")
            name, program, peer_kernels = _drawn(draw)
            entries[f"{number:04} {name}"] = _decisions(program, peer_kernels)
    return {**entries, "warnings": {"texts": sorted(set(warnings))}}


def _decisions(program: Any, peer_kernels: Any) -> dict[str, Any]:
    try:
        fun, arguments = program()
        explanation = explain(fun, peer_kernels=peer_kernels, verbose=True)(*arguments)
    except Exception as error:  # Also one that no caller should see belongs to the behaviour.
        return {"error": error_text(error)}
    return {
        "decisions": [*map(decision_fields, explanation.decisions)],
        "lines": [*map(_without_place, explanation.table(_WIDE).splitlines())],
        "peer kernels": str(explanation.peer_kernels),
    }


def _without_place(line: str) -> str:
    """A line of a table without padding, and without the place in this tool that calls the op."""
    return re.sub(r" {2,}", " | ", re.sub(r"\S+\.py:\d+ in \S+", "", line.strip()))


def _drawn(draw: random.Random) -> tuple[str, Any, Any]:
    """A name, a function that makes the program, and the argument peer_kernels of `explain`."""
    kind = draw.choices(list(_DEVICES), (5, 2, 2, 1, 2))[0]
    peer_kernels = draw.choice((True, False, "auto"))
    implementation = _drawn_implementation(draw)
    direction = draw.choice(("forward", "vjp"))
    end = f"{kind} | peer kernels {peer_kernels}"
    if draw.random() < 0.12:
        einsum = draw.choice(EINSUMS)
        fp8 = draw.choice((None, *RECIPES)) if einsum.is_matmul or draw.random() < 0.1 else None
        devices, scale = draw.choice((2, 2, 4)), draw.choice((1, 1, 4, 16))
        name = f"einsum {einsum} × {scale} | {fp8} | {implementation} | {direction} | {devices}"
        keywords = {"fp8": fp8, "implementation": implementation}
        arguments = (einsum, scale, devices, keywords, direction, _DEVICES[kind])
        return f"{name} | {end}", lambda: _einsum_program(*arguments), peer_kernels
    call = Call(
        draw.choice(OPS), _drawn_storage(draw), implementation, direction, _drawn_form(draw)
    )
    call = _with_mistake(call, draw) if draw.random() < 0.05 else call
    in_branch = draw.random() < 0.06

    def program() -> Program:
        if in_branch:
            return _in_branch(call, _DEVICES[kind])
        return call.program(call.abstract_mesh(_DEVICES[kind]))

    branch = " | in a branch" if in_branch else ""
    return f"{call}{branch} | {end}", program, peer_kernels


def _in_branch(call: Call, device: AbstractDevice | None) -> Program:
    """The forward pass of a call inside a branch, whose predicate may differ between devices."""
    mesh = call.abstract_mesh(device)
    x_spec, w_specs, y_specs = call.all_specs

    def body(x: Any, ws: Any) -> Any:
        return lax.cond(x.ravel()[0] > 0, lambda: call.apply(x, ws), lambda: call.apply(2 * x, ws))

    fun = jax.shard_map(
        body, mesh=mesh, in_specs=(x_spec, w_specs), out_specs=y_specs, check_vma=False
    )
    return Program(fun, replace(call, direction="forward").program(mesh).arguments)


def _drawn_implementation(draw: random.Random) -> Any:
    if draw.random() < 0.45:
        return None
    if draw.random() < 0.55:
        return draw.choice(IMPLEMENTATIONS)
    return tuple(draw.sample(IMPLEMENTATIONS, draw.choice((2, 3))))


def _drawn_storage(draw: random.Random) -> Storage:
    fp8 = draw.choice((None, None, *RECIPES))
    prequantized = fp8 is not None and draw.random() < 0.4
    return Storage(fp8, prequantized, draw.choice((None, None, None, 0, 1)))


def _drawn_form(draw: random.Random) -> Form:
    """A layer of a model, divided over the axis, or odd sizes."""
    devices = draw.choices((1, 2, 4, 8), (1, 4, 5, 3))[0]
    rows = max(draw.choice(_ROWS) // devices, 1)
    contracted, columns = draw.choice(_FEATURES), draw.choice(_HIDDEN) // devices
    if draw.random() < 0.5:
        contracted, columns = columns, contracted
    if draw.random() < 0.35:
        features, hidden = draw.choice(_MODELS)
        rows = draw.choice((64, 512, 2048, 8192, 16384)) // devices
        sizes = draw.choice(((features, hidden // devices), (hidden // devices, features)))
        name = f"{devices} devices {rows} {sizes}"
        return Form(name, devices, rows, contracted=sizes[0], columns=(sizes[1:],))
    dtype = draw.choices(("bfloat16", "float16", "float32"), (6, 1, 1))[0]
    several = draw.random() < 0.3
    before, after = draw.choice((((), ()), ((), ()), ((2,), ()), ((), (2,)), ((3,), (1,))))
    form = Form(
        "",
        devices,
        rows,
        before,
        after,
        contracted,
        ((columns,), (columns,)) if several else ((columns,),),
        dtype,
        draw.choice((dtype, "float32")),
        check_vma=draw.random() < 0.7,
        outside=draw.random() < 0.3,
        mean=draw.random() < 0.2,
        replicated=draw.random() < 0.1,
        other_axis=draw.choices((None, AxisType.Auto), (12, 1))[0],
    )
    sizes = f"{before} {rows} {after} {contracted} {form.columns} {dtype}, {form.shard_dtype}"
    traits = ("check_vma", "outside", "mean", "replicated", "other_axis")
    others = " ".join(name for name in traits if getattr(form, name))
    return replace(form, name=f"{devices} devices {sizes} {others}")


def _with_mistake(call: Call, draw: random.Random) -> Call:
    """The call with an argument that does not fit."""
    mistakes: tuple[dict[str, Any], ...] = (
        {"implementation": "rnig"},
        {"implementation": ()},
        {"implementation": ("ring", "rings")},
        {"storage": Storage("colwise")},
        {"storage": Storage("rowwise", False, 2)},
        {"form": replace(call.form, dtype="int8", name=f"int8 {call.form.name}")},
        {"form": replace(call.form, contracted=0, name=f"empty {call.form.name}")},
        {"form": replace(call.form, rows=0, name=f"no rows {call.form.name}")},
    )
    return replace(call, **draw.choice(mistakes))


def _einsum_program(
    einsum: Any,
    scale: int,
    devices: int,
    keywords: Any,
    direction: str,
    device: AbstractDevice | None,
) -> Program:
    """An einsum whose labels have the same local sizes on any number of devices, but for one."""
    mesh = AbstractMesh(
        (devices, 2), (TENSOR, FSDP), axis_types=(AxisType.Auto,) * 2, abstract_device=device
    )
    spec, parts = P((TENSOR, FSDP)), 2 * devices

    def fun(x: Any, w: Any) -> Any:
        if direction == "forward":
            return einsum(x, w, **keywords)
        y, transpose = jax.vjp(lambda x, w: einsum(x, w, **keywords), x, w)
        return transpose(y)

    def argument(shape: tuple[int, ...], labels: str) -> ShapeDtypeStruct:
        ((_, label),) = einsum.communicated.items()
        sizes = [
            size * (scale if name == label else 1) for name, size in zip(labels, shape, strict=True)
        ]
        return ShapeDtypeStruct((parts * sizes[0], *sizes[1:]), "bfloat16")

    labels_x, labels_w = einsum.subscripts.partition("->")[0].split(",")
    arguments = argument(einsum.x, labels_x), argument(einsum.w, labels_w)
    sharded = jax.shard_map(fun, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    return Program(sharded, arguments)
