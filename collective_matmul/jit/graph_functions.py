"""Functions that take, change or return Flax nnx modules, as pure functions.

`jax.jit` sees an nnx module as a pytree: what a function changes in it is lost, and two references
to one module become two modules. `GraphFunction` splits modules into arrays and a static graph
definition before the call and merges them again inside, and the same in the other direction, as
`nnx.jit` does. It uses `nnx.update_context`, which keeps track of the objects on both sides.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

#: The arguments of `jax.jit` that may hold an `nnx.StateSharding`.
SHARDINGS = ("in_shardings", "out_shardings")


def check_function(fun: Any) -> None:
    """Raises TypeError for what cannot be called, before it is wrapped."""
    if not callable(fun):
        raise TypeError(f"fun={fun!r}: expected a function")


@contextlib.contextmanager
def explaining_arguments(
    call: str, fun: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Explains errors inside, where a function is traced, if it does not take its arguments.

    Args:
      call: how to pass arguments, with a place for the function's name, such as "tune({}, *args)".
      fun: the function.
      args: the arguments by position.
      kwargs: those by name.

    Raises:
      TypeError: in place of a TypeError or ValueError inside.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if (wrong := _wrong_arguments(call, fun, args, kwargs)) is None:
            raise
        raise TypeError(wrong) from error


def _wrong_arguments(
    call: str, fun: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Why a function does not take arguments; None if it does, or its signature is not known."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fun, "__name__", type(fun).__name__)
        given = f"{len(args)}, a {type(args[0]).__name__}" if len(args) == 1 else f"{len(args)}"
        given += f", and {', '.join(kwargs)} by name" if kwargs else ""
        names = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        taken = signature.replace(parameters=names, return_annotation=signature.empty)
        return (
            f"args: {given}: {error}; give the arguments of {name}{taken} one by one:"
            f" {call.format(name)}"
        )
    return None


class GraphNodesError(Exception):
    """Raised while a function is traced that has nnx objects, and so needs a `GraphFunction`."""


class StaticArguments(NamedTuple):
    """The arguments of a function that `jax.jit` does not trace."""

    positions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, fun: Callable, options: Mapping[str, Any]) -> StaticArguments:
        """The static arguments by the options of `jax.jit`, which infers names from numbers."""
        numbers, names = options.get("static_argnums"), options.get("static_argnames")
        if numbers is None and names is None:
            return cls()
        given = numbers is not None, names is not None
        numbers = _integers(() if numbers is None else numbers)
        names = (names,) if isinstance(names, str) else tuple(names or ())
        if all(given):
            return cls(numbers, names)
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (ValueError, TypeError):
            return cls(numbers, names)
        named = {i: p.name for i, p in enumerate(parameters) if p.kind is p.POSITIONAL_OR_KEYWORD}
        if names:
            return cls(tuple(i for i, name in named.items() if name in names), names)
        return cls(numbers, tuple(name for i, name in named.items() if i in numbers))

    def traced(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[int, Any], dict[str, Any]]:
        """The other arguments, by position and by name."""
        static = {i % len(args) for i in self.positions if -len(args) <= i < len(args)}
        return (
            {i: arg for i, arg in enumerate(args) if i not in static},
            {name: arg for name, arg in kwargs.items() if name not in self.names},
        )


#: All arguments are traced.
NO_STATIC_ARGUMENTS = StaticArguments()


def _integers(numbers: Any) -> tuple[int, ...]:
    try:
        return (operator.index(numbers),)
    except TypeError:
        return tuple(map(operator.index, numbers))


def holds_graph_nodes(tree: Any) -> bool:
    """Whether a pytree holds nnx objects, other than the variables of an `nnx.State`.

    In an `nnx.State`, variables are passed to pure functions by value. JAX's own mutable arrays,
    which nnx counts among graph nodes, are passed by reference by JAX itself.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:  # Nobody can have created a module.
        return False
    leaves = jax.tree.leaves(
        tree, is_leaf=lambda x: isinstance(x, nnx.State) or nnx.graphlib.is_graph_node(x)
    )
    return any(nnx.graphlib.is_graph_node(x) and not isinstance(x, jax.Ref) for x in leaves)


def holds_state_sharding(options: Mapping[str, Any]) -> bool:
    """Whether the shardings among options of `jax.jit` are those of nnx."""
    nnx = sys.modules.get("flax.nnx")
    leaves = jax.tree.leaves([options.get(name) for name in SHARDINGS])
    return nnx is not None and any(isinstance(x, nnx.StateSharding) for x in leaves)


