"""`overlap_jit`: `jax.jit`, or `nnx.jit`, with the compiler options that rings need on GPUs."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import jax

from collective_matmul._compat import (
    ShardingTypeError,
    calls_run_programs,
    differentiates,
    knowing_devices_of,
)
from collective_matmul.agreement import check_same, check_same_order, is_alone
from collective_matmul.dispatch.recording import Decision, record, record_decisions
from collective_matmul.jit.communication_order import communication_order
from collective_matmul.jit.deciding_function import WrongVariantError, deciding, deciding_function
from collective_matmul.jit.graph_functions import (
    SHARDINGS,
    GraphFunction,
    GraphJitted,
    GraphNodesError,
    StaticArguments,
    check_function,
    holds_graph_nodes,
    holds_state_sharding,
    pure_function,
)
from collective_matmul.jit.peer_decision import PeerKernelDecision, decide_once, warn_withheld
from collective_matmul.jit.xla_options import (
    OVERLAP_OPTIONS,
    PEER_KERNEL_OPTIONS,
    PERMUTE_MODE,
    peer_kernel_options,
)
from collective_matmul.log import warn_once
from collective_matmul.peer_access import (
    UNDECIDED,
    Disallowed,
    no_peer_access_reason,
    peer_kernels_allowed,
)
from collective_matmul.source_location import warn_deprecated

#: The values of the argument `peer_kernels`.
PeerKernels = bool | Literal["auto"]


@overload
def overlap_jit(
    fun: Callable,
    *,
    peer_kernels: PeerKernels = UNDECIDED,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> OverlapJit: ...
@overload
def overlap_jit(
    *,
    peer_kernels: PeerKernels = UNDECIDED,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[[Callable], OverlapJit]: ...
def overlap_jit(
    fun: Callable | None = None,
    *,
    peer_kernels: PeerKernels = UNDECIDED,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """`jax.jit` with the compiler options that rings need on GPUs; harmless on other platforms.

    Compiler options apply to a whole program, so use it for the outermost function only, and
    differentiate and overlap inside it: ``overlap_jit(jax.grad(overlap(loss)))``. A call inside a
    function that JAX traces is refused. So is ``jax.grad(overlap_jit(loss))`` before jax 0.12;
    since 0.12 it compiles two programs, with a warning, and is refused only inside `jax.jit`.

    Flax nnx modules, optimizers, metrics, random bits and other nnx objects, anywhere among the
    arguments, are treated as by `nnx.jit`: what the function changes in them is changed after the
    call, and shared references stay shared. It may also create and return modules. An `nnx.State`
    is passed by value, as by `jax.jit`. A function without such arguments and results is compiled
    and called by `jax.jit` itself.

    If GPUs cannot address each other's memory, permutes go through NCCL instead, and a warning
    names the GPUs once. In programs of several processes, XLA chooses for each ring: copies between
    peers within a process, NCCL across processes. Before processes compile a program that they run
    together, they compare what they have chosen for its ops.

    Args:
      fun: the function to compile; without it, a decorator with these options is returned.
      peer_kernels: whether the program may use kernels that address the memory of peer GPUs, as the
        backends "fused" and "one_shot" do, where they are requested or expected to be fastest. XLA
        then overlaps no other collective with anything, and calls of such programs are launched one
        at a time, because all devices must run them in the same order. Several processes must call
        them in the same order. "auto" decides for every program, so for every shape of the
        arguments: it may, if its ops are predicted to gain more than the other collectives can
        lose, those included that XLA adds where it shards arrays by itself, and if these can be
        estimated. Inference is faster with such kernels; training seldom is. `explain` shows the
        decision. With "auto", what `lower` and `trace` return has none of them: it may be exported,
        and launched from any thread. What `decided` returns is the program of a call.
      compiler_options: further options; they override ours.
      **kwargs: arguments of `jax.jit`. Shardings may be `nnx.StateSharding`, as for `nnx.jit`.

    Returns:
      An object with the public methods of a jitted function; what `lower` and `trace` return takes
      nnx objects too. It looks at the devices when it is first used, so that decorating a function
      does not initialize JAX's backend.

    Raises:
      RuntimeError: at compilation, from XLA, for an unknown option.
      ValueError, TypeError: from `jax.jit`, for arguments that do not fit.
      ValueError: with ``peer_kernels=True``, for an option in `compiler_options` that such kernels
        depend on; for other values of `peer_kernels`.
      ValueError: when called inside another function that JAX traces.
      RuntimeError: when called, if another process has chosen differently for the program, or
        if XLA has compiled another one for it.
    """
    if fun is None:
        options = dict(peer_kernels=peer_kernels, compiler_options=compiler_options, **kwargs)
        return functools.partial(overlap_jit, **options)
    check_function(fun)
    if "fused" in kwargs:
        peer_kernels = renamed_fused("overlap_jit", kwargs.pop("fused"))
    check_peer_kernels("overlap_jit", peer_kernels)
    users = compiler_options or {}
    disallowed = None
    if taken := sorted(users.keys() & {*PEER_KERNEL_OPTIONS, PERMUTE_MODE}):
        reason = f"compiler_options: {', '.join(taken)}: kernels that address peers need our value"
        if peer_kernels is True:
            raise ValueError(f"{reason}; leave out either the option or peer_kernels=True")
        disallowed = Disallowed(reason) if peer_kernels == UNDECIDED else None
    return OverlapJit(fun, users, disallowed or peer_kernels, kwargs)


def check_peer_kernels(function: str, value: Any) -> None:
    """Refuses values of the argument `peer_kernels` that it does not have."""
    if not isinstance(value, bool) and value != UNDECIDED:
        raise ValueError(
            f"{function}: peer_kernels={value!r}: expected 'auto', to decide for every program, or"
            " True or False"
        )


def renamed_fused(function: str, value: bool) -> bool:
    """Warns that the argument `fused` is called `peer_kernels` now, and returns its value."""
    warn_deprecated(
        f"{function}: fused={value} is now called peer_kernels={value}; the old name will be"
        " removed"
    )
    return value


EXPLICIT_AXES = (
    "some mesh has Explicit axes, which are the default of jax.make_mesh. With them, operations"
    " whose sharding JAX cannot infer need an out_sharding. To let the compiler choose it, as most"
    " models expect, create the mesh with Auto axes:"
    " jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))"
)

#: Why what `lower` and `trace` return has no kernels that address peers, unless it is asked for.
COMPILED_BY_HAND = (
    "what lower and trace return may be exported, and launched from several threads at once"
)

# Kernels that address peers wait for each other, so every device must run programs in the same
# order. If two threads launched at once, the order could differ between devices.
_launching = threading.RLock()


class _Variant:
    """A function compiled with the options of programs whose kernels may address peers, or others.

    One value decides about the options and about what is traced, so no program has such kernels
    without the options.

    Args:
      jit: makes a jitted function from compiler options.
      graph_jit: the same for functions of nnx objects.
      users: the user's compiler options.
      allowed: the value of `peer_kernels_allowed` while the function is traced.
    """

    def __init__(self, jit: Callable, graph_jit: Callable, users: Mapping[str, Any], allowed: Any):
        self._jit, self._graph_jit = jit, graph_jit
        self._users_options, self.allowed = users, allowed

    @property
    def has_peer_kernels(self) -> bool:
        """Whether kernels may address peers."""
        return self.allowed is True

    def devices_of(self, arguments: Any) -> contextlib.AbstractContextManager:
        """A context that knows the devices of the arguments, if kernels need to know them."""
        return knowing_devices_of(arguments) if self.has_peer_kernels else contextlib.nullcontext()

    @functools.cached_property
    def jitted(self) -> Any:
        return self._jit(compiler_options=self._compiler_options())

    @functools.cached_property
    def graph_jitted(self) -> GraphJitted:
        return self._graph_jit(compiler_options=self._compiler_options())

    def _compiler_options(self) -> dict[str, Any]:
        ours = peer_kernel_options(jax.process_count()) if self.has_peer_kernels else {}
        return _options({**ours, **self._users_options})


@dataclass(frozen=True)
class DecidedProgram:
    """The program that a call of an `OverlapJit` would run, traced and not yet lowered.

    Attributes:
      name: the name of the function.
      peer_kernels: whether it has kernels that address peers' memory, and why.
      decisions: the decisions for its ops, if JAX has not traced it before.
    """

    name: str
    peer_kernels: PeerKernelDecision
    decisions: tuple[Decision, ...]
    _lower: Callable[[], jax.stages.Lowered] = field(repr=False)

    def lower(self) -> jax.stages.Lowered:
        """Lowers the program.

        One with kernels that address peers cannot be exported. Launch what is compiled of it from
        one thread, and in the same order as all other programs in all processes. The processes
        lower it together.
        """
        return self._lower()

    def compile(self) -> jax.stages.Compiled:
        """Compiles the program of all processes. They call this in the same order.

        Raises:
          DisagreementError: XLA has compiled for another process what communicates in another
            order.
        """
        compiled = self.lower().compile()
        _check_order(f"compiled {self.name}", compiled)
        return compiled


class OverlapJit:
    """A function compiled by `jax.jit`, with compiler options that depend on the devices.

    With ``peer_kernels="auto"`` it is compiled in two variants, without and with kernels that
    address peers. The variant that was right last is called first. Where both are in use, it is the
    one that was right for these shapes, as JAX traces the other one again at each call.
    """

    def __init__(
        self, fun: Callable, users: Mapping[str, Any], allowed: Any, kwargs: Mapping[str, Any]
    ):
        functools.update_wrapper(self, fun, updated=())
        self._static = static = StaticArguments.of(fun, kwargs)
        graph = GraphFunction(fun, static, *map(kwargs.get, SHARDINGS))
        others = {name: value for name, value in kwargs.items() if name not in SHARDINGS}
        pure, pure_graph = pure_function(fun, static), graph.pure
        self._decides = allowed == UNDECIDED
        if self._decides:
            pure, pure_graph = (deciding_function(each, static) for each in (pure, pure_graph))
        self._functions: tuple[Any, ...] = pure, pure_graph
        jit = functools.partial(jax.jit, pure, **kwargs)
        graph_jit = functools.partial(GraphJitted, graph, pure_graph, **others)
        self._default = self._current = _Variant(jit, graph_jit, users, allowed)
        self._with_peer_kernels = _Variant(jit, graph_jit, users, True)
        # The variant to call for shapes. It has two entries once both variants are in use.
        self._by_shapes: dict[Any, _Variant] = {}
        # The programs whose choices were compared with those of other processes.
        self._compared: set[tuple] = set()
        # Whether the function is known to take or return nnx objects. nnx's shardings say so.
        self._is_graph_function = holds_state_sharding(kwargs)
        # Refuses bad arguments here, not at the first call.
        graph_jit() if self._is_graph_function else jit()

    def _use(self, variant: _Variant, use: Callable[[Any], Any], *arguments: Any) -> Any:
        """Uses what `jax.jit` makes of the function, or of its graph function if it needs one.

        What is traced meanwhile knows how it will be compiled.
        """
        with peer_kernels_allowed(variant.allowed), variant.devices_of(arguments):
            if not self._is_graph_function:
                try:
                    return use(variant.jitted)
                except GraphNodesError:
                    pass
                except TypeError:
                    # `jax.jit` refuses modules that are no pytrees before it traces the function.
                    if not holds_graph_nodes(arguments):
                        raise
                self._is_graph_function = True
            return use(variant.graph_jitted)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds it as a method, as functions in a class are."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function, compiled for these arguments."""
        with _explaining_errors():
            # Where JAX traces another function, nothing here launches the programs in order. Where
            # nothing is compiled, there are no compiler options.
            if not self._decides or not calls_run_programs():
                result = self._run(self._default, args, kwargs)
                if differentiates():
                    warn_once(
                        f"{self._name}: JAX differentiates what overlap_jit returned, so forward"
                        " and backward are two programs, without kernels that address peers;"
                        " differentiate inside: overlap_jit(jax.grad(f))"
                    )
                return result
            variant = self._current
            if len(self._by_shapes) > 1:  # Else both are not in use.
                variant = self._by_shapes.setdefault(_shapes((args, kwargs)), variant)
            try:
                with deciding():
                    return self._run(variant, args, kwargs)
            except WrongVariantError:
                pass  # What is raised from here on has nothing to do with it.
            is_default = variant is self._default
            self._current = right = self._with_peer_kernels if is_default else self._default
            self._by_shapes[_shapes((args, kwargs))] = right
            return self._run(right, args, kwargs)

    def _run(self, variant: _Variant, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not is_alone() and calls_run_programs():
            self._compare_choices(variant, args, kwargs)
        order = _launching if variant.has_peer_kernels else contextlib.nullcontext()
        with order:
            return self._use(variant, lambda jitted: jitted(*args, **kwargs), args, kwargs)

    def _compare_choices(self, variant: _Variant, args: tuple, kwargs: dict[str, Any]) -> None:
        """Checks that all processes choose alike for a program, and compile it alike.

        `jax.jit` then calls what is compiled here.
        """
        key = variant.has_peer_kernels, _shapes((args, kwargs))
        if key in self._compared or not _is_joint((args, kwargs)):
            return
        with record_decisions() as decisions:
            traced = self._trace(variant, args, kwargs)
        self._compared.add(key)
        program = f"{self._name} {key[1]}"
        check_same(program, _choices(variant.has_peer_kernels, decisions))
        compiled = self._lower(variant, traced, args, kwargs).compile()
        _check_order(f"order of {program}", compiled)

    @property
    def requested(self) -> PeerKernels:
        """The argument `peer_kernels`."""
        allowed = self._default.allowed
        return allowed if isinstance(allowed, bool) else UNDECIDED

    def uncompiled(
        self, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Callable, tuple, dict[str, Any]]:
        """The function without its static arguments, and the arguments that are left."""
        fun = self.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]
        positions, traced = self._static.traced(args, kwargs)

        def with_static_arguments(*others: Any, **named: Any) -> Any:
            by_position = dict(enumerate(args)) | dict(zip(positions, others, strict=True))
            return fun(*by_position.values(), **{**kwargs, **named})

        return with_static_arguments, tuple(positions.values()), traced

    @property
    def _name(self) -> str:
        return getattr(self, "__qualname__", type(self).__name__)

    def decided(self, *args: Any, **kwargs: Any) -> DecidedProgram:
        """Decides about the program that a call with these arguments would run, and traces it.

        With ``peer_kernels="auto"``, what `lower` and `trace` return is not always that program.
        The processes of a program call this together.
        """
        variant = self._default
        with record_decisions(hidden=True) as decisions:
            traced = self._trace(variant, args, kwargs)
        if self._decides:
            decision = decide_once(traced.jaxpr.jaxpr)
        elif isinstance(variant.allowed, Disallowed):
            decision = PeerKernelDecision(False, variant.allowed.reason)
        else:
            decision = PeerKernelDecision(variant.allowed, "requested")
        if decision.allowed and self._decides:
            variant = self._with_peer_kernels
            with record_decisions(hidden=True) as decisions:
                traced = self._trace(variant, args, kwargs)
        elif not decision.allowed:
            warn_withheld(decision.withheld, decision.reason)
        for each in decisions:
            record(each)
        lower = functools.partial(self._lower, variant, traced, args, kwargs)
        return DecidedProgram(self._name, decision, tuple(decisions), lower)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the function for these arguments, as `jax.jit` does."""
        return self._lower(self._default, self.trace(*args, **kwargs), args, kwargs)

    def _lower(
        self, variant: _Variant, traced: Any, args: tuple, kwargs: dict[str, Any]
    ) -> jax.stages.Lowered:
        with (
            _explaining_errors(),
            peer_kernels_allowed(variant.allowed),
            variant.devices_of((args, kwargs)),
        ):
            return traced.lower()

    def _trace(self, variant: _Variant, args: tuple, kwargs: dict[str, Any]) -> jax.stages.Traced:
        with _explaining_errors():
            return self._use(variant, lambda jitted: jitted.trace(*args, **kwargs), args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the function for these arguments, as `jax.jit` does."""
        traced = self._trace(self._default, args, kwargs)
        if self._decides:
            warn_withheld(decide_once(traced.jaxpr.jaxpr).withheld, COMPILED_BY_HAND)
        return traced

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result, as from `jax.jit`."""
        with _explaining_errors():
            return self._use(
                self._default, lambda jitted: jitted.eval_shape(*args, **kwargs), args, kwargs
            )

    def clear_cache(self) -> None:
        """Drops the compiled programs, as `jax.jit` does."""
        self._by_shapes.clear()
        for function in self._functions if self._decides else ():
            function.clear_cache()
        for variant in (self._default, self._with_peer_kernels):
            variant.jitted.clear_cache()
            variant.graph_jitted.clear_cache()


def _check_order(program: str, compiled: jax.stages.Compiled) -> None:
    """Checks that all processes communicate in the same order in a program."""
    if not is_alone():
        check_same_order(program, communication_order(compiled.as_text() or ""))


def _shapes(arguments: Any) -> tuple:
    """The shapes of all arrays among arguments, by which the variant is guessed."""
    return tuple([getattr(leaf, "shape", None) for leaf in jax.tree.leaves(arguments)])


def _is_joint(arguments: Any) -> bool:
    """Whether arguments have parts in other processes."""
    arrays = (leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array))
    return not all(array.is_fully_addressable for array in arrays)


def _choices(peer_kernels: bool, decisions: Iterable[Decision]) -> dict[str, list[str]]:
    """The choices for a program, and for each of its ops."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    found["kernels that address peers' memory"] = ["them" if peer_kernels else "none"]
    for decision in decisions:
        found[f"{decision.site}, {decision.site.source}"].append(decision.implementation)
    return {key: sorted(set(names)) for key, names in found.items()}


