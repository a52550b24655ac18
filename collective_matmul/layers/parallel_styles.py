"""Plans: which layers of a model become collective, by patterns over their paths."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Column:
    """Spread a layer's output features over the axis and gather its input.

    Args:
      gather_dimension: the dimension of the input [..., S, K] that is sharded between layers;
        negative numbers count from the features. None: the input is whole on every device.
    """

    gather_dimension: int | None = -2


@dataclass(frozen=True)
class Row:
    """Spread a layer's input features over the axis and scatter the sum of its results.

    Args:
      scatter_dimension: the dimension of the result [..., S, N] to shard; negative numbers count
        from the features. None: the sum is whole on every device.
    """

    scatter_dimension: int | None = -2


#: Patterns as of `fnmatch` over dotted paths, where ``*`` spans dots too.
ParallelStyles = Mapping[str, Column | Row]


def check(plan: ParallelStyles) -> None:
    """Raises TypeError or ValueError unless `plan` is a mapping with at least one fitting entry."""
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
      ValueError: if there are several.
    """
    found = [pattern for pattern in plan if fnmatchcase(path, pattern)]
    if len(found) > 1:
        raise ValueError(
            f"plan: {' and '.join(map(repr, found))} both match {path!r}; narrow one of them"
        )
    return found[0] if found else None


def check_all_match(plan: ParallelStyles, paths: Collection[str], kind: str) -> None:
    """Raises ValueError if an entry matches none of the `paths`, which are of layers of `kind`."""
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
    """Raises ValueError unless `layer` is of exactly this kind, with options we can honour.

    `options` are the attributes that change what the layer computes, with the only value of each
    that leaves it ``x @ kernel + bias``.
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
