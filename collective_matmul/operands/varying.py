"""The mesh axes over which an op's operands vary, according to their types."""

from __future__ import annotations

from typing import Any

import jax

from collective_matmul._compat import tracks_varying_axes, vary_over, varying_axes


def pvary_all(axis_name: str | tuple[str, ...], operands: Any) -> Any:
    """Types all arrays as varying over an op's axes and over those that one of them varies over.

    Call this outside a custom gradient, so that JAX sums the cotangent of a replicated operand.
    """
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not names or not tracks_varying_axes(names[0]):
        return operands
    axes = frozenset(names).union(*map(varying_axes, jax.tree.leaves(operands)))
    return jax.tree.map(lambda array: vary_over(array, axes), operands)