class PureFunction:
    """A function that raises `GraphNodesError` if it is traced with nnx objects or returns some.

    `jax.jit` gets it in place of the function itself. So the question is asked when the function is
    traced, and costs nothing when it is called. It is otherwise like the function itself.

    Attributes:
      deciding: its `DecidingFunction`, if it has one.
    """

    def __init__(self, fun: Callable, static: StaticArguments):
        self._fun, self.static = weakref.ref(fun), static
        self.deciding: Any = None

    @property
    def __wrapped__(self) -> Callable:
        fun = self._fun()
        assert fun is not None, "held by whoever holds this object"
        return fun

    def __getattr__(self, name: str) -> Any:
        """The attributes of the function, which `jax.jit` reads: its name, where it is defined."""
        fun = self.__wrapped__
        while name == "__name__" and isinstance(fun, functools.partial):
            fun = fun.func
        return getattr(fun, name)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> PureFunction:
        return pure_function(copy.deepcopy(self.__wrapped__, memo), self.static)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        traced = self.static.traced(args, kwargs)
        if holds_graph_nodes(traced):
            raise GraphNodesError
        result = self.__wrapped__(*args, **kwargs)
        if holds_graph_nodes(result):
            raise GraphNodesError
        return result


_pure_functions: dict[tuple[int, StaticArguments], PureFunction] = {}


def pure_function(fun: Callable, static: StaticArguments = NO_STATIC_ARGUMENTS) -> PureFunction:
    """The `PureFunction` of a function, always the same: `jax.jit` caches programs by its identity.

    It does not keep the function alive.
    """
    key = id(fun), static
    if key not in _pure_functions:
        _pure_functions[key] = PureFunction(fun, static)
        weakref.finalize(fun, _pure_functions.pop, key, None).atexit = False
    return _pure_functions[key]


