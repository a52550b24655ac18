"""Calls of the ops in every form: op, storage of operands, backend, direction, shapes and axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    prequantize,
)
from tests.snapshot.library import RECIPES

TENSOR, FSDP = "tensor", "fsdp"
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
DIRECTIONS = ("forward", "vjp")


class Storage(NamedTuple):
    """How the weights of a call are stored.

    Attributes:
      fp8: the recipe by which operands are quantized, or None.
      prequantized: whether `prequantize` has made the weights.
      sharded: the dimension that a second axis shards, or None.
    """

    fp8: Any = None
    prequantized: bool = False
    sharded: int | None = None

    def __str__(self) -> str:
        shards = f"shards {self.sharded}" if self.sharded is not None else "plain"
        return " ".join([shards, self.fp8 or "", "prequantized" * self.prequantized]).strip()


STORAGES = [
    Storage(fp8, prequantized, sharded)
    for sharded in (None, 0, 1)
    for fp8 in (None, *RECIPES)
    for prequantized in (False, True)
    if fp8 or not prequantized
]


@dataclass(frozen=True)
class Form:
    """Shapes, dtypes and axes of a call. Sizes are local.

    Attributes:
      name: the name of the form.
      devices: the size of the axis.
      rows: rows of a shard of x, in the dimension that is gathered or scattered.
      before: sizes of x's dimensions before that one.
      after: sizes between that one and the last.
      contracted: K.
      columns: *N of each weight; further ones are for gathers only.
      dtype: of x.
      shard_dtype: of weights that a second axis shards.
      check_vma: whether `shard_map` tracks which axes arrays vary over.
      outside: whether `shard_map` is differentiated, not the function inside.
      mean: whether sums are averaged, where the op can.
      replicated: whether weights are the same along the second axis, which all forms have then.
      other_axis: the type of a further axis that stays with the compiler, or None. If it is
        explicit, it shards the sizes in `after`.
    """

    name: str
    devices: int = 4
    rows: int = 128
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    contracted: int = 256
    columns: tuple[tuple[int, ...], ...] = ((256,),)
    dtype: str = "bfloat16"
    shard_dtype: str = "bfloat16"
    check_vma: bool = True
    outside: bool = False
    mean: bool = False
    replicated: bool = False
    other_axis: AxisType | None = None


FORMS = {
    form.name: form
    for form in (
        Form("four devices"),
        Form(
            "two devices, later dimension, outside",
            devices=2,
            before=(3,),
            columns=((4, 64), (128,)),
            shard_dtype="float32",
            check_vma=False,
            outside=True,
            replicated=True,
        ),
        Form("one device", devices=1),
        Form(
            "float32, odd sizes",
            rows=6,
            after=(3,),
            contracted=20,
            columns=((12,), (6, 2)),
            dtype="float32",
            shard_dtype="float32",
            mean=True,
        ),
        Form("automatic axis", devices=2, other_axis=AxisType.Auto),
        Form("explicit axis", devices=2, after=(4,), other_axis=AxisType.Explicit),
    )
}


class Program(NamedTuple):
    """A function of global arrays, and their types."""

    fun: Callable
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """A call of an op, with its gradients if the direction is "vjp"."""

    op: str
    storage: Storage
    implementation: Any
    direction: str
    form: Form = field(default=FORMS["four devices"])

    def __str__(self) -> str:
        parts = (self.op, self.storage, self.implementation, self.direction, self.form.name)
        return " | ".join(map(str, parts))

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh axes over which `shard_map` is manual."""
        second = self.form.replicated or self.storage.sharded is not None
        return {TENSOR: self.form.devices} | ({FSDP: 2} if second else {})

    def abstract_mesh(self, device: AbstractDevice | None) -> AbstractMesh:
        """A mesh of described devices; None describes nothing, as for the CPU."""
        axes, other = self.axes, self.form.other_axis
        sizes, types = (*axes.values(),), (AxisType.Auto,) * len(axes)
        if other is None:
            return AbstractMesh(sizes, (*axes,), axis_types=types, abstract_device=device)
        return AbstractMesh(
            (*sizes, 2), (*axes, "data"), axis_types=(*types, other), abstract_device=device
        )

    def program(self, mesh: Any) -> Program:
        """The call on global arrays, of which each device has a part of the first dimension."""
        form, axes = self.form, tuple(self.axes)
        x, ws, dys = self.local_types()
        x_spec, w_specs, y_specs = self.all_specs

        def sharded(fun: Callable, in_specs: Any, out_specs: Any) -> Callable:
            manual = {} if form.other_axis is None else {"axis_names": set(axes)}
            return jax.shard_map(
                fun,
                mesh=mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                check_vma=form.check_vma,
                **manual,
            )

        def gradients(x: Any, ws: Any, dys: Any) -> Any:
            call, operands = self._differentiable(x, ws)
            ys, transpose = jax.vjp(call, *operands)
            return ys, transpose(dys)

        data = P(*[None] * (len(form.before) + 1), "data")
        typed = {"sharding": NamedSharding(mesh, data)} if self._has_explicit_axis else {}
        whole = _global(self.axes, x, x_spec, **typed), _global(self.axes, ws, w_specs[0])
        forward = sharded(self.apply, (x_spec, w_specs), y_specs)
        if self.direction == "forward":
            return Program(forward, whole)
        whole = (*whole, _global(self.axes, dys, y_specs[0], **typed))
        if form.outside:
            return Program(lambda x, ws, dys: _with_gradients(forward, x, ws, dys), whole)
        specs = (x_spec, w_specs, y_specs)
        return Program(sharded(gradients, specs, (y_specs, (x_spec, w_specs))), whole)

    @property
    def specs(self) -> tuple[Any, ...]:
        """The specs of the arguments of `program`."""
        return self.all_specs[: 2 if self.direction == "forward" else 3]

    @property
    def all_specs(self) -> tuple[P, tuple[P, ...], tuple[P, ...]]:
        """The specs of x, of each weight and of each result."""
        axes, (_, ws, ys) = tuple(self.axes), self.local_types()
        x_spec, y_spec = P(axes), P(axes if self.op != "matmul_all_reduce" else axes[1:])
        replicated = self.form.replicated and self.storage.sharded is None
        return x_spec, (P(TENSOR) if replicated else x_spec,) * len(ws), (y_spec,) * len(ys)

    def apply(self, x: Any, ws: Any) -> Any:
        """The op on local arrays."""
        call, operands = self._differentiable(x, ws)
        return call(*operands)

    def _differentiable(self, x: Any, ws: Any) -> tuple[Callable, tuple[Any, Any]]:
        """The op as a function of x and the weights as arrays, which are quantized before."""
        if not self.storage.prequantized:
            return self._op, (x, ws)
        rounded = tuple(w.astype(x.dtype) for w in ws)
        quantized = prequantize(rounded, self.storage.fp8, **self._shards)

        def call(x: Any, ws: Any) -> Any:
            return self._op(x, [q.with_array(w) for q, w in zip(quantized, ws, strict=True)])

        return call, (x, ws)

    @property
    def _shards(self) -> dict[str, Any]:
        dimension = self.storage.sharded
        if dimension is None:
            return {}
        return {"weight_axis_name": FSDP, "weight_dimension": dimension}

    def _op(self, x: Any, ws: Sequence[Any]) -> tuple[Any, ...]:
        form, dimension = self.form, len(self.form.before)
        keywords: Any = {"fp8": self.storage.fp8, "implementation": self.implementation}
        keywords |= self._shards
        if self.op == "all_gather_matmul":
            return all_gather_matmul(x, tuple(ws), TENSOR, gather_dimension=dimension, **keywords)
        (w,) = ws
        if self.op == "matmul_all_reduce":
            return (matmul_all_reduce(x, w, TENSOR, **keywords),)
        keywords |= {"scatter_dimension": dimension, "mean": form.mean}
        return (matmul_reduce_scatter(x, w, TENSOR, **keywords),)

    def local_types(self) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        """The types of x, of each weight and of each result on one device."""
        form, sharded = self.form, self.storage.sharded
        gathers = self.op == "all_gather_matmul"
        whole = form.rows * form.devices
        rows_x, rows_y = (form.rows, whole) if gathers else (whole, form.rows)
        if self.op == "matmul_all_reduce":
            rows_y = rows_x
        w_dtype = form.dtype if sharded is None else form.shard_dtype
        ws, ys = [], []
        for columns in form.columns if gathers else form.columns[:1]:
            shape = [form.contracted, *columns]
            if sharded in (0, 1):
                shape[sharded] //= self.axes[FSDP]
            ws.append(ShapeDtypeStruct(tuple(shape), jnp.dtype(w_dtype)))
            y = (*form.before, rows_y, *form.after, *columns)
            ys.append(ShapeDtypeStruct(y, jnp.dtype(form.dtype)))
        x = (*form.before, rows_x, *form.after, form.contracted)
        return ShapeDtypeStruct(x, jnp.dtype(form.dtype)), tuple(ws), tuple(ys)

    @property
    def _has_explicit_axis(self) -> bool:
        return self.form.other_axis is AxisType.Explicit


