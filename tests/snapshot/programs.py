"""Programs besides single calls of the ops: einsums, and plain programs that `overlap` rewrites."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct, lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from collective_matmul import (
    all_gather_matmul,
    collective_einsum,
    matmul_reduce_scatter,
    overlap,
    overlap_jit,
)
from tests.snapshot.calls import FSDP, TENSOR, Program
from tests.snapshot.library import RECIPES

DEVICES = 2


@dataclass(frozen=True)
class Einsum:
    """An einsum and the local shapes of its operands.

    Attributes:
      subscripts: as `collective_einsum` takes them.
      x: local shape.
      w: local shape.
      communicated: the label that is gathered or scattered, by these words.
      is_matmul: whether it is a matmul of whole dimensions, which may be in 8 bits.
    """

    subscripts: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    communicated: Mapping[str, str]
    is_matmul: bool = False

    def __str__(self) -> str:
        ((how, label),) = self.communicated.items()
        return f"{self.subscripts} {how} {label}"

    def __call__(self, x: Any, w: Any, **keywords: Any) -> Any:
        return collective_einsum(self.subscripts, x, w, TENSOR, **self.communicated, **keywords)


EINSUMS = [
    Einsum("bsd,dhk->bshk", (2, 128, 256), (256, 4, 64), {"gather": "s"}, True),
    Einsum("bshk,hkd->bsd", (2, 128, 4, 64), (4, 64, 256), {"scatter": "s"}, True),
    Einsum("sd,fd->sf", (128, 256), (128, 256), {"gather": "s"}, True),
    Einsum("sd,df->fs", (128, 256), (256, 128), {"gather": "s"}),
    Einsum("sd,sf->df", (128, 256), (256, 128), {"gather": "s"}),
    Einsum("ecd,edf->ecf", (2, 64, 128), (4, 128, 64), {"gather": "e"}),
    Einsum("bd,df->bf", (128, 256), (256, 128), {"gather": "f"}),
    Einsum("bsd,bdf->bsf", (2, 128, 64), (2, 64, 128), {"scatter": "s"}),
    Einsum("sd,sf->df", (128, 256), (128, 64), {"scatter": "d"}),
    Einsum("ecf,efd->ecd", (4, 64, 128), (4, 128, 64), {"scatter": "e"}),
]


def einsum_programs(
    implementations: tuple[Any, ...], device: AbstractDevice | None
) -> Iterator[tuple[str, Callable[[], Program]]]:
    """Names of einsums, and how to make the program of each."""
    for einsum in EINSUMS:
        for fp8 in (None, *(RECIPES if einsum.is_matmul else ())):
            for implementation in implementations:
                for differentiated in (False, True):
                    keywords = {"fp8": fp8, "implementation": implementation}
                    fun = functools.partial(einsum, **keywords)
                    shapes = einsum.x, einsum.w
                    direction = "vjp" if differentiated else "forward"
                    name = f"einsum {einsum} | {fp8 or 'plain'} | {implementation} | {direction}"
                    yield name, functools.partial(_local, fun, shapes, device, differentiated)


def _local(
    fun: Callable,
    shapes: tuple[tuple[int, ...], ...],
    device: AbstractDevice | None,
    differentiated: bool,
    after: Callable = lambda fun: fun,
    before: Callable = lambda fun: fun,
    dtype: str = "bfloat16",
) -> Program:
    """A function of local arrays, which differ on all devices, as one of global arrays.

    Args:
      fun: the function.
      shapes: of its arguments, local.
      device: what the mesh consists of.
      differentiated: whether to compute gradients too, of the sum of the results.
      after: a transformation of the differentiated function.
      before: a transformation of the function.
      dtype: of the arguments.
    """
    axes = {TENSOR: DEVICES, FSDP: 2}
    mesh = AbstractMesh(
        (*axes.values(),), (*axes,), axis_types=(AxisType.Auto,) * 2, abstract_device=device
    )
    spec, parts = P((*axes,)), DEVICES * 2
    sharded = before(jax.shard_map(fun, mesh=mesh, in_specs=(spec,) * len(shapes), out_specs=spec))

    def results_and_gradients(*arguments: Any) -> Any:
        ys, transpose = jax.vjp(sharded, *arguments)
        return ys, transpose(jax.tree.map(lambda y: y * y, ys))

    arguments = (ShapeDtypeStruct((parts * s[0], *s[1:]), jnp.dtype(dtype)) for s in shapes)
    return Program(after(results_and_gradients if differentiated else sharded), (*arguments,))


def _gather(x: Any) -> Any:
    return lax.all_gather(x, TENSOR, axis=0, tiled=True)


def _scatter(y: Any) -> Any:
    return lax.psum_scatter(y, TENSOR, scatter_dimension=0, tiled=True)


def _gathered_weight(w: Any) -> Any:
    return lax.all_gather(w, FSDP, axis=0, tiled=True)


def _gather_dot(x: Any, w: Any) -> Any:
    return _gather(x) @ w


def _two_dots(x: Any, w: Any, v: Any) -> Any:
    whole = _gather(x)
    return jax.nn.silu(whole @ w) * (whole @ v)


def _other_use(x: Any, w: Any) -> Any:
    whole = _gather(x)
    return whole @ w, 2 * whole


def _dot_scatter(x: Any, w: Any) -> Any:
    return _scatter(x @ w)


def _sum_scatter(x: Any, w: Any, v: Any) -> Any:
    return _scatter(x @ w - jnp.tanh(x) @ v)


def _dot_psum(x: Any, w: Any) -> Any:
    return lax.psum(x @ w, TENSOR)


def _mlp(x: Any, up: Any, down: Any) -> Any:
    with jax.named_scope("up"):
        hidden = _gather(x) @ up
    with jax.named_scope("down"):
        return _scatter(jax.nn.gelu(hidden) @ down)


def _sharded_mlp(x: Any, up: Any, down: Any) -> Any:
    return _mlp(x, _gathered_weight(up), _gathered_weight(down))


def _batched(x: Any, w: Any) -> Any:
    whole = lax.all_gather(x, TENSOR, axis=1, tiled=True)
    return jnp.einsum("bsd,bdf->bsf", whole, w)


def _transposed(x: Any, w: Any) -> Any:
    return jnp.einsum("sd,fd->sf", _gather(x), w)


def _ops(x: Any, up: Any, down: Any) -> Any:
    """The ops themselves, which choose."""
    hidden = all_gather_matmul(x, up, TENSOR)
    return matmul_reduce_scatter(jax.nn.gelu(hidden), down, TENSOR)


_ROWS, _LONG = (128, 256), (256, 256)
PLAIN_PROGRAMS: dict[str, tuple[Callable, tuple[tuple[int, ...], ...]]] = {
    "gather, dot": (_gather_dot, (_ROWS, (256, 128))),
    "gather, two dots": (_two_dots, (_ROWS, (256, 128), (256, 128))),
    "gather with another use": (_other_use, (_ROWS, (256, 128))),
    "gather, batched dot": (_batched, ((2, 128, 256), (2, 256, 128))),
    "gather, dot of a transposed weight": (_transposed, (_ROWS, (128, 256))),
    "dot, scatter": (_dot_scatter, (_LONG, (256, 128))),
    "sum of dots, scatter": (_sum_scatter, (_LONG, (256, 128), (256, 128))),
    "dot, psum": (_dot_psum, (_LONG, (256, 128))),
    "mlp": (_mlp, (_ROWS, (256, 128), (128, 256))),
    "mlp with sharded weights": (_sharded_mlp, (_ROWS, (128, 128), (64, 256))),
    "ops": (_ops, (_ROWS, (256, 128), (128, 256))),
}
#: Arguments of `overlap`. Scopes are those of `_mlp`.
OVERLAP_OPTIONS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "xla": {"implementation": "xla"},
    "ring": {"implementation": "ring"},
    "ring_direct": {"implementation": ("fused", "ring_direct")},
    **{f"ring {fp8}": {"implementation": "ring", "fp8": fp8} for fp8 in RECIPES},
    "xla rowwise": {"implementation": "xla", "fp8": "rowwise"},
}
_SCOPED = {"up": "rowwise", "down": "tensorwise"}


def overlap_programs(
    device: AbstractDevice | None,
) -> Iterator[tuple[str, Callable[[], Program]]]:
    """Names of plain programs after `overlap`, and how to make each."""
    for name, (fun, shapes) in PLAIN_PROGRAMS.items():
        options = dict(OVERLAP_OPTIONS)
        if "mlp" in name:
            options["ring, recipes by scope"] = {"implementation": "ring", "fp8": _SCOPED}
        for described, keywords in options.items():
            rewritten = functools.partial(overlap, **keywords)
            for how, arguments in {
                "forward": {"differentiated": False, "before": rewritten},
                "gradients of overlap": {"differentiated": True, "before": rewritten},
                "overlap of gradients": {"differentiated": True, "after": rewritten},
            }.items():
                make = functools.partial(_local, fun, shapes, device, **arguments)
                yield f"overlap {name} | {described} | {how}", make


def explicit_programs(
    device: AbstractDevice | None,
) -> Iterator[tuple[str, Callable[[], Program]]]:
    """Names of programs over axes of type Explicit after `overlap`, and how to make each."""
    for sharded in (False, True):
        for described, keywords in OVERLAP_OPTIONS.items():
            for differentiated in (False, True):
                name = "sharded weights" if sharded else "whole weights"
                direction = "gradients" if differentiated else "forward"
                make = functools.partial(_explicit_mlp, device, sharded, differentiated, keywords)
                yield f"overlap explicit mlp, {name} | {described} | {direction}", make


def _explicit_mlp(
    device: AbstractDevice | None, sharded: bool, differentiated: bool, keywords: Mapping[str, Any]
) -> Program:
    mesh = AbstractMesh(
        (2, DEVICES), ("data", TENSOR), (AxisType.Explicit,) * 2, abstract_device=device
    )
    rows, up_spec, down_spec = P("data", TENSOR), P(None, TENSOR), P(TENSOR)

    def on(x: Any, spec: P) -> Any:
        return reshard(x, NamedSharding(mesh, spec))

    def mlp(x: Any, up: Any, down: Any) -> Any:
        x, up, down = on(x, P("data")), on(up, up_spec), on(down, down_spec)
        return jnp.dot(jax.nn.gelu(x @ up), down, out_sharding=NamedSharding(mesh, rows))

    def gradients(*arguments: Any) -> Any:
        y, transpose = jax.vjp(mlp, *arguments)
        return y, transpose(y)

    specs = rows, *((P("data", TENSOR), P(TENSOR, "data")) if sharded else (up_spec, down_spec))
    shapes = (2, 256, 256), (256, 256), (256, 256)
    arguments = (
        ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )
    return Program(overlap(gradients if differentiated else mlp, **keywords), (*arguments,))


def decided_programs(device: AbstractDevice) -> Iterator[tuple[str, Callable[[], Program]]]:
    """Names of programs that `overlap_jit` traces, and how to make each."""
    for name in ("mlp", "ops"):
        fun, shapes = PLAIN_PROGRAMS[name]
        for peer_kernels in ("auto", True, False):
            after = functools.partial(_overlap_jit, peer_kernels)
            make = functools.partial(_local, fun, shapes, device, True, after=after)
            yield f"overlap_jit {name} | peer_kernels={peer_kernels}", make


def _overlap_jit(peer_kernels: Any, fun: Callable) -> Callable:
    return overlap_jit(overlap(fun), peer_kernels=peer_kernels)