class GraphFunction:
    """A function of nnx objects as a function `pure` of arrays and static graph definitions.

    Args:
      fun: the function.
      static: the arguments that are not to be split.
      in_shardings: as for `nnx.jit`: shardings or `nnx.StateSharding`, a prefix of the traced
        arguments; or None.
      out_shardings: the same for the result.
    """

    def __init__(
        self,
        fun: Callable,
        static: StaticArguments = NO_STATIC_ARGUMENTS,
        in_shardings: Any = None,
        out_shardings: Any = None,
    ):
        self._fun = fun
        # With the signature of the function, from which `jax.jit` infers names.
        self.pure = functools.update_wrapper(
            lambda *args, **kwargs: self._call_pure(*args, **kwargs), fun, updated=()
        )
        self.static = static
        self._in_shardings = tuple(in_shardings) if isinstance(in_shardings, list) else in_shardings
        self._out_shardings = out_shardings

    def with_static(self, static: StaticArguments) -> GraphFunction:
        """This function with other static arguments."""
        return GraphFunction(self._fun, static, self._in_shardings, self._out_shardings)

    @property
    def shardings(self) -> dict[str, Any]:
        """The shardings of `pure`, as arguments of `jax.jit`."""
        if self._in_shardings is None and self._out_shardings is None:
            return {}
        ins, outs = map(_state_prefixes, (self._in_shardings, self._out_shardings))
        return {"in_shardings": ins, "out_shardings": (ins, None, outs)}

    def call(self, pure: Callable, args: Any, kwargs: Any) -> Any:
        """Calls a transformed `pure`; updates nnx objects among the arguments."""
        from flax import nnx

        with nnx.update_context(self):
            args, kwargs = self._split(args, kwargs)
            *_, result = nnx.from_tree(
                pure(*args, **kwargs), merge_fn=_merge, is_inner=False, ctxtag=self
            )
        return result

    def use_split(self, use: Callable, args: Any, kwargs: Any) -> Any:
        """Calls a function that only traces `pure`, with its arguments. Nothing is updated."""
        from flax import nnx

        with nnx.update_context(self):
            args, kwargs = self._split(args, kwargs)
            return use(*args, **kwargs)

    def _split(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        from flax import nnx

        traced, names = self.static.traced(args, kwargs)
        prefix = None if self._in_shardings is None else (self._in_shardings, None)
        states, named = nnx.to_tree(
            (tuple(traced.values()), names),
            prefix=prefix,
            split_fn=_split,
            check_aliasing=prefix is not None,
            ctxtag=self,
        )
        return _replaced(args, dict(zip(traced, states, strict=True))), {**kwargs, **named}

    def _call_pure(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Takes split arguments; returns the nnx objects among them and the result, split again."""
        from flax import nnx

        split, split_names = self.static.traced(args, kwargs)
        traced, names = nnx.from_tree(
            (tuple(split.values()), split_names), merge_fn=_merge, is_inner=True, ctxtag=self
        )
        merged = _replaced(args, dict(zip(split, traced, strict=True)))
        result = self._fun(*merged, **{**kwargs, **names})
        return nnx.to_tree(
            (*_only_graph_nodes((traced, names)), result),
            prefix=(self._in_shardings, None, self._out_shardings),
            split_fn=_split,
            ctxtag=self,
        )


class GraphJitted:
    """A `GraphFunction` compiled by `jax.jit`, with the methods of a jitted function.

    Args:
      graph: the function.
      pure: the function to compile: its `pure`, or a function that calls it.
      **kwargs: arguments of `jax.jit`, except shardings.
    """

    def __init__(self, graph: GraphFunction, pure: Callable, **kwargs: Any):
        self._graph = graph
        self._jitted: Any = jax.jit(pure, **graph.shardings, **kwargs)
        # Compiled programs are called without static arguments.
        self._without_static = graph.with_static(NO_STATIC_ARGUMENTS)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function."""
        return self._graph.call(self._jitted, args, kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result; its modules hold shapes."""
        from flax import nnx

        # A copy of the arguments is updated.
        traced, names = self._graph.static.traced(args, kwargs)
        copies, names = nnx.clone((traced, names))
        return self._graph.call(
            self._jitted.eval_shape, _replaced(args, copies), {**kwargs, **names}
        )

    def trace(self, *args: Any, **kwargs: Any) -> GraphStage:
        """Traces the function; the result has the methods of `jax.stages.Traced`."""
        return self._stage(self._jitted.trace, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> GraphStage:
        """Lowers the function; the result has the methods of `jax.stages.Lowered`."""
        return self._stage(self._jitted.lower, args, kwargs)

    def _stage(self, use: Callable, args: Any, kwargs: Any) -> GraphStage:
        return GraphStage(self._graph.use_split(use, args, kwargs), self._without_static)

    def clear_cache(self) -> None:
        """Drops the compiled programs."""
        self._jitted.clear_cache()


class GraphStage:
    """One of `jax.stages` of a function of nnx objects, with its methods and attributes.

    `lower` and `compile` lead to the next stage. A compiled stage is called with nnx objects, and
    updates them.
    """

    def __init__(self, stage: Any, graph: GraphFunction):
        self._stage, self._graph = stage, graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def lower(self, *args: Any, **kwargs: Any) -> GraphStage:
        """Lowers what was traced, as `jax.stages.Traced` does."""
        return GraphStage(self._stage.lower(*args, **kwargs), self._graph)

    def compile(self, *args: Any, **kwargs: Any) -> GraphStage:
        """Compiles what was lowered, as `jax.stages.Lowered` does."""
        return GraphStage(self._stage.compile(*args, **kwargs), self._graph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs what was compiled, without the static arguments, as `jax.stages.Compiled` does."""
        return self._graph.call(self._stage, args, kwargs)


def _replaced(args: Sequence[Any], values: Mapping[int, Any]) -> tuple[Any, ...]:
    return tuple(values.get(i, arg) for i, arg in enumerate(args))


def _split(context: Any, path: Any, prefix: Any, node: Any) -> Any:
    """An nnx object as `nnx.NodeStates`, by the filters of an `nnx.StateSharding` if it has one."""
    from flax import nnx

    del path
    if isinstance(prefix, nnx.StateSharding):
        graph, *states = context.flatten(node, *prefix.filters)
        return nnx.NodeStates.from_split(graph, *states, metadata=prefix)
    return nnx.NodeStates.from_split(*context.flatten(node, with_paths=False))


def _merge(context: Any, path: Any, prefix: Any, split: Any) -> Any:
    del path, prefix
    return context.unflatten(split.graphdef, *split.states)


def _only_graph_nodes(tree: Any) -> Any:
    """None in place of all other leaves."""
    from flax import nnx

    is_node = nnx.graphlib.is_graph_node
    return jax.tree.map(lambda x: x if is_node(x) else None, tree, is_leaf=is_node)


def _state_prefixes(shardings: Any) -> Any:
    """Shardings for the states into which `_split` cuts objects."""
    from flax import nnx

    def prefix(entry: Any) -> Any:
        if isinstance(entry, nnx.StateSharding):
            return nnx.NodeStates.from_prefixes(entry.shardings, metadata=entry)
        return entry

    return jax.tree.map(prefix, shardings, is_leaf=lambda x: x is None)
