"""`overlap_jit` calls the variant that was decided for, and JAX traces no more than it has to."""

from __future__ import annotations

import contextvars
import copy
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collective_matmul import explain, overlap_jit
from collective_matmul.jit import compiler, deciding_function
from collective_matmul.jit.peer_decision import PeerKernelDecision
from collective_matmul.peer_access import peer_kernels_disallowed_reason

FEW, MANY = np.ones(3, np.float32), np.ones(5, np.float32)


@pytest.fixture
def _few_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decides for peer kernels where the first array has fewer than 4 elements."""

    def decide_once(program: Any) -> PeerKernelDecision:
        sizes = [math.prod(var.aval.shape) for var in program.invars if var.aval.shape]
        return PeerKernelDecision(bool(sizes) and sizes[0] < 4, "by the number of elements")

    monkeypatch.setattr(deciding_function, "decide_once", decide_once)
    monkeypatch.setattr(compiler, "decide_once", decide_once)


few_are_allowed = pytest.mark.usefixtures("_few_are_allowed")


class Traced:
    """Doubles arrays. For each time it is traced: whether kernels may address peers' memory."""

    def __init__(self) -> None:
        self.allowed: list[bool] = []

    def __call__(self, x: Any, factor: Any = 2) -> Any:
        self.allowed.append(peer_kernels_disallowed_reason() is None)
        return factor * x


class Launches:
    """The lock that launches take, and how often they did."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: Any) -> None:
        pass


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches()
    monkeypatch.setattr(compiler, "_launching", launches)
    return launches


@few_are_allowed
def test_each_shape_has_its_variant(launches: Launches) -> None:
    """The function is traced once to decide, and once more where kernels are allowed."""
    traced = Traced()
    fun = overlap_jit(traced)
    known: set[int] = set()
    for x in (FEW, MANY, FEW, FEW[:2], MANY[:4], MANY, FEW[:2], FEW):
        traced.allowed.clear()
        np.testing.assert_array_equal(fun(x), 2 * x)
        if x.size in known:
            assert traced.allowed == []
        else:
            assert traced.allowed == ([False, True] if x.size < 4 else [False])
        known.add(x.size)
        before = launches.count
        fun(x)
        assert launches.count - before == (x.size < 4)


@few_are_allowed
def test_a_known_shape_runs_no_python_of_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    for x in (FEW, MANY):
        fun = overlap_jit(lambda x: 2 * x)
        fun(x)
        with monkeypatch.context() as patch:
            patch.setattr(deciding_function.DecidingFunction, "__call__", None)
            np.testing.assert_array_equal(fun(x), 2 * x)


@few_are_allowed
def test_shapes_that_take_turns_run_no_python_of_the_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts and single tokens take such turns: JAX would trace the wrong variant at each."""
    turns = [MANY, FEW, FEW[:2], MANY[:4]]

    def fun(x: Any, offset: Any) -> Any:
        return 2 * x + offset["by"]

    many_first, few_first = overlap_jit(fun), overlap_jit(fun)
    for _ in range(2):  # In the second round, the first shape is decided about again.
        for each in turns:
            many_first(each, {"by": 1})
            few_first(each[::-1], offset={"by": 1})
            few_first(FEW, offset={"by": 1})
    monkeypatch.setattr(deciding_function.DecidingFunction, "__call__", None)
    for each in turns * 2:
        np.testing.assert_array_equal(many_first(each, {"by": 1}), 2 * each + 1)
        np.testing.assert_array_equal(few_first(each, offset={"by": 1}), 2 * each + 1)


@few_are_allowed
def test_a_dropped_cache_is_traced_again() -> None:
    for x in (FEW, MANY):
        traced = Traced()
        fun = overlap_jit(traced)
        fun(x)
        before = list(traced.allowed)
        fun.clear_cache()
        fun(x)
        assert traced.allowed == before * 2


@few_are_allowed
def test_nothing_is_allowed_where_nothing_is_compiled() -> None:
    """Then there are no compiler options."""
    traced = Traced()
    with jax.disable_jit():
        np.testing.assert_array_equal(overlap_jit(traced)(FEW), 2 * FEW)
    assert traced.allowed == [False]


