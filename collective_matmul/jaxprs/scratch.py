"""Memory that kernels of other libraries allocate while they run, outside of XLA's plan."""

from __future__ import annotations

from collections.abc import Callable

from jax.extend.core import Jaxpr, JaxprEqn

from collective_matmul.jaxprs.walks import distinct_equations

_BYTES_OF: dict[str, Callable[[JaxprEqn], int]] = {}


def declare_scratch(target: str, bytes_of: Callable[[JaxprEqn], int]) -> None:
    """Declares that a function called through XLA's foreign function interface allocates memory.

    Args:
      target: the name under which the function is registered.
      bytes_of: the bytes that a call allocates, by its equation.
    """
    _BYTES_OF[target] = bytes_of


def scratch_bytes(jaxpr: Jaxpr) -> int:
    """The most bytes that an equation of a program allocates beside XLA's plan, at any depth."""

    def allocated(equation: JaxprEqn) -> int:
        bytes_of = _BYTES_OF.get(equation.params.get("target_name", ""))
        return 0 if bytes_of is None else bytes_of(equation)

    return max(map(allocated, distinct_equations(jaxpr)), default=0)
