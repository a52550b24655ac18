"""Which recipe of 8 bits a site gets, by the name scopes that it is in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from collective_matmul.jaxprs.bodies import opened
from collective_matmul.jaxprs.walks import distinct_equations
from collective_matmul.ops.matmul import checks
from collective_matmul.ops.matmul.checks import RecipeName

#: What `overlap` takes: one recipe for all sites, or those of scopes.
Fp8 = RecipeName | Mapping[str, RecipeName | None] | None

#: Among the names of a program: there are others, which are not known. No scope is called so.
_UNKNOWN = "()"


@dataclass(frozen=True)
class ScopedRecipes:
    """The recipes of the sites of a jaxpr. Hashable.

    Attributes:
      otherwise: of sites that are in none of the scopes inside the jaxpr.
      scopes: names with their recipes.
    """

    otherwise: RecipeName | None = None
    scopes: tuple[tuple[str, RecipeName | None], ...] = ()

    def of(self, equation: JaxprEqn) -> RecipeName | None:
        """The recipe of the innermost scope that has one, of those of an equation."""
        return self._innermost(_names(equation))

    def within(self, equation: JaxprEqn) -> ScopedRecipes:
        """The recipes of the jaxprs that an equation executes, whose names begin again."""
        names = [*_names(equation), *_called(equation)]
        return replace(self, otherwise=self._innermost(names))

    def _innermost(self, names: list[str]) -> RecipeName | None:
        recipes = dict(self.scopes)
        for name in reversed(names):
            if name in recipes:
                return recipes[name]
        return self.otherwise

    def check(self, jaxpr: Jaxpr) -> None:
        """Raises ValueError for a scope that a program does not have.

        What the gradients of a `jax.custom_vjp` are made of is not known before they are traced.
        """
        if not self.scopes:
            return
        found = set(_all_names(jaxpr))
        if _UNKNOWN in found:
            return
        for name, _ in self.scopes:
            if name not in found:
                raise ValueError(
                    f"fp8={dict(self.scopes)}: the program has no scope {name!r}; expected names"
                    f" of jax.named_scope or of functions under jax.jit, as"
                    f" {', '.join(map(repr, sorted(found))) or 'it has none'}"
                )


def scoped_recipes(fp8: Fp8) -> ScopedRecipes:
    """The argument `fp8` of `overlap`, checked.

    Raises:
      ValueError: for an unknown recipe, or a key that is no name.
    """
    if not isinstance(fp8, Mapping):
        return ScopedRecipes(checks.fp8(fp8))
    for name in fp8:
        if not isinstance(name, str) or not re.fullmatch(r"[^/()]+", name):
            raise ValueError(
                f"fp8={dict(fp8)}: {name!r} is not one name; expected that of a jax.named_scope,"
                " without / and parentheses"
            )
    return ScopedRecipes(scopes=tuple((name, checks.fp8(value)) for name, value in fp8.items()))


def _names(equation: JaxprEqn) -> list[str]:
    """The names around an equation, the outermost first, without JAX's transformations of them."""
    return re.findall(r"[^/()]+(?![^/()]*\()", str(equation.source_info.name_stack))


def _called(equation: JaxprEqn) -> list[str]:
    """The name of the function that an equation calls, if it calls one under `jax.jit`."""
    return [equation.params["name"]] if equation.primitive.name in ("jit", "pjit") else []


def _all_names(jaxpr: Any) -> Iterator[str]:
    for equation in distinct_equations(opened(jaxpr)):
        yield from _names(equation)
        yield from _called(equation)
        if equation.primitive.name.startswith("custom_vjp"):
            yield _UNKNOWN
