"""Equations in words, and the lines of the program that they come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jax.extend.core import JaxprEqn

from collective_matmul.source_location import SourceLocation, is_library

#: Names of primitives that say little, in words.
_WORDS = {
    "scan": "a loop (scan)",
    "while": "a loop (while_loop)",
    "cond": "a branch (cond)",
    "custom_jvp_call": "a function with gradients of its own (custom_jvp)",
    "custom_vjp_call": "a function with gradients of its own (custom_vjp)",
    "add_any": "a sum of gradients",
    "select_n": "jnp.where (select_n)",
    "convert_element_type": "a cast (convert_element_type)",
    "ragged_dot_general": "lax.ragged_dot",
}


def described(equation: JaxprEqn, calls: Sequence[JaxprEqn] = ()) -> str:
    """An equation as its author knows it, with its line: "relu() at model.py:12".

    Args:
      equation: the equation.
      calls: what executes it, the outermost first. Inside a function that JAX jits for itself, such
        as `jnp.take`, the line is that of the innermost call that is known.
    """
    name, parameters = equation.primitive.name, equation.params
    if name in ("jit", "pjit"):
        name = f"{str(parameters['name']).strip('_')}()"
    places = map(place_of, (equation, *reversed(calls)))
    return _WORDS.get(name, name) + next(filter(None, places), "")


def place_of(equation: JaxprEqn) -> str:
    """Text to follow what an equation is, such as " at model.py:12"; "" if it is not known."""
    source = source_of(equation)
    return "" if source is None else f" at {Path(source.file).name}:{source.line}"


def source_of(equation: JaxprEqn) -> SourceLocation | None:
    """The line of the user's program that an equation comes from."""
    for frame in frames_of(equation):
        if not is_library(frame.file_name):
            return SourceLocation(frame.file_name, frame.line_num, frame.function_name)
    return None


def frames_of(equation: JaxprEqn) -> Sequence:
    """The frames of the trace in which the equation was made, the innermost first."""
    traceback = equation.source_info.traceback
    return () if traceback is None else traceback.frames