def test_errors_of_jax_name_the_function() -> None:
    def double(x: Any) -> Any:
        return 2 * x

    with pytest.raises(TypeError, match=r"<function .*double at"):
        overlap_jit(double)("text")


@few_are_allowed
@pytest.mark.parametrize("x", [FEW, MANY], ids=["allowed", "not"])
def test_programs_are_shared_by_all_that_compile_a_function(x: np.ndarray) -> None:
    traced = Traced()
    for _ in range(3):
        overlap_jit(traced)(x)
    assert traced.allowed == ([False, True] if x is FEW else [False])


@few_are_allowed
def test_no_program_has_kernels_without_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    active = contextvars.ContextVar[Any]("active")
    seen = set()
    jit = jax.jit

    def recording(fun: Callable, **kwargs: Any) -> Any:
        made = jit(fun, **kwargs)
        if "compiler_options" not in kwargs:
            return made

        def call(*args: Any) -> Any:
            token = active.set(kwargs["compiler_options"])
            try:
                return made(*args)
            finally:
                active.reset(token)

        return call

    def fun(x: jax.Array) -> jax.Array:
        has_options = compiler.PEER_KERNEL_OPTIONS.items() <= active.get().items()
        seen.add((peer_kernels_disallowed_reason() is None, has_options))
        return x

    monkeypatch.setattr(jax, "jit", recording)
    for value in ("auto", False, True):
        compiled = overlap_jit(fun, peer_kernels=value)
        for x in (FEW, MANY, FEW[:2], MANY[:4]):
            compiled(x)
    assert (True, True) in seen and (False, False) in seen
    assert (True, False) not in seen


@pytest.mark.parametrize("value", [True, False])
def test_nothing_is_decided_where_a_value_is_given(
    value: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deciding_function, "decide_once", lambda _: pytest.fail("decided"))
    traced = Traced()
    overlap_jit(traced, peer_kernels=value)(FEW)
    assert traced.allowed == [value]


@pytest.mark.parametrize("value", ["always", None, 1, 0.0])
def test_other_values_are_refused(value: Any) -> None:
    for function in (overlap_jit, explain):
        with pytest.raises(ValueError, match=rf"^{function.__name__}: peer_kernels={value!r}: exp"):
            function(jnp.sin, peer_kernels=value)


@few_are_allowed
def test_options_that_conflict_are_a_reason_against_it() -> None:
    reasons = []

    def fun(x: jax.Array) -> jax.Array:
        reasons.append(peer_kernels_disallowed_reason())
        return x

    for option in (*compiler.PEER_KERNEL_OPTIONS, compiler.PERMUTE_MODE):
        overlap_jit(fun, compiler_options={option: "DEFAULT"}).trace(FEW)
        assert f"compiler_options: {option}: kernels that address peers need our" in reasons[-1]


@few_are_allowed
@pytest.mark.parametrize("use", ["trace", "lower", "eval_shape", "export", "jit", "grad", "vmap"])
def test_what_is_not_called_has_none(use: str) -> None:
    """Programs compiled by hand may be exported, and launched in any order."""
    traced = Traced()
    fun = overlap_jit(traced)
    fun(FEW)
    traced.allowed.clear()
    x = FEW[:2]
    match use:
        case "lower":
            np.testing.assert_array_equal(fun.lower(x).compile()(x), 2 * x)
        case "export":
            np.testing.assert_array_equal(jax.export.export(fun)(x).call(x), 2 * x)
        case "jit":
            with pytest.raises(ValueError, match="make it the outermost"):
                jax.jit(fun)(x)
        case "grad" if jax.__version_info__ < (0, 12):
            with pytest.raises(ValueError, match="make it the outermost"):
                jax.grad(lambda x: fun(x).sum())(x)
        case "grad":
            np.testing.assert_array_equal(jax.grad(lambda x: fun(x).sum())(x), [2, 2])
        case "vmap":
            np.testing.assert_array_equal(jax.vmap(fun)(x[None]), 2 * x[None])
        case _:
            getattr(fun, use)(x)
    assert traced.allowed and not any(traced.allowed)