def _global(axes: Mapping[str, int], types: Any, spec: P, **attributes: Any) -> Any:
    """Global types of arrays that `shard_map` divides along their first dimension only."""
    (names,) = (*spec, None)[:1]
    names = (names,) if isinstance(names, str) else names or ()
    parts = math.prod(axes[name] for name in names)

    def whole(local: ShapeDtypeStruct) -> ShapeDtypeStruct:
        shape = (parts * local.shape[0], *local.shape[1:])
        return ShapeDtypeStruct(shape, local.dtype, **attributes)

    return jax.tree.map(whole, types)


def _with_gradients(fun: Callable, x: Any, ws: Any, dys: Any) -> Any:
    ys, transpose = jax.vjp(fun, x, ws)
    return ys, transpose(dys)


def calls(implementations: Sequence[Any], forms: Sequence[str] = tuple(FORMS)) -> Iterator[Call]:
    """Calls of every op, storage, backend, direction and form."""
    product = itertools.product(forms, OPS, STORAGES, implementations, DIRECTIONS)
    for form, op, storage, implementation, direction in product:
        yield Call(op, storage, implementation, direction, FORMS[form])


def with_dtype(form: Form, dtype: str) -> Form:
    """The form with operands of another dtype."""
    return replace(form, dtype=dtype, shard_dtype=dtype)
