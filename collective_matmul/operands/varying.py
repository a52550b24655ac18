"""The mesh axes over which an op's operands vary, according to their types."""

from __future__ import annotations

from typing import Any

import jax

from collective_matmul._compat import tracks_varying_axes, vary_over, varying_axes


def pvary_all(axis_name: str, operands: Any) -> Any:
    """Types all arrays as varying over the axis and over every axis that one of them varies over.

    Call this outside a custom gradient, so that JAX sums the cotangent of a replicated operand.
    """
    axes = frozenset({axis_name}).union(*map(varying_axes, jax.tree.leaves(operands)))
    if not tracks_varying_axes(axis_name):
        return operands
    return jax.tree.map(lambda array: vary_over(array, axes), operands)