class Counter(nnx.Module):
    def __init__(self, size: int) -> None:
        self.total = nnx.Variable(jnp.zeros(size))
        self.calls = nnx.Variable(jnp.zeros(()))


@few_are_allowed
def test_nnx_modules_are_updated_once_for_each_call() -> None:
    allowed = []

    def add(counter: Counter, by: jax.Array) -> Counter:
        allowed.append(peer_kernels_disallowed_reason() is None)
        counter.total[...] += by
        counter.calls[...] += 1
        return counter

    fun = overlap_jit(add, donate_argnums=0)
    few, many = Counter(2), Counter(6)
    for calls in (1, 2, 3):
        for counter in (few, many):
            old = counter.total[...]
            assert fun(counter, 2.0) is counter
            assert old.is_deleted()
            np.testing.assert_array_equal(counter.total[...], np.full(old.shape, 2.0 * calls))
            assert counter.calls[...] == calls
    assert sorted(allowed) == [False, False, True]
    lowered = fun.lower(few, 2.0)
    assert lowered.compile()(few, 2.0) is few
    assert few.calls[...] == 4
    assert fun.eval_shape(few, 2.0).calls.shape == ()


@few_are_allowed
@pytest.mark.parametrize("options", [{"static_argnums": 1}, {"static_argnames": "factor"}], ids=str)
def test_static_arguments(options: dict[str, Any]) -> None:
    fun = overlap_jit(Traced(), **options)
    for x in (FEW, MANY):
        for factor in (2, 3, 2):
            np.testing.assert_array_equal(fun(x, factor), factor * x)


@few_are_allowed
def test_donated_arguments() -> None:
    fun = overlap_jit(Traced(), donate_argnums=0)
    for size in (3, 5, 3, 5):
        x = jnp.ones(size)
        np.testing.assert_array_equal(fun(x), 2 * np.ones(size))
        assert x.is_deleted()


@few_are_allowed
def test_errors_of_the_function_are_its_own() -> None:
    def fun(x: jax.Array) -> jax.Array:
        if peer_kernels_disallowed_reason() is None or x.size > 3:
            raise KeyError("mine")
        return x

    for x in (FEW, MANY):
        with pytest.raises(KeyError, match="mine") as error:
            overlap_jit(fun)(x)
        assert error.value.__context__ is None


@few_are_allowed
def test_copies_decide_too() -> None:
    fun = copy.deepcopy(overlap_jit(Traced()))
    for x in (FEW, MANY):
        np.testing.assert_array_equal(fun(x), 2 * x)
    fun.clear_cache()
    np.testing.assert_array_equal(fun(FEW), 2 * FEW)


@few_are_allowed
@pytest.mark.parametrize("x", [FEW, MANY], ids=["few", "many"])
def test_a_decided_program_is_that_of_a_call(x: np.ndarray) -> None:
    """The program of `lower` never has kernels that address peers."""
    traced = Traced()
    fun = overlap_jit(traced, donate_argnums=0)
    program = fun.decided(x)
    is_few = x.size < 4
    assert program.peer_kernels.allowed == is_few
    assert traced.allowed == ([False, True] if is_few else [False])
    lowered = program.lower()
    assert lowered.args_info[0][0].donated
    np.testing.assert_array_equal(lowered.compile()(jnp.asarray(x)), 2 * x)
    assert traced.allowed == ([False, True] if is_few else [False])
    fun.lower(x)
    assert not any(traced.allowed[2:])


@pytest.mark.parametrize("requested", [True, False])
def test_a_program_for_which_was_decided_before(requested: bool) -> None:
    traced = Traced()
    program = overlap_jit(traced, peer_kernels=requested).decided(FEW)
    assert (program.peer_kernels.allowed, program.peer_kernels.reason) == (requested, "requested")
    assert traced.allowed == [requested]
    np.testing.assert_array_equal(program.lower().compile()(FEW), 2 * FEW)


def test_a_program_whose_options_contradict_says_so() -> None:
    options = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
    decision = overlap_jit(Traced(), compiler_options=options).decided(FEW).peer_kernels
    assert not decision.allowed
    assert decision.reason.startswith("compiler_options: xla_gpu_collective_permute_mode: kernels")
