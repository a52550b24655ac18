"""Which layer of a model gets which parallel style, by patterns over the layers' paths."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from collective_matmul.layers.parallel_styles import Column, ParallelStyles, Row


def check(plan: ParallelStyles) -> None:
    """Checks the type and the entries of a plan.

    Raises:
      TypeError: if it is not a mapping from patterns to styles.
      ValueError: if it is empty.
    """
    if not isinstance(plan, Mapping):
        raise TypeError(
            f"plan={plan!r}: expected a dictionary such as {{'mlp.up': Column(), 'mlp.down':"
            " Row()}"
        )
    if not plan:
        raise ValueError("plan={}: expected at least one entry, such as {'mlp.up': Column()}")
    for pattern, entry in plan.items():
        if not isinstance(pattern, str) or not isinstance(entry, Column | Row):
            raise TypeError(
                f"plan[{pattern!r}]={entry!r}: expected a path pattern, a string, and Column() or"
                " Row()"
            )


def matches(plan: ParallelStyles, path: str) -> str | None:
    """The pattern that matches `path`, or None.

    Raises:
      ValueError: if several match.
    """
    found = [pattern for pattern in plan if fnmatchcase(path, pattern)]
    if len(found) > 1:
        raise ValueError(
            f"plan: {' and '.join(map(repr, found))} both match {path!r}; narrow one of them"
        )
    return found[0] if found else None


def check_all_match(plan: ParallelStyles, paths: Collection[str], kind: str) -> None:
    """Checks that every pattern matches one of the `paths` of layers of `kind`.

    Raises:
      ValueError: if one does not.
    """
    for pattern in plan:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise ValueError(
                f"plan[{pattern!r}]: matches no layer; the {kind} layers here are"
                f" {', '.join(sorted(paths)) or '(none)'}"
            )


def check_layer(
    plan: ParallelStyles,
    pattern: str,
    path: str,
    layer: Any,
    kind: type,
    options: Mapping[str, Any],
) -> None:
    """Checks that a matched layer can be replaced.

    Args:
      plan: the plan.
      pattern: the pattern that matches the layer.
      path: the path of the layer.
      layer: the layer.
      kind: the exact class that it must have.
      options: attributes that change what the layer computes, each with the only supported value.

    Raises:
      ValueError: if it cannot be replaced.
    """
    where = f"plan[{pattern!r}]: {path!r}"
    if type(layer) is not kind:
        replacement = type(plan[pattern]).__name__ + "ParallelLinear"
        raise ValueError(
            f"{where} is a {type(layer).__name__}, and only {kind.__name__} layers can be replaced;"
            f" narrow the pattern, or construct a {replacement}, which takes several feature"
            " dimensions, in its place"
        )
    for name, plain in options.items():
        value = getattr(layer, name)
        if value is not plain:
            advice = f"construct it with {name}={getattr(plain, '__name__', plain)}"
            if name == "precision":
                advice += " and set jax.default_matmul_precision around the step"
            raise ValueError(
                f"{where} has {name}={value!r}, which a collective matmul cannot honour; {advice},"
                " or leave it out of the plan"
            )
