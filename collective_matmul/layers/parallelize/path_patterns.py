"""Parallel styles for the layers of a model, by patterns over the layers' paths."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from collective_matmul.layers.parallelize.parallel_styles import (
    Heads,
    ParallelStyle,
    ParallelStyles,
    Shared,
)


def check(plan: ParallelStyles) -> None:
    """Checks the type and the entries of a plan.

    Raises:
      TypeError: if it is not a mapping from patterns to styles.
      ValueError: if it is empty.
    """
    if not isinstance(plan, Mapping):
        raise TypeError(
            f"plan={_in_a_line(plan)}: expected a dictionary such as {{'mlp.up': Column(),"
            " 'mlp.down': Row()}"
        )
    if not plan:
        raise ValueError("plan={}: expected at least one entry, such as {'mlp.up': Column()}")
    for pattern, entry in plan.items():
        if not isinstance(pattern, str) or not isinstance(entry, ParallelStyle):
            raise TypeError(
                f"plan[{_in_a_line(pattern)}]={_in_a_line(entry)}: expected a path pattern, a"
                " string, and Column(), Row(), Heads() or Shared()"
            )


def _in_a_line(value: object) -> str:
    """The value, which may be a whole model, in few words."""
    return textwrap.shorten(repr(value), 80, placeholder=" …")


def matches(plan: ParallelStyles, path: str) -> str | None:
    """The pattern that gives the module at `path` a style, or None.

    Raises:
      ValueError: if several match.
    """
    return _only(plan, path, lambda style: not isinstance(style, Shared))


def matches_sharing(plan: ParallelStyles, path: str, names: Collection[str]) -> str | None:
    """The pattern by which layers of the module at `path` share a gather, or None.

    Args:
      plan: the plan.
      path: the path of the module.
      names: attributes of it; all layers that share a gather are among them.

    Raises:
      ValueError: if several match.
    """
    return _only(plan, path, lambda style: isinstance(style, Shared) and {*style.names} <= {*names})


def sharing_layer(plan: ParallelStyles, path: str) -> str | None:
    """The pattern by which the layer at `path` shares a gather with others of its module, or None.

    Raises:
      ValueError: if several match.
    """
    above, _, name = path.rpartition(".")
    return _only(plan, above, lambda style: isinstance(style, Shared) and name in style.names)


def _only(plan: ParallelStyles, path: str, meant: Callable[[ParallelStyle], bool]) -> str | None:
    found = [pattern for pattern in plan if fnmatchcase(path, pattern) and meant(plan[pattern])]
    if len(found) > 1:
        raise ValueError(
            f"plan: {' and '.join(map(repr, found))} both match {path!r}; narrow one of them"
        )
    return found[0] if found else None


def check_all_match(plan: ParallelStyles, paths: Collection[str], library: str) -> None:
    """Checks that every pattern matches one of the `paths` of layers.

    Raises:
      ValueError: if one does not.
    """
    for pattern, style in plan.items():
        candidates, what = paths, "layer"
        if isinstance(style, Shared):
            above = {path.rpartition(".")[0] for path in paths}
            candidates = [module for module in above if {*style.paths(module)} <= {*paths}]
            what = f"module with layers {', '.join(style.names)}"
        if not any(fnmatchcase(path, pattern) for path in candidates):
            raise ValueError(f"plan[{pattern!r}]: matches no {what}; {_layers_of(paths, library)}")


def _layers_of(paths: Collection[str], library: str) -> str:
    named = ", ".join(sorted(filter(None, paths)))
    if named:
        return f"the {library} layers here are {named}"
    if paths:
        return f"the model itself is the only {library} layer here, and its path is ''"
    return f"the model has no {library} layers that Column(), Row() or Heads() take"


def check_layer(
    plan: ParallelStyles,
    pattern: str,
    path: str,
    layer: Any,
    kinds: Mapping[type, Mapping[str, Any]],
    library: str,
) -> None:
    """Checks that a matched module can be executed collectively.

    Args:
      plan: the plan.
      pattern: the pattern that matches the module.
      path: the path of the module.
      layer: the module.
      kinds: the classes that the style takes. Each has the attributes that change what the layer
        computes, with the only supported value.
      library: "nnx" or "linen".

    Raises:
      ValueError: if it cannot.
    """
    where = f"plan[{pattern!r}]: {path!r}"
    kind = class_that_calls(type(layer))
    if kind not in kinds:
        raise ValueError(
            f"{where} is a {type(layer).__name__}, defined in {type(layer).__module__};"
            f" {type(plan[pattern]).__name__}() takes {_listed(kinds, library)}"
            f"{_advice(layer, kinds, plan[pattern])}"
        )
    for name, plain in kinds[kind].items():
        value = getattr(layer, name)
        if value is not plain and value != plain:
            advice = f"construct it with {name}={getattr(plain, '__name__', plain)}"
            if name == "precision":
                advice += " and set jax.default_matmul_precision around the step"
            raise ValueError(
                f"{where} has {name}={value!r}, which a collective matmul cannot honour; {advice},"
                " or leave it out of the plan"
            )


def check_trailing(pattern: str, path: str, axes: tuple[int, ...], ndim: int | None = None) -> None:
    """Checks that a layer contracts the last dimensions of its input.

    Args:
      pattern: the pattern that matches the layer.
      path: the path of the layer.
      axes: the dimensions that it contracts.
      ndim: the number of dimensions of its input, or None if it is not known.

    Raises:
      ValueError: if it contracts others.
    """
    count = len(axes)
    from_the_back = tuple(a - ndim if ndim and a >= 0 else a for a in axes)
    if sorted(from_the_back) != list(range(-count, 0)):
        expected = -1 if count == 1 else tuple(range(-count, 0))
        raise ValueError(
            f"plan[{pattern!r}]: {path!r} has axis={axes}; a collective matmul contracts the last"
            f" dimensions: construct it with axis={expected}, or leave it out of the plan"
        )


def class_that_calls(kind: type) -> type:
    """The class of which `kind` inherits `__call__`, or itself."""
    return next(base for base in kind.__mro__ if "__call__" in vars(base) or base is object)


def _listed(kinds: Collection[type], library: str) -> str:
    """Classes in words, such as "linen.Dense and linen.DenseGeneral"."""
    *others, last = (f"{library}.{kind.__name__}" for kind in kinds)
    return f"{', '.join(others)} and {last}" if others else last


def _advice(layer: Any, kinds: Collection[type], style: ParallelStyle) -> str:
    """How an error about a module of another class goes on."""
    kind = type(layer)
    linear_layers = "Column() and Row() take linear layers"
    if issubclass(kind, tuple(kinds)):
        advice = ", and subclasses that inherit its __call__; this one has its own. "
        inside = f"{linear_layers.replace('linear', 'the linear')} inside it"
        return advice + (inside if isinstance(style, Heads) else "Leave it out of the plan")
    if kind.__module__.startswith("collective_matmul.layers."):
        own = "Layers of collective_matmul are parallel by their own arguments, such as axis_name"
        return f". {own}: leave it out of the plan"
    if _stacks_matrices(layer):
        return (
            ". Its parameters are stacked matrices, like those of experts. To divide experts over"
            " devices, build a collective_matmul.layers.ExpertMLP in its place, and leave it out of"
            " the plan"
        )
    if isinstance(style, Heads):
        return f". {linear_layers}"
    if kind.__name__.endswith("Attention"):
        return ". Heads() takes Flax's attention modules"
    return ". Narrow the pattern so that it matches only such layers"


def _stacks_matrices(layer: Any) -> bool:
    """Whether several parameters of a module have a matrix for each of as many experts."""
    shapes = (getattr(value, "shape", ()) for value in vars(layer).values())
    stacks = [shape[0] for shape in shapes if isinstance(shape, tuple) and len(shape) == 3]
    return len(stacks) > len(set(stacks))
