"""`collective_einsum`: any einsum of two operands, with one label gathered or scattered under it.

Call it inside `jax.shard_map` on per-device arrays. Dtypes, gradients and checkpoint names are as
described in `collective_matmul.ops.matmul.api`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.explicit_axes import entries, spec_of, with_auto_axes
from collective_matmul.operands.format import PLAIN, Format, format_named
from collective_matmul.operands.quantized import Quantized
from collective_matmul.operands.varying import pvary_all
from collective_matmul.ops.matmul import checks, einsum_checks
from collective_matmul.ops.matmul.api import named
from collective_matmul.ops.matmul.backend import MatmulBackend
from collective_matmul.ops.matmul.call import Call, call_here
from collective_matmul.ops.matmul.checks import Implementation, RecipeName
from collective_matmul.ops.matmul.einsum_execution import contract
from collective_matmul.ops.matmul.equation import Equation, parse
from collective_matmul.ops.matmul.gradients import gather_matmul, matmul_scatter, op_of
from collective_matmul.ops.matmul.request import Einsum, Site


def collective_einsum(
    subscripts: str,
    x: jax.Array,
    w: jax.Array,
    axis_name: str,
    *,
    gather: str | None = None,
    scatter: str | None = None,
    fp8: RecipeName | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """`jnp.einsum` of two operands, with one label gathered before it or scattered after it.

    Exactly one of `gather` and `scatter` is given. With D the size of the axis::

        collective_einsum("bsd,dhk->bshk", x, w, axis, gather="s")    jnp.einsum of all_gather(x)
        collective_einsum("bshk,hkd->bsd", x, w, axis, scatter="s")   reduce_scatter of jnp.einsum
        collective_einsum("sd,sf->df", x, w, axis, gather="s")        chunks of s are summed
        collective_einsum("ecd,edf->ecf", x, w, axis, gather="e")     chunks of e are slices

    **gather**: the operand that has the label is gathered. If both have it, one must have 1/D of
    the size that the label has in the other, which is whole on every device; the smaller one is
    gathered. If the result has the label, the label is whole there.

    **scatter**: the label is whole in every operand that has it. The einsums of the devices are
    summed over the axis, and every device gets its shard of the sum along the label.

    Labels may be in any order. If the einsum is not a matmul of whole dimensions, because of the
    order or of batch labels, every chunk is multiplied by an einsum of XLA. If an array has to be
    transposed before or after, `collective_matmul.explain` names it.

    Backward, with A the gathered a, and b the other operand::

        y      = einsum(A, b)
        da     = reduce_scatter(einsum(dy, b))    a is co-gathered in the same loop
        A      = all_gather(a)                    and returned whole
        db     = einsum(A, dy)                    one contraction, undivided

    For a scattered result, with a the operand that has the label (x if both have it)::

        y      = reduce_scatter(einsum(a, b))
        da     = einsum(dY, b)                    the loop keeps the gathered dy:
        dY     = all_gather(dy)
        db     = einsum(a, dY)                    one contraction, undivided

    Args:
      subscripts: as in `numpy.einsum`, including ``...``.
      x: the first operand, local; of a dtype that the ops support.
      w: the second operand, local; of the same dtype.
      axis_name: the mesh axis to gather over, or to sum and scatter over.
      gather: the label to gather: free, batch or contracted.
      scatter: the label of the result to scatter: free or batch.
      fp8: None, or the recipe by which operands are quantized, or the name of a registered format,
        as the ops take it. Only for matmuls of whole dimensions, such as the first two above.
      implementation: None chooses per shape; or the name of a backend, or several, of which the
        first that can is used; see `collective_matmul.ops.matmul.backends`. Some execute only
        matmuls.

    Returns:
      The result, local, in the operands' dtype.

    Raises:
      ValueError, TypeError: for arguments that do not fit, before anything is compiled.
      NameError: if `axis_name` is not an axis of an enclosing `shard_map`.
    """
    devices = checks.axis_size(axis_name)
    requested, recipe = checks.implementation(implementation), checks.fp8(fp8)
    checks.arrays(x, (w,), recipe=recipe)
    labels_x, labels_w, labels_y = parse(subscripts, (x.ndim, w.ndim))
    label = einsum_checks.communicated_label(gather, scatter, labels_x, labels_w, labels_y)
    sizes_x, sizes_w = (
        einsum_checks.label_sizes("x", labels_x, x),
        einsum_checks.label_sizes("w", labels_w, w),
    )
    einsum_checks.check_equal_sizes(sizes_x, sizes_w, gather)
    if gather is not None:
        from_w = einsum_checks.gathers_w(label, sizes_x, sizes_w, axis_name)
    else:
        from_w = label not in sizes_x
        einsum_checks.check_divisible(label, (sizes_x | sizes_w)[label], axis_name)
    x, w = pvary_all(axis_name, (x, w))
    x, labels_x = _without_sums(x, labels_x, labels_w + labels_y)
    w, labels_w = _without_sums(w, labels_w, labels_x + labels_y)
    if from_w:
        x, w, labels_x, labels_w = w, x, labels_w, labels_x
    equation = Equation(labels_x, labels_w, labels_y, label)
    if recipe is not None:
        einsum_checks.check_matmul(subscripts, equation, recipe)
    if not x.size or not w.size:  # XLA can neither gather nor sum these over devices.
        sizes = sizes_w | sizes_x
        whole = (sizes_w if from_w else sizes_x).get(label, 0) * devices
        sizes[label] = sizes[label] // devices if gather is None else whole
        zeros = jnp.zeros([sizes[label] for label in labels_y], x.dtype)
        return named(vary_over(zeros, varying_axes(x)))
    call = call_here(axis_name, None, requested)
    return named(einsum(x, w, equation, call, format_named(recipe), scatters=gather is None))


def einsum(
    a: jax.Array, b: jax.Array, equation: Equation, call: Call, stored: Format, *, scatters: bool
) -> jax.Array:
    """The einsum of the gathered a and b; or of a and b, summed and scattered if it `scatters`.

    In another format than arrays, it is executed as the op of its matmul.
    """
    if stored == PLAIN:
        return einsum_op((a,), (b,), EinsumCall(**vars(call), equation=equation, scatters=scatters))
    rows, columns = len(equation.rows), len(equation.columns)
    x = a.reshape(*a.shape[:rows], -1)
    w = jnp.transpose(b, [equation.b.index(label) for label in equation.matrices[0]])
    features = w.shape[w.ndim - columns :]
    weight = Quantized(w.reshape(x.shape[-1], -1), None, None, stored)
    call = replace(call, dimension=equation.a.index(equation.label))
    if scatters:
        y = matmul_scatter((x,), (weight,), call)
    else:
        ((y,), _) = gather_matmul(x, (weight,), call)
    return y.reshape(*y.shape[:rows], *features)


@dataclass(frozen=True)
class EinsumCall(Call):
    """The parameters of an einsum.

    Attributes:
      equation: the einsum.
      scatters: whether its result is scattered; else its first operand is gathered.
    """

    equation: Equation = field(kw_only=True)
    scatters: bool = field(kw_only=True)

    def choose_pass(
        self, a: jax.Array, b: jax.Array, undivided: Equation | None = None, **attributes: Any
    ) -> tuple[MatmulBackend, Site]:
        """The backend for one pass, and its request.

        `undivided` is the einsum that follows in a backward; `attributes` are further attributes
        of the request.
        """
        equation = self.equation
        moved = equation.transposed + (undivided.transposed if undivided else ())
        is_matmul, shapes = equation.is_matmul, (a.shape, b.shape)
        request = self.site(
            "matmul_reduce_scatter" if self.scatters else "all_gather_matmul",
            operands=(_work(equation, a, b),),
            dtype=a.dtype,
            einsum=None if is_matmul else Einsum(str(equation), shapes, equation.accumulates),
            equation=equation,
            dimension=equation.a.index(equation.label) if is_matmul else None,
            transpose_w=equation.is_stored_transposed,
            transposed=tuple(dict.fromkeys(moved)),
            **attributes,
        )
        return self.chosen(request)


def _forward(xs: Sequence[Any], ws: Sequence[Any], call: EinsumCall) -> tuple[jax.Array, Any]:
    (a,), (b,) = xs, ws
    backend, request = call.choose_pass(a, b)

    def execute(a: jax.Array, b: jax.Array) -> Any:
        return backend.execute(request, (a,), (b,))[0]

    return with_auto_axes(execute, lambda: _result_spec(call.equation, a, b), a, b), xs


def _gradients(call: EinsumCall, xs: Sequence[Any], ws: Sequence[Any], dy: jax.Array) -> Any:
    """The gradients of a and b: the input gradient's loop gathers what the other's contracts."""
    (a,), (b,) = xs, ws
    of_a, of_b = call.equation.gradients
    backward = replace(call, equation=of_a, scatters=not call.scatters)
    attributes: dict[str, Any] = {"direction": "backward", "undivided": of_b}
    if call.scatters:
        backend, request = backward.choose_pass(dy, b, keep_gathered=True, **attributes)
        da, gathered = backend.execute(request, (dy,), (b,))
        return (da,), (contract(of_b, a, gathered),)
    # Without the barrier, XLA would reuse the forward's gather and keep its result until now.
    a, dy = lax.optimization_barrier((a, dy))
    left, right = (b, dy) if call.equation.accumulates else (dy, b)
    backend, request = backward.choose_pass(left, right, co_gathered=a.shape, **attributes)
    da, gathered = backend.execute(request, (left,), (right,), a)
    return (da,), (contract(of_b, gathered, dy),)


einsum_op = op_of(_forward, _gradients)


def _result_spec(equation: Equation, a: jax.Array, b: jax.Array) -> PartitionSpec:
    """The explicit axes that shard the result: those of each label, in a or else in b."""
    axes = dict(zip(equation.b, entries(b), strict=True))
    axes |= {k: v for k, v in zip(equation.a, entries(a), strict=True) if v or k not in axes}
    return spec_of([axes[label] for label in equation.y])


def _work(
    equation: Equation, a: jax.Array, b: jax.Array
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Shapes of x [..., K] and w [K, N], a matmul with as much work and communication.

    For an equation that is a matmul, it is that matmul. If the label is contracted, chunks are
    slices of the contraction, which is counted as rows.
    """
    rows, contracted = [], 1
    for label, size in zip(equation.a, a.shape, strict=True):
        if (label in equation.y) == (equation.label in equation.y):
            rows.append(size)
        else:
            contracted *= size
    columns = math.prod(
        size for label, size in zip(equation.b, b.shape, strict=True) if label in equation.columns
    )
    return (*rows, contracted), (contracted, columns)


def _without_sums(array: jax.Array, labels: str, others: str) -> tuple[jax.Array, str]:
    """The diagonal along labels that occur twice, summed over labels that occur nowhere else."""
    diagonal = "".join(dict.fromkeys(labels))
    if diagonal != labels:
        array = jnp.einsum(f"{labels}->{diagonal}", array)
    own = tuple(i for i, label in enumerate(diagonal) if label not in others)
    # jnp.sum accumulates in float32; jnp.einsum does not promise it for one operand.
    array = jnp.sum(array, own) if own else array
    return array, "".join(label for label in diagonal if label in others)