@contextlib.contextmanager
def _explaining_errors() -> Iterator[None]:
    """Says what to do about errors of JAX whose cause is far from where they are raised."""
    try:
        yield
    except ShardingTypeError as error:
        error.add_note(f"overlap_jit: {EXPLICIT_AXES}")
        raise
    except ValueError as error:
        if "Mesh for all inputs should be equal" in str(error):
            error.add_note(f"overlap_jit: {EXPLICIT_AXES}")
        if "can only be passed to top-level" not in str(error):
            raise
        raise ValueError(
            "overlap_jit: called inside a function that JAX traces, and its compiler options are of"
            " a whole program; make it the outermost: write overlap_jit(overlap(f)),"
            " overlap_jit(jax.grad(f)); explain and tune take overlap_jit(f) itself"
        ) from error


def _options(users: Mapping[str, Any]) -> dict[str, Any]:
    """Our options for the devices here, overridden by the user's."""
    options: dict[str, Any] = dict(OVERLAP_OPTIONS)
    if PERMUTE_MODE not in users and (reason := no_peer_access_reason()):
        warn_once(f"overlap_jit leaves permutes to NCCL, where no matmul hides them: {reason}")
        del options[PERMUTE_MODE]
    if jax.process_count() > 1:
        # By default, all devices of a program are one group, whose permutes all go through NCCL if
        # one of them must. With this option, every ring is a group.
        options["xla_gpu_collective_permute_connected_components"] = True
    return options | dict(users)
