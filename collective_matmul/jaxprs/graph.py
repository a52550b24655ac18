"""The dataflow of one jaxpr."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, Var

Shape = tuple[int, ...]
#: An operand of an equation: a variable or a literal.
Atom = Any


class Graph:
    """Producers and users of the variables of a jaxpr."""

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        self.equations: list[JaxprEqn] = list(jaxpr.eqns)
        self.results = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
        self._producer: dict[Var, int] = {}
        self._users: dict[Var, list[int]] = defaultdict(list)
        for index, equation in enumerate(self.equations):
            for var in equation.outvars:
                self._producer[var] = index
            for atom in equation.invars:
                if isinstance(atom, Literal):
                    continue
                users = self._users[atom]
                if not users or users[-1] != index:
                    users.append(index)

    def producer(self, atom: Atom) -> int | None:
        """Index of the equation that makes `atom`; None for an argument, constant or literal."""
        return None if isinstance(atom, Literal) else self._producer.get(atom)

    def users(self, atom: Atom) -> list[int]:
        """Indices of the equations that read `atom`, each once, in order; none for a literal."""
        return [] if isinstance(atom, Literal) else self._users.get(atom, [])

    def only_user(self, atom: Atom) -> int | None:
        """Index of the one equation that reads `atom`; None if anything else needs it."""
        users = self.users(atom)
        return users[0] if len(users) == 1 and atom not in self.results else None

    def unneeded(
        self, candidates: Iterable[int], gone: Iterable[int], read: Collection[Var] = ()
    ) -> set[int]:
        """Finds equations, of one result each, that nothing needs once others are gone.

        Args:
          candidates: indices of equations.
          gone: indices of equations that are not executed.
          read: variables that are needed in any case.
        """
        without, found = set(gone), set[int]()
        for index in sorted(set(candidates), reverse=True):
            (var,) = self.equations[index].outvars
            used = var in self.results or var in read
            if not used and all(i in found or i in without for i in self.users(var)):
                found.add(index)
        return found

    def constant(self, atom: Atom) -> Any | None:
        """The value of a scalar constant, or of an array broadcast from one; None otherwise."""
        if isinstance(atom, Literal):
            return atom.val if jnp.ndim(atom.val) == 0 else None
        index = self.producer(atom)
        if index is None:
            return None
        equation = self.equations[index]
        if equation.primitive.name == "convert_element_type":
            value = self.constant(equation.invars[0])
            return None if value is None else jnp.dtype(equation.params["new_dtype"]).type(value)
        if equation.primitive.name in ("pvary", "broadcast_in_dim"):
            return self.constant(equation.invars[0])
        return None


def type_of(atom: Atom) -> Any:
    """The abstract value: shape and dtype."""
    return atom.aval


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The atoms that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def is_pure(equation: JaxprEqn) -> bool:
    """Whether the equation may be moved: it has no effect other than communication."""
    return all(map(_is_over_axes, equation.effects))


def communicates(equation: JaxprEqn) -> bool:
    """Whether devices exchange arrays in the equation."""
    return any(map(_is_over_axes, equation.effects))


def _is_over_axes(effect: Any) -> bool:
    """Whether an effect is that of an equation over mesh axes, which orders nothing."""
    return type(effect).__name__ == "NamedAxisEffect"


def renamed(atoms: Iterable[Atom], names: Mapping[Var, Atom]) -> list[Atom]:
    """The atoms, with variables replaced by others, which may have been replaced themselves."""
    result = []
    for atom in atoms:
        while not isinstance(atom, Literal) and atom in names:
            atom = names[atom]
        result.append(atom)
    return result


def copied(
    jaxpr: Jaxpr, arguments: Sequence[Atom], source: Callable[[JaxprEqn], Any]
) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations of a jaxpr with other arguments and new variables, and its results.

    Args:
      jaxpr: the jaxpr.
      arguments: what its arguments become.
      source: returns the source information of the copy of an equation.
    """
    names: dict[Var, Atom] = dict(zip(jaxpr.invars, arguments, strict=True))
    equations = []
    for equation in jaxpr.eqns:
        invars = renamed(equation.invars, names)
        outvars = [v if isinstance(v, DropVar) else Var(type_of(v)) for v in equation.outvars]
        names.update(zip(equation.outvars, outvars, strict=True))
        info = source(equation)
        equations.append(equation.replace(invars=invars, outvars=outvars, source_info=info))
    return equations, renamed(jaxpr.outvars, names)
