"""The jaxprs that an equation executes: how often, and how their values and its own are connected.

In JAX's parameters, each primitive says this in its own way. Everything else reads `Body`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from collective_matmul._compat import scan_counts

_T = TypeVar("_T")

#: Calls, which execute one jaxpr, once, and do nothing else.
CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2"}
    | {"custom_vjp_call", "custom_jvp_call"}
)
#: Calls, loops and branches. They depend on nothing but what their jaxprs read and return.
CONTROL_FLOW = CALLS | {"scan", "while", "cond"}
#: Others that execute one jaxpr with their operands. A shard_map executes it with parts of them.
_LIKE_CALLS = CALLS | {"shard_map", "custom_vmap_call"}
#: All that executes the equations of its jaxprs as they are. What else has jaxprs is a kernel.
PROGRAMS = CONTROL_FLOW | _LIKE_CALLS


class Body(NamedTuple):
    """A jaxpr that an equation executes.

    Attributes:
      parameter: the name of the equation's parameter that holds it, alone or in a tuple.
      value: the jaxpr as the parameter holds it, closed or not.
      operands: for each argument, the index of the equation's operand that it is, or that it is a
        slice of, or that it is in the first step of a loop; None if that is not known.
      results: for each result, the index of the equation's result that it becomes, or that it is a
        slice of. Empty where `operands` is None, and for the condition of a loop.
      carried: what a step passes on to the next: pairs of a result and the operand that it is
        instead of.
      sliced: the index of the first argument that is a slice, along the first dimension.
      stacked: the index of the first result that is a slice.
      steps: how often the equation executes it; None where that is computed. 1 for each branch.
    """

    parameter: str
    value: Any
    operands: Sequence[int] | None = None
    results: Sequence[int] = ()
    carried: Sequence[tuple[int, int]] = ()
    sliced: int | None = None
    stacked: int | None = None
    steps: int | None = 1

    @property
    def jaxpr(self) -> Jaxpr:
        """The jaxpr, not closed."""
        return opened(self.value)

    def arguments(self, operands: Sequence[_T]) -> list[_T]:
        """Operands of the equation that the arguments are, or are slices of."""
        assert self.operands is not None
        return [operands[index] for index in self.operands]

    @property
    def runs(self) -> int:
        """How often it counts as executed: `steps`, or once where these are computed."""
        return 1 if self.steps is None else self.steps


def bodies_of(equation: JaxprEqn) -> list[Body]:
    """The jaxprs that an equation executes: of a loop, its condition and then its body."""
    if not executes_jaxprs(equation):
        return []
    name = equation.primitive.name
    if name == "while":
        return _of_while(equation)
    if name == "scan":
        return [_of_scan(equation)]
    held = [
        (parameter, each)
        for parameter, value in equation.params.items()
        for each in (value if isinstance(value, tuple) else (value,))
        if _is_jaxpr(each)
    ]
    operands = range(len(equation.invars))[name == "cond" :]
    results = range(len(equation.outvars))
    is_known = name == "cond" or (name in _LIKE_CALLS and len(held) == 1)
    if is_known and all(len(opened(each).invars) == len(operands) for _, each in held):
        return [Body(parameter, each, operands, results) for parameter, each in held]
    return [Body(parameter, each) for parameter, each in held]


def _of_scan(equation: JaxprEqn) -> Body:
    params = equation.params
    consts, carries = scan_counts(params)
    return Body(
        parameter="jaxpr",
        value=params["jaxpr"],
        operands=range(len(equation.invars)),
        results=range(len(equation.outvars)),
        carried=[(i, consts + i) for i in range(carries)],
        sliced=consts + carries,
        stacked=carries,
        steps=params["length"],
    )


def _of_while(equation: JaxprEqn) -> list[Body]:
    params, every = equation.params, range(len(equation.invars))
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    carried = list(enumerate(every[second:]))
    results = range(len(carried))
    return [
        Body("cond_jaxpr", condition, [*every[:first], *every[second:]], steps=None),
        Body("body_jaxpr", body, every[first:], results, carried, steps=None),
    ]


def jaxprs_of(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs that an equation executes, if only they are of interest."""
    return jaxprs_in_params(equation.params)


def called(equation: JaxprEqn) -> Any:
    """The only jaxpr that an equation executes, closed or not, as its parameter holds it."""
    (body,) = bodies_of(equation)
    return body.value


def with_jaxprs(equation: JaxprEqn, jaxprs: Sequence[Any]) -> JaxprEqn:
    """The equation, executing others in place of its `bodies_of`; the same object if they are."""
    bodies = bodies_of(equation)
    if all(body.value is new for body, new in zip(bodies, jaxprs, strict=True)):
        return equation
    made: dict[str, list[Any]] = {}
    for body, new in zip(bodies, jaxprs, strict=True):
        made.setdefault(body.parameter, []).append(new)
    params = dict(equation.params)
    for name, new in made.items():
        params[name] = tuple(new) if isinstance(params[name], tuple) else new[0]
    return equation.replace(params=params)


def executes_jaxprs(equation: JaxprEqn) -> bool:
    """Whether the equation executes jaxprs. Plain loops, as programs have many equations."""
    for value in equation.params.values():
        if isinstance(value, tuple):
            for inner in value:
                if _is_jaxpr(inner):
                    return True
        elif _is_jaxpr(value):
            return True
    return False


def opened(program: Any) -> Jaxpr:
    """The jaxpr of a closed one, or one that is not closed."""
    return getattr(program, "jaxpr", program)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(opened(value), Jaxpr)
